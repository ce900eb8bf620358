"""How much a random sample of small mistakes in the engine is noticed by the tests of its files.

Each mutant changes one place of one file: a comparison, an operator, a constant, a returned value,
a deleted statement. It is written into a copy of the project, and the tests that mirror the file
run there until the first fails. A mutant that lets them hang counts as killed.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from time import monotonic
from typing import Any

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.tables import aligned

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/shardwise")
SKIPPED = frozenset({"annotation", "returns", "decorator_list"})
FOLDERS = ("layout", "schedule", "memory", "runtime", "comm")
# file or folder → tests that cover it besides those that mirror it
MORE: dict[str, tuple[str, ...]] = {"runtime": ("tests/parity/test_one_by_one.py",)}

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # below the project's root
    line: int
    change: str
    index: int  # in the order of ``changes``


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant."""

    mutant: Mutant
    killed: bool
    seconds: float


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine
    seed: int
    outcomes: tuple[Outcome, ...]
    schema: int = 1


# ---- mutants -------------------------------------------------------------------------------


def changes(node: ast.AST, line: int = 0) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Every change below ``node``: its line, what it is, and what makes it in the tree."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for number, child in enumerate(children):
            if field in SKIPPED or not isinstance(child, ast.AST) or _does_nothing(child):
                continue
            here = getattr(child, "lineno", line)
            if (new := _replacement(child)) is not None:
                put: Callable[..., None] = partial(setattr, node, field)
                if isinstance(value, list):
                    put = partial(value.__setitem__, number)
                yield here, f"{_text(child)} → {_text(new)}", partial(put, new)
            yield from changes(child, here)


def _does_nothing(node: ast.AST) -> bool:
    """An assertion, or the list of exported names."""
    exported = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return exported or isinstance(node, ast.Assert)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:60] or type(node).__name__


def _replacement(node: ast.AST) -> ast.AST | None:
    """What is put in its place, if it is of a kind that is changed."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.Return(value=ast.Constant(value=None)):
            return None
        case ast.Return(value=ast.AST()):
            return ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Constant() | ast.Yield()):
            return None
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            return ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return ast.Pass()
    return SWAPS[type(node)]() if type(node) in SWAPS else None


def mutants_of(file: str) -> list[Mutant]:
    """All of one file."""
    each = enumerate(changes(ast.parse((ROOT / file).read_text("utf-8"))))
    return [Mutant(file, line, change, index) for index, (line, change, _) in each]


def mutated(mutant: Mutant) -> str:
    """The file's text with the change."""
    tree = ast.parse((ROOT / mutant.file).read_text("utf-8"))
    list(changes(tree))[mutant.index][2]()
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def files_of(folders: Iterable[str]) -> list[str]:
    """The files of these folders of the package, or of the modules of these names."""
    package = ROOT / PACKAGE
    found = [[*package.glob(f"{name}/**/*.py"), *package.glob(f"{name}.py")] for name in folders]
    files = {path.relative_to(ROOT).as_posix() for paths in found for path in paths}
    return sorted(file for file in files if not file.endswith("__init__.py"))


# ---- tests ---------------------------------------------------------------------------------


def tests_of(file: str) -> list[str]:
    """The mirror of the file, then its folder's other tests that name the module, then ``MORE``."""
    module = Path(file).relative_to(PACKAGE).with_suffix("")
    folder = Path("tests") / module.parent
    name = ".".join(("shardwise", *module.parts))
    naming = sorted(p for p in (ROOT / folder).glob("test_*.py") if name in p.read_text("utf-8"))
    mirror = ROOT / folder / f"test_{module.name}.py"
    paths = [mirror] * mirror.is_file() + [path for path in naming if path != mirror]
    more = (*MORE.get(str(module), ()), *MORE.get(module.parts[0], ()))
    return list(dict.fromkeys([*(p.relative_to(ROOT).as_posix() for p in paths), *more]))


def passes(copy: Path, tests: Sequence[str], limit: float) -> bool:
    """Do all tests pass, within ``limit`` seconds, in this copy? No test finds nothing."""
    if not tests:
        return True
    paths = os.pathsep.join((str(copy / "src"), str(copy)))
    process = subprocess.Popen(  # noqa: S603 - our own tests
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def new_copy(folder: str) -> Path:
    """The project as it is; without bytecode, which could be an older mutant's."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
    return Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))


def run(
    folders: Sequence[str], sample: int, seed: int, jobs: int, log: Callable[[str], None]
) -> Report:
    """Try a random sample of the mutants of ``folders``, ``jobs`` at a time.

    Raises:
        RuntimeError: the tests of a file fail before anything is changed.
        ValueError: there is no such folder.
    """
    every = [mutant for file in files_of(folders) for mutant in mutants_of(file)]
    if not every:
        raise ValueError(f"{PACKAGE} has no code in {', '.join(folders)}")
    chosen = random.Random(seed).sample(every, min(sample, len(every)))  # noqa: S311
    copies: Queue[Path] = Queue()

    def limit(file: str) -> tuple[str, float]:
        """Seconds for a file's tests: three times what they need as it is, and a little."""
        copy, start = copies.get(), monotonic()
        if not passes(copy, tests_of(file), 1800):
            raise RuntimeError(f"the tests of {file} fail as it is: {' '.join(tests_of(file))}")
        copies.put(copy)
        log(f"{file}: its tests need {monotonic() - start:.0f} s")
        return file, 30 + 3 * (monotonic() - start)

    def outcome(mutant: Mutant) -> Outcome:
        copy, start = copies.get(), monotonic()
        (copy / mutant.file).write_text(mutated(mutant), "utf-8")
        killed = not passes(copy, tests_of(mutant.file), limits[mutant.file])
        shutil.copy(ROOT / mutant.file, copy / mutant.file)
        copies.put(copy)
        verdict = "killed" if killed else "survived"
        log(f"{verdict}: {mutant.file}:{mutant.line}: {mutant.change}")
        return Outcome(mutant, killed, monotonic() - start)

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            copies.put(new_copy(stack.enter_context(tempfile.TemporaryDirectory())))
        limits = dict(pool.map(limit, sorted({mutant.file for mutant in chosen})))
        return Report(this_machine(), seed, tuple(pool.map(outcome, chosen)))


def lines(report: Report) -> list[str]:
    """Killed and all mutants of each file, and those that survived."""
    files: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        files.setdefault(outcome.mutant.file, []).append(outcome)
    files = dict(sorted(files.items())) | {"all": list(report.outcomes)}
    rows: list[Any] = [("file", "mutants", "killed", "share")]
    for file, outcomes in files.items():
        killed = sum(outcome.killed for outcome in outcomes)
        rows.append((file, str(len(outcomes)), str(killed), f"{killed / len(outcomes):.0%}"))
    survivors = [outcome.mutant for outcome in report.outcomes if not outcome.killed]
    head = f"{len(report.outcomes)} mutants drawn with seed {report.seed}"
    return [str(report.machine), head, "", *aligned(rows), ""] + [
        f"survived: {mutant.file}:{mutant.line}: {mutant.change}" for mutant in survivors
    ]
