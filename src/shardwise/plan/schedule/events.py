"""One step as a list of events: the words of the list. Pure: no torch, no network, no clock.

The ordinary way scatters the order of a step over hooks and flags, so a planner has to
imitate it and a test has to patch it. Here the order is a value: the runtime carries it
out, the planner weighs it, the trace prints it, the tests read it as a table.

    cues (what the user's code does)          events (what we add)
    enter root                                gather root
      enter blocks.0   exit blocks.0          gather blocks.0 … free blocks.0
      enter blocks.1   exit blocks.1          gather blocks.1 … free blocks.1
    exit root
    … and back again, where an exit also reduces, and a settle ends what a reduce began; between
    them an average goes on over a hybrid's copies

``decide`` says which events a cue has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shardwise.config.placement import Placement
from shardwise.config.prefetch import Prefetch

Mode = str
MODES: tuple[Mode, ...] = ("train", "accumulate", "between", "last")
"""One micro-batch; the first, others, the last of several. ``"forward"`` has no gradients."""


class Op(StrEnum):
    """Actions of an event. The first three are cues: the user's code triggers them."""

    ENTER = "enter"
    EXIT = "exit"
    END = "end"  # the step is over: the forward pass without gradients, or the backward pass
    UPDATE = "update"  # join what the optimizers of a shard's copies have written, once per step
    GATHER = "gather"
    LOAD = "load"  # copy a shard from host memory to the device
    FREE = "free"
    REDUCE = "reduce"
    AVERAGE = "average"  # wait for a reduce, release the gradient bucket, sum over the copies
    SETTLE = "settle"  # wait for the sums, hand the result over, release the gradient bucket
    STORE = "store"  # copy what was reduced to host memory, release it on the device


class Phase(StrEnum):
    """The half of a step that an event lies in."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Cue(NamedTuple):
    """A module of ``unit`` begins or ends computing. ``END`` has no unit."""

    op: Op
    unit: str
    phase: Phase


class Event(NamedTuple):
    """One entry of the schedule. ``reason`` is for people."""

    op: Op
    unit: str
    phase: Phase
    reason: str = ""


class Order(NamedTuple):
    """The cues of one step. ``backward`` is empty where no gradients are computed."""

    forward: tuple[Cue, ...]
    backward: tuple[Cue, ...] = ()


class UnitBytes(NamedTuple):
    """Bytes of a unit."""

    gathered: int  # its parameters, as computed in
    gradients: int  # what travels to be summed; 0 if it is frozen
    spread: int = 0  # of the mean gradients, as stored, what copies send each other
    joined: int = 0  # of what is gathered, what copies join first
    gather_sent: int = 0  # by one rank
    update_sent: int = 0
    reduce_sent: int = 0
    average_sent: int = 0
    loaded: int = 0  # what this rank loads from host memory; 0 if it rests on the device
    stored: int = 0  # what this rank stores there of its gradients
    kept_sent: int = 0  # of ``gather_sent``, what is frozen and stays: only in the first step


@dataclass(frozen=True)
class Policy:
    """Everything besides the order that a schedule depends on.

    Where computing needs another dtype than is stored (``casts``), even whole parameters are
    "gathered": cast, and nothing is sent.
    """

    placements: Mapping[str, Placement]  # by unit
    prefetch: Prefetch = Prefetch()
    casts: bool = False
    averages: frozenset[str] = frozenset()  # units whose gradients are summed over copies, too
    joins: frozenset[str] = frozenset()  # units of whose shards each copy updates a piece
    loads: frozenset[str] = frozenset()  # units whose shards and gradients are in host memory
    reloads: frozenset[str] = frozenset()  # of them, those of which the device keeps nothing

    def gathers(self, unit: str) -> bool:
        """Is the unit at rest something else than what it computes with?"""
        return self.placements[unit].splits or self.casts or unit in self.loads

    def left_whole(self, order: Order) -> list[str]:
        """Return the units that micro-batches before have left gathered."""
        used = dict.fromkeys(cue.unit for cue in order.forward)
        return [unit for unit in used if self.gathers(unit) and not self.placements[unit].frees]

    def gathering(self, unit: str, phase: Phase, reason: str) -> Iterator[Event]:
        """Return the events that all-gather a unit, without those already issued in this step."""
        if unit in self.loads:
            again = "nothing of it is kept" if unit in self.reloads else "the optimizer has stepped"
            yield Event(Op.LOAD, unit, phase, again)
        if unit in self.joins:
            yield Event(Op.UPDATE, unit, phase, "the optimizers of its copies have stepped")
        yield Event(Op.GATHER, unit, phase, reason)

    def settling(self, unit: str, phase: Phase, reason: str) -> Iterator[Event]:
        """Return the events that end a reduce, without those already carried out."""
        if unit in self.averages:
            yield Event(Op.AVERAGE, unit, phase, reason)
        yield Event(Op.SETTLE, unit, phase, reason)
        if unit in self.loads:
            yield Event(Op.STORE, unit, phase, reason)
