"""Units: parameters that are gathered together. Every parameter lies in exactly one.

A unit is the parameters of one module's subtree that no nested unit claims; the root has the
rest. The ordinary way, wrapping modules one inside the other, makes a parameter that two of them
share an error. Here it has a unit of its own, which each of its users enters, or joins its users
in one unit if it is most of what they hold: a tied embedding and head are one unit.

    (root)             what nobody claims; gathered while the model runs
    embed+norm+lm_head entered three times: the tied weight is gathered for its uses only
    blocks.0
    blocks.1
    blocks.0.fc+1.fc   a weight that two blocks share

A module is the root of at most one unit.
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

from shardwise.config.ignored import Ignored, ignored_params
from shardwise.errors import ConfigError
from shardwise.plan.units.structure import Group, as_group, elements, has_forward
from shardwise.plan.units.wrap import Wrap, automatic, called_modules, checked_groups


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter, wherever it appears in the model."""

    name: str  # its first full name, as in ``model.named_parameters()``
    aliases: tuple[str, ...]  # all its full names, the first included
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]  # each module and attribute that hold it, once
    shape: torch.Size  # the whole one, which ``param`` no longer has once it is sharded

    def __repr__(self) -> str:
        return f"Member({self.name!r}, {tuple(self.shape)}, {self.param.dtype})"

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together."""

    name: str  # unique in the model; "" for the root's unit
    modules: Group  # calling any of them needs the unit; in order of registration
    class_name: str  # of the modules
    members: tuple[Member, ...]  # at least one, in order of registration

    @property
    def title(self) -> str:
        """Its name as it is shown."""
        return self.name or "(root)"

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return sum(member.numel for member in self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameters in their own dtypes, without padding."""
        return sum(member.numel * member.param.element_size() for member in self.members)

    @property
    def trainable(self) -> int:
        """Elements whose parameters require a gradient."""
        return sum(member.numel for member in self.members if member.param.requires_grad)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.class_name}, {self.numel:,} parameters)"


@dataclass(frozen=True)
class Units(Sequence[Unit]):
    """A model's units: the root's first if it has parameters, then by first module."""

    units: tuple[Unit, ...]
    padding: Mapping[str, int] | None = None  # bytes by unit, once layouts exist
    placements: Mapping[str, str] | None = None  # "sharded" or "replicated", by unit
    forwards: Mapping[str, str] | None = None  # compiled, recomputed …, by unit

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Unit, ...]: ...
    def __getitem__(self, index: int | slice) -> Unit | tuple[Unit, ...]:
        return self.units[index]

    def __len__(self) -> int:
        return len(self.units)

    @property
    def unit_names(self) -> dict[nn.Module, str]:
        """The name of the unit that a module's forward uses, for each such module."""
        return {module: unit.name for unit in self for module in unit.modules}

    def __str__(self) -> str:
        """One line per unit and a total."""
        columns = {
            "unit": [*(unit.title for unit in self), "total"],
            "class": [*(unit.class_name for unit in self), ""],
            "parameters": _summed(unit.numel for unit in self),
            "bytes": _summed(unit.nbytes for unit in self),
            "trainable": _summed(unit.trainable for unit in self),
        }
        if self.padding is not None:
            columns["padding"] = _summed(self.padding[unit.name] for unit in self)
        if self.placements is not None:
            columns["placement"] = [*(self.placements[unit.name] for unit in self), ""]
        if self.forwards is not None and any(self.forwards.values()):
            columns["forward"] = [*(self.forwards[unit.name] or "-" for unit in self), ""]
        return _aligned(columns)

    __repr__ = __str__


def choose_units(
    model: nn.Module, wrap: Wrap | None = None, ignored: Ignored = (), joined_trained: int = 0
) -> Units:
    """Divide a model's parameters into units, by default those of ``wrap.automatic()``.

    Those that are ``ignored`` are in none. ``joined_trained``: bytes, as ``residency`` says.

    Pure, and the same on every rank. The model may be on the meta device.

    Raises:
        ConfigError: a parameter lies in no module that is called, or has no shape yet, or the
            rule does not fit the model.
    """
    _refuse_unfit(model)
    groups = checked_groups(model, wrap or automatic(), joined_trained)
    grouping = _Grouping(model, [*groups, *_called_parts(model, groups)])
    left_alone = ignored_params(model, ignored)
    members = [member for member in _members(model) if member.param not in left_alone]
    for member in members:
        grouping.join(member)
    members_of: dict[Group, list[Member]] = defaultdict(list)
    for member in members:
        members_of[grouping.group_of(member)].append(member)
    if not has_forward(model) and (model,) in members_of:
        raise _never_gathered(model, members_of[model,][0])
    ordered = sorted(members_of, key=lambda group: grouping.position[group[0]])
    units = (
        Unit(
            _name([grouping.called[m] for m in group]),
            group,
            "+".join(dict.fromkeys(type(module).__name__ for module in group)),
            tuple(members_of[group]),
        )
        for group in ordered
    )
    return Units(tuple(units))


