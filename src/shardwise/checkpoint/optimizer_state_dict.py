"""An optimizer's state dict by parameter name: out of the shards, and back into them.

    {"state": {NAME: {"step": …, "exp_avg": …}}, "param_groups": [{"params": [NAME, …], "lr": …}]}

This is what FSDP's ``full_optim_state_dict`` and DCP's ``get_optimizer_state_dict`` give. A plain
torch optimizer numbers its parameters instead; ``numbered`` and ``by_name`` lead there and back.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint.collectives import raise_on_all, run_on_rank_0
from shardwise.checkpoint.load_plan import misfit_error
from shardwise.checkpoint.local_shards import param_shards
from shardwise.checkpoint.optimizer_restore import Restored, StoredStates
from shardwise.checkpoint.optimizer_state import (
    AS_BUILT,
    ByName,
    Named,
    check_key,
    groups_of,
    local_state,
    record_of,
)
from shardwise.checkpoint.state_dict import StateDict, joined, offered, receive, warn_of_copies
from shardwise.checkpoint.wrappers import bare_names, further_names
from shardwise.errors import CheckpointError
from shardwise.optim.cut_state import each_whole
from shardwise.optim.sharded_model import ShardedModel

ADDED_LATER = frozenset({"maximize", "decoupled_weight_decay"})
"""Options that state of older releases of torch lacks; they stay as the optimizer was made."""


# --- out -------------------------------------------------------------------------------------


def optimizer_state(sharded: ShardedModel, optimizer: Optimizer, how: StateDict) -> dict[str, Any]:
    """``{"state": …, "param_groups": …}`` by parameter name, first names only. A collective.

    Its tensors are whole, or this rank's parts; it is empty where ``rank0_only`` leaves a rank out.
    """
    comm, named = sharded.comm, Named(param_shards(sharded))
    comm.agree(how.facts())
    groups, parts, state = raise_on_all(
        comm, "reading optimizer state", lambda: _local(optimizer, named, how)
    )
    if how.kind == "full":
        _gather(sharded, parts, state, how)
        if not how.rank0_only:
            warn_of_copies(comm, (v for one in state.values() for v in one.values()))
    else:
        for shard in named.places:
            for key, value in parts.get(shard.member.name, {}).items():
                state[shard.member.name][key] = how.part(value, shard)
    if how.rank0_only and comm.rank:
        return {}
    return {"state": {name: one for name, one in state.items() if one}, "param_groups": groups}


def _local(
    optimizer: Optimizer, named: Named, how: StateDict
) -> tuple[list[dict[str, Any]], ByName, ByName]:
    """Groups; this rank's parts of what is cut with its parameter; what is alike on all ranks."""
    parts, scalars, values = local_state(optimizer, named)
    names = [s.member.name for s in named.places if how.wants(s.member.aliases)]
    alike: ByName = {name: copy.deepcopy(values.get(name, {})) for name in names}
    for name in names:
        alike[name] |= {key: how.part(value) for key, value in scalars.get(name, {}).items()}
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items()}
        for group in groups_of(optimizer, named)
    ]
    return groups, {name: parts[name] for name in names if name in parts}, alike


def _gather(sharded: ShardedModel, parts: ByName, into: ByName, how: StateDict) -> None:
    kept = sharded.comm.rank == 0 or not how.rank0_only
    bare = bare_names(sharded.model)
    facts = {n: [(k, str(v.dtype)) for k, v in sorted(keys.items())] for n, keys in parts.items()}
    sharded.comm.agree({"optimizer state": json.dumps(dict(sorted(facts.items())))})
    for bucket in sharded.buckets:
        names = [bare(member.name) for member in bucket.members]
        of_params = [{(key, 0): v for key, v in parts.get(name, {}).items()} for name in names]
        for index, (key, _), whole in each_whole(bucket, of_params):
            if kept:
                into[names[index]][key] = how.part(whole)


# --- numbers and names -----------------------------------------------------------------------


