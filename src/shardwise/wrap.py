"""Which modules become units: rules that read a model and return groups of its modules.

A rule decides and does nothing else, so its answer can be printed, tested and compared between
ranks before anything is sharded. The ordinary way, a policy called back for each module while
the tree is being rewritten, can only be seen by its effects.

    sw.wrap.automatic()                  repeated blocks, embeddings, head (the default)
    sw.wrap.by_class("LlamaDecoderLayer")
    sw.wrap.by_size(100_000)
    sw.wrap.by_hand("embed", ("norm", "lm_head"))     a tuple is one unit
    sw.wrap.whole()                      everything in one unit

What no group claims belongs to the root. Groups may be nested; the innermost claims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from shardwise.errors import ConfigError, nearest

__all__ = [
    "Group",
    "Wrap",
    "automatic",
    "brackets",
    "by_class",
    "by_hand",
    "by_size",
    "checked_groups",
    "whole",
]

Group = tuple[nn.Module, ...]
"""Modules that share one unit: entering any of them needs all of its parameters."""

ClassLike = type[nn.Module] | str | Iterable[type[nn.Module] | str]
ModuleLike = nn.Module | str | Iterable[nn.Module | str]


@dataclass(frozen=True)
class Wrap:
    """A rule from a model to groups of its modules.

    Attributes:
        says: how the rule reads in messages, for example ``by_class(Block)``.
        pick: the rule itself. Pure: it changes nothing in the model.
    """

    says: str
    pick: Callable[[nn.Module], list[Group]]

    def __str__(self) -> str:
        return self.says


def whole() -> Wrap:
    """Everything in one unit: one gather, one reduce, no memory saved while it is gathered."""
    return Wrap("whole()", _pick_nothing)


def by_class(*classes: ClassLike) -> Wrap:
    """Every module of these classes, and of their subclasses, is a unit.

    Args:
        classes: classes, names of classes (``"Block"`` or ``"package.module.Block"``), several
            names with commas between them, or lists of these.

    Raises:
        ConfigError: here, if nothing is named; when the rule meets a model, if a class is not
            in it (the message lists those that are, nearest first) or has no parameters there.
    """
    wanted = tuple(_classes(classes))
    if not wanted:
        raise ConfigError("by_class() names no class, so it would pick nothing. Name one, or use "
                          "whole() for a single unit.")  # fmt: skip
    says = ", ".join(want if isinstance(want, str) else want.__name__ for want in wanted)
    return Wrap(f"by_class({says})", partial(_pick_classes, wanted=wanted))


def by_size(min_num_params: int) -> Wrap:
    """A module is a unit when its parameters that are not yet in one reach the minimum.

    Children come first, in the order of registration; then their parent, with what is left.
    This is the rule of PyTorch's ``size_based_auto_wrap_policy`` (``torch/distributed/fsdp/
    wrap.py``), its exceptions included: modules below the minimum are not looked into,
    ``nn.ModuleList`` and ``nn.ModuleDict`` have no forward and are never units, the inside of
    ``nn.MultiheadAttention`` is never taken apart, the root takes the rest. One thing is
    stricter: a parameter shared by several modules is counted once.

    Raises:
        ConfigError: ``min_num_params`` is below 1.
    """
    if min_num_params < 1:
        raise ConfigError(f"by_size({min_num_params}): the minimum is a number of parameters, "
                          "1 or more; with less, every module would be a unit.")  # fmt: skip
    return Wrap(f"by_size({min_num_params:,})", partial(_pick_sizes, minimum=min_num_params))


def by_hand(*modules: ModuleLike) -> Wrap:
    """These modules are units; a list or tuple of several becomes one unit.

    Args:
        modules: modules, or their full names as in ``model.named_modules()``.

    Raises:
        ConfigError: when the rule meets a model: a name or module is not in it, has no
            parameters, or cannot say when its parameters are needed (``nn.ModuleList``).
    """
    groups = tuple((m,) if isinstance(m, str | nn.Module) else tuple(m) for m in modules)
    says = ", ".join("+".join(_says(m) for m in group) for group in groups)
    return Wrap(f"by_hand({says})", partial(_pick_by_hand, wanted=groups))


def automatic() -> Wrap:
    """Repeated blocks are units; so is each embedding outside them; so is the head.

    Blocks are the topmost siblings, two or more of one class, in a ``ModuleList``,
    ``Sequential`` or ``ModuleDict``: a list is how authors say "these are alike". Attributes
    of one class are not blocks: they have roles (query, key and value; encoder and decoder).
    Single layers (a ``Linear`` in a ``Sequential``) count only in a model without larger
    blocks, and norms never do: a collective for a vector costs more than keeping it.
    Siblings no two of which have equal shapes, and most of which hold blocks themselves, are
    stages (Swin, ConvNeXt), and their blocks are taken instead. A repeated ``ModuleList`` of
    layers, as in ``ModuleList([ModuleList([attention, mlp]), …])``, is one unit of its layers.

    What is registered after the last block and ends in a matrix is the head: one unit, the
    final norm included. A model without repeated blocks is one unit.
    """
    return Wrap("automatic()", _pick_automatic)


# ------------------------------------------------------------------ what can bracket a unit


def brackets(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose entry says that their parameters are needed, with their first names.

    Two kinds cannot say it: a module without a forward, and the parts of
    ``nn.MultiheadAttention``, which reads its ``out_proj.weight`` without calling ``out_proj``.
    """
    attention = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    uncalled = {part for m in attention for part in m.children()}
    named = model.named_modules()
    return {m: name for name, m in named if _has_forward(m) and m not in uncalled}


