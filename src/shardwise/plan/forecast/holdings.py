"""Bytes that the engine holds, bucket by bucket, as the events of a step come.

The same transitions as in ``memory.parameters`` and ``memory.gradients``, on numbers instead of
tensors. What an event allocates and frees again counts for its peak only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import torch

from shardwise.comm.codec import QUANTISED, wire_nbytes
from shardwise.comm.grid import Axis
from shardwise.comm.pages import LARGE
from shardwise.plan.schedule.events import Event, Op
from shardwise.plan.spec import BucketSpec


class Kind(StrEnum):
    """Uses of memory."""

    PARAMETERS = "parameters"  # shards, with their padding
    JOINED = "joined"  # what is sent in a gather, where that is neither shard nor full bucket
    GATHERED = "gathered"  # full buckets, without slices of them that are shards
    BUCKETS = "gradient buckets"  # written, or on their way
    GRADIENTS = "gradients"  # means of shards, and what becomes of them
    COMMUNICATION = "communication"  # memory to receive in
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    BATCH = "batch"


POOLED = frozenset({Kind.GATHERED, Kind.BUCKETS, Kind.GRADIENTS, Kind.COMMUNICATION})
"""On CPU, uses of the engine's own pages (``comm.pages``), which keeps what it has had at most."""
IN_HEAP = frozenset({Kind.GRADIENTS, Kind.COMMUNICATION})
"""Of these, uses whose small tensors lie in the C library's heap: activations go as they come."""


class Use(NamedTuple):
    """A use of memory, by a unit."""

    kind: Kind
    unit: str
    in_host: bool = False


class Ledger:
    """Bytes in use.

    Attributes:
        uses: now.
        now, in_host: the sums of those on the device, and of those in host memory beside it.
        most: bytes of each kind on the device at most so far.
        pooled: bytes of the kinds in ``POOLED`` together, at most so far, without
        small: those smaller than ``comm.pages.LARGE`` of the kinds in ``IN_HEAP``, at most so far.
        peak: bytes on the device at most since it was last set.
        at_peak: the uses when the device held more than ever before.
    """

    def __init__(self) -> None:
        self.uses: Counter[Use] = Counter()
        self.now = self.in_host = self.peak = 0
        self.most: Counter[Kind] = Counter()
        self.at_peak: dict[Use, int] = {}
        self.pooled = self.small = self._in_pool = self._in_heap = 0
        self._kinds: Counter[Kind] = Counter()
        self._ever = 0

    @property
    def received(self) -> int:
        """Bytes on the device in use to receive in."""
        return self._kinds[Kind.COMMUNICATION]

    def add(self, use: Use, nbytes: int) -> None:
        """Allocate ``nbytes``, or free them where they are negative."""
        self.uses[use] += nbytes
        if use.in_host:
            self.in_host += nbytes
            return
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self._kinds[use.kind] += nbytes
        self.most[use.kind] = max(self.most[use.kind], self._kinds[use.kind])
        if use.kind in IN_HEAP and abs(nbytes) < LARGE:
            self._in_heap += nbytes
            self.small = max(self.small, self._in_heap)
        elif use.kind in POOLED:
            self._in_pool += nbytes
            self.pooled = max(self.pooled, self._in_pool)
        if self.now > self._ever:
            self._ever, self.at_peak = self.now, dict(self.uses)


