"""Which modules become units: rules that read a model and return groups of its modules.

A rule decides and does nothing else, so its answer can be printed, tested and compared between
ranks before anything is sharded. The ordinary way, a policy called back for each module while
the tree is being rewritten, can only be seen by its effects.

    sw.wrap.automatic()                               blocks, embeddings, head: the default
    sw.wrap.by_class("LlamaDecoderLayer")
    sw.wrap.by_size(100_000)
    sw.wrap.by_hand("embed", ("norm", "lm_head"))     a tuple is one unit
    sw.wrap.whole()                                   everything in one unit

What no group claims belongs to the root. Groups may be nested; the innermost one claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from shardwise.blocks import Group, has_forward, holds_parameters, pick_by_structure
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


def automatic() -> Wrap:
    """Repeated blocks are units; so is each embedding outside them; so is the head.

    Blocks are the topmost siblings, two or more of one class, in a ``ModuleList``,
    ``Sequential`` or ``ModuleDict``: a list is how authors say "these are alike". Attributes
    of one class are not blocks, for they have roles: query, key and value; encoder and decoder.
    What is registered after the last block and ends in a matrix is the head: one unit, the
    final norm included. A model that repeats nothing is one unit. `shardwise.blocks` has the
    details.
    """
    return Wrap("automatic()", pick_by_structure)


def whole() -> Wrap:
    """Everything in one unit: the fewest collectives, and no memory saved while it is gathered."""
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
    wanted = tuple(_flat_classes(classes))
    if not wanted:
        raise ConfigError(
            "by_class() names no class, so it would pick nothing. "
            "Name one, or use whole() for a single unit."
        )
    says = ", ".join(want if isinstance(want, str) else want.__name__ for want in wanted)
    return Wrap(f"by_class({says})", partial(_pick_classes, wanted=wanted))


def by_size(min_num_params: int) -> Wrap:
    """A module is a unit when its parameters that are not yet in one reach the minimum.

    Children come first, in the order of registration; then their parent, with what is left.
    This is the rule of PyTorch's ``size_based_auto_wrap_policy`` (torch/distributed/fsdp/wrap.py),
    with its exceptions: a module below the minimum is not looked into, ``nn.ModuleList`` and
    ``nn.ModuleDict`` are never units, ``nn.MultiheadAttention`` stays with its parent, and the
    root takes the rest. One thing is stricter: a shared parameter is counted once.

    Args:
        min_num_params: in elements, 1 or more.

    Raises:
        ConfigError: ``min_num_params`` is below 1.
    """
    if min_num_params < 1:
        raise ConfigError(
            f"by_size({min_num_params}) would make every module a unit. "
            "The minimum is a number of parameters, 1 or more."
        )
    return Wrap(f"by_size({min_num_params:,})", partial(_pick_sizes, minimum=min_num_params))


def by_hand(*modules: ModuleLike) -> Wrap:
    """These modules are units; several in one list or tuple become one unit.

    Args:
        modules: modules, or their full names as in ``model.named_modules()``.

    Raises:
        ConfigError: when the rule meets a model: a name or module is not in it, is picked
            twice, has no parameters, or cannot say when they are needed (``nn.ModuleList``).
    """
    groups = tuple(
        (pick,) if isinstance(pick, str | nn.Module) else tuple(pick) for pick in modules
    )
    says = ", ".join("+".join(_says(pick) for pick in group) for group in groups)
    return Wrap(f"by_hand({says})", partial(_pick_by_hand, wanted=groups))


# ------------------------------------------------------------------ what can bracket a unit


def brackets(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose entry says that their parameters are needed, with their first names.

    Two kinds cannot say it: a module without a forward, and the parts of
    ``nn.MultiheadAttention``, which reads its ``out_proj.weight`` without calling ``out_proj``.
    """
    attention = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    uncalled = {part for m in attention for part in m.children()}
    named = model.named_modules()
    return {m: name for name, m in named if has_forward(m) and m not in uncalled}


def checked_groups(model: nn.Module, wrap: Wrap) -> list[Group]:
    """What the rule picks, once it is sure to work. A group with the root in it is the root's.

    Raises:
        ConfigError: a module is not in the model, is picked twice, has no parameters, or
            cannot be a bracket.
    """
    names = {module: name for name, module in model.named_modules()}
    able, seen = brackets(model), set[nn.Module]()
    groups = [group for group in wrap.pick(model) if group and model not in group]
    for module in (module for group in groups for module in group):
        _refuse_misfit(module, names, wrap)
        if module not in able:
            raise _no_bracket(module, names[module])
        if module in seen:
            raise ConfigError(
                f"{wrap} picks {names[module]!r} twice, and a module is in one unit only. "
                "Pick it once."
            )
        seen.add(module)
    return groups


