from __future__ import annotations

import errno
import json
import signal
from pathlib import Path

import pytest

from shardwise.errors import CheckpointError, ConfigError, RanksDisagree
from shardwise.launch.error_files import (
    RankFailure,
    os_error_message,
    record_errors,
    root_cause,
    write_error_file,
)

# --- in a rank -------------------------------------------------------------------------------


def failure_of(error: Exception, monkeypatch: pytest.MonkeyPatch, folder: Path) -> RankFailure:
    """What the launcher finds of a rank that raised ``error``."""
    report = folder / "reason.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with pytest.raises(type(error)), record_errors():
        raise error
    message = json.loads(report.read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == message["message"]  # what torchrun prints
    return RankFailure.from_error_file(1, 7, 1, report)


def test_an_error_of_ours_explains_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert failure_of(ConfigError("32 rows"), monkeypatch, tmp_path).message == "32 rows"


def test_any_other_error_comes_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = failure_of(ZeroDivisionError("oh"), monkeypatch, tmp_path).message
    assert message.startswith("Traceback")
    assert message.endswith("ZeroDivisionError: oh")


def test_an_error_of_the_system_is_a_sentence_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from_error_file = failure_of(
        OSError(errno.ENOSPC, "No space left", "run/a"), monkeypatch, tmp_path
    )
    assert from_error_file.message == (
        "run/a cannot be used: No space left; the disk is full: free space there, or choose "
        "another place."
    )
    assert not from_error_file.is_permanent


def test_a_file_in_a_folder_that_is_missing_is_told_by_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "none" / "a.yaml").write_text("")
    message = os_error_message(caught.value)
    assert message.endswith(
        f"there is no folder {tmp_path / 'none'}: make it, or choose another place."
    )


def test_of_what_the_system_says_nothing_more_is_known() -> None:
    message = os_error_message(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    assert message == "a file, a pipe or a socket cannot be used: Connection reset by peer."
    assert os_error_message(OSError()).endswith("cannot be used: OSError.")


@pytest.mark.parametrize(
    ("error", "is_consequence", "is_permanent"),
    [
        (ConfigError("a"), False, True),
        (CheckpointError("a"), False, True),
        (RanksDisagree("a"), True, False),
        (MemoryError("a"), False, False),
    ],
)
def test_what_would_be_the_same_again_is_final(
    error: Exception,
    is_consequence: bool,
    is_permanent: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from_error_file = failure_of(error, monkeypatch, tmp_path)
    assert (from_error_file.is_consequence, from_error_file.is_permanent) == (
        is_consequence,
        is_permanent,
    )


def test_the_first_reason_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failure_of(ConfigError("the cause"), monkeypatch, tmp_path)
    assert write_error_file(ConfigError("a consequence"))
    assert "the cause" in (tmp_path / "reason.json").read_text()


def test_without_a_launcher_nobody_reads_a_reason() -> None:
    assert write_error_file(ConfigError("no")) is False


# --- in the launcher -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"message": "no"}', "\x00"])
def test_a_report_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    report = tmp_path / "reason.json"
    report.write_text(text)
    assert RankFailure.from_error_file(0, 7, 1, report).message == ""


def test_how_a_rank_ended_is_one_clause() -> None:
    assert RankFailure(1, 7, 3, 0.0).summary == "rank 1 ended with status 3 and left no reason"
    assert RankFailure(1, 7, -9, 0.0).summary == "rank 1 (process 7) was killed by SIGKILL"
    assert RankFailure(1, 7, -42, 0.0).summary == "rank 1 (process 7) was killed by signal 42"
    assert RankFailure(1, 7, 1, 0.0, "no data").summary == "rank 1: no data"
    assert RankFailure(1, 7, 1, 0.0, "rank 0: no disk").summary == "rank 0: no disk"


def test_the_cause_is_told_from_what_followed() -> None:
    killed = RankFailure(1, 7, -signal.SIGKILL, 9.0)
    own = RankFailure(2, 7, 1, 5.0, "no data")
    later = RankFailure(3, 7, 1, 6.0, "no disk")
    is_consequence = RankFailure(0, 7, 1, 1.0, "rank 1 is gone", is_consequence=True)
    stopped = RankFailure(4, 7, -signal.SIGTERM, 0.0)
    store = RankFailure.of_store(8, -signal.SIGKILL)
    everybody = [stopped, is_consequence, later, own, killed, store]
    for cause in (store, killed, own, later, is_consequence, stopped):
        assert root_cause(everybody) == cause
        everybody.remove(cause)
