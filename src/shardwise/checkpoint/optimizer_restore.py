"""Stored optimizer state on its way back: to each parameter its own, by name.

State tensors that exist in the right shape are filled where they are, so loading needs no second
copy. A parameter gets the whole of its state or none of it. Every parameter brings its own options;
those with which the parameters of a group disagree are a problem, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.local_shards import ParamShard
from shardwise.checkpoint.optimizer_state import (
    AS_BUILT,
    Named,
    Optimizers,
    check_disjoint,
    params_of,
)
from shardwise.checkpoint.read_requests import ReadRequest, request_for
from shardwise.checkpoint.reader import TensorLocation, find_stored
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.checkpoint.wrappers import bare_record, renamed
from shardwise.comm.malloc import in_huge_pages
from shardwise.errors import CheckpointError
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.optim.blockwise import SCALES, block_of, cut_inside, is_blockwise, state_shape
from shardwise.optim.cut_state import is_scalar


class StoredStates(NamedTuple):
    """Optimizers' state in a checkpoint, or in rank 0's state dict."""

    records: Sequence[Mapping[str, Any]]  # one for each optimizer; see ``record_of``
    places: Mapping[str, TensorLocation]  # the tensors, by ``STATE/PARAMETER``
    aliases: Mapping[str, str]  # further names of tied parameters → the name in the records
    # Parameters whose values are converted → the dtype that they are stored in
    converted: Mapping[str, str]
    names: Callable[[str], bool] | None = None  # of parameters whose state is wanted; ``None``: all

    def wants(self, name: str) -> bool:
        """Is the state of this parameter to be loaded?"""
        return self.names is None or self.names(name)


@dataclass(frozen=True)
class _Saved:
    """The stored state of one parameter."""

    kind: str  # the optimizer's class
    group: int  # its number in that optimizer
    options: Mapping[str, Any]
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorLocation]


@dataclass(frozen=True, eq=False)
class _Target:
    optimizer: Optimizer
    number: int  # of the group
    param: Tensor
    shard: ParamShard
    saved: _Saved

    @property
    def name(self) -> str:
        return self.shard.member.name

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.number]


class Restored:
    """Stored state that optimizers get back."""

    def __init__(self, optimizers: Optimizers, named: Named, stored: StoredStates) -> None:
        check_disjoint(optimizers, named)
        saved, groupless = _parsed(stored)
        found = list(_targets(optimizers, named, saved, stored.aliases))
        targets = [target for target in found if stored.wants(target.name)]
        misfits = {id(target): list(_misfits(target)) for target in targets}
        self._converted = stored.converted
        self._targets = [target for target in targets if not misfits[id(target)]]
        self._conflicts: dict[tuple[int, str], str] = {}  # a group and an option → a line about it
        for option, line in _conflicts(self._targets):
            self._conflicts.setdefault(option, line)
        self._states: list[tuple[_Target, dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], str, Any]] = []
        used = {id(part) for target in found for part in (target.param, target.saved)}
        held = [(param, optimizer) for optimizer in optimizers for param in params_of(optimizer)]
        absent = [named.shard(*one).member.name for one in held if id(one[0]) not in used]
        known = {name: target.name for target in targets for name in target.shard.member.aliases}
        extra = [n for n, state in saved.items() if id(state) not in used and stored.wants(n)]
        #: One line for each thing that does not fit, and is left as it is.
        self.problems = [
            *(f"{n}: its optimizer state is not stored" for n in absent if stored.wants(n)),
            *(f"{n}: stored, and no optimizer has this parameter" for n in extra if n not in known),
            *(f"{name}: it has state, and is in no stored group" for name in groupless),
            *(line for target in targets for line in misfits[id(target)]),
            *self._conflicts.values(),
        ]
        #: And for each that has no place now, though everything fits: of a weight not tied then.
        self.dropped = [
            f"{name}: its optimizer state is left out, since it is tied to {known[name]} now"
            for name in extra
            if name in known
        ]
        #: And for each group that had another number.
        self.reordered = [*dict.fromkeys(_reordered(targets))]

    def requests(self) -> list[ReadRequest]:
        """Return the reads into state that exists or is made here."""
        requests = []
        for target in self._targets:
            state: dict[str, Any] = {}
            for key, place in target.saved.tensors.items():
                state[key], start = _memory(target, key, place, self._dtype(target, key, place))
                requests.append(request_for(place, start, state[key]))
            state |= {key: json_codec.decode(value) for key, value in target.saved.values.items()}
            self._states.append((target, state))
            self._options += [
                (target.group, key, json_codec.decode(value))
                for key, value in target.saved.options.items()
                if key not in AS_BUILT and (id(target.group), key) not in self._conflicts
            ]
        return requests

    def apply(self) -> None:
        """Give the optimizers what was read, and the options of their groups."""
        for target, state in self._states:
            target.optimizer.state[target.param].clear()
            target.optimizer.state[target.param].update(state)
            if not state:
                del target.optimizer.state[target.param]
        for group, key, value in self._options:
            if isinstance(present := group.get(key), Tensor):  # which a compiled step reads
                present.fill_(float(value))
            else:
                group[key] = value

    def _dtype(self, target: _Target, key: str, place: TensorLocation) -> torch.dtype:
        """Return the stored dtype; the parameter's, if converted and its state had its dtype."""
        alike = place.stored.dtype == self._converted.get(target.name)
        if alike and not _is_one(target, key, place) and not is_blockwise(target.optimizer):
            return target.shard.value.dtype
        return dtype_of(place.stored.dtype)


