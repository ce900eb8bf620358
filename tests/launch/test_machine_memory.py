"""The memory of this machine, of which a container or a job of SLURM may have a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.launch import machine_memory as memory
from shardwise.launch.machine_memory import machine_memory

MiB = 1 << 20


@pytest.fixture(name="groups")
def _groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of this process's groups, of version 2 and in ``v1`` of version 1."""
    files = {
        is_second: (str(tmp_path / folder), memory.FILES[is_second][1])
        for is_second, folder in ((True, ""), (False, "v1"))
    }
    monkeypatch.setattr(memory, "FILES", files)
    monkeypatch.setattr(memory, "OF_PROCESS", tmp_path / "cgroup")
    return tmp_path


def limit(group: Path, name: str, text: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(text + "\n", "ascii")


def test_without_groups_it_is_the_machines(groups: Path) -> None:
    assert not (groups / "cgroup").exists()
    assert machine_memory() > 2**28


def test_it_is_what_a_container_may_use(groups: Path) -> None:
    whole = machine_memory()
    (groups / "cgroup").write_text("0::/\n", "ascii")
    for text, expected in (("max", whole), (str(MiB), MiB)):
        limit(groups, "memory.max", text)
        assert machine_memory() == expected


@pytest.mark.parametrize(
    ("line", "folder", "name"),
    [
        ("0::/slurm/job_1/step_0", "slurm/job_1", "memory.max"),
        ("4:cpu,memory:/slurm/job_1/step_0", "v1/slurm/job_1", "memory.limit_in_bytes"),
    ],
)
def test_the_least_limit_of_the_groups_around_a_job_counts(
    line: str, folder: str, name: str, groups: Path
) -> None:
    (groups / "cgroup").write_text(f"3:cpuset:/other\n{line}\n", "ascii")
    limit(groups / folder, name, str(MiB))
    limit(groups / folder / "step_0", name, str(2 * MiB))
    assert machine_memory() == MiB


def test_of_a_path_of_the_host_that_a_container_does_not_see_the_root_counts(groups: Path) -> None:
    (groups / "cgroup").write_text("4:memory:/docker/0123\n", "ascii")
    limit(groups / "v1", "memory.limit_in_bytes", str(MiB))
    assert machine_memory() == MiB


def test_swap_holds_no_pinned_memory(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_limits", lambda: ())
    meminfo = "MemTotal: 1 kB\nSwapTotal: 4096 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_: meminfo)
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert machine_memory() == machine_memory(pinned=True) + 4 * MiB
