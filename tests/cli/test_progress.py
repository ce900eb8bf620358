from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from shardwise.cli.progress import reporter, working
from shardwise.train.records import Built, Evaluated, Record, Resumed, Stepped, Warned


def records_of(steps: int) -> list[Record]:
    walked = [Stepped(i + 1, steps, 5.0, 1e-3, 1.0, 100.0, 2**20, 1.0) for i in range(steps)]
    return [Warned("[bold]text[/]"), *walked, Evaluated(steps, 4.0, 0.1, 6.0, 9, 1.0)]


def printed(records: Iterable[Record], log_every: int, capsys: pytest.CaptureFixture[str]) -> str:
    with reporter(log_every) as report:
        for record in records:
            report(record)
    return capsys.readouterr().out


def test_a_log_gets_a_line_every_so_many_steps_and_the_first_and_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(records_of(25), 10, capsys).splitlines()
    assert [line.split("/")[0] for line in lines if "/25" in line] == [
        "step  1",
        "step 10",
        "step 20",
        "step 25",
    ]
    assert lines[0] == "warning   [bold]text[/]"
    assert lines[-1].startswith("step 25  validation loss 4.0000")


def test_a_log_holds_no_control_characters_and_no_wrapped_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(records_of(3), 1, capsys)
    assert "\x1b" not in text
    assert "\r" not in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize("terminal", [False, True])
def test_after_a_crash_what_was_said_before_is_not_said_again(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    known = Built(31_392, "full_shard", 3, 12, 2, 2, 32, 30, 0.5)
    with reporter(1, restarted=True) as report:
        report(known)
        report(Resumed(2, 24, "run/checkpoints/step-2", 3))
    assert capsys.readouterr().out.splitlines()[0].startswith("resumed at step 2, sample 24")
    assert "31,392" in printed([known], 1, capsys)


@pytest.mark.parametrize("width", [80, 60, 30])
def test_a_terminal_gets_a_moving_line_and_keeps_what_a_log_gets(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(records_of(25), 10, capsys)
    assert "\x1b[2K" in text  # a line was erased, to be written anew
    assert text.startswith("warning   [bold]text[/]")
    shown = [re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", line) for line in text.splitlines()]
    steps = [line for line in shown if "/25" in line]
    assert all(len(line) <= width and line.endswith("ETA 0:01") for line in steps)
    numbers = dict.fromkeys(line.split("  ETA")[0].split("/")[0] for line in steps)
    assert [*numbers] == ["step  1", "step 10", "step 20", "step 25"]
    assert shown[-1].startswith("step 25  validation loss 4.0000")


def test_a_dumb_terminal_gets_the_lines_of_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    text = printed(records_of(25), 10, capsys)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 6


def test_a_terminal_is_restored_after_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")

    def interrupted() -> None:
        with reporter(1) as report:
            report(records_of(5)[1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    text = capsys.readouterr().out
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor is shown again


@pytest.mark.parametrize("terminal", ["xterm", "dumb", ""])
def test_a_terminal_is_told_what_works_until_that_ends(
    terminal: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal or "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1" * bool(terminal))
    with working("planning a [model]"):
        pass
    out, error = capsys.readouterr()
    assert ("planning a [model]" in error) == error.endswith("\x1b[2K") == (terminal == "xterm")
    assert (error.isascii(), out) == (True, "")