def checked_groups(model: nn.Module, wrap: Wrap) -> list[Group]:
    """What the rule picks, once it is sure that it can work; the root's own group left out.

    Raises:
        ConfigError: a module is not in the model, is picked twice, has no parameters, or
            cannot be a bracket.
    """
    able, owner = brackets(model), dict[nn.Module, Group]()
    names = {m: name for name, m in model.named_modules()}
    groups = [group for group in wrap.pick(model) if group and model not in group]
    for group in groups:
        for module in group:
            _refuse_misfit(module, names, able, wrap)
            if module in owner:
                raise ConfigError(f"{wrap} picks {names[module]!r} twice, and a module is in one "
                                  "unit. Pick it once.")  # fmt: skip
            owner[module] = group
    return groups


def _refuse_misfit(
    module: nn.Module,
    names: Mapping[nn.Module, str],
    able: Mapping[nn.Module, str],
    wrap: Wrap,
) -> None:
    kind = type(module).__name__
    if module not in names:
        raise ConfigError(f"{wrap} picks a {kind} that is not a module of this model. Pick it from "
                          "the model that is sharded, or by its name.")  # fmt: skip
    name = names[module]
    if not any(True for _ in module.parameters()):
        raise ConfigError(f"{name!r} ({kind}) has no parameters, so there is nothing to gather "
                          "for it. Leave it out.")  # fmt: skip
    if not _has_forward(module):
        inside = [f"{name}.{child}" for child, _ in module.named_children()]
        instead = f"what it holds: {', '.join(inside[:4])}" if inside else "the module around it"
        more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
        raise ConfigError(f"{name!r} is a {kind}, which has no forward: nothing would say when its "
                          f"parameters are needed. Pick {instead}{more}.")  # fmt: skip
    if module not in able:
        parent = name.rpartition(".")[0]
        raise ConfigError(f"{name!r} is read by {parent!r} (MultiheadAttention) without being "
                          f"called, so it cannot be a unit. Pick {parent!r}.")  # fmt: skip


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


# ------------------------------------------------------------------ by class


def _classes(wanted: Iterable[ClassLike]) -> Iterator[type[nn.Module] | str]:
    for want in wanted:
        if isinstance(want, nn.Module):  # an nn.Sequential would even pass for a list
            raise ConfigError(f"by_class() takes classes or their names, and got a module, a "
                              f"{type(want).__name__}. Use by_hand() to pick modules.")  # fmt: skip
        if isinstance(want, str):
            yield from (name.strip() for name in want.split(",") if name.strip())
        elif isinstance(want, type):
            yield want
        else:
            yield from _classes(want)


def _pick_classes(model: nn.Module, wanted: tuple[type[nn.Module] | str, ...]) -> list[Group]:
    picked = set[nn.Module]()
    for want in wanted:
        picked.update(_of_class(model, want))
    return [(module,) for module in model.modules() if module in picked]


def _of_class(model: nn.Module, want: type[nn.Module] | str) -> list[nn.Module]:
    found = [module for module in model.modules() if _is_a(module, want)]
    if not found:
        raise _no_such_class(model, want if isinstance(want, str) else want.__name__)
    filled = [module for module in found if any(True for _ in module.parameters())]
    able = brackets(model)
    # A part of nn.MultiheadAttention stays with it; if nothing is left, checked_groups explains.
    return [module for module in filled if module in able] or filled or found


def _is_a(module: nn.Module, want: type[nn.Module] | str) -> bool:
    if not isinstance(want, str):
        return isinstance(module, want)
    # Subclasses count for names too: an accelerator's port of a block keeps its base's name.
    return any(want in (c.__name__, f"{c.__module__}.{c.__qualname__}")
               for c in type(module).__mro__)  # fmt: skip


def _no_such_class(model: nn.Module, name: str) -> ConfigError:
    able = brackets(model)
    filled = {type(m).__name__ for m in able if any(True for _ in m.parameters())}
    near = nearest(name.rpartition(".")[2], filled, limit=12)
    if not near:
        return ConfigError(f"{name} is not in this model, which has no parameters at all.")
    rest = f" Classes with parameters here, nearest first: {', '.join(near)}."
    return ConfigError(f"{name} is not in this model; {near[0]} is.{rest} Name one of these.")


