"""Trained parameters: laid out when the model was sharded, looked up in every step.

A GAN switches its discriminator off and on in each step, a fine-tuning unfreezes a block now and
then. A new layout would move every parameter and all optimizer state. So buckets stay as they
are, and only what is expected changes: a frozen parameter of a trainable bucket has no gradient, a
unit without any trained parameter is not reduced, and a bucket that was frozen takes memory for
gradients when the first one arrives.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import torch

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ScheduleError
from shardwise.memory.parameters import Bucket, State
from shardwise.runtime.unit import UnitState
from shardwise.torch_internals import disable_torch_function


class Trained:
    """Parameters that are trained, as of the last look.

    ``stored`` is the dtype in which they are to be stored; ``None`` = as they are.
    """

    #: Per parameter of each bucket, did it get a gradient when they were last reduced?
    used: Mapping[Bucket, Sequence[bool]] = {}

    def __init__(
        self, units: Iterable[UnitState], comm: Comm, stored: torch.dtype | None = None
    ) -> None:
        self._states, self._comm, self._stored = tuple(units), comm, stored
        every = [bucket for state in self._states for bucket in state.buckets]
        self._places = [(bucket, index) for bucket in every for index in range(len(bucket.params))]
        self.params = [bucket.params[index] for bucket, index in self._places]
        self._flags = [bucket.trainable for bucket, _ in self._places]  # one for each parameter
        self._unreduced: frozenset[Bucket] = frozenset()  # with gradients that were not averaged
        self.updates: Counter[str] = Counter()  # by optimizers, since ranks were last asked
        self._apply()

    def update(self) -> None:
        """Read every ``requires_grad`` again. A collective where one changed.

        Raises:
            ScheduleError: a parameter cannot be trained in the bucket that it has.
            RanksDisagree: it changed on some ranks only; the message names it.
        """
        if flags := self.changed():
            self._agree(flags)
            self._flags = flags
            self._apply()
        elif self._holds_frozen and not self._unreduced:
            self._apply()

    def changed(self) -> list[bool]:
        """Every ``requires_grad``, if one is not as it was at the last look; otherwise nothing."""
        with disable_torch_function():
            flags = [param.requires_grad for param in self.params]
        return flags if flags != self._flags else []

    @property
    def taken(self) -> list[str]:
        """The updates since ranks were last asked, such as ``"1 × SGD.step() with lr 0.1"``."""
        return [f"{n} × {text}" for text, n in sorted(self.updates.items())]

    def ask_used(self) -> Callable[[], list[bool]]:
        arrived: list[bool] = []
        for bucket in self.buckets:
            touched, n = bucket.gradients.touched, len(bucket.params)
            arrived += [True] * n if len(touched) == n else [index in touched for index in range(n)]
        updates = "".join(f", after {update}" for update in self.taken)
        self.updates.clear()
        return ask_used(arrived, self._comm, updates)

    def end_backward(self, used: Callable[[], list[bool]] | None) -> None:
        """Give every shard its mean gradient, or what this rank has collected so far.

        Args:
            used: the answer of ``ask_used``; ``None``: gradients are not reduced yet, and until
                then their buckets take part in backward passes.
        """
        self._unreduced = frozenset(self.buckets if used is None else ())
        if used is None:
            for bucket in self.buckets:
                bucket.gradients.show()
            return
        for bucket in self.buckets if self._copies else ():
            bucket.gradients.mean.value()
        for comm in self._copies:  # peers still read this rank's mean
            comm.fence(Label("fence", "gradients"))
        flags = iter(used())
        self.used = {bucket: [*islice(flags, len(bucket.params))] for bucket in self.buckets}
        for bucket, used_here in self.used.items():
            bucket.gradients.deliver(used_here, bucket.state is State.AT_REST)

    def forget_gradients(self) -> None:
        """Forget what was collected and not reduced: it was dropped."""
        self._unreduced = frozenset()

    def _agree(self, flags: list[bool]) -> None:
        """Check that every rank has changed the same."""
        pairs = zip(self._places, self._flags, flags, strict=True)
        changed = [(bucket, index, new) for (bucket, index), old, new in pairs if old is not new]
        for bucket, index, trained in changed:
            if trained and self._stored not in (None, bucket.dtypes.stored):
                raise _wrong_dtype(bucket, index, self._stored)
        bucket, index, trained = changed[0]
        what = f"that {bucket.members[index].name!r} is {'trained' if trained else 'frozen'} now"
        more = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
        label = Label("agree", f"{what}{more} [{zlib.crc32(bytes(flags)):08x}]")
        self._comm.gather_rows(torch.zeros(1, dtype=torch.uint8), label)

    def _apply(self) -> None:
        """Expect gradients of the parameters that are trained."""
        flags = iter(self._flags)
        for state in self._states:
            for bucket in state.buckets:
                trained = [index for index in range(len(bucket.params)) if next(flags)]
                bucket.gradients.trained = frozenset(trained)
            counts = {b: len(b.gradients.trained) for b in state.buckets}
            trainable = [b for b in counts if counts[b] or b in self._unreduced]
            state.train(trainable, all(counts[b] == len(b.params) for b in counts))
        #: Those that take part in backward passes, and below the names of their units.
        self.buckets = [bucket for state in self._states for bucket in state.trainable]
        copied = (b.mesh.replicate for b in self.buckets if b.spec.spreads)
        self._copies = list(dict.fromkeys(copied))
        self.units = frozenset(state.name for state in self._states if state.trainable)
        #: Does a bucket take part only until its gradients are reduced?
        self._holds_frozen = not all(bucket.gradients.trained for bucket in self.buckets)


def _wrong_dtype(bucket: Bucket, index: int, stored: torch.dtype | None) -> ScheduleError:
    return ScheduleError(
        f"parameter {bucket.members[index].name!r} is trainable now, and was not when the model "
        f"was sharded: its bucket is stored in {bucket.dtypes.stored}, and precision.stored_dtype "
        f"asks for {stored}. Call sharded.relayout() after changing requires_grad."
    )


def ask_used(arrived: Sequence[bool], comm: Comm, updates: str = "") -> Callable[[], list[bool]]:
    """Ask which parameters had a gradient on any rank; call the answer to wait. A collective.

    A plain training step leaves ``.grad`` at ``None`` where no gradient came, and an optimizer then
    leaves the parameter and its state alone. Ranks that take different branches would disagree
    about that, so each sends one byte for each parameter. The bytes are sent before the last
    reductions are waited for and read after them, so they cost no waiting of their own.
    The label has the ``updates``: a rank that skips one, or has another learning rate, is named.
    """
    mine = list(arrived)
    if comm.size == 1 or not mine:
        return lambda: mine
    flags = torch.ones(comm.size * len(mine), dtype=torch.uint8, device=comm.device)
    rows = flags.view(comm.size, -1)
    if not (every := all(mine)):  # as usual; to read the others' bytes would wait for the device
        rows[comm.rank] = torch.tensor(mine, dtype=torch.uint8)
    pending = comm.all_gather(flags, Label("agree", f"used parameters{updates}"))

    def answer() -> list[bool]:
        pending.wait()
        return mine if every else [bool(flag) for flag in rows.any(dim=0).tolist()]

    return answer
