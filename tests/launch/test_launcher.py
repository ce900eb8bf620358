from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.launch.launcher import EXIT_STOPPED, available_cores, default_environment, start
from tests.forked import forked
from tests.waiting import wait_for

# What each rank runs: a short script, not torch, so that a test takes about a second.
FAIL = """
import json, os, time
def fail(said, moment=None):
    moment = time.time() if moment is None else moment
    extra = {"timestamp": str(int(moment)), "exact": moment, "py_callstack": said}
    extra["is_consequence"] = "rank" in said
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
    variables = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [rank["LOCAL_RANK"] for rank in variables] == ["0", "1", "2"]
    assert {rank["WORLD_SIZE"] for rank in variables} == {"3"}
    assert {rank["MASTER_ADDR"] for rank in variables} == {"127.0.0.1"}
    assert len({rank["MASTER_PORT"] for rank in variables}) == 1


def when_both_left_a_reason(folder: Path) -> str:
    """Code that lets neither of two ranks end before the other has said why it does."""
    return f"""
def leave(status, leave=os._exit):
    open(os.path.join({str(folder)!r}, str(rank)), "w").close()
    for _ in range(3000):
        if len(os.listdir({str(folder)!r})) == 2:
            leave(status)
        time.sleep(0.01)
os._exit = leave
"""


def test_the_reason_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    code = """
now = 1_700_000_000.0  # in one second: only the exact moment tells them apart
fail("came second", now + 0.2) if rank == 0 else fail("came first", now + 0.1)
"""
    assert reason_for(when_both_left_a_reason(tmp_path) + code) == "rank 1: came first"


def test_a_rank_that_was_killed_is_the_reason_for_the_others_errors(tmp_path: Path) -> None:
    code = f"""
note = os.path.join({str(tmp_path)!r}, "pid")
if rank == 1:
    open(note + ".new", "w").write(str(os.getpid()))
    os.rename(note + ".new", note)
    os.kill(os.getpid(), 9)
while not os.path.exists(note):
    time.sleep(0.01)
stat = "/proc/" + open(note).read() + "/stat"
try:
    while open(stat).read().rpartition(") ")[2][0] != "Z":
        time.sleep(0.01)
except OSError:  # and its parent has noticed
    pass
fail("my peer is gone")
"""
    reason = reason_for(code)
    assert reason.startswith("rank 1 (process ")
    assert "was killed by SIGKILL. If nobody did so on purpose, the system was out of" in reason


def test_what_a_rank_says_of_another_is_a_consequence(tmp_path: Path) -> None:
    code = """
now = 1_700_000_000.0
fail("no such folder", now + 0.2) if rank == 0 else fail("rank 0 has left", now + 0.1)
"""
    assert reason_for(when_both_left_a_reason(tmp_path) + code) == "rank 0: no such folder"


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
    assert time.monotonic() - start_time < 200
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_nothing_but_the_reason_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    reason_for('fail("no")')
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 9)]
)
@forked
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
from shardwise.launch.launcher import start
try:
    start([sys.executable, "-c", {rank!r}], 2)
except KeyboardInterrupt:
    sys.exit(9)
"""
    assert subprocess.run(python(launcher), check=False, timeout=240).returncode == status
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


# --- signals ---------------------------------------------------------------------------------

# A rank that notes the signals that it receives, and stops when it is to.
RANK_WITH_HANDLERS = """
import os, signal, sys, time
rank, received, launcher = os.environ["RANK"], [], os.getppid()
def on_signal(number, frame):
    received.append(number)
    with open(os.path.join(sys.argv[1], rank), "w") as file:
        file.write(" ".join(str(int(number)) for number in received))
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on_signal)
with open(os.path.join(sys.argv[1], "pid-" + rank), "w") as file:
    file.write(str(os.getpid()))
open(os.path.join(sys.argv[1], rank), "w").close()
while signal.SIGTERM not in received and os.getppid() == launcher:
    time.sleep(0.01)
if len(sys.argv) > 2:  # it does not end before two signals
    while signal.SIGINT not in received and os.getppid() == launcher:
        time.sleep(0.01)
sys.exit(75)
"""
LAUNCHER = """
import sys
from shardwise.launch.launcher import start
start([sys.executable, "-c", *sys.argv[1:]], 2)
"""
FORKING = """
import sys
from shardwise.launch.launcher import start
code, *sys.argv[1:] = sys.argv[1:]
start(["rank"], 2, prepare=lambda: lambda: exec(code, {}))
"""
both_kinds = pytest.mark.parametrize("launcher_code", [LAUNCHER, FORKING], ids=["new", "forked"])


