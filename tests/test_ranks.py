"""The ranks that other tests run on: values in order, errors with their rank, nobody left over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from shardwise.comm.protocol import Comm
from tests.ranks import fork_server, outcomes_of, run_processes, run_threads

ROOT = Path(__file__).parent.parent


def whoami(comm: Comm, greeting: str) -> str:
    return f"{greeting} {comm.rank} of {comm.size}"


def misbehave(rank: int, world: int, folder: str) -> int:
    if rank == 0:
        raise KeyError("no such file")
    if rank == 1:
        os._exit(3)
    return os.getpid()


def sleep(rank: int, world: int, folder: str) -> None:
    time.sleep(600)


def write_pid_and_sleep(rank: int, world: int, folder: str, notes: str) -> None:
    Path(notes, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_threads_return_values_in_rank_order() -> None:
    assert run_threads(3, whoami, "I am") == ["I am 0 of 3", "I am 1 of 3", "I am 2 of 3"]


@pytest.mark.spawn
def test_processes_return_values_in_rank_order() -> None:
    assert run_processes(2, whoami, "I am") == ["I am 0 of 2", "I am 1 of 2"]


def raise_on_rank_1(comm: Comm) -> None:
    if comm.rank == 1:
        raise KeyError("no such file")


@pytest.mark.spawn
def test_an_error_names_its_rank_and_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 of 2 .*in raise_on_rank_1.*KeyError"):
        run_processes(2, raise_on_rank_1)


@pytest.mark.spawn
def test_every_end_is_reported_and_no_process_is_left() -> None:
    raised, died, fine = outcomes_of(3, misbehave)
    assert ("KeyError: 'no such file'" in raised.error, raised.exitcode) == (True, 1)
    assert (died.error, died.exitcode) == ("it ended without a result", 3)
    assert (fine.error, fine.exitcode) == ("", 0)
    assert not alive(fine.value)


@pytest.mark.spawn
def test_a_process_that_never_ends_is_ended() -> None:
    (hung,) = outcomes_of(1, sleep, timeout=0.5)
    assert (hung.error, hung.exitcode) == ("it did not end in time, and was killed", -9)


@pytest.mark.spawn
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    script = (
        "from tests.ranks import outcomes_of\n"
        "from tests.test_ranks import write_pid_and_sleep\n"
        "if __name__ == '__main__':\n"
        f"    outcomes_of(2, write_pid_and_sleep, {str(tmp_path)!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        deadline = time.monotonic() + 200
        while len(list(tmp_path.glob("[01]"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(path.read_text()) for path in tmp_path.glob("[01]")]
    assert len(pids) == 2
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_the_server_of_all_processes_has_no_variable_of_the_test_that_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = dict[str, str]()
    monkeypatch.setattr(forkserver, "ensure_running", lambda: environment.update(os.environ))
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fork_server()
    assert "ZE_AFFINITY_MASK" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert os.environ["ZE_AFFINITY_MASK"] == "3"
