"""Processes that form one gloo group on the loopback interface and report to their parent.

Spawned, not forked: each begins with a heap of its own, so that what one engine leaves in the
allocator is not another's peak. They die with their parent, and the parent raises as soon as
one of them dies: a benchmark must not wait for a rank that will never come.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Crew", "Seat"]

LINUX_PR_SET_PDEATHSIG = 1


class Seat:
    """A rank's place: who it is, and its line to the parent. Final."""

    def __init__(self, rank: int, world: int, folder: str, line: Connection) -> None:
        self.rank, self.world = rank, world
        self._folder = folder
        self._line = line

    def tell(self, value: Any) -> None:
        """Send ``value`` to the parent, where ``Crew.hear`` returns it."""
        self._line.send_bytes(pickle.dumps((True, value)))

    @contextmanager
    def group(self) -> Iterator[None]:
        """The default process group: gloo, met in a file, so no port and no listener."""
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # DeepSpeed reads these even where the group exists.
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank)}
        os.environ["WORLD_SIZE"] = str(self.world)
        store = dist.FileStore(str(Path(self._folder) / "store"), self.world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        yield
        dist.barrier()  # the parent ends everybody by signal if anything above raised


class Crew:
    """``world`` processes that run ``fn(seat, *args)``; ``fn`` must be importable.

    Args:
        world: how many.
        fn: what each runs. It talks by ``seat.tell``.
        args: more arguments, picklable.
        patience: seconds that ``hear`` waits before it gives up.
    """

    def __init__(
        self, world: int, fn: Callable[..., None], *args: Any, patience: float = 600.0
    ) -> None:
        self._stack = ExitStack()
        self._patience = patience
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        context = mp.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self._lines = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(
                target=_sit, args=(rank, world, folder, theirs, os.getpid(), fn, args), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in order."""
        return [process.pid for process in self._processes if process.pid is not None]

    def hear(self) -> list[Any]:
        """The next value that each rank tells, in rank order.

        Raises:
            RuntimeError: a rank raised (with its traceback), died, or said nothing in time.
        """
        deadline = time.monotonic() + self._patience
        said: dict[Connection, Any] = {}
        while left := [line for line in self._lines if line not in said]:
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank, line in enumerate(self._lines) if line in left]
                raise RuntimeError(f"ranks {missing} said nothing for {self._patience:.0f} s")
            said |= {line: self._receive(line) for line in self._lines if line in ready}
        return [said[line] for line in self._lines]

    def stop(self) -> None:
        """End every rank at once, whatever it does."""
        for process in self._processes:
            process.kill()

    def is_silent(self, seconds: float) -> bool:
        """Wait up to ``seconds``; has nobody anything to say?"""
        return not wait(self._lines, seconds)

    def _receive(self, line: Connection) -> Any:
        rank = self._lines.index(line)
        try:
            fine, value = pickle.loads(line.recv_bytes())  # noqa: S301 - our own children
        except EOFError:
            raise RuntimeError(f"rank {rank} died without a word") from None
        if not fine:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.join(10 if error is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._stack.close()


def _sit(
    rank: int,
    world: int,
    folder: str,
    line: Connection,
    parent: int,
    fn: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    ctypes.CDLL(None).prctl(LINUX_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    import torch

    torch.set_num_threads(1)
    code = 0
    try:
        fn(Seat(rank, world, folder, line), *args)
    except BaseException:  # noqa: BLE001 - the parent re-raises it
        line.send_bytes(pickle.dumps((False, traceback.format_exc())))
        code = 1
    # Not a return: rivals leave threads behind that abort the process while it is taken down.
    os._exit(code)
