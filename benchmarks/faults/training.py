"""What is trained: a small model with Adam and dropout, saved after every step, always resumed.

The same command whether it starts, starts again, or is the run that nobody disturbs. Losses from
before a crash come from the checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.faults.calls import watched
from benchmarks.faults.case import EVERYBODY, STEPS, Case, Kill
from shardwise.checkpoint import failpoints, folder
from shardwise.comm.protocol import Comm

LINGER = 60.0
"""Seconds for which a rank whose launcher was killed goes on, if nobody ends it."""


@dataclass(frozen=True)
class Final:
    """What a rank has when it comes to its end."""

    losses: tuple[float, ...]  # of every step, its own
    parameters: str  # SHA-256 of its shards
    state: str  # SHA-256 of its optimizer state
    resumed: int | None  # the step of the checkpoint it began with; ``None``: from nothing
    # of rank 0, where no point was aimed at: how many file-system calls there had been when each
    # save began, and at the end
    calls: tuple[int, ...] = ()
    seconds: float = 0.0  # from the first save's start to the last one's end

    def equals(self, other: Final) -> bool:
        """The same losses, parameters and state, to the last bit."""
        same = replace(other, resumed=self.resumed, calls=self.calls, seconds=self.seconds)
        return self == same


def train(comm: Comm, run: Path, case: Case, begun: Callable[[], object] = lambda: None) -> Final:
    """One rank's whole run. With a ``case.kill`` it may not come to its end. A collective.

    Args:
        begun: called before the first save.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 200), nn.Dropout(0.3), nn.GELU(), nn.Linear(200, 24))
    sharded = sw.shard(model, comm=comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + comm.rank)
    report = sharded.resume(run, optimizer, sw.Training())
    losses: list[float] = [] if report is None else list(report.local)
    saver = _Saver(sharded, run, case, begun)
    # A file system that cannot exchange two names, where that is asked for.
    refused = mock.patch.object(folder, "_exchange", return_value=False)
    with _struck(case, saver), nullcontext() if case.how.exchanges else refused:
        for step in range(len(losses) + 1, STEPS + 1):
            loss = model(_batch(step, comm.rank)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            saver.save(step, optimizer, losses)
        sharded._background.wait_pending()  # noqa: SLF001 - as the next save would
    state = {
        f"{key}/{name}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    return Final(
        tuple(losses),
        _sha256(sharded.local_state_dict()),
        _sha256(state),
        None if report is None else report.step,
        (*saver.calls, saver.calls_made),
        time.monotonic() - saver.start,
    )


@dataclass
class _Saver:
    sharded: sw.Sharded
    run: Path
    case: Case
    begun: Callable[[], object]
    calls_made: int = 0  # file-system calls
    calls: list[int] = field(default_factory=list)  # as many when each save began
    start: float = 0.0

    def save(self, step: int, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
        """Save once or twice, in the foreground or in the background."""
        how, path = self.case.how, self.run / f"step-{step}"
        if not self.start:
            self.start = time.monotonic()
            self.begun()
        training = sw.Training(step=step, local=list(losses))
        begin = self.sharded.save_async if how.background else self.sharded.save
        for _ in range(1 + how.again):
            self.calls.append(self.calls_made)
            options: dict[str, Any] = {"kind": how.kind, "save_total_limit": how.limit}
            begin(path, optimizer, training, **options)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(1000 * step + rank))


# --- how it dies -----------------------------------------------------------------------------


@contextmanager
def _struck(case: Case, saver: _Saver) -> Iterator[None]:
    kill, rank = case.kill, saver.sharded.comm.rank
    if kill.point:
        counts: Counter[str] = Counter()

        def at_point(point: str, who: int) -> None:
            counts[point] += 1
            struck = 0 if kill.who == EVERYBODY else kill.who
            if who == struck and (point, counts[point]) == (kill.point, kill.nth):
                _strike(kill)

        failpoints.listeners.append(at_point)
        yield
        failpoints.listeners.remove(at_point)
    elif not kill.share and rank == 0:

        def before(_: str) -> None:
            saver.calls_made += bool(saver.calls)
            if 0 < kill.nth == saver.calls_made:
                _strike(kill)

        with watched(before):
            yield
    else:
        yield


def _strike(kill: Kill) -> None:
    if kill.launcher:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(LINGER)
        return
    if kill.who == EVERYBODY:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# --- its end ---------------------------------------------------------------------------------


def _sha256(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(run: str, case: str, out: str) -> None:
    """A rank under a launcher: ``python -m benchmarks.faults.training RUN CASE OUT``."""
    from shardwise.launch.launcher import exit_with_launcher

    exit_with_launcher(os.environ)
    with sw.connect() as comm:
        (Path(out) / f"{comm.rank}.pid").write_text(str(os.getpid()))
        train(comm, Path(run), pickle.loads(bytes.fromhex(case)))  # noqa: S301 - our own parent's


if __name__ == "__main__":
    main(*sys.argv[1:])
