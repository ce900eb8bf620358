"""Schedules and layouts as plain text: one line for each event, or for each parameter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.comm.grid import Grid
from shardwise.config.precision import dtype_name
from shardwise.plan.schedule.events import Event, Op, UnitBytes
from shardwise.plan.spec import BucketSpec
from shardwise.plan.units.names import group_names

_NUMBER = re.compile(r"\d+")


def size(nbytes: float) -> str:
    """``1536`` → ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@dataclass(frozen=True)
class Schedule:
    """One step's events; iterate over ``events``, or print it."""

    events: tuple[Event, ...]  # the step, in order
    nbytes: Mapping[str, UnitBytes]  # of each unit
    strategy: str
    mode: str
    grid: Grid  # the place of this rank among all
    specs: tuple[BucketSpec, ...]
    plain: tuple[Event, ...] = ()  # the same step, if only the strategy kept units
    buffers: str = "local"  # what becomes of them when gradients are reduced

    @property
    def saved(self) -> int:
        """Bytes that one rank sends less in a step than if nothing stayed gathered."""
        return sum(map(self._sent_at_first, self.plain)) - sum(map(self.sent, self.events))

    def sent(self, event: Event) -> int:
        """Bytes that one rank sends for ``event``, in any step but the first."""
        kept = self.nbytes[event.unit].kept_sent if event.op is Op.GATHER else 0
        return self._sent_at_first(event) - kept

    def _sent_at_first(self, event: Event) -> int:
        if event.op not in (Op.UPDATE, Op.GATHER, Op.REDUCE, Op.AVERAGE):
            return 0
        unit = self.nbytes[event.unit]
        sent = {
            Op.GATHER: unit.gather_sent,
            Op.UPDATE: unit.update_sent,
            Op.REDUCE: unit.reduce_sent,
            Op.AVERAGE: unit.average_sent,
        }
        return sent[event.op]

    def __str__(self) -> str:
        width = max([len(_name(unit)) for unit in self.nbytes], default=6)
        of_op = max([6, *(len(event.op) for event in self.events)])
        lines, phase, depth = [self._title()], None, 0
        for event in self.events:
            if event.phase is not phase:
                phase = event.phase
                lines.append(f"{phase}:")
            depth -= event.op is Op.EXIT
            lines.append("    " + self._line(event, depth, of_op, width))
            depth += event.op is Op.ENTER
        return "\n".join(lines)

    __repr__ = __str__

    def _title(self) -> str:
        gathers = sum(event.op is Op.GATHER for event in self.events)
        reduces = sum(event.op is Op.REDUCE for event in self.events)
        sent = sum(self.sent(event) for event in self.events)
        return (
            f"# one step ({self.mode}) of {self.strategy} on {self.grid.size} "
            f"rank{'s' * (self.grid.size != 1)}: {gathers} gather{'s' * (gathers != 1)}, "
            f"{reduces} reduce{'s' * (reduces != 1)}, a rank sends {size(sent)}"
            f"{f' ({size(self.saved)} less: some units stay unsharded)' if self.saved else ''}"
            f"{f'; buffers: {self.buffers}' if reduces and self.buffers != 'local' else ''}"
        )

    def _line(self, event: Event, depth: int, of_op: int, width: int) -> str:
        name = "" if event.op is Op.END else _name(event.unit)
        text = f"{'  ' * max(depth, 0)}{event.op:<{of_op}}  {name:<{width}}"
        if event.op is Op.GATHER and self.grid.shard.size > 1:
            full = size(self.nbytes[event.unit].gathered)
            shared = self.grid.shard.shared
            sends = "memory is shared" if shared else f"sends {size(self.sent(event))}"
            text += f"  # all-gather{self._over('shard')}, {full}, {sends}: {event.reason}"
        elif event.op in (Op.LOAD, Op.STORE):
            unit = self.nbytes[event.unit]
            way = ("to", unit.loaded) if event.op is Op.LOAD else ("from", unit.stored)
            text += f"  # {way[0]} the device, {size(way[1])}: {event.reason}"
        elif event.op is Op.UPDATE:
            part = size(self.nbytes[event.unit].joined // self.grid.shard.size)
            sends = f"sends {size(self.sent(event))}"
            text += f"  # all-gather over replicate, {part}, {sends}: {event.reason}"
        elif event.op in (Op.REDUCE, Op.AVERAGE):
            parts = self.grid.shard.size if event.op is Op.AVERAGE else 1
            summed, sent = self.nbytes[event.unit].gradients // parts, self.sent(event)
            text += f"  # {self._sum(event)}, {size(summed)}, sends {size(sent)}: {event.reason}"
        elif event.reason:
            text += f"  # {event.reason}"
        return text.rstrip()

    def _over(self, axis: str) -> str:
        """Name the axis that a collective uses, where the grid has two."""
        return f" over {axis}" if min(axis.size for axis in self.grid) > 1 else ""

    def _sum(self, event: Event) -> str:
        if event.op is Op.REDUCE and (self.grid.shard.size > 1 or self.grid.replicate.size == 1):
            return "reduce-scatter" + self._over("shard")
        spread = " + all-gather" if self.nbytes[event.unit].spread else ""
        all_at_once = any(spec.exchanges for spec in self.specs if spec.unit == event.unit)
        how = "all-reduce" if all_at_once else f"reduce-scatter{spread}"
        return how + self._over("replicate")


def _name(unit: str) -> str:
    return unit or "(root)"


@dataclass(frozen=True)
class Layouts:
    """The layout of every parameter and its dtypes, by unit; print it."""

    specs: tuple[BucketSpec, ...]

    def __str__(self) -> str:
        alike: dict[object, list[BucketSpec]] = {}
        for spec in self.specs:
            names = (_NUMBER.sub("#", name) for name in (spec.unit, *spec.layout.by_name))
            places = ((slot.shape, slot.start) for slot in spec.layout.slots)
            key = (self._kind(spec), spec.layout.shard_numel, *names, *places)
            alike.setdefault(key, []).append(spec)
        return "\n\n".join(map(self._block, alike.values()))

    __repr__ = __str__

    def _block(self, alike: Sequence[BucketSpec]) -> str:
        """The layout of buckets that differ in nothing but names; that of the first is shown."""
        names = group_names((_name(spec.unit), None) for spec in alike)
        more = f"; {len(alike)} alike, here the first" if len(alike) > 1 else ""
        kind = self._kind(alike[0])
        return f"{', '.join(name.name for name in names)}  ({kind}{more})\n{alike[0].layout}"

    def _kind(self, spec: BucketSpec) -> str:
        dtypes = spec.dtypes
        parts = [f"stored {dtype_name(dtypes.stored)}", f"computed in {dtype_name(dtypes.param)}"]
        if spec.trainable:
            parts += [f"gradients sent in {dtype_name(dtypes.reduce)}"]
            parts += [f"summed in {dtype_name(dtypes.sum)}", f"mean by {spec.reduction.how}"]
        else:
            parts += ["frozen"]
        return ", ".join(parts)

    def dtypes(self) -> tuple[str, ...]:
        """Say how many elements are stored, computed in, sent and summed in which dtypes."""
        numels: Counter[str] = Counter()
        for spec in self.specs:
            numels[self._kind(spec)] += spec.layout.used
        return tuple(f"{numel:,} {kind}" for kind, numel in numels.items())

    def padding(self) -> dict[str, int]:
        """Bytes of padding of each unit, over all ranks, as gathered."""
        padding: dict[str, int] = {}
        for spec in self.specs:
            nbytes = spec.layout.padding * spec.dtypes.param.itemsize
            padding[spec.unit] = padding.get(spec.unit, 0) + nbytes
        return padding
