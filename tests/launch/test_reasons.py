from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import pytest

from shardwise.errors import CheckpointError, ConfigError, RanksDisagree
from shardwise.launch.reasons import Ended, cause, leave_reason, of_system, reasons_left

# --- in a rank -------------------------------------------------------------------------------


def left(error: Exception, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Ended:
    """What the launcher finds of a rank that raised ``error``."""
    report = folder / "reason.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with pytest.raises(type(error)), reasons_left():
        raise error
    message = json.loads(report.read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == message["message"]  # what torchrun prints
    return Ended.found(1, 7, 1, report)


def test_an_error_of_ours_explains_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert left(ConfigError("32 rows"), monkeypatch, tmp_path).said == "32 rows"


def test_any_other_error_comes_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = left(ZeroDivisionError("oh"), monkeypatch, tmp_path).said
    assert said.startswith("Traceback")
    assert said.endswith("ZeroDivisionError: oh")


def test_an_error_of_the_system_is_a_sentence_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = left(OSError(errno.ENOSPC, "No space left", "run/a"), monkeypatch, tmp_path)
    assert found.said == (
        "run/a cannot be used: No space left. The disk is full: free space there, or choose "
        "another folder."
    )
    assert not found.final


def test_of_what_the_system_says_nothing_more_is_known() -> None:
    said = of_system(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    assert said == "a file, a pipe or a socket cannot be used: Connection reset by peer."
    assert of_system(OSError()).endswith("cannot be used: OSError.")


@pytest.mark.parametrize(
    ("error", "follows", "final"),
    [
        (ConfigError("a"), False, True),
        (CheckpointError("a"), False, True),
        (RanksDisagree("a"), True, False),
        (MemoryError("a"), False, False),
    ],
)
def test_what_would_be_the_same_again_is_final(
    error: Exception, follows: bool, final: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = left(error, monkeypatch, tmp_path)
    assert (found.follows, found.final) == (follows, final)


def test_the_first_reason_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left(ConfigError("the cause"), monkeypatch, tmp_path)
    assert leave_reason(ConfigError("a consequence"))
    assert "the cause" in (tmp_path / "reason.json").read_text()


def test_without_a_launcher_nobody_reads_a_reason() -> None:
    assert leave_reason(ConfigError("no")) is False


# --- in the launcher -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"message": "no"}', "\x00"])
def test_a_report_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    report = tmp_path / "reason.json"
    report.write_text(text)
    assert Ended.found(0, 7, 1, report).said == ""


def test_how_a_rank_ended_is_one_clause() -> None:
    assert Ended(1, 7, 3, 0.0).fact == "rank 1 ended with status 3 and left no reason"
    assert Ended(1, 7, -9, 0.0).fact == "rank 1 (process 7) was killed by SIGKILL"
    assert Ended(1, 7, -42, 0.0).fact == "rank 1 (process 7) was killed by signal 42"
    assert Ended(1, 7, 1, 0.0, "no data").fact == "rank 1: no data"
    assert Ended(1, 7, 1, 0.0, "rank 0: no disk").fact == "rank 0: no disk"


def test_the_cause_is_told_from_what_followed() -> None:
    killed = Ended(1, 7, -signal.SIGKILL, 9.0)
    own = Ended(2, 7, 1, 5.0, "no data")
    later = Ended(3, 7, 1, 6.0, "no disk")
    follows = Ended(0, 7, 1, 1.0, "rank 1 is gone", follows=True)
    told = Ended(4, 7, -signal.SIGTERM, 0.0)
    everybody = [told, follows, later, own, killed]
    for wanted in (killed, own, later, follows, told):
        assert cause(everybody) == wanted
        everybody.remove(wanted)
