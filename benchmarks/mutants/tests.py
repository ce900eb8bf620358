"""Which tests are asked about a mutant of a file, and in which order. Pure but for folder lists.

The file's mirror comes first (``src/shardwise/comm/desync.py`` → ``tests/comm/test_desync.py``),
then the other tests of its folder, those first that name the file's module, and last all that
start processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path("src/shardwise")
FOLDERS = ("layout", "schedule", "memory", "runtime", "comm")
# folder → tests that cover it and lie elsewhere
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "runtime": ("tests/parity/test_one_by_one.py", "tests/test_sharded.py"),
}


@dataclass(frozen=True)
class Stage:
    """One run of pytest."""

    files: tuple[str, ...]  # below the project's root
    marks: str  # pytest's ``-m``


def sources(root: Path, folder: str) -> list[str]:
    """The files of one folder of the package, below ``root``."""
    paths = set((root / PACKAGE / folder).glob("**/*.py"))
    files = (path.relative_to(root).as_posix() for path in paths if path.is_file())
    return sorted(file for file in files if not file.endswith("__init__.py"))


def stages(root: Path, folder: str, file: str) -> list[Stage]:
    """The runs of pytest that decide about a mutant of ``file``, the shortest first."""
    every = _tests_of_folder(root, folder)
    module = Path(file).relative_to(PACKAGE).with_suffix("")
    mirror = f"tests/{module.parent.as_posix()}/test_{module.name}.py".replace("/./", "/")
    name = ".".join(("shardwise", *module.parts))
    rest = [test for test in every if test != mirror]
    rest.sort(key=lambda test: (name not in (root / test).read_text("utf-8"), test))
    first = [mirror] if mirror in every else []
    quick = [Stage(tuple(files), "not spawn") for files in (first, rest) if files]
    return [*quick, Stage((*first, *rest), "spawn")] if every else []


def _tests_of_folder(root: Path, folder: str) -> list[str]:
    paths = {root / test for test in ELSEWHERE.get(folder, ())}
    paths |= set((root / "tests" / folder).glob("**/test_*.py"))
    return sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
