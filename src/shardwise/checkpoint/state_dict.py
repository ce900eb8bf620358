"""A model's state dict, as FSDP's users know it: out of the shards, and back into them.

kind       FSDP1's word         a rank has                             loads at
full       FULL_STATE_DICT      whole tensors under the usual names    any number of ranks
sharded    SHARDED_STATE_DICT   shards that know their whole           any, by ``full_tensor()``
local      LOCAL_STATE_DICT     its shards as plain tensors            the same layout alone

Whole tensors exist one bucket at a time. On the way back rank 0 has the tensors, or joins those
of which every rank gives its shard, and every rank keeps its part of each.
"""

from __future__ import annotations

import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.checkpoint.collectives import all_gather_object, run_on_rank_0
from shardwise.checkpoint.load_plan import ModelPlan, misfit_error
from shardwise.checkpoint.local_shards import (
    ParamShard,
    bare_member,
    held_whole,
    param_shards,
    warn_of_extra_state,
)
from shardwise.checkpoint.options import kind_of
from shardwise.checkpoint.read_requests import ReadRequest
from shardwise.checkpoint.reader import TensorLocation
from shardwise.checkpoint.safetensors_format import DTYPES, Stored, bytes_of, code_of, dtype_of
from shardwise.checkpoint.wrappers import bare_names, further_names
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import CheckpointError, ConfigError
from shardwise.errors.arguments import checked, taken
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.whole import gather_whole
from shardwise.optim.sharded_model import ShardedModel
from shardwise.plan.printed import size
from shardwise.plan.units.units import Member
from shardwise.torch_internals import buffers_of, parameters_of, tree_leaves, tree_map_only

CONFIG = re.compile("(Full|Sharded|Local)(?:Optim)?StateDictConfig")
"""Classes of ``torch.distributed.fsdp``, known by their names without importing them."""


