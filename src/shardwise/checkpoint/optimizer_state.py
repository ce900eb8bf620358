"""Optimizer state by parameter name, whatever the groups, the ranks and the optimizer's order.

Each element-wise state is a tensor of the whole parameter's shape, ``exp_avg/NAME``,
stored by ranges like the parameter; what is one number for the parameter (``step``) is a
0-dim tensor; and a group's options are kept with the names of its parameters.

On the way back state tensors that exist in the right shape are filled where they are, so loading
needs no second copy. Every parameter brings its own options, and a group whose parameters disagree
is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.local_shards import LocalShard, ParamShard, of_rank_0
from shardwise.checkpoint.read_requests import ReadRequest, request_for
from shardwise.checkpoint.reader import TensorLocation, find_stored
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.comm.malloc import in_huge_pages
from shardwise.errors import CheckpointError
from shardwise.memory.shard_tensor import ShardTensor
from shardwise.optim.blockwise import SCALES, block_of, cut_inside, state_shape, without_tables
from shardwise.optim.cut_state import is_scalar

Optimizers = Sequence[Optimizer]
Given = Optimizer | Iterable[Optimizer] | None

AS_BUILT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that say which parameters, or how to compute: they stay as the optimizer was made."""


def as_optimizers(given: Given) -> tuple[Optimizer, ...]:
    """One, several or none, as a tuple."""
    if given is None:
        return ()
    optimizers = (given,) if isinstance(given, Optimizer) else tuple(given)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise CheckpointError(
                f"optimizer is a {type(one).__qualname__}, and not a torch.optim.Optimizer. Pass "
                "the optimizer, or several of them in a list."
            )
    return optimizers


class Named:
    """The parameters of a model, looked up by the objects that optimizers hold."""

    def __init__(self, places: Sequence[ParamShard]) -> None:
        self.places = places
        self._by_id = {id(shard.member.param): shard for shard in places}

    def shard(self, param: Tensor, optimizer: Optimizer) -> ParamShard:
        """The shard of a parameter of ``optimizer``, with its name."""
        if id(param) not in self._by_id:
            raise CheckpointError(
                f"{type(optimizer).__qualname__} holds a parameter of shape {tuple(param.shape)} "
                "that is none of this sharded model's, so it has no name to be stored by. Pass the "
                "optimizer of this model's parameters."
            )
        return self._by_id[id(param)]


ByName = dict[str, dict[str, Any]]
"""Parameter → key of its state → value."""


class LocalState(NamedTuple):
    """An optimizer's state on this rank, by parameter name."""

    parts: ByName  # tensors with a value for each element of this rank's part
    scalars: ByName  # tensors of one number for the parameter, alike on all ranks
    values: ByName  # all others


def local_state(optimizer: Optimizer, named: Named) -> LocalState:
    """All that the optimizer keeps, by parameter name."""
    state = LocalState({}, {}, {})
    for param in params_of(optimizer):
        shard = named.shard(param, optimizer)
        name = shard.member.name
        for key, value in without_tables(optimizer.state.get(param, {})).items():
            check_key(key, name)
            here = value.to_local() if isinstance(value, ShardTensor) else value
            if not isinstance(here, Tensor):
                state.values.setdefault(name, {})[key] = here
            elif is_scalar(key, here, shard.member.shape):
                state.scalars.setdefault(name, {})[key] = here
            else:
                state.parts.setdefault(name, {})[key] = part_of(key, here, shard)
    return state


