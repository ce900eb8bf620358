"""Divides parameters into units, which are gathered together. Each is in exactly one unit.

A unit is the parameters of one module's subtree that are in no nested unit; the root has the
rest. Nested wrappers cannot hold a parameter that two modules share. Here it gets a unit of its
own, which each of its users enters, or its users become one unit if it is most of their elements:
a tied embedding and head are one unit.

    (root)             parameters of no other unit; gathered while the model runs
    embed+norm+lm_head entered three times; the tied weight is gathered for its uses only
    blocks.0
    blocks.1
    blocks.0.fc+1.fc   a weight that two blocks share

A module is the entry module of one unit only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import overload

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardwise.blocks import Group, as_group, has_forward
from shardwise.errors import ConfigError
from shardwise.wrap import Wrap, automatic, checked_groups, entry_modules

__all__ = ["Member", "Unit", "Units", "choose_units"]


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter of the model, with all its names.

    Attributes:
        name: its first full name, as in ``model.named_parameters()``.
        aliases: all its full names, the first included.
        param: the parameter.
        owners: each module and attribute that refer to it.
        shape: its full shape, also after ``param`` is sharded.
    """

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size

    def __repr__(self) -> str:
        return f"Member({self.name!r}, {tuple(self.shape)}, {self.param.dtype})"

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.shape.numel()


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: unique in the model; ``""`` for the root's unit.
        modules: its entry modules, whose forward needs the unit; in order of registration.
        class_name: the classes of the entry modules.
        members: the parameters, in order of registration; at least one.
    """

    name: str
    modules: Group
    class_name: str
    members: tuple[Member, ...]

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return sum(member.numel for member in self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameters in their own dtypes, without padding."""
        return sum(member.numel * member.param.element_size() for member in self.members)

    @property
    def trainable(self) -> int:
        """Elements whose parameters require a gradient."""
        return sum(member.numel for member in self.members if member.param.requires_grad)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.class_name}, {self.numel:,} parameters)"


@dataclass(frozen=True)
class Units(Sequence[Unit]):
    """A model's units: the root's first if it has parameters, then by first module.

    Attributes:
        units: the units.
        padding: bytes of padding by unit name; ``None`` without layouts.
        placements: ``"sharded"`` or ``"replicated"`` by unit name; ``None`` without a strategy.
    """

    units: tuple[Unit, ...]
    padding: Mapping[str, int] | None = None
    placements: Mapping[str, str] | None = None

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Unit, ...]: ...
    def __getitem__(self, index: int | slice) -> Unit | tuple[Unit, ...]:
        return self.units[index]

    def __len__(self) -> int:
        return len(self.units)

    def __str__(self) -> str:
        """One line per unit and a total."""
        columns = {
            "unit": [*(unit.name or "(root)" for unit in self), "total"],
            "class": [*(unit.class_name for unit in self), ""],
            "parameters": _with_total(unit.numel for unit in self),
            "bytes": _with_total(unit.nbytes for unit in self),
            "trainable": _with_total(unit.trainable for unit in self),
        }
        if self.padding is not None:
            columns["padding"] = _with_total(self.padding[unit.name] for unit in self)
        if self.placements is not None:
            columns["placement"] = [*(self.placements[unit.name] for unit in self), ""]
        return _aligned(columns)


def choose_units(model: nn.Module, wrap: Wrap | None = None) -> Units:
    """Divide a model's parameters into units. Pure, and the same on every rank.

    Args:
        model: any module with a forward. It may be on the meta device.
        wrap: the wrap policy (default: `shardwise.wrap.automatic`).

    Raises:
        ConfigError: a parameter is in no module with a forward, or is not initialised, or the
            policy does not fit the model.
    """
    _check_initialized(model)
    groups = checked_groups(model, wrap or automatic())
    claims = _Claims(model, [*groups, *_called_parts(model, groups)])
    members = _members(model)
    for member in members:
        claims.merge_users(member)
    members_of: dict[Group, list[Member]] = defaultdict(list)
    for member in members:
        members_of[claims.group_of(member)].append(member)
    if not has_forward(model) and (model,) in members_of:
        raise _never_gathered(model, members_of[model,][0])
    ordered = sorted(members_of.items(), key=lambda group_of: claims.position[group_of[0][0]])
    units = (
        Unit(_name([claims.entries[m] for m in group]), group, _class(group), tuple(members))
        for group, members in ordered
    )
    return Units(tuple(units))


def _called_parts(model: nn.Module, groups: Sequence[Group]) -> list[Group]:
    """The callable parts of a model without a forward, such as the two networks of a GAN."""
    picked = {module for group in groups for module in group}
    return [] if has_forward(model) else [(m,) for m in as_group(model) if m not in picked]


def _never_gathered(model: nn.Module, member: Member) -> ConfigError:
    return ConfigError(
        f"the model is a {type(model).__name__}, which has no forward, and parameter "
        f"{member.name!r} lies in no module that has one, so no step would ever gather it. Shard "
        "the modules that the model holds, or a module that calls them."
    )


def _check_initialized(model: nn.Module) -> None:
    named = model.named_parameters()
    if uninitialized := [
        name for name, param in named if isinstance(param, UninitializedParameter)
    ]:
        raise ConfigError(
            f"{len(uninitialized)} parameters have no shape yet, the first is "
            f"{uninitialized[0]!r}, so they cannot be sharded. Run the model once to initialise "
            "its lazy modules."
        )


