"""A cursor along the schedule: carries out what lies between two cues.

Each cue (a unit's module begins or ends computing) is looked up in the schedule of the
step's mode. Where it is what was expected, the listed events are carried out, prefetches
included. Where it is not (a skipped branch, a unit entered twice, a second forward pass),
the rest of the step is improvised: gathered on demand, freed after use, reduced when
complete. That is never wrong, only less far-sighted, and what really happened becomes the
order of the next step. The same holds on every rank, so an improvised step cannot hang.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm, Label
from shardwise.cursor import Cursor, Step
from shardwise.errors import ScheduleError
from shardwise.precision import Precision
from shardwise.schedule import Cue, Event, Op, Order, Phase, Policy
from shardwise.schedules import Mode, Schedules
from shardwise.trained import Trained
from shardwise.unit_state import UnitState
from shardwise.used import ask_used
from shardwise.visits import Visit

__all__ = ["Runtime"]

log = logging.getLogger("shardwise")


class Runtime:
    """Carries out steps. Hooks call it; it calls the buckets.

    Args:
        units: the state of each unit, by name, in order.
        comm: the ranks.
        policy: placement and prefetch (modes are derived from it).
        precision: how trained parameters are stored.
        order: the first guess.
        participates: skip to a cue that comes later in the schedule, carrying out what lies
            between, instead of improvising (``divergence="participate"``).
    """

    def __init__(
        self,
        units: Mapping[str, UnitState],
        comm: Comm,
        policy: Policy,
        precision: Precision,
        order: Order,
        participates: bool = False,
    ) -> None:
        self.units, self.comm, self.policy = units, comm, policy
        self._gathers, self._skip = policy.gathers, self._skipped if participates else None
        self.reduces = True  # accumulate() sets it
        self.schedules, self._cursor = Schedules(units, policy, order), Cursor("train", ())
        self._settling: list[str] = []
        self.trained = Trained(units.values(), comm, precision.stored)
        self._acts = {
            Op.GATHER: self._gather,
            Op.FREE: self._free,
            Op.REDUCE: self._reduce,
            Op.SETTLE: self._settle,
        }
        self._read = False  # may a rank still read parameters that another is to write next?
        self.recorded = False  # does a graph of a backward pass wait for another one?
        self._endless: list[Visit] = []  # of the backward pass that is under way
        self._pinned: list[str] = []  # before the forward pass without gradients
        self.steps_done, self._warned = 0, set[Mode]()
        self.listeners: list[Callable[[Event], None]] = []

    def _mode(self) -> Mode:
        """Of a pass with gradients: grad mode itself is off in a backward pass."""
        if not self.reduces:
            return "accumulate"
        return "last" if any(state.collected for state in self.units.values()) else "train"

    def whole_trainable(self) -> Iterator[nn.Parameter]:
        """The trainable parameters that are whole now."""
        whole = (state for state in self.units.values() if state.gathered)
        return (param for state in whole for bucket in state.trainable for param in bucket.params)

    # ---- a step ----------------------------------------------------------------------------

    def begin(self, first: str | None) -> Cursor:
        """A forward pass starts with unit ``first``. Returns the cursor to ``resume`` after it."""
        before = self._cursor
        if not torch.is_grad_enabled():
            self._cursor = Cursor("forward", self.schedules.script("forward"))
            self._pinned = [name for name, state in self.units.items() if state.pinned]
            for bucket in self.trained.buckets:
                bucket.gradients.look()  # memory of what was thrown away is not kept
            return before
        self._read, mode = True, self._mode()
        if before.mode == mode and not before.ended and self._goes_on(first):
            return before
        if before.ended:
            self._cursor = Cursor(mode, self.schedules.script(mode))
        else:  # not "unless its graph is gone": how long a graph lives may differ by rank
            before.improvise()
        return self._cursor

    def _goes_on(self, first: str | None) -> bool:
        """Does the schedule list another forward pass here? A root may have no unit to tell by."""
        if first is not None:
            return self._cursor.expects(Cue(Op.ENTER, first, Phase.FORWARD))
        return self._cursor.expects_forward()

    def awaits_backward(self) -> bool:
        """Does any graph exist whose backward pass would come through a unit?"""
        return any(state.visits.live() for state in self.units.values())

    def resume(self, cursor: Cursor) -> None:
        """A forward pass is over: end it, if no backward pass will."""
        if self._cursor.mode == "forward":
            self.cue(Op.END, "", Phase.FORWARD)
            self.comm.fence(Label("fence", "forward"))
            self._read = False
            self._release_all(Phase.FORWARD, self._pinned)
            self._ended()
            self._cursor = cursor

    def cue(self, op: Op, unit: str, phase: Phase) -> None:
        """What the user's code did. Carries out what the schedule says, or improvises."""
        cue = Cue(op, unit, phase)
        step = self._cursor.match(cue, self._skip) or self._improvised(cue)
        if step.before:
            self._carry_out(step.before)
        if op is Op.ENTER:
            self.serve(unit, phase, "on demand")
        if self.listeners:
            self._tell(Event(op, unit, phase))
        if step.after:
            self._carry_out(step.after)

    def serve(self, unit: str, phase: Phase, reason: str) -> None:
        """Let a unit be whole now, whatever the schedule says."""
        state = self.units[unit]
        if not state.gathered:
            self._carry_out([Event(Op.GATHER, unit, phase, reason)])
        state.ready()

    def _improvised(self, cue: Cue) -> Step:
        placement, after = self.policy.placement, list[Event]()
        if cue.op is not Op.EXIT:
            return Step(cue, (), ())
        state = self.units[cue.unit]
        # Calls are counted, not graphs: those are the same on every rank.
        done = cue.phase is Phase.BACKWARD and not self._cursor.owes(cue.unit)
        if placement.frees or (done and self.reduces and not placement.resident):
            after.append(Event(Op.FREE, cue.unit, cue.phase, "on demand"))
        if done and self.reduces and state.trainable:
            after.append(Event(Op.REDUCE, cue.unit, cue.phase, "on demand"))
            after += [Event(Op.SETTLE, name, cue.phase, "on demand") for name in self._settling]
        return Step(cue, (), tuple(after))

    def _skipped(self, step: Step) -> None:
        """Take part in what other ranks may do in a unit that this rank does not enter."""
        self._carry_out(step.before + step.after)

    def _carry_out(self, listed: Iterable[Event]) -> None:
        """Listeners hear of what was done, not of what was done already or must wait."""
        for event in listed:
            if self._acts[event.op](self.units[event.unit]) and self.listeners:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

    def _gather(self, state: UnitState) -> bool:
        if state.gathered:
            return False
        state.gather()
        return self._gathers

    def _free(self, state: UnitState) -> bool:
        if not state.gathered or state.in_use or self.recorded:
            return False
        state.free()
        return self._gathers

    def _reduce(self, state: UnitState) -> bool:
        for bucket in state.trainable:
            bucket.gradients.reduce()
        state.reducing = True
        self._settling.append(state.name)
        return True

    def _settle(self, state: UnitState) -> bool:
        if not state.reducing:
            return False
        for bucket in state.trainable:
            bucket.gradients.settle()
        state.reducing = False
        self._settling.remove(state.name)
        return True

    # ---- the backward pass -----------------------------------------------------------------

    def begin_backward(self, recorded: bool) -> None:
        """Before the first gradient: the shards' own gradients step aside.

        What comes through the graph of a recorded pass reads parameters before it is at a unit.
        """
        self.recorded = self.recorded or recorded
        self.take_up_trained()  # gradients go to what is trained now, whatever it was before
        if self._cursor.mode == "forward" or self._cursor.ended:
            self._cursor = Cursor(self._mode(), ())
            self._cursor.improvise()
        for bucket in self.trained.buckets:
            bucket.gradients.set_aside()

    def end_backward(self, kept: bool) -> None:
        """After the last gradient: what is still open is closed, and every shard has its grad."""
        for state in reversed(self.units.values()):  # type: ignore[call-overload]
            for visit in state.visits.open():
                self.leave_backward(visit)
        self._endless.clear()
        if self.reduces:
            left = [n for n, state in self.units.items() if state.collected and not state.reducing]
            self._carry_out(Event(Op.REDUCE, name, Phase.BACKWARD, "left over") for name in left)
        cue = Cue(Op.END, "", Phase.BACKWARD)
        end = self._cursor.match(cue, self._skip) or self._improvised(cue)
        used = self._ask_used()
        self._carry_out(end.before)
        self._tell(Event(*end.cue))
        self._carry_out(end.after)
        self._carry_out([Event(Op.SETTLE, n, Phase.BACKWARD, "left over") for n in self._settling])
        self.recorded = self.recorded and kept  # else no graph is there any more
        if self.reduces or self.policy.placement.frees:
            self._release_all(Phase.BACKWARD)
        if self.reduces:
            for comm in self.trained.copies:  # peers still read this rank's mean
                comm.fence(Label("fence", "gradients"))
            self.trained.deliver(used())
            if self.trained.buckets:  # every rank has answered
                self._read = False
        for bucket in self.trained.buckets if not self.reduces else ():
            bucket.gradients.show()
        self.trained.owe(self.reduces)
        self._ended()

    def enter_backward(self, visit: Visit) -> None:
        """The gradients of a visit's outputs are there; its unit computes next."""
        if visit.unit is None or (visit.entered and not visit.done):
            return
        if visit.done:  # a second backward pass through the same graph, or a late second output
            visit.begin_again()
            self.units[visit.unit].visits.add(visit)
        visit.entered = True
        if visit.endless:
            self._endless.append(visit)
        for bucket in self.units[visit.unit].trainable:
            bucket.gradients.fresh.clear()
        self.cue(Op.ENTER, visit.unit, Phase.BACKWARD)

    def leave_backward(self, visit: Visit) -> None:
        """A visit's unit has computed all its gradients."""
        if visit.done or not visit.entered or visit.unit is None:
            return
        visit.done = True
        self.cue(Op.EXIT, visit.unit, Phase.BACKWARD)

    def leave_after(self, node: int) -> None:
        """Autograd goes back in time: it is at ``node``, so what began after it has ended.

        An embedding has no inputs that would tell. Where its weight is tied, the gradient of that
        comes with the last use only, and would keep the unit whole until then.
        """
        if not self._endless:
            return
        ended = [visit for visit in self._endless if visit.start > node]
        self._endless = [visit for visit in self._endless if visit.start <= node]
        for visit in reversed(ended):
            self.leave_backward(visit)

    def collect(self, state: UnitState, bucket: Bucket, index: int, grad: Tensor) -> None:
        """Autograd has a parameter's gradient: move it into the gradient bucket."""
        if not bucket.is_whole:
            raise ScheduleError(
                f"the gradient of {bucket.members[index].name!r} came while unit "
                f"{state.name or '(root)'!r} was at rest or on its way: the backward pass reached "
                "it through a tensor that the unit did not return, so it computed with shards or "
                "with values that had not arrived. Return every tensor that a loss needs from "
                "forward(), instead of keeping it in an attribute."
            )
        if state.reducing:  # a late gradient must not be written into a bucket that travels
            self._carry_out([Event(Op.SETTLE, state.name, Phase.BACKWARD, "a gradient came late")])
        complete = bucket.gradients.collect(index, grad, not self.reduces) and state.complete
        if not complete or self._cursor.awaits(state.name):
            return
        for visit in state.visits.open():
            if visit.ending or (visit.endless and state.wholly_trained):
                self.leave_backward(visit)

    def end_visit(self, visit: Visit) -> None:
        """A visit's input gradients are there; those of its parameters may be on their way."""
        if visit.unit is None or self.units[visit.unit].complete:
            self.leave_backward(visit)
        else:
            visit.ending = True

    def _ask_used(self) -> Callable[[], list[bool]]:
        buckets = self.trained.buckets
        touched = [flag for bucket in buckets for flag in bucket.gradients.touched_flags()]
        return ask_used(touched, self.comm) if self.reduces else lambda: touched

    # ---- ends ------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Free what a forward pass left whole for a backward pass that may never come.

        Values may change now, so nothing that was gathered or cast counts as new.
        """
        self.recorded = False
        self._carry_out(Event(Op.FREE, n, Phase.FORWARD, "between steps") for n in self.units)
        for state in self.units.values():
            state.shelve()

    def before_write(self, unit: str) -> None:
        """Every rank writes shards of a unit at rest next; a peer may still compute with them."""
        if self.units[unit].gathered:  # ahead of its use, and what travels would be old
            self._carry_out([Event(Op.FREE, unit, Phase.FORWARD, "written")])
        if self._cursor.ended:
            self.await_readers()
        else:
            self.comm.fence(Label("fence", "written"))

    def await_readers(self) -> None:
        """Shared parameters are written next: wait for a forward pass that had no other end."""
        if self._read:
            self.comm.fence(Label("fence", "forward"))
            self._read = False

    def _release_all(self, phase: Phase, pinned: Collection[str] = ()) -> None:
        """Free every unit, but for those that a step pinned whose backward pass is to come."""
        for name, state in self.units.items():
            state.pinned = state.pinned and (state.depth > 0 or name in pinned)
            for bucket in state.buckets:
                bucket.expire()
        self._carry_out(Event(Op.FREE, name, phase, "the step is over") for name in self.units)

    def _ended(self) -> None:
        cursor, mode = self._cursor, self._cursor.mode
        cursor.ended = True
        self.steps_done += mode != "forward"
        if cursor.improvised and self._skip is None:
            order = cursor.recorded()  # without a forward pass: a second one through one graph
            if order.forward and order != self.schedules.orders[mode]:
                self._re_record(mode, order)
        self.schedules.ran.add(mode)

    def _re_record(self, mode: Mode, order: Order) -> None:
        known = mode in self.schedules.ran
        if known and mode not in self._warned and self.comm.rank == 0:
            self._warned.add(mode)
            log.warning(
                "the order of units changed in step %d (%s): the new one is used from now on. "
                "A model whose order changes often gains nothing from prefetch; "
                "set prefetch=sw.Prefetch(forward=0, backward=0). This is said once.",
                self.steps_done,
                mode,
            )
        self.schedules.set_order(mode, order)

    def abandon(self, why: str) -> None:
        """Forget a pass that stopped before it had a gradient: nothing is gathered."""
        log.warning("%s: parameters and gradients are as before it", why)
        self._abandon()

    def drop_gradients(self, why: str) -> None:
        """Forget a pass that stopped half-way, and all that was collected and not reduced."""
        log.warning("%s: what was not averaged yet was dropped, parameters are as before it", why)
        self._abandon()
        for state in self.units.values():
            state.drop_gradients()
        self._settling.clear()
        self.trained.owe(reduced=True)

    def _abandon(self) -> None:
        for state in self.units.values():
            state.abandon()
        self._endless.clear()
        self.recorded, self._cursor.ended = False, True

    def take_up_trained(self) -> None:
        """Parameters whose ``requires_grad`` is set are those that are trained, from now on."""
        units = self.trained.units
        self.trained.take_up()
        if self.trained.units == units:
            return
        self.schedules.turn_to(self.trained.units)
        if not self._cursor.ended:  # what it still has to do was decided for other units
            self._cursor.improvise()
