"""The tensors to store, and this rank's part of each, where it is in memory.

Parameters, optimizer state and what each rank has of its own are alike here: a name, a whole shape,
and for every rank a range of elements. So one writer and one reader serve all of them, and another
strategy, number of ranks or choice of units is nothing but other ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor, nn

from shardwise.checkpoint.plan import Entry, Held
from shardwise.checkpoint.safetensors_format import code_of
from shardwise.checkpoint.wrappers import bare_names
from shardwise.memory.parameters import Bucket
from shardwise.memory.sharding import sharding_of
from shardwise.optim.sharded_model import ShardedModel
from shardwise.plan.layout.layout import Layout, Slot
from shardwise.plan.units.units import Member
from shardwise.torch_internals import tensors_of

log = logging.getLogger("shardwise")


class LocalShard(NamedTuple):
    """A tensor to store."""

    entry: Entry
    value: Tensor  # the elements that this rank holds; any shape, any device
    start: int  # which element of the flattened tensor the first of them is

    def clone(self) -> LocalShard:
        """The same, of the value as it is now."""
        return self._replace(value=self.value.detach().clone())


@dataclass(frozen=True, eq=False)
class ParamShard:
    """The place of a parameter's elements."""

    member: Member
    held: tuple[Held, ...]  # who holds which elements
    value: Tensor  # this rank's part of it, as at rest
    start: int  # which element of the flattened parameter the first of them is
    bucket: Bucket  # that it is of
    index: int  # its number there

    def stored_as(self, name: str, value: Tensor, block: int = 1) -> LocalShard:
        """A tensor that has one element for each ``block`` of the parameter's."""
        shape, held = tuple(self.member.shape), self.held
        if block != 1:
            shape = (-(-self.member.numel // block),)
            held = tuple(Held(h.start // block, -(-h.stop // block), h.ranks) for h in held)
        entry = Entry(name, code_of(value.dtype, name), shape, held)
        return LocalShard(entry, value, self.start // block)


def param_shards(sharded: ShardedModel) -> list[ParamShard]:
    """Every parameter, in the order of slots: what a rank holds of a bucket is one range."""
    shards, bare = [], bare_names(sharded.model)
    for bucket in sharded.buckets:
        bucket.adopt()
        spec = bucket.spec
        views, sizes = spec.rest_views(bucket.shard), (spec.shard.size, spec.replicate.size)
        for k, held, start in _places(spec.layout, tuple(spec.slots), *sizes, spec.position):
            member = bare_member(spec.members[k], bare)
            shards.append(ParamShard(member, held, views[k], start, bucket, k))
    return shards


def bare_member(member: Member, bare: Callable[[str], str]) -> Member:
    """The same parameter by its names without wrappers."""
    name, aliases = bare(member.name), tuple(map(bare, member.aliases))
    is_bare = (name, aliases) == (member.name, member.aliases)
    return member if is_bare else replace(member, name=name, aliases=aliases)


@lru_cache(maxsize=1 << 10)  # every save of a run has the same layout
def _places(
    layout: Layout, slots: tuple[Slot, ...], shards: int, copies: int, position: int
) -> list[tuple[int, tuple[Held, ...], int]]:
    """Every slot, in order: its number, who holds what, and which element is the first here."""

    def ranks(part: int) -> tuple[int, ...]:  # of a shard all its copies, or of a piece one
        if layout.world > shards:
            return (part % copies * shards + part // copies,)
        return tuple(range(part, shards * copies, shards))

    return [
        (k, tuple(Held(*layout.owned(s, p), ranks(p)) for p in layout.owners(s)), here)
        for k, s in sorted(enumerate(slots), key=lambda pair: (pair[1].start, pair[1].stop))
        for here, _ in [layout.owned(s, position)]
    ]


def weights(
    params: Iterable[ParamShard], model: nn.Module
) -> tuple[list[LocalShard], dict[str, str]]:
    """Parameters and persistent buffers, each once; and further names → the name it is stored by.

    What is whole on every rank is stored as rank 0 has it.
    """
    shards: list[LocalShard] = []
    aliases: dict[str, str] = {}
    for shard in params:
        shards.append(shard.stored_as(shard.member.name, shard.value))
        aliases |= dict.fromkeys(shard.member.aliases[1:], shard.member.name)
    for names, buffer in held_whole(model):
        aliases |= dict.fromkeys(names[1:], names[0])
        shards.append(of_rank_0(names[0], buffer))
    warn_of_extra_state(model, "checkpoint")
    return shards, aliases


def of_rank_0(name: str, value: Tensor) -> LocalShard:
    """A tensor that is stored as rank 0 has it."""
    shape, numel = tuple(value.shape), value.shape.numel()
    held = (Held(0, numel, (0,)),) if numel else ()
    entry = Entry(name, code_of(value.dtype, name), shape, held, everywhere=True)
    return LocalShard(entry, value, 0)


def own_rows(values: Mapping[str, Tensor], rank: int, world: int) -> list[LocalShard]:
    """Tensors that every rank has one of, alike in shape and dtype, stored as ``[world, …]``."""
    shards = []
    for name, value in values.items():
        size = value.shape.numel()
        held = tuple(Held(r * size, (r + 1) * size, (r,)) for r in range(world) if size)
        entry = Entry(name, code_of(value.dtype, name), (world, *value.shape), held)
        shards.append(LocalShard(entry, value, rank * size))
    return shards


def held_whole(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Name what each rank has whole: persistent buffers, and parameters that are not sharded.

    Each once, with all its names without wrappers, in order of registration.
    """
    return [(names, tensor.detach()) for names, tensor in _once(model)]


def persistent_buffers(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each persistent buffer once, with all its names, in order of registration."""
    return [(names, t) for names, t in _once(model) if not isinstance(t, nn.Parameter)]


def _once(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    bare = bare_names(model)
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in tensors_of(module):
            is_whole = sharding_of(tensor) is None  # a buffer, or ``ignored=``
            if is_whole and name not in module._non_persistent_buffers_set:
                names.setdefault(id(tensor), []).append(bare(f"{prefix}.{name}".lstrip(".")))
                tensors[id(tensor)] = tensor
    return [(tuple(aliases), tensors[key]) for key, aliases in names.items()]


def ignored_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that ``ignored=`` left whole, by each of their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: param for name, param in named if sharding_of(param) is None}


def warn_of_extra_state(model: nn.Module, what: str) -> None:
    """Warn that what modules return from ``get_extra_state`` is not in this ``what``."""
    plain = nn.Module.get_extra_state
    if odd := [name for name, m in model.named_modules() if type(m).get_extra_state is not plain]:
        log.warning(
            "%d modules keep extra state (get_extra_state), the first is %r; it may be any object, "
            "which only pickle could write, so it is not in this %s",
            len(odd),
            odd[0],
            what,
        )
