"""Seconds of a collective over ranks in hosts.

A ring sends each byte over each link once, so the slowest link on its way bounds it. Between hosts
all rings of a host share its cards (not each rank its own card: inside, bytes are forwarded). Each
further rank is one more hop, most of them inside hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm.grid import Grid
from shardwise.plan.forecast.machine import Machine
from shardwise.plan.schedule.events import Op, UnitBytes

CORES = 0.5  # of what a collective inside a host takes from computing, the part that is cores


@dataclass(frozen=True)
class Ring:
    """Ranks of one axis of a mesh: ``size`` of them, each ``stride`` ranks after the one before."""

    machine: Machine
    size: int
    stride: int = 1

    @property
    def hosts(self) -> int:
        """Hosts that it lies in."""
        return -(-self.size * self.stride // self.machine.per_host) if self.crosses else 1

    @property
    def _parts(self) -> int:
        """Runs of neighbours in one host; between two of them is a hop between hosts."""
        return min(self.size, self.hosts)

    @property
    def crosses(self) -> bool:
        """Does it leave a host?"""
        return self.size * self.stride > self.machine.per_host

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank sends."""
        inside, between = self.machine.inside.bandwidth, self.machine.between.bandwidth
        if not self.crosses:
            return inside
        rings = min(self.stride, self.machine.per_host)
        alone = self.stride >= self.machine.per_host  # no two of its ranks are in one host
        return between / rings if alone else min(inside, between / rings)

    def strain(self, sent: float, rounds: int = 1) -> float:
        """Return what it takes from computing, beside a ring that is bound by the host's own link.

        Cores, for as long as it lasts, and memory, by the bytes that it moves: in equal parts. So a
        faster link takes no more than a slower one. Arguments are those of ``seconds``.
        """
        seconds = self.seconds(sent, rounds)
        moved = sent / seconds if seconds else 0.0
        return CORES + (1 - CORES) * min(1.0, moved / self.machine.inside.bandwidth)

    def seconds(self, sent: float, rounds: int = 1) -> float:
        """Time of a collective in which each rank sends so many bytes.

        Args:
            sent: ``(size - 1) / size`` of the whole for an all-gather or a reduce-scatter, twice
                that for an all-reduce.
            rounds: 2 for an all-reduce.
        """
        if self.size < 2 or not sent:
            return 0.0
        hops = self.machine.inside.latency * (self.size - self._parts)
        hops += self.machine.between.latency * (self._parts - 1)
        return sent / self.bandwidth + rounds * hops


@dataclass(frozen=True)
class Network:
    """The rings of one rank, and the way to its host's memory."""

    shard: Ring
    replicate: Ring
    host: float  # bytes per second

    @classmethod
    def of(cls, machine: Machine, grid: Grid) -> Network:
        """Ranks are numbered as in ``Grid``: those of a shard are neighbours."""
        shards, copies = grid.shard.size, grid.replicate.size
        host = machine.host.bandwidth
        return cls(Ring(machine, shards), Ring(machine, copies, shards), host)

    def seconds(self, op: Op, unit: UnitBytes) -> float:
        """Time of an event of ``unit`` that moves bytes between ranks, or to the host and back."""
        ring = self._ring(op)
        if ring is None:
            return (unit.loaded if op is Op.LOAD else unit.stored) / self.host
        return ring.seconds(*self._sent(op, unit))

    def strain(self, op: Op, unit: UnitBytes) -> float:
        """Return its ring's; 1 on the way to a host's memory."""
        ring = self._ring(op)
        return ring.strain(*self._sent(op, unit)) if ring is not None else 1.0

    def _sent(self, op: Op, unit: UnitBytes) -> tuple[float, int]:
        """Bytes that each rank sends in a collective, and its rounds."""
        if op is Op.GATHER:
            return unit.gather_sent - unit.kept_sent, 1
        if op is Op.UPDATE:
            return unit.update_sent, 1
        sent = unit.reduce_sent if op is Op.REDUCE else unit.average_sent
        averages = self._ring(op) is self.replicate and bool(unit.spread)
        return sent, 1 + averages

    def _ring(self, op: Op) -> Ring | None:
        """That of a collective."""
        if op in (Op.LOAD, Op.STORE):
            return None
        sharded = op is Op.GATHER or (op is Op.REDUCE and self.shard.size > 1)
        return self.shard if sharded else self.replicate
