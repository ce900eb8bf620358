"""What reaches the disk, and in which order: as the kernel saw it, on every rank.

every rank: its data → rank 0: headers → small files → folder → manifest → rename → folder
→ rename of the folder → parent folder → latest → parent folder
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.faults.case import BACKGROUND, NEW, STEPS, Case, SaveMode
from benchmarks.faults.run import NOBODY
from benchmarks.faults.server import start

CALLS = "fsync,fdatasync,rename,renameat,renameat2,symlink,symlinkat"
RUNS = (NEW, BACKGROUND)
DATA = ("model.safetensors", "training/optimizer.safetensors", "training/ranks.safetensors")

pytestmark = [pytest.mark.spawn, pytest.mark.slow]


@dataclass(frozen=True)
class Call:
    """One system call that returned: ``fsync`` of a path, or ``rename`` to one."""

    pid: int
    what: str
    name: str


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[SaveMode, list[Call]]:
    """All such calls of undisturbed runs of two ranks, in the order in which they returned."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("traced")
    log = folder / "calls.txt"
    options = ["-f", "-y", "-qq", "--seccomp-bpf", "-e", "signal=none", "-e", f"trace={CALLS}"]
    script = [sys.executable, "-m", "tests.checkpoint.test_durability", str(folder)]
    done = subprocess.run(
        ["strace", *options, "-o", str(log), *script], capture_output=True, text=True, check=False
    )
    if "PTRACE" in done.stderr and "not permitted" in done.stderr:
        pytest.skip(f"processes may not be traced here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return {how: calls_in(log.read_text(), folder / how.name) for how in RUNS}


def calls_in(text: str, run: Path) -> list[Call]:
    """Parse what strace wrote; calls that were interrupted by another thread's are put together."""
    begun: dict[int, str] = {}
    calls = []
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[int(pid)] = rest.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            rest = begun.pop(int(pid)) + resumed[1]
        if call := _call(int(pid), rest, run):
            calls.append(call)
    return calls


def _call(pid: int, text: str, run: Path) -> Call | None:
    if not text.rstrip().endswith("= 0"):
        return None
    if match := re.match(r"f(?:data)?sync\(\d+<([^>]*)>", text):
        what, path = "fsync", match[1]
    elif match := re.match(r"(rename|symlink)\w*\((.*)\)", text):
        what, path = match[1], re.findall(r'"([^"]*)"', match[2])[-1]
    else:
        return None
    if not path.startswith(str(run)):
        return None
    return Call(pid, what, plain(path.removeprefix(str(run)).lstrip("/") or "."))


def plain(name: str) -> str:
    """The name without its random part."""
    name = re.sub(r"\.partial-[0-9a-f]{16}", ".partial", name)
    return re.sub(r"\.latest-[0-9a-f]{16}", ".latest", name)


def save_of(step: int, calls: Sequence[Call]) -> list[Call]:
    """The calls of one save: after the ``latest`` of the one before, to its own."""
    ends = [k for k, call in enumerate(calls) if (call.what, call.name) == ("rename", "latest")]
    assert len(ends) == STEPS
    first = ends[step - 2] + 2 if step > 1 else 0
    return list(calls[first : ends[step - 1] + 2])


@pytest.mark.parametrize("how", RUNS, ids=lambda how: how.name)
def test_everything_is_on_the_disk_before_anything_leads_to_it(
    how: SaveMode, traced: dict[SaveMode, list[Call]]
) -> None:
    calls = traced[how]
    for step in range(1, STEPS + 1):
        folder = f"step-{step}.partial"
        mine = [call for call in save_of(step, calls) if step_in(call.name) in (None, step)]
        publisher = next(c.pid for c in mine if (c.what, c.name) == ("rename", f"step-{step}"))
        end = [
            *(("fsync", f"{folder}/{name}") for name in DATA),  # their headers
            ("fsync", f"{folder}/training.json"),
            ("fsync", f"{folder}/training"),
            ("fsync", folder),
            ("fsync", f"{folder}/.manifest.json.unfinished"),
            ("rename", f"{folder}/manifest.json"),
            ("fsync", folder),
            ("rename", f"step-{step}"),
            ("fsync", "."),
            ("symlink", ".latest"),
            ("rename", "latest"),
            ("fsync", "."),
        ]
        assert [(call.what, call.name) for call in mine[-len(end) :]] == end
        assert {call.pid for call in mine[-len(end) :]} == {publisher}
        before = [call for call in mine[: -len(end)] if not call.name.endswith("/.lock")]
        for name in DATA:  # of every rank that wrote some of it
            synced = {call.pid for call in before if call.name == f"{folder}/{name}"}
            assert len(synced) == 2, (step, name)
        assert all(call.what == "fsync" for call in before if ".part-" not in call.name)
        if how.background:  # each rank's part, last and whole
            left = [call.name for call in before if call.what == "rename"]
            assert sorted(left) == [f"{folder}/.part-0000{rank}.json" for rank in range(2)]


def step_in(name: str) -> int | None:
    """Which step a path is of."""
    match = re.match(r"step-(\d+)", name)
    return int(match[1]) if match else None


def test_what_strace_writes_is_understood() -> None:
    text = """7 fsync(9</r/step-1.partial-0123456789abcdef/x>) = 0
8 fsync(9</r/step-1.partial-0123456789abcdef> <unfinished ...>
7 rename("/r/step-1.partial-0123456789abcdef", "/r/step-1") = 0
8 <... fsync resumed>) = 0
7 renameat2(AT_FDCWD, "/r/a", AT_FDCWD, "/r/b", RENAME_EXCHANGE) = -1 EINVAL (Invalid argument)
7 fsync(3</elsewhere>) = 0
7 symlink("step-1", "/r/.latest-0123456789abcdef") = 0"""
    assert calls_in(text, Path("/r")) == [
        Call(7, "fsync", "step-1.partial/x"),
        Call(7, "rename", "step-1"),
        Call(8, "fsync", "step-1.partial"),
        Call(7, "symlink", ".latest"),
    ]


def main(folder: str) -> None:
    """What is traced."""
    for how in RUNS:
        attempt = start(Path(folder) / how.name, Case(how, NOBODY))
        assert attempt.statuses == (0, 0), attempt.errors


if __name__ == "__main__":
    main(*sys.argv[1:])
