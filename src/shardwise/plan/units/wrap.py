"""Wrap policies: pure functions from a model to the groups of modules that become units.

    sw.wrap.automatic()                               blocks, embeddings, head: the default
    sw.wrap.by_class("LlamaDecoderLayer")
    sw.wrap.by_size(100_000)
    sw.wrap.by_hand("embed", ("norm", "lm_head"))     a tuple is one unit
    sw.wrap.whole()                                   everything in one unit

Parameters of no group belong to the root. Groups may be nested; the innermost one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.errors.arguments import checked
from shardwise.plan.units.structure import (
    Group,
    all_nbytes,
    has_forward,
    holds_parameters,
    joined,
    pick_by_structure,
    trained_nbytes,
)

__all__ = ["Wrap", "automatic", "by_class", "by_hand", "by_size", "whole"]

# Measured: benchmarks/RESULTS.md, "Small programs beside DDP".
JOINED_NBYTES = 4 << 20  # of what is gathered for each use
JOINED_TRAINED_NBYTES = 32 << 20  # of what is only reduced, since parameters stay gathered

ClassLike = type[nn.Module] | str | Iterable[type[nn.Module] | str]
ModuleLike = nn.Module | str | Iterable[nn.Module | str]


@dataclass(frozen=True)
class Wrap:
    """A wrap policy."""

    says: str  # its text in messages, for example "by_class(Block)"
    pick: Callable[[nn.Module], list[Group]]  # the groups of a model. It changes nothing there
    joined_nbytes: int | None = 0  # up to which neighbours are one unit; ``None``: as measured

    def __str__(self) -> str:
        return self.says


@checked
def automatic(joined_nbytes: int | None = None) -> Wrap:
    """Units are the repeated blocks, each embedding outside them, and the head.

    Blocks are the topmost siblings, two or more of one class, in a ``ModuleList``,
    ``Sequential`` or ``ModuleDict``. Attributes of one class are not blocks, since they have
    different roles: query, key and value; encoder and decoder. The modules registered after the
    last block, if the last has a matrix, are the head: one unit, with the final norm. A model
    without repeated blocks is one unit. See `shardwise.plan.units.structure` for details.

    Neighbours whose parameters together are small are one unit, since a collective costs time of
    its own. Not where units are compiled or recomputed, which is done block by block.

    Args:
        joined_nbytes: the most bytes of what is joined; by default 4 MiB, ``0`` joins nothing.
            Where all parameters stay gathered (``no_shard``, ``zero1``, and models that
            ``unsharded=`` leaves whole by default), only those that are trained count, since
            nothing else is sent, and the default is 32 MiB, in shared memory 16 MiB.
    """
    return Wrap("automatic()", pick_by_structure, joined_nbytes)


def whole() -> Wrap:
    """Everything in one unit: the fewest collectives, and all parameters gathered at once."""
    return Wrap("whole()", _pick_nothing)


def by_class(*classes: ClassLike) -> Wrap:
    """Every module of these classes, and of their subclasses, is a unit.

    Args:
        classes: classes, names of classes (``"Block"`` or ``"package.module.Block"``), several
            names with commas between them, or lists of these.

    Raises:
        ConfigError: no class is named; when applied to a model: a class is not in it (the message
            lists the classes that are, nearest first) or has no parameters.
    """
    wanted = tuple(_flat_classes(classes))
    if not wanted:
        raise ConfigError(
            "by_class() names no class, so it would pick nothing. "
            "Name one, or use whole() for a single unit."
        )
    says = ", ".join(target if isinstance(target, str) else target.__name__ for target in wanted)
    return Wrap(f"by_class({says})", partial(_pick_classes, wanted=wanted))


@checked
def by_size(min_num_params: int) -> Wrap:
    """A module is a unit if its parameters that are in no other unit reach the minimum.

    Children come first, in order of registration; then their parent, with the remaining
    parameters. This is PyTorch's ``size_based_auto_wrap_policy`` (torch/distributed/fsdp/wrap.py)
    with its exceptions: submodules of a module below the minimum are skipped, ``nn.ModuleList``
    and ``nn.ModuleDict`` are never units, ``nn.MultiheadAttention`` stays with its parent, and the
    root has the rest. Unlike there, a shared parameter is counted once.

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
    """These modules are units; a list or tuple of modules is one unit.

    Args:
        modules: modules, or their full names as in ``model.named_modules()``.

    Raises:
        ConfigError: when applied to a model: a name or module is not in it, is picked twice, has
            no parameters, or has no forward (``nn.ModuleList``).
    """
    groups = tuple((one,) if isinstance(one, str | nn.Module) else tuple(one) for one in modules)
    names = [[p if isinstance(p, str) else type(p).__name__ for p in group] for group in groups]
    says = ", ".join(map("+".join, names))
    return Wrap(f"by_hand({says})", partial(_pick_by_hand, wanted=groups))


# ------------------------------------------------------------------ what can be picked


