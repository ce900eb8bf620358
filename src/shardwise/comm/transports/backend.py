"""Communicator over the collectives of a vendor's backend: NCCL, XCCL, HCCL.

Reductions have a process group of their own: on a shared one, a gather that the forward pass
waits for would queue behind reductions of the backward pass. A narrow dtype is summed in a wider
one by an all-to-all and one local kernel, which sends half the bytes of widening first.

On a device, every collective of a comm and all computation with its memory belong on one stream
(see ``one_stream``): the host frees memory as soon as that stream waits for its last reader.

These backends have no tags. The watchdog finds mismatched collectives from the ranks' progress.

A group that is destroyed finishes its collectives first, for ever where one has no partners. So
none is destroyed before the device has finished them, under the watchdog; after an error what is
unfinished is aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import Store

from shardwise.comm.protocol import (
    CLOSED,
    ENDED,
    Label,
    OnReceived,
    Pending,
    Sizes,
    check_divisible,
    rows_of,
)
from shardwise.comm.transports.gloo import close_connections, is_closed
from shardwise.comm.transports.transport import (
    IMMEDIATE,
    Group,
    Shutdown,
    Transfer,
    end_group,
    noop,
)
from shardwise.comm.watchdog.desync import Collective
from shardwise.comm.watchdog.watchdog import Wait, Watchdog, weakly

GLANCE = 0.005  # seconds between two looks whether the device has finished
log = logging.getLogger("shardwise")

SUCCESS = 0  # of torch's C++ enum WorkResult


class BackendComm(Group):
    """One rank's communicator over a vendor's backend. Final; see ``Group``.

    Args:
        group: the ranks. Gathers and broadcasts use it, so nothing else may use it meanwhile.
        device: this rank's, with its index.
        has_average: whether to let the backend average, if it passes a self-test on every rank.
    """

    has_reduce_scatter = True
    closes_unused = False  # a vendor's group ends by a collective

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        store: Store,
        has_average: bool,
        timeout: float,
        shutdown: Shutdown = IMMEDIATE,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device, shutdown)
        self._calls = _calls()
        self._gather_group = self._reduce_group = group
        self._is_gloo = dist.get_backend(group) == "gloo"
        self._unawaited: dict[int, tuple[Collective, Work]] = {}  # by number
        self._last: Collective | None = None
        self._watchdog = Watchdog(
            *(store, self.rank, self.size, weakly(self._interrupt), timeout),
            *(shutdown.where, shutdown.failure),
        )
        if self._is_gloo:
            self._watchdog.is_closed = partial(is_closed, group)
        with self._watchdog.meeting():
            self._watchdog.greet("start")
            # All processes must call new_group, so it can be called only for a group of all
            # ranks. A mesh axis uses one process group, with less overlap.
            if self.size == dist.get_world_size():
                # After torch's timeout (ten minutes for NCCL) the process is killed. It must be
                # longer than ours, so that the watchdog can report first.
                longer, name = timedelta(seconds=timeout + 60), "shardwise reductions"
                self._reduce_group = dist.new_group(timeout=longer, group_desc=name)
            self.has_average = has_average and self.average_is_right()
        self._opened()

    @property
    def is_usable(self) -> bool:
        return not self._watchdog.failure  # also after ``close``

    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        data = full.view(torch.uint8)  # bytes: not every backend supports every dtype
        size = data.numel() // self.size
        piece = data[self.rank * size : (self.rank + 1) * size]
        call = partial(self._calls.gather, data, piece, group=self._gather_group, async_op=True)
        return self._start(collective, call)

    def _exchange(
        self, collective: Collective, full: Tensor, on_received: OnReceived, out: Tensor | None
    ) -> Transfer:
        received, group = torch.empty_like(full), self._reduce_group
        call = partial(dist.all_to_all_single, received, full, group=group, async_op=True)
        return self._start(collective, call, lambda: on_received(rows_of(received, self.size)))

    def _all_to_all(
        self, collective: Collective, sent: Tensor, received: Tensor, sizes: Sizes
    ) -> Transfer:
        outgoing = [n * sent.itemsize for n in sizes[self.rank]]
        incoming = [row[self.rank] * sent.itemsize for row in sizes]
        data = received.view(torch.uint8), sent.view(torch.uint8)  # as in a gather
        split = partial(dist.all_to_all_single, *data, incoming, outgoing)
        return self._start(collective, partial(split, group=self._reduce_group, async_op=True))

    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        data, group = data.view(torch.uint8), self._gather_group
        call = partial(dist.broadcast, data, group_src=root, group=group, async_op=True)
        return self._start(collective, call)

    def reduce_scatter(self, out: Tensor, full: Tensor, average: bool, label: Label) -> Pending:
        full = check_divisible(full, self.size, label)
        op, group = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, self._reduce_group
        collective = self._next("reduce_scatter", label, full.nbytes)
        call = partial(self._calls.scatter, out, full, op=op, group=group, async_op=True)
        transfer = self._start(collective, call)
        return self._in_flight(collective, transfer, full.nbytes - full.nbytes // self.size)

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        return self._watchdog.gather_texts(collective, text)

    def _leave(self, reason: str) -> None:
        is_idle = self._idle()
        try:
            if reason in (CLOSED, ENDED):
                self._finish(is_idle)
            aborts = self.is_usable and (bool(self._unawaited) or not is_idle())
        except RuntimeError as error:  # what was computed is lost, and why must not be
            log.error("%s", error)  # noqa: TRY400 - its text says all
            aborts = self.is_usable  # a group that has failed was aborted
        self._watchdog.leave(reason, self.shutdown.linger)
        if aborts:  # peers have read why by now
            self._interrupt()
        if self._reduce_group is not self._gather_group:
            end_group(self._reduce_group)

    def _finish(self, is_idle: Callable[[], bool]) -> None:
        """Wait until the device has finished all collectives, or raise what the watchdog finds."""
        for collective, work in tuple(self._unawaited.values()):
            self._complete(collective, work)
        if self._last is not None:
            self._watchdog.waits = Wait(self._last, monotonic(), is_complete=is_idle)
        while self.is_usable and not is_idle():
            sleep(GLANCE)
        self._watchdog.raise_if_failed()

    def _idle(self) -> Callable[[], bool]:
        """A question: has the device finished what this thread's stream holds?"""
        if self._last is None or self.device.type == "cpu":
            return lambda: True
        stream = torch.accelerator.current_stream(self.device)
        return lambda: stream.record_event().query()  # HPU's streams have no query()

    def _start(
        self, issued: Collective, call: Callable[[], Work | None], finish: Callable[[], None] = noop
    ) -> Transfer:
        self._watchdog.issue(issued)
        if issued.nbytes == 0:
            return Transfer(noop, finish)
        try:
            with self._watchdog.calling(issued):
                work = call()
        except RuntimeError as error:
            raise self._watchdog.explain(error) from error
        assert work is not None  # torch returns None only to ranks outside the group
        self._last, self._unawaited[issued.seq] = issued, (issued, work)
        return Transfer(partial(self._complete, issued, work), finish)

    def _complete(self, collective: Collective, work: Work) -> None:
        # On a GPU `wait` only orders streams, so the watchdog keeps polling the work, and an event
        # for each one before it: works would keep memory.
        waits = Wait(collective, monotonic(), is_complete=partial(_has_succeeded, work))
        self._watchdog.waits = waits
        try:
            work.wait()
            if self.device.type != "cpu":
                ended = torch.accelerator.current_stream(self.device).record_event()
                self._watchdog.on_device.append(waits._replace(is_complete=ended.query))
        except RuntimeError as error:
            raise self._watchdog.explain(error) from error
        self._unawaited.pop(collective.seq, None)

    def average_is_right(self) -> bool:
        """Test that AVG of 1, 2, …, size is (size + 1) / 2, for some sizes, on every rank."""
        is_correct = True
        for n in (1, 513, 65_537):
            full = torch.full((self.size * n,), self.rank + 1.0, device=self.device)
            out = torch.empty(n, device=self.device)
            with self._watchdog.calling(self._watchdog.greeting("self-test of AVG")):
                self._calls.scatter(out, full, op=dist.ReduceOp.AVG, group=self._reduce_group)
                is_correct &= bool((out == (self.size + 1) / 2).all())
        return set(self._watchdog.greet("self-test of AVG", str(is_correct))) == {"True"}

    def _interrupt(self) -> None:
        for group in {self._gather_group, self._reduce_group}:
            if self._is_gloo:
                close_connections(group, self.peers[0])
            else:
                group.abort()


class _Calls(NamedTuple):
    gather: Callable[..., Work]
    scatter: Callable[..., Work]


def _calls() -> _Calls:
    """The functions by their names of torch 2.13, or by their older names."""
    if torch.__version__ >= "2.13":
        return _Calls(dist.all_gather_single, dist.reduce_scatter_single)
    return _Calls(dist.all_gather_into_tensor, dist.reduce_scatter_tensor)


def _has_succeeded(work: Work) -> bool:
    """Is the work complete without an error? For NCCL failed work is complete, too."""
    if not work.is_completed():
        return False
    try:
        result = work.get_future_result()  # type: ignore[attr-defined]
    except RuntimeError:  # not supported by this backend
        return True
    return bool(result.done() and result.value() == SUCCESS)
