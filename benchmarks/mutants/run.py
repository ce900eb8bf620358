"""A random sample of mutants: which of them do the tests of their folders notice?

A file's mirror is asked first (``src/shardwise/comm/codec.py`` → ``tests/comm/test_codec.py``),
then the other tests of its folder, those first that name the file's module, and last all that
start processes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from time import monotonic

from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Table
from benchmarks.mutants.changes import Mutant, mutants_of, mutated

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/shardwise")
FOLDERS = ("plan", "memory", "runtime", "comm")
# folder → tests that cover it and lie elsewhere
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "memory": (  # on the host, in copies, encoded; unscaled
        "tests/parity/test_offload.py",
        "tests/parity/test_hybrid.py",
        "tests/parity/test_wires.py",
        "tests/optim/test_grad_scaler.py",
    ),
    "runtime": (  # steps; reads and writes beside a unit; what stays gathered, or is loaded
        "tests/parity/test_one_by_one.py",
        "tests/api/test_sharded.py",
        "tests/memory/shard_tensor/test_torch_functions.py",
        "tests/plan/test_residency.py",
        "tests/parity/test_offload.py",
    ),
}
TEST_LIMIT = 60.0  # seconds for one test
LONGEST = 1800.0  # seconds for the tests of a folder as it is
NO_TESTS = 5  # pytest's exit status
OPTIONS = ("-x", "-q", "--timeout-method=thread", "-p", "no:cacheprovider", "--assert=plain")
COLUMNS = (Column("file"), Column("mutants"), Column("killed"), Column("share", ".0%"))
Stage = tuple[list[str], str]
"""One run of pytest: files below the project's root, and its ``-m``."""


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
    copies: Queue[Path] = Queue()
    with ExitStack() as stack, ThreadPoolExecutor(config.jobs) as pool:
        for _ in range(config.jobs):
            copies.put(stack.enter_context(_copy_of_project()))
        folders = sorted({folder for folder, _ in chosen})
        limits = dict(pool.map(lambda folder: (folder, _limit(copies, folder, log)), folders))
        outcomes = []
        tried = pool.map(lambda each: _outcome(copies, each[0], each[1], limits, log), chosen)
        for outcome in tried:
            outcomes.append(outcome)
            yield report_of(outcomes, config)


def sources(root: Path, folder: str) -> list[str]:
    """The files of one folder of the package, below ``root``."""
    files = (path.relative_to(root).as_posix() for path in (root / PACKAGE / folder).rglob("*.py"))
    return sorted(file for file in files if not file.endswith("__init__.py"))


def stages(root: Path, folder: str, file: str) -> list[Stage]:
    """The runs of pytest that decide about a mutant of ``file``, the shortest first."""
    paths = {path.relative_to(root) for path in (root / "tests" / folder).rglob("test_*.py")}
    every = {path.as_posix() for path in paths} | {*ELSEWHERE.get(folder, ())}
    module = Path(file).relative_to(PACKAGE).with_suffix("")
    mirror = f"tests/{module.parent.as_posix()}/test_{module.name}.py"
    name = ".".join(("shardwise", *module.parts))
    first = sorted({mirror} & every)
    others = sorted(
        every - {mirror}, key=lambda test: (name not in (root / test).read_text("utf-8"), test)
    )
    quick = [(files, "not spawn") for files in (first, others) if files]
    return [*quick, (first + others, "spawn")] if every else []


@contextmanager
def _copy_of_project() -> Iterator[Path]:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results")
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))


def _limit(copies: Queue[Path], folder: str, log: Log) -> float:
    """Seconds for the tests of a folder: three times what they need as it is, and a minute."""
    start, file = monotonic(), sources(ROOT, folder)[0]
    code = (ROOT / file).read_text("utf-8")
    if failed := _failed(copies, folder, file, code, LONGEST):
        raise RuntimeError(f"tests fail before anything is changed: {failed}")
    seconds = monotonic() - start
    log(f"{folder}: its tests take {seconds:.0f} s")
    return 60 + 3 * seconds


def _outcome(
    copies: Queue[Path], folder: str, mutant: Mutant, limits: Mapping[str, float], log: Log
) -> Outcome:
    code = mutated(mutant, (ROOT / mutant.file).read_text("utf-8"))
    start = monotonic()
    failed = _failed(copies, folder, mutant.file, code, limits[folder])
    seconds = monotonic() - start
    verdict = "killed" if failed else "SURVIVED"
    log(f"{verdict} in {seconds:.0f} s: {mutant.file}:{mutant.line}: {mutant.change}")
    return Outcome(folder, mutant, bool(failed), seconds)


def _failed(copies: Queue[Path], folder: str, file: str, code: str, limit: float) -> str:
    """The tests that fail, or take too long, with this ``code`` in the file; ``""`` if none do."""
    copy, deadline = copies.get(), monotonic() + limit
    (copy / file).write_text(code, "utf-8")
    paths = os.pathsep.join((str(copy / "src"), str(copy)))
    env = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    pytest = (sys.executable, "-P", "-m", "pytest", *OPTIONS, f"--timeout={TEST_LIMIT}")
    try:
        for files, marks in stages(ROOT, folder, file):
            with suppress(subprocess.TimeoutExpired):
                ended = subprocess.run(  # noqa: S603 - ourselves
                    [*pytest, "-m", marks, *files],
                    cwd=copy,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=max(0, deadline - monotonic()),
                    check=False,
                )
                if ended.returncode in (0, NO_TESTS):
                    continue
            return f"{' '.join(files)} -m '{marks}'"
        return ""
    finally:
        shutil.copy(ROOT / file, copy / file)
        copies.put(copy)


def report_of(outcomes: Sequence[Outcome], config: Config) -> Report:
    """Killed and all mutants of each file and folder, and those that survived."""
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
        (Table("", COLUMNS, tuple(rows)),),
        tuple(f"survived: {m.file}:{m.line}: {m.change}" for m in survivors),
    )