def _called_parts(model: nn.Module, groups: Sequence[Group]) -> list[Group]:
    """Return the called parts of a model without a forward, such as the two nets of a GAN."""
    picked = {module for group in groups for module in group}
    return [] if has_forward(model) else [(m,) for m in as_group(model) if m not in picked]


def _never_gathered(model: nn.Module, member: Member) -> ConfigError:
    return ConfigError(
        f"the model is a {type(model).__name__}, which has no forward, and parameter "
        f"{member.name!r} lies in no module that has one, so no step would ever gather it. Shard "
        "the modules that the model holds, or a module that calls them."
    )


def _refuse_unfit(model: nn.Module) -> None:
    named = model.named_parameters()
    if lazy := [name for name, param in named if isinstance(param, UninitializedParameter)]:
        raise ConfigError(
            f"{len(lazy)} parameters have no shape yet, the first is {lazy[0]!r}, so they cannot "
            "be laid out. Run the model once, so that its lazy modules learn their shapes."
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


class _Grouping:
    """Groups of parameters: a parameter belongs to the innermost group on its path.

    A parameter with several names may lie in several groups; `join` and `group_of` decide that.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        self.called = called_modules(model)
        self.position = {module: i for i, module in enumerate(model.modules())}
        self._paths = dict(model.named_modules(remove_duplicate=False))
        self._of = {model: (model,)} | {m: self._sorted(group) for group in groups for m in group}
        self._sharing: dict[nn.Module, Group] = {}  # modules that share a parameter, in no group

    def join(self, member: Member) -> None:
        """Make one unit of the layers that share ``member``, if it is most of what they hold."""
        if len(self._innermost(member)) == 1:
            return
        if (shared := self._shared_module(member)) is not None:
            self._of[shared] = (shared,)
            return
        parts = [self._most(module, member) for module in self._users(member)]
        if all(parts):
            self._unite({module for part in parts for module in part})

    def group_of(self, member: Member) -> Group:
        """The one group whose unit holds ``member``."""
        around = [self._groups_around(alias) for alias in member.aliases]
        common = next(group for group in around[0] if all(group in groups for groups in around))
        if common in self._innermost(member):  # the only one, or one that encloses the others
            return common
        users = self._users(member)
        if any(m in self._of or self._sharing.get(m, users) != users for m in users):
            return common  # a module is the root of at most one unit
        self._sharing |= dict.fromkeys(users, users)
        return users

    def _modules_around(self, alias: str) -> Iterator[nn.Module]:
        """Return the modules around a parameter, innermost first."""
        while alias:
            alias = alias.rpartition(".")[0]
            yield self._paths[alias]

    def _groups_around(self, alias: str) -> list[Group]:
        return [self._of[module] for module in self._modules_around(alias) if module in self._of]

    def _innermost(self, member: Member) -> set[Group]:
        return {self._groups_around(alias)[0] for alias in member.aliases}

    def _users(self, member: Member) -> Group:
        """The modules whose forward reads ``member``: the nearest ones that are called."""
        around = [list(self._modules_around(alias)) for alias in member.aliases]
        nearest = {next(m for m in modules if m in self.called) for modules in around}
        return self._sorted([m for m in modules if m in nearest][-1] for modules in around)

    def _shared_module(self, member: Member) -> nn.Module | None:
        """The largest module of which all of the parameter's names are a part, if any."""
        levels = zip(*(self._modules_around(alias) for alias in member.aliases), strict=False)
        same = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
        return next((module for module in reversed(same) if module in self.called), None)

    def _most(self, module: nn.Module, member: Member) -> Group:
        """The module's group, or else the module, if ``member`` is most of it; or nothing."""
        group = self._of.get(module, (module,))
        return next((part for part in (group, (module,)) if _is_mostly(part, member)), ())

    def _unite(self, modules: set[nn.Module]) -> None:
        """Make one group of these, and leave their old groups without them."""
        left = {self._of[module] for module in modules if module in self._of}
        for group in [self._sorted(modules), *(self._sorted(set(g) - modules) for g in left)]:
            self._of |= dict.fromkeys(group, group)

    def _sorted(self, modules: Iterable[nn.Module]) -> Group:
        return tuple(sorted(set(modules), key=self.position.__getitem__))


def _is_mostly(group: Group, member: Member) -> bool:
    """Are these single layers, at least half of whose elements are ``member``'s?"""
    has_parts = any(True for module in group for _ in module.children())
    return not has_parts and 2 * member.param.numel() >= elements(group)


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


def _summed(values: Iterable[int]) -> list[str]:
    """Each number, then their sum."""
    numbers = list(values)
    return [f"{number:,}" for number in (*numbers, sum(numbers))]


def _aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """Text to the left, numbers to the right."""
    text = {"unit", "class", "placement"}
    padded = []
    for title, cells in columns.items():
        width = max(map(len, (title, *cells)))
        align = str.ljust if title in text else str.rjust
        padded.append([align(cell, width) for cell in (title, *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