def called_modules(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose forward can gather their parameters, with their first names.

    Excluded are modules without a forward, and the children of those that read a child's weight
    without calling it: ``nn.MultiheadAttention``, and peft's layer for new tokens.
    """
    readers = {"MultiheadAttention", "TrainableTokensLayer"}
    reading = (m for m in model.modules() if readers & {kind.__name__ for kind in type(m).__mro__})
    uncalled = {part for m in reading for part in m.children()}
    named = model.named_modules()
    return {m: name for name, m in named if has_forward(m) and m not in uncalled}


def checked_groups(model: nn.Module, wrap: Wrap, joined_trained: int = 0) -> list[Group]:
    """The groups that the policy picks, or a ``ConfigError``; without those of the root."""
    names = {module: name for name, module in model.named_modules()}
    called, picked_modules = called_modules(model), set[nn.Module]()
    groups = [group for group in wrap.pick(model) if group and model not in group]
    if wrap.joined_nbytes != 0:
        most = wrap.joined_nbytes or joined_trained or JOINED_NBYTES
        groups = joined(model, groups, most, trained_nbytes if joined_trained else all_nbytes)
    for module in (module for group in groups for module in group):
        _check_pick(module, names, wrap)
        if module not in called:
            raise _no_entry_error(module, names[module])
        if module in picked_modules:
            raise ConfigError(
                f"{wrap} picks {names[module]!r} twice, and a module is in one unit only. "
                "Pick it once."
            )
        picked_modules.add(module)
    return groups


def _check_pick(module: nn.Module, names: Mapping[nn.Module, str], wrap: Wrap) -> None:
    class_name = type(module).__name__
    if module not in names:
        raise ConfigError(
            f"{wrap} picks a {class_name} that is not in this model, so it would never be called. "
            "Pick it from the model that is sharded, or by its name."
        )
    if not holds_parameters(module):
        raise ConfigError(
            f"{wrap} picks {names[module]!r} ({class_name}), which has no parameters, so there is "
            "nothing to gather. Leave it out."
        )


def _no_entry_error(module: nn.Module, name: str) -> ConfigError:
    parent = name.rpartition(".")[0]
    if has_forward(module):
        return ConfigError(
            f"{name!r} is read by {parent!r} (MultiheadAttention) without being called, so its "
            f"parameters could not be gathered. Pick {parent!r}."
        )
    inside = [f"{name}.{child}" for child, m in module.named_children() if holds_parameters(m)]
    more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
    advice = f"its children: {', '.join(inside[:4])}{more}" if inside else f"{parent!r}"
    return ConfigError(
        f"{name!r} is a {type(module).__name__}, which has no forward, so its parameters could "
        f"not be gathered. Pick {advice}."
    )


# ------------------------------------------------------------------ the policies


def _pick_nothing(_: nn.Module) -> list[Group]:
    return []


def _flat_classes(wanted: Iterable[ClassLike]) -> Iterator[type[nn.Module] | str]:
    for target in wanted:
        if isinstance(target, nn.Module):  # checked first, since nn.Sequential is iterable
            raise ConfigError(
                f"by_class() takes classes and names of classes, and got a module "
                f"({type(target).__name__}). Use by_hand() to pick modules."
            )
        if isinstance(target, str):
            yield from (name.strip() for name in target.split(",") if name.strip())
        elif isinstance(target, type):
            yield target
        else:
            yield from _flat_classes(target)


def _pick_classes(model: nn.Module, wanted: tuple[type[nn.Module] | str, ...]) -> list[Group]:
    called = called_modules(model)
    picked = {module for target in wanted for module in _of_class(model, target, called)}
    return [(module,) for module in model.modules() if module in picked]


def _of_class(
    model: nn.Module, target: type[nn.Module] | str, called: Mapping[nn.Module, str]
) -> list[nn.Module]:
    modules = [module for module in model.modules() if _is_a(module, target)]
    if not modules:
        raise _no_such_class(target if isinstance(target, str) else target.__name__, called)
    with_parameters = [module for module in modules if holds_parameters(module)]
    # Children of nn.MultiheadAttention stay with it. If nothing remains, checked_groups raises.
    return [module for module in with_parameters if module in called] or with_parameters or modules


def _is_a(module: nn.Module, target: type[nn.Module] | str) -> bool:
    if not isinstance(target, str):
        return isinstance(module, target)
    # Subclasses match by name, too: a port of a block often derives from it.
    classes = type(module).__mro__
    return any(target in (c.__name__, f"{c.__module__}.{c.__qualname__}") for c in classes)


def _no_such_class(name: str, called: Iterable[nn.Module]) -> ConfigError:
    classes = {type(module).__name__ for module in called if holds_parameters(module)}
    suggestions = nearest(name.rpartition(".")[2], classes, limit=12)
    if not suggestions:
        return ConfigError(f"{name} is not in this model, which has no parameters at all.")
    return ConfigError(
        f"{name} is not in this model; {suggestions[0]} is. Classes with parameters here, nearest "
        f"first: {', '.join(suggestions)}. Name one of these."
    )


def _pick_sizes(model: nn.Module, minimum: int) -> list[Group]:
    called, visited = called_modules(model), {model}
    picked, claimed = list[Group](), set[nn.Parameter]()

    def unclaimed(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters() if param not in claimed)

    def visit(module: nn.Module) -> None:
        if unclaimed(module) < minimum or isinstance(module, nn.MultiheadAttention):
            return
        for child in module.children():
            if child not in visited:
                visited.add(child)
                visit(child)
        if module is not model and module in called and unclaimed(module) >= minimum:
            picked.append((module,))
            claimed.update(module.parameters())

    visit(model)
    return picked


def _pick_by_hand(model: nn.Module, wanted: tuple[tuple[nn.Module | str, ...], ...]) -> list[Group]:
    names = dict(model.named_modules(remove_duplicate=False))
    return [tuple(_resolved(pick, names) for pick in group) for group in wanted]


def _resolved(pick: nn.Module | str, names: Mapping[str, nn.Module]) -> nn.Module:
    if not isinstance(pick, str):
        return pick
    if pick not in names:
        suggestions = ", ".join(repr(name) for name in nearest(pick, filter(None, names)))
        raise ConfigError(
            f"{pick!r} is not a module of this model. The nearest names are {suggestions}; "
            "model.named_modules() gives all of them."
        )
    return names[pick]
