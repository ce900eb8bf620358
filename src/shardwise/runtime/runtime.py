"""Carries out events and reports facts. What happens in a step is decided elsewhere, by values.

    user's code ─ cue ─▶ runtime ─┬─ as expected ──▶ what was decided beforehand ─┐
                                  └─ a surprise ───▶ decide(facts, cue) ──────────┴─▶ done, if due

From the first cue that the schedule of the step's mode does not list there, each cue of the step
is decided when it comes, and what really happened is the order of the next step. The same holds on
every rank, so such a step cannot hang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import nn

from shardwise.comm.one_stream import OneStream
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.watchdog.call_site import active
from shardwise.config.precision import Precision
from shardwise.errors import ScheduleError
from shardwise.memory.gathered_parameter import CALLED, UNCALLED, turn
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.use_errors import gradient_without_gather
from shardwise.plan.schedule.cursor import Cursor
from shardwise.plan.schedule.decide import Facts, Upcoming, decide
from shardwise.plan.schedule.events import Cue, Event, Op, Order, Phase, Policy
from shardwise.runtime.schedules import Schedules
from shardwise.runtime.trained import Trained
from shardwise.runtime.unit import UnitState

log = logging.getLogger("shardwise")


class Runtime:
    """Carries out steps. Hooks call it; it calls the buckets. ``order`` is the first guess."""

    def __init__(
        self,
        units: Mapping[str, UnitState],
        comm: Comm,
        policy: Policy,
        precision: Precision,
        order: Order,
    ) -> None:
        self.units, self.comm, self.policy = units, comm, policy
        self.trained = Trained(units.values(), comm, precision.stored_dtype)
        self.schedules, self._cursor = Schedules(units, policy, order), Cursor("train", ())
        # Only ``reduces`` is set from outside.
        self.facts = Facts(trained=self.trained.units, reloads=policy.reloads)
        #: Nothing is gathered where parameters are whole at rest, so listeners do not get these.
        self._unreported = {
            (op, unit) for unit in units if not policy.gathers(unit) for op in (Op.GATHER, Op.FREE)
        }
        self._stream = OneStream(comm.device)
        self._peers_may_read = False  # a peer may still compute with shared parameters
        buckets = [bucket for state in units.values() for bucket in state.buckets]
        #: The units of whose shards something is made that is kept.
        self._expiring = {bucket.unit for bucket in buckets if bucket.expires}
        #: Otherwise a rank has all parameters itself, and may compute with them alone.
        self._is_split = not all(bucket.allocation.whole for bucket in buckets)
        #: Before a forward pass without gradients: where a step was, what was pinned, and whole.
        self._interrupted = self._cursor
        self._pinned: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()
        self.at_step_end: Callable[[Comm], object] = lambda _: None  # once gradients are reduced
        self._is_at_end = True  # else a graph that is kept may read what that changes
        #: Called before an optimizer updates: what rooms above have to check or to finish by then.
        self.before_update: list[Callable[[], object]] = []
        self.listeners: list[Callable[[Event], None]] = []  # of events that are carried out
        self._steps = 0  # whose gradients were reduced
        active.add(self)

    def activity(self) -> str:
        """The unit that computes now, for example ``"step 12: backward of blocks.3"``."""
        for phase in reversed(self.facts.calls):
            if units := [unit for unit, calls in list(self.facts.calls[phase].items()) if calls]:
                return f"step {self._steps + 1}: {phase.value} of {units[-1] or '(root)'}"
        return f"after step {self._steps}" if self._steps else ""

    def whole(self) -> Iterator[nn.Parameter]:
        """The parameters that are whole now, or on their way."""
        states = map(self.units.__getitem__, self.facts.gathered)
        return (param for state in states for bucket in state.buckets for param in bucket.params)

    # ---- cues ------------------------------------------------------------------------------

    def enter(self, unit: str, phase: Phase, listed: bool = True, together: bool = False) -> None:
        """A call of ``unit`` begins, or its backward pass; ``listed=False``: a recomputation.

        ``together``: its small gradients are not needed before it ends.
        """
        self._stream.check()
        state = self.units[unit]
        if phase is Phase.BACKWARD:
            reducing, again = unit in self.facts.reducing, self.facts.backward[unit]
            is_plain = not (reducing or again or torch.is_grad_enabled())
            for bucket in state.trainable:
                bucket.gradients.expect(is_plain, not self.facts.reduces, tells=not together)
        try:
            if not listed:
                self.serve(unit, Phase.BACKWARD, "recomputed")
                return
            cue = state.enters[phase]
            step = self._cursor.match(cue)
            self._carry_out(self._decide(cue) if step is None else step.events)
            self.serve(unit, phase, "on demand")
            if self.listeners:
                self._report(Event(*cue))
        finally:  # not before: the cue may bring what frees the unit after an earlier call
            self.facts.calls[phase][unit] += 1

    def exit(self, unit: str, phase: Phase, listed: bool = True) -> None:
        """A call of ``unit`` has ended, or its backward pass has."""
        self.facts.calls[phase][unit] -= 1
        if not listed:
            return
        state = self.units[unit]
        cue = state.exits[phase]
        if phase is Phase.BACKWARD:
            for bucket in state.trainable:
                bucket.gradients.collect_arrivals()
        step = self._cursor.match(cue)
        if self.listeners:
            self._report(Event(*cue))
        if step is None:
            ends = phase is Phase.BACKWARD and not self._cursor.awaits_backward(unit, Op.EXIT)
            self._carry_out(self._decide(cue, is_last=ends))
        else:
            self._carry_out(step.events)

    def serve(self, unit: str, phase: Phase, reason: str) -> None:
        """Unshard a unit now, whatever the schedule says."""
        if unit not in self.facts.gathered:
            self._carry_out(self.policy.gathering(unit, phase, reason))
        for bucket in self.units[unit].buckets:
            bucket.ready()

    def _decide(self, cue: Cue, is_last: bool = False) -> list[Event]:
        """The events of a cue that was not expected; ``is_last``: of the calls of its unit."""
        return decide(self.policy, self.facts, cue, Upcoming(is_last=is_last))

    # ---- events ----------------------------------------------------------------------------

    def _carry_out(self, listed: Iterable[Event]) -> None:
        for event in listed:
            if self.facts.take(event):
                for act in self.units[event.unit].actions[event.op]:
                    act()
                if self.listeners and event[:2] not in self._unreported:
                    self._report(event)

    def _report(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def _finish(self, end: Cue, stay: Collection[str], pinned: Collection[str] = ()) -> None:
        """A pass is over: what is in flight is settled, and units are freed, with their pins."""
        self.facts.unpin({*stay, *pinned})
        self._carry_out(self._decide(end))
        if end.phase is Phase.FORWARD or self.facts.reduces:  # an optimizer may step next
            self._expire(self.units.keys() - stay, steps_only=True)

    # ---- the forward pass --------------------------------------------------------------------

    def begin_forward(self, first: str | None) -> None:
        """A forward pass starts with unit ``first``."""
        turn(self.whole(), CALLED)
        before = self._cursor
        if not torch.is_grad_enabled():
            self._interrupted = before
            self._cursor = Cursor("forward", self.schedules.script("forward"))
            self._pinned = frozenset(self.facts.pinned)
            # The backward pass of a step under way reads what is whole now.
            self._kept = frozenset() if before.ended else frozenset(self.facts.gathered)
            self.facts.pinned |= self._kept
            for bucket in self.trained.buckets:
                bucket.gradients.adopt()  # memory of what was thrown away is not kept
            return
        self._peers_may_read, mode = True, self._mode()
        if before.ended:
            self._cursor = Cursor(mode, self.schedules.script(mode))
        elif not before.lists_forward(mode, first):
            before.improvise()

    def end_forward(self) -> None:
        """A forward pass is over: end the step, if no backward pass will."""
        if self._cursor.mode == "forward":
            end = Cue(Op.END, "", Phase.FORWARD)
            self._cursor.match(end)
            self._report(Event(*end))
            self._fence()
            self._finish(end, self._kept, self._pinned)
            self.facts.pinned &= self._pinned
            self._learn()
            self._cursor = self._interrupted
        turn(self.whole(), UNCALLED)

    def _mode(self) -> str:
        return self.facts.mode(any(state.collected for state in self.units.values()))

    # ---- the backward pass -------------------------------------------------------------------

    def begin_backward(self, recorded: bool) -> None:
        """Begin a backward pass before its first gradient: the shards' own gradients step aside.

        A pass that is ``recorded`` makes a graph, whose backward pass reads parameters before it
        comes to a unit; so units stay whole for it.
        """
        turn(self.whole(), CALLED)
        self.facts.keeps_graph = self.facts.keeps_graph or recorded
        self.update_trained()  # gradients go to what is trained now, whatever it was before
        if self._cursor.mode == "forward" or self._cursor.ended:
            self._cursor = Cursor(self._mode(), ())
            self._cursor.improvise()
            # Graphs of the same forward passes may read what earlier passes have found whole.
            for unit in [name for name in self.units if name in self.facts.left_whole]:
                self.serve(unit, Phase.BACKWARD, "read before")
            self.facts.pinned |= self.facts.left_pinned
        self.facts.left_whole |= self.facts.gathered
        self.facts.left_pinned |= self.facts.pinned
        for bucket in self.trained.buckets:
            bucket.gradients.set_aside()

    def expect_late(self, state: UnitState, bucket: Bucket, index: int) -> None:
        """A gradient has come that may have to wait, or that nobody can use."""
        if not bucket.is_whole:
            raise gradient_without_gather(bucket.members[index].name, state.name)
        if state.name in self.facts.reducing:  # nothing may be written into what travels
            late = self.policy.settling(state.name, Phase.BACKWARD, "a gradient came late")
            self._carry_out(late)

    def is_complete(self, state: UnitState) -> bool:
        """Has every gradient of a unit come, for the last of its calls?"""
        return state.complete and not self._cursor.awaits_backward(state.name, Op.ENTER)

    def end_backward(self, kept: bool) -> None:
        """End a backward pass; ``kept``: its graph is kept for another one."""
        facts, end = self.facts, Cue(Op.END, "", Phase.BACKWARD)
        self._cursor.match(end)
        collected = [name for name, state in self.units.items() if state.collected]
        left = [name for name in collected if facts.reduces and name not in facts.reducing]
        for unit in left:  # gradients that came outside of its calls
            self._carry_out(self._decide(Cue(Op.EXIT, unit, Phase.BACKWARD), is_last=True))
        used = self.trained.ask_used() if facts.reduces else None
        self._report(Event(*end))
        facts.keeps_graph = facts.keeps_graph and kept
        frees = [unit for unit, placement in self.policy.placements.items() if placement.frees]
        self._finish(end, () if facts.reduces else self.units.keys() - frees)
        self.trained.end_backward(used)
        turn(self.whole(), UNCALLED)
        if used is not None:
            self._peers_may_read &= not self.trained.buckets  # else every rank has answered
            self._steps += 1
            self._is_at_end = not kept
            if not kept:
                self.at_step_end(self.comm)
        self._learn()

    def _learn(self) -> None:
        """Take what really happened as the order of the next step."""
        self._cursor.ended = True
        cursor, logs = self._cursor, self.comm.rank == 0
        self.schedules.learn(cursor.mode, cursor.changed_order(), logs)

    # ---- between steps -----------------------------------------------------------------------

    def end_step(self, steps_only: bool = False) -> None:
        """Free what a forward pass left whole for a backward pass that may never come.

        Values may change now, so nothing that was gathered or cast counts as new, but for what is
        frozen where an optimizer ``steps_only``.
        """
        self.facts.keeps_graph = False
        self.facts.left_whole.clear()  # a graph of the step has no backward pass any more
        self.facts.left_pinned.clear()
        gathered = self.facts.gathered
        whole = [name for name in self.units if name in gathered]  # in one order on every rank
        self._carry_out([Event(Op.FREE, name, Phase.FORWARD, "between steps") for name in whole])
        for name in [name for name in whole if name in gathered]:
            self.units[name].free(still_read=True)
        self._expire(self.units, steps_only)
        gathered.clear()

    def expect_update(self, *updates: str) -> None:
        """Parameters are updated next, or their gradients scaled: between steps, on all ranks."""
        self.trained.updates.update(updates)
        for entry in self.before_update:
            entry()
        if not self._is_at_end:
            self._is_at_end = True
            self.at_step_end(self.comm)
        self.end_step(steps_only=True)
        self.await_readers()
        self.check_reduced(
            "so this update would miss them. Run the last micro-batch under "
            "sharded.accumulate(last=True)"
        )

    def check_reduced(self, consequence: str) -> None:
        """Raises ``ScheduleError`` if gradients wait for micro-batches that have not come."""
        for state in self.units.values():
            if not all(bucket.gradients.is_reduced() for bucket in state.trainable):
                raise ScheduleError(
                    f"unit {state.name or '(root)'!r} holds gradients that were accumulated and "
                    f"never reduced, {consequence}, or call sharded.drop_gradients()."
                )

    def _expire(self, units: Iterable[str], steps_only: bool = False) -> None:
        """Shards may be written next, so what was made of them is old then."""
        for unit in self._expiring.intersection(units):
            self.units[unit].expire(steps_only)
        self.facts.expire(units)

    def before_write(self, unit: str) -> None:
        """Every rank writes shards of a unit at rest next; a peer may still compute with them."""
        # Where it was gathered ahead of its use, what travels would be old.
        self._carry_out([Event(Op.FREE, unit, Phase.FORWARD, "written")])
        self._expire([unit])
        if self._cursor.ended:
            self.await_readers()
        else:
            self.comm.fence(Label("fence", "written"))

    def await_readers(self) -> None:
        """Shared parameters are written next: wait for a forward pass that had no other end."""
        if self._peers_may_read:
            self._fence()

    def _fence(self) -> None:
        """Wait until every rank is here, so until none computes with shared parameters."""
        if self._is_split:
            self.comm.fence(Label("fence", "forward"))
        self._peers_may_read = False

    def update_trained(self) -> None:
        """Look up ``requires_grad``: the parameters that have it are trained from now on."""
        self.trained.update()
        if self.trained.units == self.facts.trained:
            return
        self.facts.trained = self.trained.units
        self.schedules.turn_to(self.trained.units)
        if not self._cursor.ended:  # what it still has to do was decided for other units
            self._cursor.improvise()

    # ---- passes that stop --------------------------------------------------------------------

    def show_shards(self) -> None:
        """At once after an exception: parameters and ``.grad`` are those of units at rest."""
        for name, state in self.units.items():
            if not self.facts.forward[name]:  # a call of the user's goes on in it
                for bucket in state.buckets:
                    bucket.rest()
                    bucket.gradients.restore()

    def abandon(self, why: str, drops: bool) -> None:
        """Forget a pass that stopped; ``drops``: and all that was collected and not reduced."""
        kept = "parameters" if drops else "parameters and gradients"
        lost = ", without gradients that were not averaged" if drops else ""
        log.warning("%s: %s are as before it%s", why, kept, lost)
        for state in self.units.values():
            state.abandon(drops)
        self.facts.forget_pass()
        self._cursor.ended = True
        if drops:
            self.facts.reducing.clear()
            self.trained.forget_gradients()