def _members(model: nn.Module) -> list[Member]:
    """Every parameter once, in order of registration."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[param].append(name)

    def member(param: nn.Parameter, aliases: Sequence[str]) -> Member:
        parts = (alias.rpartition(".") for alias in aliases)
        owners = dict.fromkeys((modules[path], attribute) for path, _, attribute in parts)
        return Member(aliases[0], tuple(aliases), param, tuple(owners), param.shape)

    return [member(param, aliases) for param, aliases in names.items()]


class _Claims:
    """Finds the group of a parameter: the innermost one on its path.

    A parameter with several names may be in several groups; `merge_users` and `group_of` choose.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        self.entries = entry_modules(model)
        self.position = {module: i for i, module in enumerate(model.modules())}
        self._paths = dict(model.named_modules(remove_duplicate=False))
        self._group_of = {model: (model,)} | {
            m: self._sorted(group) for group in groups for m in group
        }
        self._user_groups: dict[nn.Module, Group] = {}  # brackets of units that claim no subtree

    def merge_users(self, member: Member) -> None:
        """Merge the layers that share ``member`` into one unit, if it is most of their elements."""
        if len(self._claimants(member)) == 1:
            return
        if (shared := self._shared_module(member)) is not None:
            self._group_of[shared] = (shared,)
            return
        parts = [self._mostly(module, member) for module in self._readers(member)]
        if all(parts):
            self._merge({module for part in parts for module in part})

    def group_of(self, member: Member) -> Group:
        """The group whose unit has ``member``."""
        claimants = self._claimants(member)
        enclosing = [self._enclosing_groups(alias) for alias in member.aliases]
        enclosing_group = next(g for g in enclosing[0] if all(g in groups for groups in enclosing))
        if enclosing_group in claimants:  # the only one, or one that contains the others
            return enclosing_group
        readers = self._readers(member)
        if any(
            m in self._group_of or self._user_groups.get(m, readers) != readers for m in readers
        ):
            return enclosing_group  # a module is the entry module of one unit only
        self._user_groups |= dict.fromkeys(readers, readers)
        return readers

    def _parents(self, alias: str) -> Iterator[nn.Module]:
        """The modules that contain a parameter, innermost first."""
        while alias:
            alias = alias.rpartition(".")[0]
            yield self._paths[alias]

    def _enclosing_groups(self, alias: str) -> list[Group]:
        return [
            self._group_of[module] for module in self._parents(alias) if module in self._group_of
        ]

    def _claimants(self, member: Member) -> set[Group]:
        return {self._enclosing_groups(alias)[0] for alias in member.aliases}

    def _readers(self, member: Member) -> Group:
        """The modules whose forward reads ``member``: its nearest brackets, the outermost ones."""
        readers = {
            next(m for m in self._parents(alias) if m in self.entries) for alias in member.aliases
        }
        enclosing_group = (
            [m for m in self._parents(alias) if m in readers] for alias in member.aliases
        )
        return self._sorted(parents[-1] for parents in enclosing_group)

    def _shared_module(self, member: Member) -> nn.Module | None:
        """The largest module that contains all names of the parameter, or ``None``."""
        parent_levels = zip(*(self._parents(alias) for alias in member.aliases), strict=False)
        common_levels = takewhile(lambda level: len(set(level)) == 1, parent_levels)
        return next(
            (level[0] for level in reversed(list(common_levels)) if level[0] in self.entries), None
        )

    def _mostly(self, module: nn.Module, member: Member) -> Group:
        """The module's group, or the module alone, if ``member`` is most of it; else ``()``."""
        group = self._group_of.get(module, (module,))
        return next((part for part in (group, (module,)) if _is_mostly(part, member)), ())

    def _merge(self, modules: set[nn.Module]) -> None:
        """Make one group of ``modules``, and remove them from their old groups."""
        old_groups = {self._group_of[module] for module in modules if module in self._group_of}
        for group in [self._sorted(modules), *(self._sorted(set(g) - modules) for g in old_groups)]:
            self._group_of |= dict.fromkeys(group, group)

    def _sorted(self, modules: Iterable[nn.Module]) -> Group:
        return tuple(sorted(set(modules), key=self.position.__getitem__))


def _is_mostly(group: Group, member: Member) -> bool:
    """Are these single layers with at least half of their elements in ``member``?"""
    if any(True for module in group for _ in module.children()):
        return False
    inside = {param for module in group for param in module.parameters()}
    return 2 * member.param.numel() >= sum(param.numel() for param in inside)


# ------------------------------------------------------------------ names and tables


def _name(parts: Sequence[str]) -> str:
    """``model.norm+lm_head``, ``blocks.0.fc+1.fc``, ``shared+...+lm_head``.

    Unique, since no other unit has the first part among its modules.
    """
    if len(parts) > 3:
        return f"{parts[0]}+...+{parts[-1]}"
    return "+".join([parts[0], *(_without_common(part, parts[0]) for part in parts[1:])])


def _without_common(name: str, first: str) -> str:
    """``name`` without the dotted prefix that it shares with ``first``."""
    pairs = zip(name.split("."), first.split("."), strict=False)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return ".".join(name.split(".")[common:]) or name


def _class(group: Group) -> str:
    return "+".join(dict.fromkeys(type(module).__name__ for module in group))


def _with_total(values: Iterable[int]) -> list[str]:
    """The numbers and their sum, as text."""
    numbers = list(values)
    return [f"{number:,}" for number in (*numbers, sum(numbers))]


def _aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """A table with text columns aligned to the left and numbers to the right."""
    text = {"unit", "class", "placement"}
    padded = []
    for title, cells in columns.items():
        width = max(map(len, (title, *cells)))
        align = str.ljust if title in text else str.rjust
        padded.append([align(cell, width) for cell in (title, *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