@checked
@dataclass(frozen=True)
class StateDict:
    """Options of ``sharded.state_dict`` and ``sharded.optimizer_state_dict``.

    ``sw.StateDict.FULL``, ``.SHARDED`` and ``.LOCAL`` are the three kinds with these defaults.

    Attributes:
        kind: ``"full"``, ``"sharded"`` or ``"local"``.
        offload_to_cpu: the tensors are in host memory, not on the device. On CPU there is only
            host memory.
        rank0_only: of ``"full"``: only rank 0 gets it, the others get nothing, and never hold
            more than one bucket.
        names: which tensors, by name; ``None`` is all. Buckets with none of them are not gathered.
    """

    FULL: ClassVar[StateDict]
    SHARDED: ClassVar[StateDict]
    LOCAL: ClassVar[StateDict]

    kind: str | Enum = "full"
    offload_to_cpu: bool = True
    rank0_only: bool = False
    names: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind_of(self.kind))
        if self.rank0_only and self.kind != "full":
            raise ConfigError(
                f"rank0_only=True with kind={self.kind!r}: every rank has shards of its own, so "
                "rank 0's alone would be a part of the model. Leave rank0_only out, or ask for "
                "kind='full'."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StateDict:
        """Make options from a caller's arguments: a policy, or a kind and the other fields.

        torch's ``FullStateDictConfig(…)`` and the like are policies.
        """
        policy = given["kind"]
        if type(policy).__name__ == "StateDictOptions":
            raise _state_dict_options(policy.full_state_dict, policy.cpu_offload)
        if name := CONFIG.fullmatch(type(policy).__name__):
            rank0_only = vars(policy).get("rank0_only", False)
            policy = cls(name[1].lower(), policy.offload_to_cpu, rank0_only)
        if not isinstance(policy, cls):
            return taken(cls, given)
        others = [item for item in fields(cls) if item.name != "kind"]
        if beside := [item.name for item in others if given[item.name] != item.default]:
            raise ConfigError(
                f"{', '.join(beside)} was passed besides a StateDict, which has these options. "
                "Set it there."
            )
        return policy

    def wants(self, names: Sequence[str]) -> bool:
        """Is a tensor of these names wanted?"""
        return self.names is None or any(map(self.names, names))

    def facts(self) -> dict[str, str]:
        """Return what every rank must ask for alike, as short texts to compare."""
        return {"kind of state dict": str(self.kind), "rank0_only": str(self.rank0_only)}

    def part(self, value: Tensor, shard: ParamShard | None = None) -> Tensor:
        """A copy of a whole tensor, or of this rank's part of one; a view would keep its bucket."""
        value = value.detach()
        part = value.cpu() if self.offload_to_cpu and not value.is_cpu else value.clone()
        if self.kind == "sharded" and shard is not None and shard.bucket.spec.placement.splits:
            part.sharding = shard.bucket.sharding(shard.index)  # type: ignore[attr-defined]
            part.__class__ = ShardTensor
        return part

    def chosen(
        self, names: Sequence[str], value: Tensor, shard: ParamShard | None = None
    ) -> dict[str, Tensor]:
        """A copy of the value under each of its names that is wanted; maybe none."""
        wanted = [name for name in names if self.wants([name])]
        return dict.fromkeys(wanted, self.part(value, shard)) if wanted else {}


# Set here, because a frozen class has no instances while it is being made.
StateDict.FULL = StateDict("full")
StateDict.SHARDED = StateDict("sharded")
StateDict.LOCAL = StateDict("local")


log = logging.getLogger("shardwise")


# --- out -------------------------------------------------------------------------------------


def _state_dict_options(full: bool, offload: bool) -> ConfigError:
    """Answer torch's StateDictOptions, whose whole and offloaded state is rank 0's."""
    only = ", rank0_only=True" * (full and offload)
    return ConfigError(
        "kind is a StateDictOptions of torch.distributed.checkpoint, which is no kind. Write "
        f"{'full' if full else 'sharded'!r}, offload_to_cpu={offload}{only} in its place; names=… "
        "leaves out what is frozen."
    )


def model_state(sharded: ShardedModel, how: StateDict) -> dict[str, Any]:
    """Parameters and persistent buffers, in the order of ``model.state_dict()``. A collective.

    Returns:
        ``"full"``: name → whole tensor; empty on ranks that ``rank0_only`` leaves out.
        ``"sharded"``: name → this rank's part, as a ``ShardTensor`` where ranks have different
        ones. ``"local"``: name → the same as a plain tensor.
    """
    comm, bare = sharded.comm, bare_names(sharded.model)
    members = {b: [bare_member(member, bare) for member in b.members] for b in sharded.buckets}
    buckets = [b for b in members if any(how.wants(member.aliases) for member in members[b])]
    comm.agree({**how.facts(), "units of it": ", ".join(bucket.unit for bucket in buckets)})
    if how.names is None:
        warn_of_extra_state(sharded.model, "state dict")
    states: dict[str, Any] = {}
    kept = how.kind != "full" or comm.rank == 0 or not how.rank0_only
    for bucket in buckets if how.kind == "full" else ():
        states |= _whole(bucket, members[bucket], how, kept)
    for shard in param_shards(sharded) if how.kind != "full" else ():
        states |= how.chosen(shard.member.aliases, shard.value, shard)
    for names, buffer in held_whole(sharded.model) if kept else ():
        states |= how.chosen(names, buffer)
    if how.kind == "full" and not how.rank0_only:
        warn_of_copies(comm, states.values())
    order = {name: k for k, name in enumerate(map(bare, _names(sharded.model)))}
    return dict(sorted(states.items(), key=lambda item: order[item[0]]))


def _whole(
    bucket: Bucket, members: Sequence[Member], how: StateDict, kept: bool
) -> dict[str, Tensor]:
    """Copies of the bucket's tensors; only one bucket is whole at a time."""
    states: dict[str, Tensor] = {}
    wholes = gather_whole(bucket)  # on all ranks: the others need this rank's part
    for member, whole in zip(members, wholes, strict=True) if kept else ():
        states |= how.chosen(member.aliases, whole)
    return states


def _names(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name in (*parameters_of(module), *buffers_of(module)):
            yield start + name


def warn_of_copies(comm: Comm, values: Iterable[Any]) -> None:
    """Warn if several ranks of one host each hold all of it. A collective."""
    hosts = all_gather_object(comm, socket.gethostname(), "host names")
    on_cpu = [v for v in values if isinstance(v, Tensor) and v.is_cpu]
    one = {value.data_ptr(): value.nbytes for value in on_cpu}
    host, copies = Counter(hosts).most_common(1)[0]
    if copies > 1 and one and comm.rank == 0:
        log.warning(
            "%d full copies of %s in host memory of %s, %s in all, since rank0_only is False. Pass "
            "rank0_only=True if rank 0 alone needs it.",
            copies,
            size(sum(one.values())),
            host,
            size(copies * sum(one.values())),
        )


# --- in --------------------------------------------------------------------------------------


def put_model_state(sharded: ShardedModel, states: Mapping[str, Tensor]) -> None:
    """Give every rank its part of rank 0's ``states``, or of all ranks' shards. A collective."""
    comm = sharded.comm
    states = joined(comm, states)
    states = _without_extra_state(states) if comm.rank == 0 else {}
    places = offered(comm, states)
    plan = ModelPlan(sharded, places, further_names(places, {}))
    if problems := plan.matched.problems(cast=False):
        raise misfit_error(
            "rank 0's state dict does not fit the model",
            problems,
            "Pass this model's state dict of kind 'full', on rank 0 at least, or one of kind "
            "'sharded', on all ranks; one of kind 'local' only fits model.load_state_dict(). "
            "Convert tensors of another dtype first: "
            "states[NAME] = states[NAME].to(dtype).",
        )
    receive(comm, states, plan.requests({}))
    plan.apply()
    for bucket in sharded.buckets:
        bucket.expire()


def joined(comm: Comm, states: Any) -> Any:
    """``states`` with whole tensors in place of shards, on rank 0. A collective.

    Raises:
        CheckpointError: not all ranks have given shards of the same parameters.
    """
    shards = [leaf for leaf in tree_leaves(states) if isinstance(leaf, ShardTensor)]
    mine = [shard.sharding.name for shard in shards]
    every = all_gather_object(comm, mine, "shards of a state dict")
    if not any(every):
        return states
    if other := next((rank for rank, names in enumerate(every) if names != every[0]), 0):
        raise CheckpointError(
            f"the state dict has {len(every[0])} shards on rank 0 and {len(every[other])} on rank "
            f"{other}, or those of other parameters. Each rank has its own part of a tensor: pass "
            "what state_dict('sharded') gave on all ranks, or one of kind 'full' on rank 0."
        )
    wholes = dict[int, Tensor]()
    for shard in shards:
        whole = shard.full_tensor()
        if comm.rank == 0:
            wholes[id(shard)] = whole
    return tree_map_only(ShardTensor, lambda s: wholes[id(s)], states) if comm.rank == 0 else {}


def _without_extra_state(states: Any) -> Any:
    """All but what modules return from ``get_extra_state``, which may be any object."""
    if not isinstance(states, Mapping):  # ``offered`` raises that on all ranks
        return states
    return {n: v for n, v in states.items() if str(n).rpartition(".")[2] != "_extra_state"}


def offered(comm: Comm, tensors: Mapping[str, Tensor]) -> dict[str, TensorLocation]:
    """Return on every rank rank 0's tensors: each in a "file" of its own name. A collective."""
    index = run_on_rank_0(comm, "names of a state dict", lambda: _index(tensors))
    return {
        name: TensorLocation(
            name, Stored(code, tuple(shape), 0, prod(shape) * dtype_of(code).itemsize)
        )
        for name, (code, shape) in index.items()
    }


def _index(tensors: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    if not isinstance(tensors, Mapping):
        raise CheckpointError(
            f"rank 0's state dict is a {type(tensors).__qualname__}. Pass a dict of names and full "
            "tensors there; other ranks' arguments are ignored."
        )
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(f"the state dict has the key {name!r:.80}. Names must be texts.")
        # Exactly these: the memory of a subclass (DTensor, FakeTensor) is not its values.
        known = type(value) in (Tensor, nn.Parameter)
        if not known or value.layout is not torch.strided or value.is_meta:
            raise CheckpointError(
                f"{name!r} in the state dict is a {type(value).__name__}, not a full, dense tensor "
                "with values. Pass the result of state_dict('full'); full_tensor(), called on "
                "every rank, gathers a ShardTensor or a DTensor."
            )
    return {n: (code_of(v.dtype, n), tuple(v.shape)) for n, v in tensors.items()}


def receive(comm: Comm, tensors: Mapping[str, Tensor], requests: Iterable[ReadRequest]) -> None:
    """Fill every rank's ``requests`` from rank 0's ``tensors``, one tensor at a time. A collective.

    All ranks request the same tensors.
    """
    by_name: dict[str, list[ReadRequest]] = {}
    for request in requests:
        by_name.setdefault(request.place.file, []).append(request)
    for name, some in sorted(by_name.items()):
        whole = _send(comm, name, some[0].place.stored, tensors.get(name))
        for _, start, out in some:
            out.copy_(whole[start : start + out.numel()])


def _send(comm: Comm, name: str, stored: Stored, value: Tensor | None) -> Tensor:
    """Rank 0's ``value``, ``[numel]`` on the comm's device, on every rank. A collective."""
    shape, dtype = (prod(stored.shape),), DTYPES[stored.dtype]
    if comm.rank == 0:
        assert value is not None, name  # rank 0 offered it
        flat = bytes_of(value.to(comm.device)).view(dtype)
    else:
        flat = torch.empty(shape, dtype=dtype, device=comm.device)
    if comm.size > 1 and flat.numel():
        comm.broadcast(flat.view(torch.uint8), 0, Label("broadcast", name)).wait()
    return flat
