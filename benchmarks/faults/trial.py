"""One case: kill, look at the folder, start again, compare. Two starts, and nothing in between.

After the kill:   what ``latest`` points at is there; every folder ``step-N`` is whole, each byte
After the next:   the step it took up is the newest that was published; losses, parameters and
                  optimizer state are those of the undisturbed run; nothing is left lying about
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.case import EVERYBODY, STEPS, Case, SaveMode, expected
from benchmarks.faults.server import Attempt
from benchmarks.faults.training import Final
from shardwise import CheckpointError
from shardwise.checkpoint.folder import checkpoints, target_of
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.recognise import LATEST, step_of, strangers

Start = Callable[[Path, Case], Attempt]


@dataclass(frozen=True)
class Trial:
    """How a case ended."""

    how: str  # the way to save, by name
    where: str  # where it was killed, in words
    who: int  # a rank, or ``EVERYBODY``
    killed: bool  # did anybody die? A random moment may come when all is over
    resumed: int | None  # the step that the next start took up; ``None``: from nothing
    lag: float  # seconds from the first death to the last end
    # a rank had to be ended, as a launcher does: it did not find out that another had died
    hung: bool
    wrong: tuple[str, ...]  # what is not as it should be; empty if all is


def try_case(case: Case, undisturbed: Sequence[Final], kill: Start, again: Start) -> Trial:
    """Run the case in a folder of its own.

    Args:
        undisturbed: what each rank had at the end of the undisturbed run.
        kill: starts the run that is killed.
        again: starts it once more, as it is.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-faults-") as folder:
        run = Path(folder) / "run"
        first = kill(run, case)
        wrong = [*_of_the_dead(first, case), *damage(run)]
        newest = _newest(run)
        second = again(run, case)
        wrong += _of_the_living(second, case, undisturbed, newest)
        wrong += damage(run)
        final = second.finals[0]
        resumed = final.resumed if final else None
        if newest != STEPS:  # else there was no save after the crash, which would have swept
            wrong += leftovers(run, case.how, resumed)
        return Trial(
            case.how.name,
            str(case.kill),
            case.kill.who,
            any(first.statuses),
            resumed,
            first.lag,
            bool(first.hung),
            tuple(wrong),
        )


def _of_the_dead(first: Attempt, case: Case) -> Iterator[str]:
    kill = case.kill
    aimed = not kill.share and not kill.launcher
    if first.hung and aimed:
        yield f"ranks {first.hung} did not end by themselves: {first.errors}"
    for rank, (status, error) in enumerate(zip(first.statuses, first.errors, strict=True)):
        if aimed and kill.who in (EVERYBODY, rank) and status != -signal.SIGKILL:
            yield f"rank {rank} should have been killed, and ended with {status}: {error[:200]}"
        elif aimed and kill.who not in (EVERYBODY, rank) and "RanksDisagree" not in error:
            yield f"rank {rank} ended with {status} and did not say why: {error[:200]}"


def _newest(run: Path) -> int | None:
    """The step of the newest checkpoint that has, or had, its name."""
    steps = [step_of(path.name) for path in checkpoints(run)] if run.is_dir() else []
    return steps[0] if steps else None


def _of_the_living(
    second: Attempt, case: Case, undisturbed: Sequence[Final], newest: int | None
) -> Iterator[str]:
    for rank, (final, error) in enumerate(zip(second.finals, second.errors, strict=True)):
        if final is None:
            yield f"the next start failed: rank {rank}: {error[:300]}"
        elif not final.equals(undisturbed[rank]):
            yield f"rank {rank} ended elsewhere than the undisturbed run"
        elif final.resumed != newest or newest not in expected(case):
            yield (
                f"rank {rank} took up step {final.resumed}; the newest was {newest}, and expected "
                f"was one of {expected(case)}"
            )


def damage(run: Path) -> Iterator[str]:
    """What is wrong with a run's folder just after a crash."""
    if not run.is_dir():
        return
    if target_of(run) is not None:
        yield from _flaws(run / LATEST)
    for path in checkpoints(run):
        yield from _flaws(path)


def _flaws(checkpoint: Path) -> Iterator[str]:
    try:
        with CheckpointReader.open(checkpoint) as source:
            if source.manifest is None:
                yield f"{checkpoint.name} has no manifest"
                return
            for name in source.manifest.files:
                source.check(name, 0, source.manifest.files[name].size)
            if extra := strangers(source.folder, source.manifest.files):
                yield f"{checkpoint.name} holds {extra}, too"
    except CheckpointError as error:
        yield f"{checkpoint.name}: {error}"


def leftovers(run: Path, how: SaveMode, resumed: int | None) -> Iterator[str]:
    """What is wrong with a run's folder at its end; what it ``resumed`` from stays."""
    first = STEPS - how.limit if how.limit else 0
    steps = {*range(first + 1, STEPS + 1), *([resumed] if resumed else [])}
    should = {"latest", *(f"step-{step}" for step in steps)}
    names = {path.name for path in run.iterdir()}
    if names != should:
        yield f"the folder holds {sorted(names)}, and should hold {sorted(should)}"
    if target_of(run) != f"step-{STEPS}":
        yield f"latest points at {target_of(run)}"
