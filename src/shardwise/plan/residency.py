"""Full buckets that stay in memory: those of named units, or within a number of bytes.

A frozen bucket that stays is never gathered again, so those come first. A trained unit that stays
from its first use to its last saves one of the two gathers of ``full_shard``: its values are new in
the next step. Of each kind the largest that fits is taken first.

A gather has a cost of its own, whatever it carries. So where nobody says otherwise a few MiB stay,
unless ranks share the memory of full buckets, where a gather moves nothing. A model that has no
more is one unit, since all of it is gathered at once anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from shardwise.comm.grid import Axis, Grid
from shardwise.config.checkpointing import NamedUnits
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.errors import ConfigError
from shardwise.plan.spec import BucketSpec
from shardwise.plan.units import wrap
from shardwise.plan.units.selection import select
from shardwise.plan.units.structure import all_nbytes
from shardwise.plan.units.units import Units

# Measured: benchmarks/RESULTS.md, "Small programs beside DDP".
KEPT_NBYTES = 16 << 20

Specs = Mapping[str, Sequence[BucketSpec]]


def joined_trained(model: nn.Module, placement: Placement, grid: Grid, options: Options) -> int:
    """Bytes of what is trained that are one unit at most; 0 if parameters do not stay gathered."""
    is_small = options.unsharded is None and all_nbytes((model,)) <= KEPT_NBYTES
    may_stay = placement.resident or _sends_again(placement, grid.shard)
    if not (may_stay and (is_small or (placement.resident and options.offload != "everything"))):
        return 0
    # Where ranks map all that is reduced, a larger unit takes memory and saves no message.
    sends = any(axis.size > 1 and not axis.shared for axis in grid)
    return wrap.JOINED_TRAINED_NBYTES // (1 if sends else 2)


def with_residency(specs: Specs, units: Units, unsharded: int | NamedUnits | None) -> Specs:
    """The specs of each unit, by its name; those that stay say so.

    Args:
        unsharded: which units, or how many bytes of full buckets; ``None``: as measured.

    Raises:
        ConfigError: no such unit, or the strategy keeps all full buckets anyway.
    """
    every = [spec for buckets in specs.values() for spec in buckets]
    if unsharded is None:
        unsharded = _by_default(every, units)
    if not unsharded:
        return specs
    if all(spec.placement.resident for spec in every):
        raise ConfigError(
            f"unsharded={unsharded!r} has no effect: with {every[0].placement.name} all full "
            "buckets stay in memory, and frozen ones are gathered once. Leave it out."
        )
    if isinstance(unsharded, int):
        chosen, left = list(specs), unsharded
    else:
        chosen, left = [unit.name for unit in select("unsharded", unsharded, units)], sys.maxsize
    frozen = [s for s in every if s.unit in chosen and not (s.trainable or s.placement.resident)]
    kept = set[BucketSpec]()
    for spec in sorted(frozen, key=_nbytes, reverse=True):
        if _nbytes(spec) <= left:
            kept.add(spec)
            left -= _nbytes(spec)
    rest = {unit: sum(_nbytes(s) for s in specs[unit] if s not in kept) for unit in chosen}
    placements = {unit: specs[unit][0].placement for unit in specs}
    for unit in sorted(rest, key=lambda unit: rest[unit], reverse=True):
        if rest[unit] <= left and placements[unit].frees:
            placements[unit] = replace(placements[unit], parameters=())
            left -= rest[unit]

    def staying(spec: BucketSpec) -> BucketSpec:
        return replace(spec, kept=spec in kept or spec.kept, placement=placements[spec.unit])

    return {unit: [*map(staying, specs[unit])] for unit in specs}


def _by_default(every: Sequence[BucketSpec], units: Units) -> int:
    """The bytes of full buckets that stay: all of a small model, in whichever dtype it computes."""
    if not any(_sends_again(spec.placement, spec.shard) for spec in every):
        return 0
    is_small = sum(unit.nbytes for unit in units) <= KEPT_NBYTES
    return sum(map(_nbytes, every)) if is_small else KEPT_NBYTES


def _sends_again(placement: Placement, shard: Axis) -> bool:
    """Does a second gather in a step send its bytes once more?"""
    return not (shard.shared or shard.size == 1 or placement.resident)


def _nbytes(spec: BucketSpec) -> int:
    return spec.layout.numel * spec.dtypes.param.itemsize
