"""Processes that form one gloo group on the loopback interface and report to their parent.

They are spawned, not forked: each begins with a heap of its own, so that what one engine leaves in
the allocator is not another's peak. They die with their parent, and the parent raises as soon as
one of them dies.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

START = "spawn"
"""How processes are started. Tests fork them from a server that has imported torch."""


class Worker:
    """One rank, as the function that it runs sees it. Final."""

    def __init__(self, rank: int, world: int, folder: str, pipe: Connection) -> None:
        self.rank, self.world = rank, world
        self.folder, self._pipe = folder, pipe

    def send(self, value: Any) -> None:
        """Send ``value`` to the parent, where ``Workers.receive`` returns it."""
        self._pipe.send_bytes(pickle.dumps((True, value)))

    def join_group(self) -> None:
        """Make the default process group, over a store in a file: it needs no port."""
        join_group(self.rank, self.world, self.folder)

    @contextmanager
    def group(self) -> Iterator[None]:
        """The default process group, until all ranks are done with it."""
        self.join_group()
        # DeepSpeed reads these even where the group exists.
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank)}
        os.environ["WORLD_SIZE"] = str(self.world)
        yield
        import torch.distributed as dist

        dist.barrier()  # the parent ends everybody by signal if anything above raised


def join_group(rank: int, world: int, folder: str) -> None:
    """Make the default process group: gloo, on the loopback interface, with a store in a file."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


class Workers:
    """``world`` processes that run ``fn(worker, *args)``; ``fn`` must be importable.

    Args:
        world: how many.
        fn: what each runs. It reports by ``worker.send``.
        args: more arguments, picklable.
        timeout: seconds that ``receive`` waits before it raises.
        start: as in ``multiprocessing``, instead of ``START``.
    """

    def __init__(
        self,
        world: int,
        fn: Callable[..., None],
        *args: Any,
        timeout: float = 600.0,
        start: str = "",
    ) -> None:
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        context: Any = mp.get_context(start or START)
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self._pipes = [reader for reader, _ in pipes]
        self.processes: list[BaseProcess] = [
            context.Process(
                target=_work, args=((rank, world, self._folder.name, pipe), fn, args), daemon=True
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, writer in pipes:
            writer.close()

    def receive(self) -> list[Any]:
        """The next value that each rank sends, in rank order.

        Raises:
            RuntimeError: a rank raised (with its traceback), died, or sent nothing in time.
        """
        deadline = time.monotonic() + self._timeout
        values: dict[Connection, Any] = {}
        while left := [pipe for pipe in self._pipes if pipe not in values]:
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank, pipe in enumerate(self._pipes) if pipe in left]
                raise RuntimeError(f"ranks {missing} sent nothing for {self._timeout:.0f} s")
            values |= {pipe: self._read(pipe) for pipe in self._pipes if pipe in ready}
        return [values[pipe] for pipe in self._pipes]

    def has_sent(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for any rank to send something or to end."""
        return bool(wait(self._pipes, seconds))

    def last_of(self, rank: int) -> tuple[bool, Any]:
        """What an ended rank sent last: ``(True, value)``, or ``(False, its traceback)``."""
        last: tuple[bool, Any] = (False, "")
        with suppress(EOFError, OSError):
            while True:
                last = pickle.loads(self._pipes[rank].recv_bytes())  # noqa: S301 - our children
        return last

    def _read(self, pipe: Connection) -> Any:
        rank = self._pipes.index(pipe)
        try:
            succeeded, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own children
        except EOFError:
            raise RuntimeError(f"rank {rank} died before it sent anything") from None
        if not succeeded:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for process in self.processes:
            process.join(10 if error is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def end_with_parent() -> None:
    """Wait for the process that started this one, and end when it ends."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def on_ranks(world: int, fn: Callable[..., None], *args: Any) -> list[Any]:
    """The one value that each of ``world`` processes sends from ``fn(worker, *args)``."""
    with Workers(world, fn, *args) as workers:
        return workers.receive()


def _work(place: tuple[int, int, str, Connection], fn: Callable[..., None], args: Any) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what is imported by now is garbage at no time
    code = 0
    try:
        fn(Worker(*place), *args)
    except BaseException:  # noqa: BLE001 - the parent re-raises it
        place[-1].send_bytes(pickle.dumps((False, traceback.format_exc())))
        code = 1
    # Not a return: rivals leave threads behind that abort the process while it is taken down.
    os._exit(code)
