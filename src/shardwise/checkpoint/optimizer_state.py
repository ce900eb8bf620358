"""Optimizer state by parameter name, whatever the groups, the ranks and the optimizer's order.

Each element-wise state is a tensor of the whole parameter's shape, ``exp_avg/NAME``,
stored by ranges like the parameter; what is one number for the parameter (``step``) is a
0-dim tensor; and a group's options are kept with the names of its parameters. What is not cut like
a parameter is stored as rank 0 has it, so all ranks must have it alike.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.local_shards import LocalShard, ParamShard, of_rank_0
from shardwise.checkpoint.training_state import short_text
from shardwise.errors import CheckpointError
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.optim.blockwise import block_of, state_shape, without_tables
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
                "that does not belong to this sharded model, so it has no name in the checkpoint. "
                "Pass the optimizer of this model's parameters."
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
    wrapped = {name: x.state for name, x in vars(optimizer).items() if isinstance(x, Optimizer)}
    keys: list[object] = [name for name in wrapped if wrapped[name] is not optimizer.state]
    if beside := [key for key in [*optimizer.state, *keys] if not isinstance(key, Tensor)]:
        raise CheckpointError(
            f"{type(optimizer).__qualname__} keeps state of no parameter, under {beside}, which a "
            "checkpoint has no place for. Keep it in the optimizer's param_groups, or store "
            "optimizer.state_dict(), or leave the optimizer out."
        )
    for param in params_of(optimizer):
        shard = named.shard(param, optimizer)
        name = shard.member.name
        for key, value in without_tables(optimizer.state.get(param, {})).items():
            check_key(key, name)
            here = value.to_local() if isinstance(value, ShardTensor) else value
            if not isinstance(here, Tensor):
                check_plain(here, key, name)
                state.values.setdefault(name, {})[key] = here
            elif is_scalar(key, here, shard.member.shape):
                state.scalars.setdefault(name, {})[key] = here
            else:
                state.parts.setdefault(name, {})[key] = part_of(key, here, shard)
    return state


def groups_of(optimizer: Optimizer, named: Named) -> list[dict[str, Any]]:
    """The optimizer's groups, with names in place of parameters."""

    def name_of(param: Tensor) -> str:
        return named.shard(param, optimizer).member.name

    return [{**g, "params": [*map(name_of, g["params"])]} for g in optimizer.param_groups]


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
    check_disjoint(optimizers, named)
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


def facts_of(shards: Sequence[LocalShard], records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what rank 0 stores for all ranks and must be alike on them, as short texts."""
    facts = {s.entry.name: str(s.value.item()) for s in shards if s.entry.everywhere}
    for number, record in enumerate(records):
        parts = {**record["values"]}
        for k, group in enumerate(record["groups"]):
            parts[f"parameters of group {k}"] = group["params"]
            parts |= {f"{key} of group {k}": value for key, value in group["options"].items()}
        for part, value in parts.items():
            text = json.dumps(value, sort_keys=True)
            facts[f"optimizer {number} ({record['class']}): {part}"] = short_text(text)
    return facts


def part_of(key: str, value: Tensor, shard: ParamShard) -> Tensor:
    """The elements of this state that belong to the rank's part of the parameter."""
    if value.shape == state_shape(key, shard.value.shape):
        return value
    if len(shard.member.shape) == 0 and value.ndim == 0:  # of a 0-dim parameter that others hold
        return value.reshape(-1)[:0]
    raise CheckpointError(
        f"optimizer state {key!r} of {shard.member.name!r} has shape {tuple(value.shape)}; the "
        f"parameter's shard has {tuple(shard.value.shape)} (of {tuple(shard.member.shape)}). Only "
        "one value for each element, or one in all, can be resharded. Leave the optimizer out."
    )


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that the optimizer holds, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_disjoint(optimizers: Optimizers, named: Named) -> None:
    """Raises ``CheckpointError`` if two optimizers hold one parameter: state goes by its name."""
    holders: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for param in params_of(optimizer):
            if (first := holders.setdefault(id(param), number)) != number:
                kinds = [type(optimizers[k]).__qualname__ for k in (first, number)]
                raise CheckpointError(
                    f"optimizers {first} and {number} ({' and '.join(kinds)}) both hold "
                    f"{named.shard(param, optimizer).member.name!r}, and a checkpoint has one "
                    "state for each parameter, so one optimizer's would be lost. Pass one of them; "
                    "keep the other's as sharded.optimizer_state_dict(optimizer), which "
                    "sharded.load_optimizer_state_dict(optimizer, states) takes back."
                )


def check_plain(value: Any, key: str, name: str) -> None:
    """Raises ``CheckpointError`` for tensors in a list or dict: they are this rank's part alone."""
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)) else ():
        if isinstance(item, Tensor):
            raise CheckpointError(
                f"optimizer state {key!r} of {name!r} is a {type(value).__qualname__} of tensors. "
                "Each rank has its own part of them, and only a tensor that is itself the state "
                "can be resharded for another number of ranks. Keep each under a key of its own, "
                f"such as '{key}_0', or leave the optimizer out."
            )
        check_plain(item, key, name)


def check_key(key: object, name: str) -> None:
    """Raises ``CheckpointError`` if no tensor can be stored under this key."""
    if not isinstance(key, str) or not key or "/" in key:
        fact = f"the optimizer keeps state under the key {key!r} for {name!r}"
        raise CheckpointError(f"{fact}; only strings without '/' can be stored.")
