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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import Store

from shardwise.comm.desync import Collective
from shardwise.comm.gloo import close_connections
from shardwise.comm.group import Ending, Group, Transfer, nothing
from shardwise.comm.protocol import Label, Pending, Use, rows_of, splits
from shardwise.comm.watchdog import Wait, Watchdog
from shardwise.errors import RanksDisagree

__all__ = ["BackendComm"]

GREETING = Collective(-2, "greeting", "start", "", 0)
SUCCESS = 0  # of torch's C++ enum WorkResult
SELF_TEST = Collective(-1, "self-test", "self-test of AVG", "", 0)


class BackendComm(Group):
    """One rank's end of a group that a vendor's library serves. Final; see ``Comm``.

    Args:
        group: the ranks. Gathers and broadcasts use it, so it must carry nothing else meanwhile.
        device: this rank's, with its index.
        store: the group's own, with no other user's keys.
        averages: whether to let the backend average, if it passes a self-test on every rank.
        timeout: seconds after which waiting for a slow rank becomes an error.
        ending: what ends with this object.
    """

    sums = True

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        store: Store,
        averages: bool,
        timeout: float,
        ending: Ending | None = None,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device, ending)
        self._calls = _calls()
        self._groups = _Groups(group, group)
        self._stop = _stopper(dist.get_backend(group), (self.rank + 1) % self.size)
        self._watchdog = Watchdog(store, self.rank, self.size, self._interrupt, timeout)
        try:
            self._watchdog.gather_texts(GREETING, "")
            # All processes must take part in making a group, so only one of all of them is safe
            # to make here. A mesh axis keeps to one communicator: right, with less overlap.
            if self.size == dist.get_world_size():
                # Torch's default is ten minutes for NCCL, and then the process is killed. Longer
                # than ours: the watchdog knows what to say.
                patience = timedelta(seconds=timeout + 60)
                reduce = dist.new_group(timeout=patience, group_desc="shardwise reductions")
                self._groups = _Groups(group, reduce)
            self.averages = averages and self._average_is_right()
        except BaseException as error:
            self._watchdog.leave(f"it raised {error!r}")
            raise
        atexit.register(self._end_with_process)

    def _all_gather(self, collective: Collective, full: Tensor) -> Transfer:
        data = full.view(torch.uint8)  # as bytes: not every backend knows every dtype
        size = data.numel() // self.size
        mine, group = data[self.rank * size : (self.rank + 1) * size], self._groups.gather
        call = partial(self._calls.gather, data, mine, group=group, async_op=True)
        return self._start(collective, call)

    def _exchange(self, collective: Collective, full: Tensor, use: Use) -> Transfer:
        received, group = torch.empty_like(full), self._groups.reduce
        call = partial(dist.all_to_all_single, received, full, group=group, async_op=True)
        return self._start(collective, call, lambda: use(rows_of(received, self.size)))

    def _broadcast(self, collective: Collective, data: Tensor, root: int) -> Transfer:
        data, group = data.view(torch.uint8), self._groups.gather
        call = partial(dist.broadcast, data, group_src=root, group=group, async_op=True)
        return self._start(collective, call)

    def reduce_scatter(self, out: Tensor, full: Tensor, average: bool, label: Label) -> Pending:
        full = splits(full, self.size, label)
        op, group = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, self._groups.reduce
        collective = self._next("reduce_scatter", label, full.nbytes)
        call = partial(self._calls.scatter, out, full, op=op, group=group, async_op=True)
        transfer = self._start(collective, call)
        return self._in_flight(collective, transfer, full.nbytes - full.nbytes // self.size)

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        return self._watchdog.gather_texts(collective, text)

    def _fail(self, reason: str) -> RanksDisagree:
        return self._watchdog.fail(reason)

    def _leave(self, how: str) -> None:
        self._watchdog.leave(how, self.ending.linger)
        if self._groups.reduce is not self._groups.gather:
            dist.destroy_process_group(self._groups.reduce)

    def _start(
        self,
        collective: Collective,
        call: Callable[[], Work | None],
        finish: Callable[[], None] = nothing,
    ) -> Transfer:
        self._watchdog.issue(collective)
        if collective.nbytes == 0:
            return Transfer(nothing, finish)
        try:
            work = call()
        except RuntimeError as error:
            raise self._watchdog.explain(-1, error) from error
        assert work is not None  # torch gives None only to ranks outside the group
        return Transfer(partial(self._complete, collective, work), finish)

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
        return set(self._watchdog.gather_texts(SELF_TEST, str(right))) == {"True"}

    def _interrupt(self) -> None:
        for group in set(self._groups):
            self._stop(group)


class _Groups(NamedTuple):
    gather: ProcessGroup
    reduce: ProcessGroup


class _Calls(NamedTuple):
    gather: Callable[..., Work]
    scatter: Callable[..., Work]


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