def _targets(
    optimizers: Optimizers, named: Named, saved: Mapping[str, _Saved], aliases: Mapping[str, str]
) -> Iterator[_Target]:
    """Each parameter that the optimizers hold and that is stored."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                shard = named.shard(param, optimizer)
                if name := find_stored(shard.member.aliases, saved, aliases):
                    yield _Target(optimizer, number, param, shard, saved[name])


def _parsed(stored: StoredStates) -> tuple[dict[str, _Saved], list[str]]:
    """Return the stored state of each parameter in a group, and names of others that have state."""
    tensors: dict[str, dict[str, TensorLocation]] = {}
    for name, place in renamed(stored.places).items():
        key, _, param = name.partition("/")
        tensors.setdefault(param, {})[key] = place
    try:
        records = [*map(bare_record, stored.records)]
        saved = {
            name: _Saved(
                record["class"],
                number,
                group["options"],
                record["values"].get(name, {}),
                tensors.get(name, {}),
            )
            for record in records
            for number, group in enumerate(record["groups"])
            for name in group["params"]
        }
        with_values = [n for record in records for n, one in record["values"].items() if one]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the training state's record of optimizers is malformed ({error!r}). Load another "
            "checkpoint, or load without the optimizer."
        ) from None
    return saved, [n for n in dict.fromkeys([*tensors, *with_values]) if n not in saved]


def _misfits(target: _Target) -> Iterator[str]:
    """Say why the parameter's state is left out, if it is."""
    kind = type(target.optimizer).__qualname__
    if target.saved.kind != kind:
        yield f"{target.name}: its state is of {target.saved.kind}, and {kind} holds it now"
    elif SCALES & target.saved.tensors.keys():
        yield from filter(None, [cut_inside(target.optimizer, target.param)])
    for key, place in target.saved.tensors.items():
        shape, stored = tuple(target.shard.member.shape), place.stored.shape
        if stored not in ((), tuple(state_shape(key, target.shard.member.shape))):
            yield f"{key} of {target.name}: stored as {stored}, the parameter has {shape}"


def _conflicts(targets: Iterable[_Target]) -> Iterator[tuple[tuple[int, str], str]]:
    """Options of groups that their parameters were saved with unlike, and a line for each such."""
    first: dict[int, _Target] = {}
    for target in targets:
        other = first.setdefault(id(target.group), target)
        for key, value in target.saved.options.items():
            if (others := other.saved.options.get(key)) != value:
                line = (
                    f"{target.name}: saved with {key}={value}, and {other.name}, now in the same "
                    f"group, with {key}={others}"
                )
                yield (id(target.group), key), line


def _reordered(targets: Iterable[_Target]) -> Iterator[str]:
    for target in targets:
        if target.number != target.saved.group:
            yield (
                f"scheduler: group {target.number} of {type(target.optimizer).__qualname__} was "
                f"group {target.saved.group} when it was saved, and a scheduler knows groups by "
                "their numbers; give the optimizer the same groups in the same order"
            )


def _is_one(target: _Target, key: str, place: TensorLocation) -> bool:
    """Is the stored state one number for the whole parameter?"""
    scalar = torch.empty(())  # of a 0-dim parameter the state may be its one element's
    return place.stored.shape == () and is_scalar(key, scalar, target.shard.member.shape)


def _memory(
    target: _Target, key: str, place: TensorLocation, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """The memory for one state of one parameter, and the index of its first element here."""
    one = _is_one(target, key, place)
    start = 0 if one else target.shard.start // block_of(key)
    shape = torch.Size([]) if one else state_shape(key, target.shard.value.shape)
    present = target.optimizer.state.get(target.param, {}).get(key)
    present = present.to_local() if isinstance(present, ShardTensor) else present
    if (
        isinstance(present, Tensor)
        and (present.shape, present.dtype) == (shape, dtype)
        and present.is_contiguous()
    ):
        return present, start
    moved = bool(target.group.get("capturable") or target.group.get("fused"))
    device = target.shard.value.device if moved or not one else torch.device("cpu")
    return in_huge_pages(torch.empty(shape, dtype=dtype, device=device)), start