class Bucket:
    """One bucket's memory, on one rank."""

    def __init__(self, spec: BucketSpec, ledger: Ledger) -> None:
        self.spec, self._ledger = spec, ledger
        self._unit, self._allocation = spec.unit, spec.allocation
        full = spec.layout.numel * spec.dtypes.param.itemsize
        #: A full bucket that ranks map counts for each of them in part.
        self._full = full // spec.shard.size if self._allocation.shared else full
        self._is_full = self._allocation.lasting
        self._collected = 0  # bytes of the gradient bucket
        self._collects: torch.dtype = spec.dtypes.collected
        self._sent = self._out = self._received = self._mean = self._stored = 0
        self._over_shards = 0  # of the sum over the first axis, while the copies' is on its way
        #: Does the memory of an earlier mean wait for the next one, held by no gradient?
        self._keeps = spec.keeps_mean
        self._has_gradients = False  # of passes before, in this step
        self._at_rest()

    def _add(self, kind: Kind, nbytes: int, in_host: bool = False) -> None:
        self._ledger.add(Use(kind, self._unit, in_host), nbytes)

    # ---- parameters ----------------------------------------------------------------------------

    def _at_rest(self) -> None:
        spec, rest = self.spec, self.spec.rest_nbytes
        in_full = 0
        if self._allocation.aliased:  # a slice of the full bucket, of which it may be all
            in_full = min(rest, self._full)
        if self._allocation.lasting:
            self._add(Kind.GATHERED, self._full - in_full)
        joined = 0
        if spec.staged is not None:
            joined = spec.layout.numel // spec.shard.size * spec.staged.itemsize
            if not spec.in_host and spec.dtypes.stored is spec.dtypes.param:
                joined -= rest  # the shard is a piece of it
        self._add(Kind.JOINED, joined)
        self._add(Kind.PARAMETERS, rest, spec.in_host)
        self._add(Kind.GRADIENTS, rest if self._keeps else 0)  # of the step before

    def load(self) -> None:
        """Copy the shard from host memory."""
        if self.spec.in_host:
            self.gather()

    def gather(self) -> None:
        """Fill the full bucket."""
        if not self._is_full:
            self._is_full = True
            self._add(Kind.GATHERED, self._full)

    def free(self) -> None:
        """Free the full bucket, unless it keeps its memory."""
        if self._is_full and not self._allocation.lasting:
            self._is_full = False
            self._add(Kind.GATHERED, -self._full)

    # ---- gradients -----------------------------------------------------------------------------

    def collect(self, dtype: torch.dtype) -> None:
        """Open the gradient bucket, if it is not open."""
        if self.spec.trainable and not self._collected:
            self._collects = dtype
            self._collected = self.spec.layout.numel * dtype.itemsize
            self._add(Kind.BUCKETS, self._collected)

    def reduce(self) -> None:
        """Send the gradients on their way."""
        if not self.spec.trainable:
            return
        self.collect(self.spec.dtypes.collected)
        numel = self.spec.layout.numel
        self._sent, self._out, self._received = self._average(0, numel, self._collects)
        if self._sent:  # in other memory than they were collected in
            self._release()

    def _average(self, at: int, numel: int, dtype: torch.dtype) -> tuple[int, int, int]:
        """Issue a reduction: bytes sent from new memory, bytes of the sum, and bytes received."""
        spec = self.spec
        axis, reduction = spec.averages[at]
        encodes, sent = reduction.wire in QUANTISED, 0
        travels = wire_nbytes(reduction.wire, numel, axis.size)
        if not encodes and dtype is not reduction.wire:
            sent = travels
            self._add(Kind.BUCKETS, sent)
        if axis.size == 1:  # its own sum, in the same memory if it is of the same dtype
            alone = reduction.wire if not encodes else dtype
            out = 0 if alone is reduction.sum else numel * reduction.sum.itemsize
            self._add(Kind.GRADIENTS, out)
            return sent, out, 0
        out = numel // (1 if reduction.whole else axis.size) * reduction.sum.itemsize
        out = 0 if reduction.in_place else out
        self._add(Kind.GRADIENTS, 0 if self._keeps else out)
        if encodes:
            sent = travels
            self._add(Kind.BUCKETS, sent)
        sums_in_place = not encodes and reduction.wire is reduction.sum and not reduction.in_place
        piece = travels if reduction.whole else travels // axis.size
        received = self._received_from_peers(axis, piece, sums_in_place)
        self._add(Kind.COMMUNICATION, received)
        return sent, out, received

    def _received_from_peers(self, axis: Axis, piece: int, sums_in_place: bool) -> int:
        """Bytes of memory for what peers send, where messages carry it.

        Shared memory is read in place, and vendors' libraries sum. Where the sum has the dtype of
        what travels, one peer's part is received in the place of the sum.
        """
        if not axis.by_messages:
            return 0
        return piece * (axis.size - 1 - sums_in_place)

    def _release(self) -> None:
        self._add(Kind.BUCKETS, -self._collected)
        self._collected = 0

    def average(self) -> None:
        """Take the sum over the first axis, and send it on its way to the copies."""
        if not self.spec.trainable:
            return
        self._add(Kind.COMMUNICATION, -self._received)
        out, sent, dtype = self._out, self._sent, self.spec.dtypes.sum
        self._over_shards = out
        self._sent, self._out, self._received = self._average(1, out // dtype.itemsize, dtype)
        if self._sent:  # in other memory than the sum
            self._forget_first()
        self._add(Kind.BUCKETS, -sent)
        self._release()

    def _forget_first(self) -> None:
        self._add(Kind.GRADIENTS, -self._over_shards)
        self._over_shards = 0

    def settle(self) -> None:
        """Take the mean, and let the gradient bucket go."""
        spec = self.spec
        if not spec.trainable:
            return
        self._add(Kind.COMMUNICATION, -self._received)
        out, dtype = self._out, spec.dtypes.sum
        if not out:  # one rank's sum, or one in place, is what was sent, and stays
            out = self._keep_sent()
        if dtype is not spec.dtypes.stored or (spec.spreads and not spec.in_place):
            stored = spec.layout.shard_numel * spec.dtypes.stored.itemsize
            self._add(Kind.GRADIENTS, stored)
            self._add(Kind.GRADIENTS, -out)
            out = stored
        self._mean += out
        self._add(Kind.BUCKETS, -self._sent)
        self._sent = self._out = self._received = 0
        self._forget_first()
        self._release()

    def _keep_sent(self) -> int:
        if self._over_shards:
            out, self._over_shards = self._over_shards, 0
            return out
        out = self._sent or self._collected
        self._add(Kind.BUCKETS, -out)
        self._add(Kind.GRADIENTS, out)
        self._sent = self._collected = 0
        return out

    def store(self) -> None:
        """Move the mean to host memory."""
        if self.spec.in_host and self.spec.trainable:
            self._stored = self.spec.rest_nbytes
            self._add(Kind.GRADIENTS, self._stored, in_host=True)
            self._add(Kind.GRADIENTS, -self._mean)
            self._mean = 0

    def deliver(self) -> None:
        """Make the mean the gradients of the step, or add it to them."""
        self._keeps = self.spec.keeps_mean and self._has_gradients
        if self._has_gradients:
            self._add(Kind.GRADIENTS, 0 if self._keeps else -self._mean)
            self._add(Kind.GRADIENTS, -self._stored, in_host=True)
        self._has_gradients, self._mean, self._stored = True, 0, 0


class Holdings:
    """The memory of all buckets of one rank."""

    def __init__(self, specs: Mapping[str, Sequence[BucketSpec]]) -> None:
        self.ledger = Ledger()
        self._buckets = {
            unit: [Bucket(spec, self.ledger) for spec in each] for unit, each in specs.items()
        }

    def collect(self, unit: str, names: Container[str], keeps: bool = False) -> None:
        """Gradients of parameters of a unit come; ``keeps``: they are reduced in a later pass."""
        for bucket in self._buckets[unit]:
            if any(slot.name in names for slot in bucket.spec.slots):
                dtypes = bucket.spec.dtypes
                bucket.collect(dtypes.sum if keeps else dtypes.collected)

    def gather(self, unit: str) -> None:
        """An earlier pass has left the unit whole."""
        for bucket in self._buckets[unit]:
            bucket.gather()

    def deliver(self) -> None:
        """A pass has ended in which all units were reduced."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.deliver()

    def take(self, event: Event) -> None:
        """Carry out an event; cues change nothing."""
        for bucket in self._buckets.get(event.unit, ()):
            match event.op:
                case Op.LOAD:
                    bucket.load()
                case Op.GATHER:
                    bucket.gather()
                case Op.FREE:
                    bucket.free()
                case Op.REDUCE:
                    bucket.reduce()
                case Op.AVERAGE:
                    bucket.average()
                case Op.SETTLE:
                    bucket.settle()
                case Op.STORE:
                    bucket.store()