@contextmanager
def launched(code: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher of two ranks, when both have signal handlers; afterwards all have ended."""
    command = python(code, RANK_WITH_HANDLERS, str(folder), *arguments)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as launcher:
        try:
            wait_for(lambda: len(list(folder.iterdir())) == 4)
            yield launcher
        finally:
            launcher.kill()


def both_received(folder: Path, *numbers: int) -> bool:
    expected = " ".join(str(int(number)) for number in numbers)
    return [(folder / rank).read_text() for rank in ("0", "1")] == [expected, expected]


@both_kinds
@forked
def test_a_signal_to_save_and_one_to_stop_reach_every_rank(
    tmp_path: Path, launcher_code: str
) -> None:
    with launched(launcher_code, tmp_path) as launcher:
        launcher.send_signal(signal.SIGUSR1)
        wait_for(
            lambda: both_received(tmp_path, signal.SIGUSR1)
        )  # two at once come in either order
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(200) == EXIT_STOPPED == 75
    assert both_received(tmp_path, signal.SIGUSR1, signal.SIGTERM)


@both_kinds
@forked
def test_the_first_interrupt_asks_to_stop_and_the_second_interrupts(
    tmp_path: Path, launcher_code: str
) -> None:
    with launched(launcher_code, tmp_path, "twice") as launcher:
        launcher.send_signal(signal.SIGINT)
        wait_for(lambda: both_received(tmp_path, signal.SIGTERM))
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(200) == EXIT_STOPPED
    assert both_received(tmp_path, signal.SIGTERM, signal.SIGINT)


NOTED = """
import os, sys, time
from shardwise.launch.launcher import exit_with_launcher
exit_with_launcher(os.environ)
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(300)
"""


@both_kinds
@forked
def test_a_launcher_that_is_killed_leaves_no_process_though_suspended_and_no_file(
    tmp_path: Path, launcher_code: str
) -> None:
    temporary, noted = tmp_path / "temporary", tmp_path / "noted"
    temporary.mkdir()
    noted.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    launcher = subprocess.Popen(python(launcher_code, NOTED, str(noted)), env=environ)
    wait_for(lambda: len(list(noted.iterdir())) == 2)
    pids = [int(path.name) for path in noted.iterdir()]
    forks = launcher_code == FORKING
    wait_for(lambda: len(children(launcher.pid)) == 2 + forks)  # the store, too
    processes = children(launcher.pid)
    launcher.send_signal(signal.SIGTSTP)
    wait_for(lambda: [state(pid) for pid in pids] == ["T", "T"])
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_alive, processes)))
    assert list(temporary.iterdir()) == []


def test_ranks_of_a_torchrun_that_is_killed_end_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    torchrun = subprocess.Popen(python(code, *python(NOTED, str(tmp_path))), env=environ)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 1)
    [rank] = [int(path.name) for path in tmp_path.iterdir()]
    torchrun.kill()
    torchrun.wait()
    wait_for(lambda: not is_alive(rank))


@both_kinds
@forked
def test_suspended_and_continued_the_ranks_are_so_too(tmp_path: Path, launcher_code: str) -> None:
    """Ctrl-Z reaches the launcher alone: each rank has a session of its own."""
    with launched(launcher_code, tmp_path) as launcher:
        ranks = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
        launcher.send_signal(signal.SIGTSTP)
        wait_for(lambda: [state(pid) for pid in (launcher.pid, *ranks)] == ["T", "T", "T"])
        launcher.send_signal(signal.SIGCONT)
        wait_for(lambda: "T" not in map(state, (launcher.pid, *ranks)))
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(200) == EXIT_STOPPED


def state(pid: int) -> str:
    """The state that the kernel shows: T is suspended, Z only waits to be reaped by its parent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be reaped by its new parent does not."""
    try:
        return state(pid) != "Z"
    except FileNotFoundError:
        return False


def test_the_store_listens_on_the_loopback_interface_only(tmp_path: Path) -> None:
    code = """
import os, shutil, sys
for name in ("tcp", "tcp6"):
    shutil.copy(f"/proc/net/{name}", sys.argv[1])
with open(os.path.join(sys.argv[1], "port"), "w") as file:
    file.write(os.environ["MASTER_PORT"])
"""
    start(python(code, str(tmp_path)), 1)
    port = f"{int((tmp_path / 'port').read_text()):04X}"
    rows = [row.split() for name in ("tcp", "tcp6") for row in open_rows(tmp_path / name)]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]


def open_rows(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]


# --- to be started again ---------------------------------------------------------------------


def test_after_a_crash_all_ranks_are_started_again(tmp_path: Path) -> None:
    code = """
import sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(os.path.join(sys.argv[1], attempt + os.environ["RANK"]), "w").close()
while len([name for name in os.listdir(sys.argv[1]) if name[0] == attempt]) < 2:
    time.sleep(0.01)
if attempt != "2":
    os.kill(os.getpid(), 9) if rank == 1 else time.sleep(300)
"""
    messages: list[str] = []
    start(python(FAIL + code, str(tmp_path)), 2, 2, messages.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00", "01", "10", "11", "20", "21"]
    assert [line.partition(" (process")[0] for line in messages] == ["rank 1", "rank 1"]
    assert messages[1].endswith("was killed by SIGKILL; all ranks start again (2 of 2)")


def test_no_more_often_than_was_said() -> None:
    messages: list[str] = []
    with pytest.raises(ShardwiseError, match="rank 0 ended with status 3"):
        start(python("import sys; sys.exit(3)"), 1, 1, messages.append)
    assert len(messages) == 1


def test_what_would_be_the_same_again_is_not_tried_again() -> None:
    code = """
import os
from shardwise.errors import ConfigError
from shardwise.launch.error_files import write_error_file
write_error_file(ConfigError("no such recipe"))
os._exit(1)
"""
    messages: list[str] = []
    with pytest.raises(ShardwiseError, match="rank 0: no such recipe"):
        start(python(code), 1, 3, messages.append)
    assert messages == []


def test_a_stop_that_was_asked_for_is_no_crash() -> None:
    messages: list[str] = []
    with pytest.raises(SystemExit) as caught:
        start(python("import sys; sys.exit(75)"), 2, 3, messages.append)
    assert (caught.value.code, messages) == (75, [])


# --- the environment of a rank ---------------------------------------------------------------


def test_ranks_share_the_cores_and_stay_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert default_environment(1)["OMP_NUM_THREADS"] == str(available_cores())
    assert default_environment(10_000)["OMP_NUM_THREADS"] == "1"
    assert default_environment(2)["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert default_environment(2) == {}