def numbered(states: Mapping[str, Any]) -> dict[str, Any]:
    """The same as a plain torch optimizer keeps it, which was made with as many groups.

    Parameters are numbered as they stand in the groups, so the plain optimizer must be given them
    in the same order.
    """
    names = [name for group in states["param_groups"] for name in group["params"]]
    return _renamed(states, {name: number for number, name in enumerate(names)})


def by_name(states: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """``plain_optimizer.state_dict()`` by name.

    Args:
        names: of the parameters, in the order of the groups: for
            ``AdamW(model.parameters())``, ``[name for name, _ in model.named_parameters()]``.

    Raises:
        CheckpointError: there are more or fewer parameters than names.
    """
    numbers = [number for group in states["param_groups"] for number in group["params"]]
    if len(numbers) != len(names):
        raise CheckpointError(
            f"the optimizer's groups hold {len(numbers)} parameters, and {len(names)} names were "
            "given. Pass one name for each, in the order of the groups."
        )
    return _renamed(states, dict(zip(numbers, names, strict=True)))


def _renamed(states: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**g, "params": [new[old] for old in g["params"]]} for g in states["param_groups"]]
    return {"state": {new[k]: dict(v) for k, v in states["state"].items()}, "param_groups": groups}


# --- in --------------------------------------------------------------------------------------


def put_optimizer_state(
    sharded: ShardedModel, optimizer: Optimizer, states: Mapping[str, Any]
) -> None:
    """Give every rank its part of rank 0's ``states``, or of all ranks' shards. A collective."""
    comm = sharded.comm
    states = joined(comm, states)
    kind = type(optimizer).__qualname__
    record = run_on_rank_0(comm, "options of an optimizer", lambda: _record(states, kind))
    tensors = _tensors(states) if comm.rank == 0 else {}
    places = offered(comm, tensors)
    aliases = further_names([n for group in record["groups"] for n in group["params"]], {})
    named = Named(param_shards(sharded))
    stored = StoredStates([record], places, aliases, {})
    restoring = raise_on_all(comm, "comparing", lambda: Restored((optimizer,), named, stored))
    if problems := [*_of_another(optimizer, record), *restoring.problems]:
        raise misfit_error(
            "rank 0's optimizer state dict does not fit",
            problems,
            "Pass the state of this model's optimizer by name, of kind 'full', or on all ranks one "
            "of kind 'sharded'; nothing loads one of kind 'local'.",
        )
    receive(comm, tensors, restoring.requests())
    restoring.apply()


def _tensors(states: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value
        for name, one in states["state"].items()
        for key, value in one.items()
        if isinstance(value, Tensor)
    }


def _of_another(optimizer: Optimizer, record: Mapping[str, Any]) -> list[str]:
    """Groups that lack options which the optimizer needs, as those of another class do."""
    needed = set(optimizer.defaults) - AS_BUILT - ADDED_LATER
    return [
        f"group {number}: it has no {', '.join(absent)}, so it is not of {record['class']}"
        for number, group in enumerate(record["groups"])
        if (absent := sorted(needed - set(group["options"])))
    ]


def _record(states: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The record that a checkpoint would hold of it: all but tensors."""
    _check_form(states)
    values = {
        name: {key: value for key, value in one.items() if not isinstance(value, Tensor)}
        for name, one in states["state"].items()
    }
    return record_of(kind, states["param_groups"], values)


def _check_form(states: Any) -> None:
    try:
        named = [name for group in states["param_groups"] for name in group["params"]]
        keys = {name: list(state) for name, state in states["state"].items()}
    except (KeyError, TypeError, AttributeError):
        named, keys = [None], {}
    if not all(isinstance(name, str) for name in (*named, *keys)):
        raise CheckpointError(
            "rank 0 needs an optimizer state dict with parameter names in state and in "
            "param_groups; a plain optimizer's has numbers. Pass sw.by_name(state, names), or the "
            "result of optimizer_state_dict()."
        )
    for name, of_name in keys.items():
        for key in of_name:
            check_key(key, name)