def _refuse_misfit(module: nn.Module, names: Mapping[nn.Module, str], wrap: Wrap) -> None:
    kind = type(module).__name__
    if module not in names:
        raise ConfigError(
            f"{wrap} picks a {kind} that is not in this model, so no step would ever enter it. "
            "Pick it from the model that is sharded, or by its name."
        )
    if not holds_parameters(module):
        raise ConfigError(
            f"{wrap} picks {names[module]!r} ({kind}), which has no parameters, so there is "
            "nothing to gather. Leave it out."
        )


def _no_bracket(module: nn.Module, name: str) -> ConfigError:
    parent = name.rpartition(".")[0]
    if has_forward(module):
        return ConfigError(
            f"{name!r} is read by {parent!r} (MultiheadAttention) without being called, so "
            f"nothing would say when its parameters are needed. Pick {parent!r}."
        )
    inside = [
        f"{name}.{child}" for child, part in module.named_children() if holds_parameters(part)
    ]
    more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
    instead = f"what it holds: {', '.join(inside[:4])}{more}" if inside else f"{parent!r}"
    return ConfigError(
        f"{name!r} is a {type(module).__name__}, which has no forward, so nothing would say "
        f"when its parameters are needed. Pick {instead}."
    )


# ------------------------------------------------------------------ the rules


def _pick_nothing(_: nn.Module) -> list[Group]:
    return []


def _flat_classes(wanted: Iterable[ClassLike]) -> Iterator[type[nn.Module] | str]:
    for want in wanted:
        if isinstance(want, nn.Module):  # an nn.Sequential would even pass for a list
            raise ConfigError(
                f"by_class() takes classes and names of classes, and got a module "
                f"({type(want).__name__}). Use by_hand() to pick modules."
            )
        if isinstance(want, str):
            yield from (name.strip() for name in want.split(",") if name.strip())
        elif isinstance(want, type):
            yield want
        else:
            yield from _flat_classes(want)


def _pick_classes(model: nn.Module, wanted: tuple[type[nn.Module] | str, ...]) -> list[Group]:
    able = brackets(model)
    picked = {module for want in wanted for module in _of_class(model, want, able)}
    return [(module,) for module in model.modules() if module in picked]


def _of_class(
    model: nn.Module, want: type[nn.Module] | str, able: Mapping[nn.Module, str]
) -> list[nn.Module]:
    found = [module for module in model.modules() if _is_a(module, want)]
    if not found:
        raise _no_such_class(want if isinstance(want, str) else want.__name__, able)
    filled = [module for module in found if holds_parameters(module)]
    # Parts of nn.MultiheadAttention stay with it. If nothing is left, checked_groups says why.
    return [module for module in filled if module in able] or filled or found


def _is_a(module: nn.Module, want: type[nn.Module] | str) -> bool:
    if not isinstance(want, str):
        return isinstance(module, want)
    # Subclasses count by name as they do by class: a port of a block often derives from it.
    classes = type(module).__mro__
    return any(want in (c.__name__, f"{c.__module__}.{c.__qualname__}") for c in classes)


def _no_such_class(name: str, able: Iterable[nn.Module]) -> ConfigError:
    here = {type(module).__name__ for module in able if holds_parameters(module)}
    near = nearest(name.rpartition(".")[2], here, limit=12)
    if not near:
        return ConfigError(f"{name} is not in this model, which has no parameters at all.")
    return ConfigError(
        f"{name} is not in this model; {near[0]} is. Classes with parameters here, nearest "
        f"first: {', '.join(near)}. Name one of these."
    )


def _pick_sizes(model: nn.Module, minimum: int) -> list[Group]:
    able, seen = brackets(model), {model}
    picked, taken = list[Group](), set[nn.Parameter]()

    def left(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters() if param not in taken)

    def visit(module: nn.Module) -> None:
        if left(module) < minimum or isinstance(module, nn.MultiheadAttention):
            return
        for child in module.children():
            if child not in seen:
                seen.add(child)
                visit(child)
        if module is not model and module in able and left(module) >= minimum:
            picked.append((module,))
            taken.update(module.parameters())

    visit(model)
    return picked


def _pick_by_hand(model: nn.Module, wanted: tuple[tuple[nn.Module | str, ...], ...]) -> list[Group]:
    names = dict(model.named_modules(remove_duplicate=False))
    return [tuple(_resolved(pick, names) for pick in group) for group in wanted]


def _resolved(pick: nn.Module | str, names: Mapping[str, nn.Module]) -> nn.Module:
    if not isinstance(pick, str):
        return pick
    if pick not in names:
        near = ", ".join(repr(name) for name in nearest(pick, filter(None, names)))
        raise ConfigError(
            f"{pick!r} is not a module of this model. The nearest names are {near}; "
            "model.named_modules() gives all of them."
        )
    return names[pick]


def _says(pick: nn.Module | str) -> str:
    return pick if isinstance(pick, str) else type(pick).__name__
