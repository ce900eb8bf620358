"""Ranks as processes whose backend's own collectives are the fast ones: NCCL, XCCL, HCCL.

Reductions have a communicator of their own: on a shared one, a gather that the forward pass
waits for would queue behind the reductions of the backward pass. A narrow wire is summed wide by
an all-to-all and one local kernel, where the ordinary way widens first and sends twice the bytes.

On a device, every collective of a comm and all that computes with its memory belong on one stream:
memory is freed by the host as soon as that stream was told to wait for what reads it.

These backends have no tags. Unlike collectives are found by the watchdog, from the ranks' cursors.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import Store

from shardwise.comm.desync import Collective
from shardwise.comm.gloo import Ending, close_connections
from shardwise.comm.local import Done
from shardwise.comm.malloc import fresh
from shardwise.comm.messages import PART, InFlight, agree, check_splits
from shardwise.comm.protocol import Counters, Label, Pending
from shardwise.comm.watchdog import Wait, Watchdog, how_this_process_ends

__all__ = ["BackendComm"]

GREETING = Collective(-2, "greeting", "start", "", 0)
SUCCESS = 0  # of torch's C++ enum WorkResult
SELF_TEST = Collective(-1, "self-test", "self-test of AVG", "", 0)


class BackendComm:
    """One rank's end of a group that a vendor's library serves. Final; see ``Comm``.

    Args:
        group: the ranks. Gathers and broadcasts use it, so it must carry nothing else meanwhile.
        device: this rank's, with its index.
        store: the group's own, with no other user's keys.
        averages: whether to let the backend average, if it passes a self-test on every rank.
        timeout: seconds after which waiting for a slow rank becomes an error.
        ending: what ends with this object.
    """

    shares = False

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        store: Store,
        averages: bool,
        timeout: float,
        ending: Ending,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self.counters = Counters()
        self._issued = 0
        self._closed = False
        self._ending = ending
        self._calls = _calls()
        self._groups = _Groups(group, group)
        self._stop = _stopper(dist.get_backend(group), (self.rank + 1) % self.size)
        self._watchdog = Watchdog(store, self.rank, self.size, self._interrupt, timeout)
        try:
            self._watchdog.share(GREETING, "")
            # All processes must take part in making a group, so only one of all of them is safe
            # to make here. A mesh axis keeps to one communicator: right, with less overlap.
            if self.size == dist.get_world_size():
                # Torch's default is ten minutes for NCCL, and then the process is killed. Longer
                # than ours: the watchdog knows what to say.
                patience = timedelta(seconds=timeout + 60)
                reduce = dist.new_group(timeout=patience, group_desc="shardwise reductions")
                self._groups = _Groups(group, reduce)
            self._averages = averages and self._average_is_right()
        except BaseException as error:
            self._watchdog.leave(f"it raised {error!r}")
            raise
        atexit.register(self._at_exit)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return fresh(numel, dtype, self.device)

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)

    def fence(self, label: Label) -> None:
        """No memory is shared."""

    def all_gather(self, full: Tensor, label: Label) -> Pending:
        check_splits(full, self.size, label)
        data = full.detach().view(torch.uint8)  # as bytes: not every backend knows every dtype
        size = data.numel() // self.size
        mine = data[self.rank * size : (self.rank + 1) * size]

        def call() -> Work:
            return self._calls.gather(data, mine, group=self._groups.gather, async_op=True)

        return self._start("all_gather", label, full.nbytes, (self.size - 1) * mine.nbytes, call)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, label: Label, divisor: float = 1.0, mean: bool = False
    ) -> Pending:
        check_splits(full, self.size, label)
        sent = (self.size - 1) * (full.nbytes // self.size)
        reduce = self._sum_wide if out.dtype != full.dtype else self._sum_native
        call, finish = reduce(out, full, float(self.size) if mean else divisor, mean)
        return self._start("reduce_scatter", label, full.nbytes, sent, call, finish)

    def broadcast(self, tensor: Tensor, root: int, label: Label) -> Pending:
        data = tensor.detach().view(-1).view(torch.uint8)
        sent = (self.size - 1) * data.nbytes if self.rank == root else 0

        def call() -> Work:
            group = self._groups.gather
            return _work(dist.broadcast(data, group_src=root, group=group, async_op=True))

        return self._start(f"broadcast from rank {root}", label, data.nbytes, sent, call)

    def agree(self, facts: Mapping[str, str]) -> None:
        def share(text: str) -> list[str]:
            return self._watchdog.share(self._next("agree", Label("agree"), 0), text)

        if difference := agree(facts, share):
            raise self._watchdog.fail(difference)

    def close(self) -> None:
        self._close("it closed its end of the group")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(f"it raised {error!r}" if error else "it closed its end of the group")

    def _sum_native(self, out: Tensor, full: Tensor, divisor: float, mean: bool) -> _Reduction:
        averages = mean and self._averages
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM

        def call() -> Work:
            return self._calls.scatter(out, full, op=op, group=self._groups.reduce, async_op=True)

        def divide() -> None:
            with torch.no_grad():
                out.div_(divisor)

        return call, None if averages or divisor == 1 else divide

    def _sum_wide(self, out: Tensor, full: Tensor, divisor: float, mean: bool) -> _Reduction:
        received = torch.empty_like(full)

        def call() -> Work:
            group = self._groups.reduce
            return _work(dist.all_to_all_single(received, full, group=group, async_op=True))

        def finish() -> None:
            # One kernel: piece after piece would be as many as ranks, each asked for by the host.
            # On CPU part by part, since there the sum makes a wide copy of what it adds.
            size = max(1, PART // self.size if out.device.type == "cpu" else out.numel())
            addends = received.view(self.size, -1).split(size, dim=1)
            with torch.no_grad():
                for part, pieces in zip(out.split(size), addends, strict=True):
                    torch.sum(pieces, dim=0, dtype=out.dtype, out=part)
                if divisor != 1:
                    out.div_(divisor)

        return call, finish

    def _next(self, kind: str, label: Label, nbytes: int) -> Collective:
        self._issued += 1
        return Collective(self._issued - 1, kind, label.op, label.unit, nbytes)

    def _start(
        self,
        kind: str,
        label: Label,
        nbytes: int,
        sent: int,
        call: Callable[[], Work],
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        collective = self._next(kind, label, nbytes)
        self._watchdog.issue(collective)
        self.counters.sent(label.op, sent)
        if nbytes == 0:
            return Done()
        try:
            work = call()
        except RuntimeError as error:
            raise self._watchdog.explain(-1, error) from error
        return InFlight(lambda: self._complete(collective, work), finish, self.counters, label.op)

    def _complete(self, collective: Collective, work: Work) -> None:
        # On a GPU `wait` only orders streams: the watchdog goes on asking whether the work is over.
        self._watchdog.waits = Wait(collective, monotonic(), over=partial(_is_over, work))
        try:
            work.wait()
        except RuntimeError as error:
            raise self._watchdog.explain(-1, error) from error

    def _average_is_right(self) -> bool:
        """Whether AVG of 1, 2, …, size is (size + 1) / 2, for each of some sizes, on every rank."""
        right = True
        for n in (1, 513, 65_537):
            full = torch.full((self.size * n,), self.rank + 1.0, device=self.device)
            out = torch.empty(n, device=self.device)
            self._calls.scatter(out, full, op=dist.ReduceOp.AVG, group=self._groups.reduce)
            right &= bool((out == (self.size + 1) / 2).all())
        return set(self._watchdog.share(SELF_TEST, str(right))) == {"True"}

    def _interrupt(self) -> None:
        for group in set(self._groups):
            self._stop(group)

    def _close(self, how: str) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._watchdog.leave(how, self._ending.linger)
        if self._groups.reduce is not self._groups.gather:
            dist.destroy_process_group(self._groups.reduce)
        self._ending.then()

    def _at_exit(self) -> None:
        self._close(how_this_process_ends())


class _Groups(NamedTuple):
    gather: ProcessGroup
    reduce: ProcessGroup


class _Calls(NamedTuple):
    gather: Callable[..., Work]
    scatter: Callable[..., Work]


_Reduction = tuple[Callable[[], Work], Callable[[], None] | None]


def _calls() -> _Calls:
    """The names of torch 2.13, where the old ones warn, or the old ones."""
    if torch.__version__ >= "2.13":
        return _Calls(dist.all_gather_single, dist.reduce_scatter_single)
    return _Calls(dist.all_gather_into_tensor, dist.reduce_scatter_tensor)


def _stopper(backend: str, peer: int) -> Callable[[ProcessGroup], None]:
    """What makes every pending operation of a group fail."""
    if backend == "gloo":
        return lambda group: close_connections(group, peer)
    return lambda group: group.abort()


def _is_over(work: Work) -> bool:
    """Is it complete and did it succeed? NCCL calls work that failed complete, too."""
    if not work.is_completed():
        return False
    try:
        result = work.get_future_result()  # type: ignore[attr-defined]
    except RuntimeError:  # this backend does not tell
        return True
    return bool(result.done() and result.value() == SUCCESS)


def _work(work: Work | None) -> Work:
    assert work is not None  # torch gives None only to ranks outside the group
    return work
