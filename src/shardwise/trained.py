"""Which parameters are trained: laid out when the model was sharded, looked up in every step.

A GAN switches its discriminator off and on in each step, a fine-tuning unfreezes a block now and
then. To lay out anew for that would move every parameter and all optimizer state. So buckets stay
as they are, and what changes is who awaits a gradient: a frozen parameter of a trainable bucket
has none, a unit without any trained parameter is not reduced, and a bucket that was frozen takes
memory for gradients when the first one arrives.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ScheduleError
from shardwise.torch_internals import disable_torch_function
from shardwise.unit_state import UnitState

__all__ = ["Trained"]


class Trained:
    """Which parameters are trained, as of the last look.

    Args:
        units: the state of each unit, in order.
        comm: the ranks.
        stored: the dtype in which trained parameters are to be stored; ``None`` = as they are.

    Attributes:
        buckets: those that take part in backward passes.
        copies: the ranks with which this rank shares their means.
        units: the names of their units.
    """

    def __init__(
        self, units: Iterable[UnitState], comm: Comm, stored: torch.dtype | None = None
    ) -> None:
        self._states, self._comm, self._stored = tuple(units), comm, stored
        every = [bucket for state in self._states for bucket in state.buckets]
        self._places = [(bucket, index) for bucket in every for index in range(len(bucket.params))]
        self._params = [bucket.params[index] for bucket, index in self._places]
        self._now = [bucket.trainable for bucket, _ in self._places]
        self._owing: frozenset[Bucket] = frozenset()  # collected from, and not reduced yet
        self._tell()

    def take_up(self) -> None:
        """Look at every ``requires_grad`` again. A collective where one changed.

        Raises:
            ScheduleError: a parameter cannot be trained in the bucket that it has.
            RanksDisagree: it changed on some ranks only; the message names it.
        """
        with disable_torch_function():
            now = [param.requires_grad for param in self._params]
        if now != self._now:
            self._agree(now)
            self._now = now
            self._tell()
        elif self._lingers and not self._owing:
            self._tell()

    def owe(self, reduced: bool) -> None:
        """A backward pass is over: until gradients are reduced, their buckets take part."""
        self._owing = frozenset() if reduced else frozenset(self.buckets)

    def deliver(self, used: list[bool]) -> None:
        """Let every shard have its gradient; ``used``: which ones any rank has used."""
        flags = iter(used)
        for bucket in self.buckets:
            used_here = [next(flags) for _ in bucket.params]
            bucket.gradients.deliver(used_here, at_rest=not bucket.gathered)

    def _agree(self, now: list[bool]) -> None:
        pairs = zip(self._places, self._now, now, strict=True)
        changed = [(bucket, index, new) for (bucket, index), old, new in pairs if old is not new]
        for bucket, index, trained in changed:
            if trained and self._stored not in (None, bucket.dtypes.stored):
                raise _misfit(bucket, index, self._stored)
        bucket, index, trained = changed[0]
        what = f"that {bucket.members[index].name!r} is {'trained' if trained else 'frozen'} now"
        more = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
        label = Label("agree", f"{what}{more} [{zlib.crc32(bytes(now)):08x}]")
        self._comm.gather_rows(torch.zeros(1, dtype=torch.uint8), label)

    def _tell(self) -> None:
        flags = iter(self._now)
        for state in self._states:
            for bucket in state.buckets:
                mine = [index for index in range(len(bucket.params)) if next(flags)]
                bucket.gradients.trained = frozenset(mine)
                bucket.trainable = bucket.trainable or bool(mine)
            state.trainable = [b for b in state.buckets if b.gradients.trained or b in self._owing]
            state.wholly_trained = all(
                len(b.gradients.trained) == len(b.params) for b in state.buckets
            )
        self.buckets = [bucket for state in self._states for bucket in state.trainable]
        self.copies = list(dict.fromkeys(b.spec.replicate for b in self.buckets))
        self.units = frozenset(state.name for state in self._states if state.trainable)
        self._lingers = not all(bucket.gradients.trained for bucket in self.buckets)


def _misfit(bucket: Bucket, index: int, stored: torch.dtype | None) -> ScheduleError:
    return ScheduleError(
        f"parameter {bucket.members[index].name!r} is trainable now, and was not when the model "
        f"was sharded: its bucket is stored in {bucket.dtypes.stored}, and precision.stored asks "
        f"for {stored}. Call sharded.relayout() after changing requires_grad."
    )