# ------------------------------------------------------------------ by size, by hand, whole


def _pick_nothing(model: nn.Module) -> list[Group]:
    del model
    return []


def _pick_sizes(model: nn.Module, minimum: int) -> list[Group]:
    able, picked, taken, seen = brackets(model), list[Group](), set[nn.Parameter](), {model}

    def left(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p not in taken)

    def visit(module: nn.Module) -> None:
        if left(module) < minimum:
            return
        for child in () if isinstance(module, nn.MultiheadAttention) else module.children():
            if child not in seen:
                seen.add(child)
                visit(child)
        if module is not model and module in able and left(module) >= minimum:
            picked.append((module,))
            taken.update(module.parameters())

    visit(model)
    return picked


def _pick_by_hand(
    model: nn.Module, wanted: tuple[tuple[nn.Module | str, ...], ...]
) -> list[Group]:
    names = dict(model.named_modules(remove_duplicate=False))
    return [tuple(_resolved(pick, names) for pick in group) for group in wanted]


def _resolved(pick: nn.Module | str, names: Mapping[str, nn.Module]) -> nn.Module:
    if not isinstance(pick, str):
        return pick
    if pick not in names:
        near = ", ".join(repr(name) for name in nearest(pick, (n for n in names if n)))
        raise ConfigError(f"{pick!r} is not a module of this model. The nearest names are {near}; "
                          "model.named_modules() lists all of them.")  # fmt: skip
    return names[pick]


def _says(pick: nn.Module | str) -> str:
    return pick if isinstance(pick, str) else type(pick).__name__


# ------------------------------------------------------------------ automatic


def _pick_automatic(model: nn.Module) -> list[Group]:
    blocks = _blocks(model, _is_large) or _blocks(model, _has_matrix)
    if not blocks:
        return []
    inside = {m for block in blocks for top in block for m in top.modules()}
    embeddings = [m for m in model.modules()
                  if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m not in inside]  # fmt: skip
    head = _head(model, inside, set(embeddings))
    return [*blocks, *((m,) for m in embeddings), *([head] if head else [])]


def _blocks(model: nn.Module, counts: Callable[[nn.Module], bool]) -> list[Group]:
    """The topmost repeated siblings among the modules that count, in order of registration."""

    def below(module: nn.Module) -> list[nn.Module]:
        found = {child: below(child) for child in module.children()}
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            for siblings in _repeated(filter(counts, found)):
                stages = _are_stages(siblings, found)
                found |= {m: (found[m] if stages else []) or [m] for m in siblings}
        return [block for blocks in found.values() for block in blocks]

    return [_as_group(block) for block in dict.fromkeys(below(model))]


def _repeated(children: Iterable[nn.Module]) -> list[list[nn.Module]]:
    by_type = defaultdict[type, list[nn.Module]](list)
    for child in children:
        by_type[type(child)].append(child)
    return [siblings for siblings in by_type.values() if len(siblings) > 1]


def _are_stages(siblings: list[nn.Module], below: Mapping[nn.Module, list[nn.Module]]) -> bool:
    shapes = {tuple((n, p.shape) for n, p in m.named_parameters()) for m in siblings}
    no_two_alike = len(shapes) == len(siblings)
    return no_two_alike and 2 * sum(bool(below[m]) for m in siblings) > len(siblings)


def _as_group(block: nn.Module) -> Group:
    """The modules that bracket a block: itself, or, if it is only a list, what it lists."""
    if _has_forward(block):
        return (block,)
    return tuple(m for child in block.children() for m in _as_group(child) if _has_any(m))


def _is_large(module: nn.Module) -> bool:
    """More than a single layer: it has parts, or several matrices of its own."""
    matrices = sum(p.ndim > 1 for p in module.parameters())
    has_parts = any(True for _ in module.children())
    return bool(_as_group(module)) and (matrices > 1 or (has_parts and _has_any(module)))


def _has_matrix(module: nn.Module) -> bool:
    return bool(_as_group(module)) and any(p.ndim > 1 for p in module.parameters())


def _has_any(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _head(model: nn.Module, blocks: set[nn.Module], embeddings: set[nn.Module]) -> Group:
    """The topmost modules registered after the last block, if the last of them has a matrix."""
    place = {module: i for i, module in enumerate(model.modules())}
    last = max(place[module] for module in blocks)

    def after(module: nn.Module) -> list[nn.Module]:
        if place[module] > last and _has_forward(module) and embeddings.isdisjoint(module.modules()):
            return [module] if _has_any(module) else []
        return [found for child in module.children() for found in after(child)]

    tail = tuple(dict.fromkeys(after(model)))
    owners = [list(m.parameters(recurse=False)) for top in tail[-1:] for m in top.modules()]
    final = [own for own in owners if own][-1:]
    return tail if any(p.ndim > 1 for own in final for p in own) else ()
