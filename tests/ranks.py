"""Ranks for tests: threads where they will do, processes where only processes will.

All take a function of a comm and return what each rank returned, in rank order.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import pickle
import reprlib
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.harness.workers import end_with_parent, join_group
from shardwise.comm.machine import connect
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.comm.transports.shared_memory import shared_memory
from shardwise.comm.transports.transport import Group
from shardwise.plan import residency
from shardwise.plan.units import wrap

T = TypeVar("T")

# Models of tests are small, and each of their blocks is to be a unit that is freed.
wrap.JOINED_NBYTES = wrap.JOINED_TRAINED_NBYTES = -1
residency.KEPT_NBYTES = 0
ENVIRONMENT = dict(os.environ)  # before any test has changed it
HUNG = "it did not end in time, and was killed"


def run_threads(world: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
    """``fn(comm, *args)`` on ``world`` threads."""
    return threads.run(world, lambda comm: fn(comm, *args), timeout)


def run_sharing(world: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
    """``fn(comm, *args)`` on ``world`` threads that share memory in the way of processes."""
    store = HashStore()

    def rank(threads: Comm) -> T:
        comm = shared_memory(store, threads.rank, world, timeout)
        assert comm is not None
        with comm:
            return fn(comm, *args)

    return run_threads(world, rank, timeout=timeout)


def run_hosts(hosts: int, ranks: int, fn: Callable[..., T], *args: Any) -> list[T]:
    """``fn(comm, *args)`` on threads: ``ranks`` of a host share memory, and hosts send messages."""
    stores = [HashStore() for _ in range(hosts)]

    def rank(comm: Comm) -> T:
        assert isinstance(comm, Group)
        host, number = divmod(comm.rank, ranks)
        open_axes = comm.shutdown.open_axes

        def axes(replicate: int, shard: int) -> tuple[Comm, Comm]:
            assert (replicate, shard) == (hosts, ranks)
            row = shared_memory(stores[host], number, ranks, timeout=60.0)
            assert row is not None
            return open_axes(replicate, shard)[0], row

        comm.shutdown = comm.shutdown._replace(open_axes=axes)
        with comm:
            return fn(comm, *args)

    return run_threads(hosts * ranks, rank)


def run_processes(world: int, fn: Callable[..., T], *args: Any, timeout: float = 240.0) -> list[T]:
    """``fn(comm, *args)`` on ``world`` gloo processes. ``fn`` must be importable.

    Raises the error of the first rank that raised or died.
    """
    outcomes = outcomes_of(world, in_group, fn, *args, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        if outcome.error or outcome.exitcode != 0:
            raise RuntimeError(
                f"rank {rank} of {world} (exit code {outcome.exitcode}):\n{outcome.error}"
            )
    return [outcome.value for outcome in outcomes]


@dataclass(frozen=True)
class Outcome:
    """How one process ended. ``error`` is its traceback, ``""`` if it raised nothing."""

    value: Any
    error: str
    exitcode: int | None


def outcomes_of(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0
) -> list[Outcome]:
    """``fn(rank, world, folder, *args)`` in ``world`` processes with no group between them.

    ``folder`` is an empty one, for their store. Every process is gone when this returns.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_child, args=(pipe[1], fn, (rank, world, folder, *args)), daemon=True
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, child in pipes:
            child.close()
        try:
            results = _results([parent for parent, _ in pipes], time.monotonic() + timeout)
            for process, (_, error) in zip(processes, results, strict=True):
                process.join(0 if error == HUNG else 60)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
    exits = [process.exitcode for process in processes]
    return [
        Outcome(value, error, code) for (value, error), code in zip(results, exits, strict=True)
    ]


def in_group(rank: int, world: int, folder: str, fn: Callable[..., T], *args: Any) -> T:
    """``fn(comm, *args)`` inside a gloo group of ``world`` processes."""
    with (
        gloo_group(rank, world, folder),
        connect.over(dist.group.WORLD, transport="messages") as comm,
    ):
        return fn(comm, *args)


@contextmanager
def gloo_group(rank: int, world: int, folder: str) -> Iterator[None]:
    """A default process group on the loopback interface, met in a file: no port, no listener."""
    join_group(rank, world, folder)
    try:
        yield
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _results(pipes: list[Connection], deadline: float) -> list[tuple[Any, str]]:
    """What each child sent, or an explanation where it sent nothing."""
    results: dict[Connection, tuple[Any, str]] = {}
    while pending := [pipe for pipe in pipes if pipe not in results]:
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in pending:
            if pipe in ready:
                try:
                    results[pipe] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    results[pipe] = (None, "it ended without a result")
    return [results.get(pipe, (None, HUNG)) for pipe in pipes]


def fork_server() -> ForkServerContext:
    """Forks processes that have imported torch already, and what its optimizers and FSDP import.

    They have no variable of the test that happens to start the server, which other tests use, too.
    """
    context = mp.get_context("forkserver")
    ours = ["tests.ranks", "shardwise.api.sharded", "shardwise.comm.machine.connect"]
    context.set_forkserver_preload([*ours, "pytest", "numpy.testing", "torch._dynamo"])
    before_tests = {name: ENVIRONMENT[name] for name in ENVIRONMENT.keys() & os.environ.keys()}
    with mock.patch.dict(os.environ, before_tests, clear=True):
        forkserver.ensure_running()
    return context


def _values(error: BaseException) -> str:
    """What the variables beside a failed assertion are: pytest does not rewrite it here.

    No dict is shown: it may be the environment, which can hold secrets.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    values = frame.f_locals if isinstance(error, AssertionError) else {}
    short = reprlib.Repr()
    short.maxdict, short.maxstring, short.maxother = 0, 4_000, 400
    return "".join(f"{name} = {short.repr(value)}\n" for name, value in values.items())


def _child(pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        result = pickle.dumps((fn(*args), ""))
    except BaseException as error:  # noqa: BLE001 - its parent reports it
        result = pickle.dumps((None, f"{traceback.format_exc()}{_values(error)}"))
    pipe.send_bytes(result)
    atexit._run_exitfuncs()  # which Python leaves out in a process that was forked
    raise SystemExit(bool(pickle.loads(result)[1]))
