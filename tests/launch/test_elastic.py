from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.launch.elastic import cores, environment, leave_reason, reasons_left, start

# What each rank runs: a short script, not torch, so that a test takes about a second.
FAIL = """
import json, os, time
def fail(said, moment=None):
    moment = time.time() if moment is None else moment
    extra = {"timestamp": str(int(moment)), "exact": moment, "py_callstack": said}
    extra["follows"] = "rank" in said
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": said, "extraInfo": extra}}, file)
    os._exit(1)
rank = int(os.environ["RANK"])
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def reason_for(code: str, ranks: int = 2) -> str:
    with pytest.raises(ShardwiseError) as caught:
        start(python(FAIL + code), ranks)
    return str(caught.value)


def test_every_rank_has_the_variables_of_torchrun(tmp_path: Path) -> None:
    code = """
import json, os, sys
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(dict(os.environ), file)
"""
    start(python(code, str(tmp_path)), 3)
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [rank["LOCAL_RANK"] for rank in told] == ["0", "1", "2"]
    assert {rank["WORLD_SIZE"] for rank in told} == {"3"}
    assert {rank["MASTER_ADDR"] for rank in told} == {"127.0.0.1"}
    assert len({rank["MASTER_PORT"] for rank in told}) == 1


def test_the_reason_is_that_of_the_rank_that_failed_first() -> None:
    code = """
now = 1_700_000_000.0  # in one second: only the exact moment tells them apart
fail("came second", now + 0.2) if rank == 0 else fail("came first", now + 0.1)
"""
    assert reason_for(code) == "rank 1: came first"


def test_a_rank_that_was_killed_is_the_reason_for_the_others_errors() -> None:
    code = """
if rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(0.05)
fail("my peer is gone")
"""
    said = reason_for(code)
    assert said.startswith("rank 1 (process ")
    assert "was killed by SIGKILL. If nobody did so on purpose, the system was out of" in said


def test_what_a_rank_says_of_another_is_a_consequence() -> None:
    code = """
now = 1_700_000_000.0
fail("no such folder", now + 0.2) if rank == 0 else fail("rank 0 has left", now + 0.1)
"""
    assert reason_for(code) == "rank 0: no such folder"


def test_a_rank_that_leaves_no_reason_is_named_with_its_status() -> None:
    code = "time.sleep(60) if rank == 0 else os._exit(7)"
    assert reason_for(code) == "rank 1 ended with status 7 and left no reason; see above."


def test_the_other_ranks_are_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
if rank == 0:
    open({str(note)!r}, "w").write(str(os.getpid()))
    time.sleep(300)
while not os.path.exists({str(note)!r}):
    time.sleep(0.01)
fail("one of us failed")
"""
    start_time = time.monotonic()
    assert reason_for(code) == "rank 1: one of us failed"
    assert time.monotonic() - start_time < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_nothing_but_the_reason_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    reason_for('fail("no")')
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 9)]
)
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals, status: int) -> None:
    rank = f"""
import os, time
open(os.path.join({str(tmp_path)!r}, str(os.getpid())), "w").close()
while len(os.listdir({str(tmp_path)!r})) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), {number:d})
time.sleep(300)
"""
    launcher = f"""
import sys
from shardwise.launch.elastic import start
try:
    start([sys.executable, "-c", {rank!r}], 2)
except KeyboardInterrupt:
    sys.exit(9)
"""
    assert subprocess.run(python(launcher), check=False, timeout=100).returncode == status
    for pid in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.name), 0)


def test_everything_is_afterwards_as_it_was_before() -> None:
    def now() -> tuple[dict[str, str], object, object]:
        return dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    before = now()
    start(python("pass"), 1)
    assert now() == before
    reason_for('fail("no")')
    assert now() == before


# --- the environment of a rank ---------------------------------------------------------------


def test_ranks_share_the_cores_and_stay_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert environment(1)["OMP_NUM_THREADS"] == str(cores())
    assert environment(10_000)["OMP_NUM_THREADS"] == "1"
    assert environment(2)["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert environment(2) == {}


# --- leaving a reason ------------------------------------------------------------------------


def left(error: Exception, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "reason.json"))
    with pytest.raises(type(error)), reasons_left():
        raise error
    message = json.loads((folder / "reason.json").read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == message["message"]
    return str(message["message"])


def test_an_error_of_ours_explains_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert left(ConfigError("32 rows"), monkeypatch, tmp_path) == "32 rows"


def test_any_other_error_comes_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = left(ZeroDivisionError("oh"), monkeypatch, tmp_path)
    assert said.startswith("Traceback")
    assert said.endswith("ZeroDivisionError: oh")


def test_the_first_reason_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left(ConfigError("the cause"), monkeypatch, tmp_path)
    assert leave_reason(ConfigError("a consequence"))
    assert "the cause" in (tmp_path / "reason.json").read_text()


def test_without_a_launcher_nobody_reads_a_reason() -> None:
    assert leave_reason(ConfigError("no")) is False
