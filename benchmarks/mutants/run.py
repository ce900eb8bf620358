"""A random sample of mutants: which of them do the tests of their folders notice?"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from queue import Queue
from time import monotonic
from typing import Self

from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Table
from benchmarks.mutants import tester
from benchmarks.mutants.changes import Mutant, mutants_of, mutated
from benchmarks.mutants.tester import Order
from benchmarks.mutants.tests import FOLDERS, PACKAGE, sources, stages

ROOT = Path(__file__).parents[2]
TEST_LIMIT = 60.0  # seconds for one test
IMPORTED = (
    "pytest", "hypothesis", "numpy", "pydantic", "torch", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "torch.testing",
)  # fmt: skip
LONGEST = 1800.0  # seconds for the tests of a folder as it is


@dataclass(frozen=True)
class Config:
    """What is tried."""

    folder: tuple[str, ...] = setting(FOLDERS, "of the package")
    sample: int = setting(200, "mutants", least=1)
    seed: int = setting(0, "of the random sample")
    jobs: int = setting(2, "mutants at a time", least=1)


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant."""

    folder: str
    mutant: Mutant
    killed: bool  # a test failed, or took too long
    seconds: float


class Tester:
    """A copy of the project, and a process that tries mutants in it. Final."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results")
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))
        paths = os.pathsep.join((str(copy / "src"), str(copy)))
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-P", tester.__file__, *IMPORTED],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def failed(self, order: Order) -> str:
        """The tests that noticed, ``""`` if none did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(order)), file=self._process.stdin, flush=True)
        answer: str = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stack.close()


def run(config: Config, log: Log) -> Iterator[Report]:
    """Change the engine's code at random places; do the tests of its folders notice?

    Raises:
        RuntimeError: the tests of a folder fail before anything is changed.
        ValueError: there is no such folder.
    """
    every = [
        (folder, mutant)
        for folder in config.folder
        for file in sources(ROOT, folder)
        for mutant in mutants_of(file, (ROOT / file).read_text("utf-8"))
    ]
    if not every:
        raise ValueError(f"{PACKAGE} has no code in {', '.join(config.folder)}")
    chosen = random.Random(config.seed).sample(every, min(config.sample, len(every)))  # noqa: S311
    testers: Queue[Tester] = Queue()
    with ExitStack() as stack, ThreadPoolExecutor(config.jobs) as pool:
        for _ in range(config.jobs):
            testers.put(stack.enter_context(Tester()))
        folders = sorted({folder for folder, _ in chosen})
        limits = dict(pool.map(lambda folder: (folder, _limit(testers, folder, log)), folders))
        tried = pool.map(lambda each: _outcome(testers, each[0], each[1], limits, log), chosen)
        outcomes = []
        for outcome in tried:
            outcomes.append(outcome)
            yield report_of(outcomes, config)


def _limit(testers: Queue[Tester], folder: str, log: Log) -> float:
    """Seconds for the tests of a folder: three times what they need as it is, and a minute."""
    start, file = monotonic(), sources(ROOT, folder)[0]
    code = (ROOT / file).read_text("utf-8")
    if failed := _failed(testers, folder, file, code, LONGEST):
        raise RuntimeError(f"tests fail before anything is changed: {failed}")
    seconds = monotonic() - start
    log(f"{folder}: its tests take {seconds:.0f} s")
    return 60 + 3 * seconds


def _outcome(
    testers: Queue[Tester], folder: str, mutant: Mutant, limits: Mapping[str, float], log: Log
) -> Outcome:
    code = mutated(mutant, (ROOT / mutant.file).read_text("utf-8"))
    start = monotonic()
    failed = _failed(testers, folder, mutant.file, code, limits[folder])
    seconds = monotonic() - start
    verdict = "killed" if failed else "SURVIVED"
    log(f"{verdict} in {seconds:.0f} s: {mutant.file}:{mutant.line}: {mutant.change}")
    return Outcome(folder, mutant, bool(failed), seconds)


def _failed(testers: Queue[Tester], folder: str, file: str, code: str, limit: float) -> str:
    """The tests that fail with this ``code`` in the file."""
    runs = [(list(files), marks) for files, marks in map(astuple, stages(ROOT, folder, file))]
    free = testers.get()
    try:
        return free.failed(Order(file, code, runs, TEST_LIMIT, limit))
    finally:
        testers.put(free)


def report_of(outcomes: Sequence[Outcome], config: Config) -> Report:
    """Killed and all mutants of each file and folder, and those that survived."""
    columns = (Column("file"), Column("mutants"), Column("killed"), Column("share", ".0%"))
    files = sorted({(each.folder, each.mutant.file) for each in outcomes})
    groups = {file: [o for o in outcomes if o.mutant.file == file] for _, file in files}
    groups |= {f"{f}, all": [o for o in outcomes if o.folder == f] for f in config.folder}
    groups["all"] = list(outcomes)
    counts = {name: (len(some), sum(o.killed for o in some)) for name, some in groups.items()}
    rows = [(name, all_, killed, killed / all_) for name, (all_, killed) in counts.items() if all_]
    survivors = (outcome.mutant for outcome in outcomes if not outcome.killed)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    sample = (
        f"{len(outcomes)} mutants drawn with seed {config.seed}, {minutes:.0f} minutes of tests"
    )
    return Report(
        this_machine(),
        (sample,),
        (Table("", columns, tuple(rows)),),
        tuple(f"survived: {m.file}:{m.line}: {m.change}" for m in survivors),
    )