def groups_of(optimizer: Optimizer, named: Named) -> list[dict[str, Any]]:
    """The optimizer's groups, with names in place of parameters."""
    return [
        {
            **group,
            "params": [named.shard(param, optimizer).member.name for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def record_of(kind: str, groups: Sequence[Mapping[str, Any]], values: ByName) -> dict[str, Any]:
    """The record in ``training.json`` of an optimizer of class ``kind``: all but tensors."""
    return {
        "class": kind,
        "groups": [
            {
                "params": list(group["params"]),
                "options": {
                    key: json_codec.encode(value, f"option {key!r} of {kind}")
                    for key, value in group.items()
                    if key not in AS_BUILT
                },
            }
            for group in groups
        ],
        "values": {
            name: {
                key: json_codec.encode(value, f"optimizer state {key!r} of {name!r}")
                for key, value in state.items()
            }
            for name, state in values.items()
        },
    }


def optimizer_shards(optimizers: Optimizers, named: Named) -> tuple[list[LocalShard], list[Any]]:
    """The tensors to store, and the rest as JSON, one record for each optimizer."""
    elements: dict[str, dict[str, Tensor]] = {}  # state name → parameter → this rank's part
    scalars: list[LocalShard] = []
    records = []
    for optimizer in optimizers:
        state = local_state(optimizer, named)
        for name, parts in state.parts.items():
            for key, value in parts.items():
                elements.setdefault(key, {})[name] = value
        for name, ones in state.scalars.items():
            scalars += [of_rank_0(f"{key}/{name}", value) for key, value in ones.items()]
        groups = groups_of(optimizer, named)
        records.append(record_of(type(optimizer).__qualname__, groups, state.values))
    shards = [
        shard.stored_as(f"{key}/{shard.member.name}", parts[shard.member.name], block_of(key))
        for key, parts in sorted(elements.items())
        for shard in named.places
        if shard.member.name in parts
    ]
    return shards + sorted(scalars, key=lambda scalar: scalar.entry.name), records


def part_of(key: str, value: Tensor, shard: ParamShard) -> Tensor:
    """The elements of this state that belong to the rank's part of the parameter."""
    if value.shape == state_shape(key, shard.value.shape):
        return value
    if len(shard.member.shape) == 0 and value.ndim == 0:  # of a 0-dim parameter that others hold
        return value.reshape(-1)[:0]
    raise CheckpointError(
        f"optimizer state {key!r} of {shard.member.name!r} has shape {tuple(value.shape)}; the "
        f"parameter's shard has {tuple(shard.value.shape)} (of {tuple(shard.member.shape)}). Only "
        "state with one value for each element, or one for the parameter, can be cut anew for "
        "another number of ranks. Use an elementwise optimizer, or leave the optimizer out."
    )


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that the optimizer holds, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_key(key: object, name: str) -> None:
    """Raises ``CheckpointError`` if no tensor can be stored under this key."""
    if not isinstance(key, str) or not key or "/" in key:
        raise CheckpointError(
            f"the optimizer keeps state under the key {key!r} for {name!r}; only texts without "
            "'/' can be stored."
        )


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint holds of one parameter."""

    kind: str  # the optimizer's class
    options: Mapping[str, Any]
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorLocation]


@dataclass(frozen=True, eq=False)
class _Target:
    optimizer: Optimizer
    group: dict[str, Any]
    param: Tensor
    shard: ParamShard
    saved: _Saved

    @property
    def name(self) -> str:
        return self.shard.member.name


class Restored:
    """Stored state that optimizers get back.

    Args:
        places: the stored tensors, ``STATE/PARAMETER``.
        aliases: further names of tied parameters → the name in the records.

    Attributes:
        problems: one line for each thing that does not fit.
        left_out: names of parameters whose state is not loaded, in the model or in the files.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        named: Named,
        records: Sequence[Mapping[str, Any]],
        places: Mapping[str, TensorLocation],
        aliases: Mapping[str, str],
    ) -> None:
        saved, groupless = _parsed(records, places)
        self._targets = targets = list(_targets(optimizers, named, saved, aliases))
        self._states: list[tuple[_Target, dict[str, Any]]] = []
        used = {id(part) for target in targets for part in (target.param, target.saved)}
        held = [(param, optimizer) for optimizer in optimizers for param in params_of(optimizer)]
        absent = [named.shard(*one).member.name for one in held if id(one[0]) not in used]
        extra = [name for name, state in saved.items() if id(state) not in used]
        self.left_out = (*absent, *extra, *groupless)
        self.problems = [
            *(f"{name}: its optimizer state is not stored" for name in absent),
            *(f"{name}: stored, and no optimizer has this parameter" for name in extra),
            *(f"{name}: it has state, and is in no stored group" for name in groupless),
            *(line for target in targets for line in _misfits(target)),
            *_conflicts(targets),
        ]

    def requests(self) -> list[ReadRequest]:
        """What is to be read, into state that exists or is made here."""
        requests = []
        for target in self._targets:
            state: dict[str, Any] = {}
            for key, place in _fitting(target):
                state[key], start = _memory(target, key, place)
                requests.append(request_for(place, start, state[key]))
            self._states.append((target, state))
        return requests

    def apply(self) -> None:
        """Give the optimizers what was read, and the options of their groups."""
        for target, state in self._states:
            state |= {key: json_codec.decode(value) for key, value in target.saved.values.items()}
            target.optimizer.state[target.param].clear()
            target.optimizer.state[target.param].update(state)
            if not state:
                del target.optimizer.state[target.param]
            for key, value in target.saved.options.items():
                _set_option(target.group, key, json_codec.decode(value))


def _targets(
    optimizers: Optimizers, named: Named, saved: Mapping[str, _Saved], aliases: Mapping[str, str]
) -> Iterator[_Target]:
    """Each parameter that the optimizers hold and that is stored."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                shard = named.shard(param, optimizer)
                if name := find_stored(shard.member.aliases, saved, aliases):
                    yield _Target(optimizer, group, param, shard, saved[name])


def _parsed(
    records: Sequence[Mapping[str, Any]], places: Mapping[str, TensorLocation]
) -> tuple[dict[str, _Saved], list[str]]:
    """What is stored of each parameter in a group; and names of others that have state."""
    tensors: dict[str, dict[str, TensorLocation]] = {}
    for name, place in places.items():
        key, _, param = name.partition("/")
        tensors.setdefault(param, {})[key] = place
    try:
        saved = {
            name: _Saved(
                record["class"],
                group["options"],
                record["values"].get(name, {}),
                tensors.get(name, {}),
            )
            for record in records
            for group in record["groups"]
            for name in group["params"]
        }
        with_values = [n for record in records for n, one in record["values"].items() if one]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the training state's record of optimizers is malformed ({error!r}). Load another "
            "checkpoint, or load without the optimizer."
        ) from None
    return saved, [n for n in dict.fromkeys([*tensors, *with_values]) if n not in saved]


def _fitting(target: _Target) -> Iterator[tuple[str, TensorLocation]]:
    for key, place in target.saved.tensors.items():
        if place.stored.shape in ((), tuple(state_shape(key, target.shard.member.shape))):
            yield key, place


def _misfits(target: _Target) -> Iterator[str]:
    kind = type(target.optimizer).__qualname__
    if target.saved.kind != kind:
        yield f"{target.name}: its state is of {target.saved.kind}, and {kind} holds it now"
    elif SCALES & target.saved.tensors.keys():
        yield from filter(None, [cut_inside(target.optimizer, target.param)])
    fits = {key for key, _ in _fitting(target)}
    for key, place in target.saved.tensors.items():
        if key not in fits:
            shape = tuple(target.shard.member.shape)
            stored = place.stored.shape
            yield f"{key} of {target.name}: stored as {stored}, the parameter has {shape}"


def _conflicts(targets: Iterable[_Target]) -> Iterator[str]:
    """Groups whose parameters were saved with unlike options."""
    first: dict[int, _Target] = {}
    for target in targets:
        other = first.setdefault(id(target.group), target)
        for key, value in target.saved.options.items():
            if (others := other.saved.options.get(key)) != value:
                yield (
                    f"{target.name}: saved with {key}={value}, and {other.name}, now in the same "
                    f"group, with {key}={others}"
                )


def _memory(target: _Target, key: str, place: TensorLocation) -> tuple[Tensor, int]:
    """The memory for one state of one parameter, and the index of its first element here."""
    dtype = dtype_of(place.stored.dtype)
    scalar = torch.empty(())  # of a 0-dim parameter the state may be its one element's
    one = place.stored.shape == () and is_scalar(key, scalar, target.shard.member.shape)
    shape = torch.Size([]) if one else state_shape(key, target.shard.value.shape)
    present = target.optimizer.state.get(target.param, {}).get(key)
    present = present.to_local() if isinstance(present, ShardTensor) else present
    if (
        isinstance(present, Tensor)
        and (present.shape, present.dtype) == (shape, dtype)
        and present.is_contiguous()
    ):
        return present, 0 if one else target.shard.start // block_of(key)
    moved = bool(target.group.get("capturable") or target.group.get("fused"))
    device = target.shard.value.device if moved or not one else torch.device("cpu")
    memory = in_huge_pages(torch.empty(shape, dtype=dtype, device=device))
    return memory, 0 if one else target.shard.start // block_of(key)


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    if key in AS_BUILT:
        return
    present = group.get(key)
    if isinstance(present, Tensor):  # a learning rate that a compiled or captured step reads
        present.fill_(float(value))
    else:
        group[key] = value
