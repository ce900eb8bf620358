from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shardwise.train.requests import FileRequests, Request, SignalRequests, combined


def test_nothing_is_asked_for_unless_somebody_asks() -> None:
    assert SignalRequests().take(1) is Request.NONE


def test_to_save_is_asked_for_once() -> None:
    requests = SignalRequests()
    requests.save()
    assert [requests.take(step) for step in (1, 2)] == [Request.SAVE, Request.NONE]


def test_to_stop_is_never_forgotten_and_includes_to_save() -> None:
    requests = SignalRequests()
    requests.stop()
    requests.save()
    assert [requests.take(step) for step in (1, 2)] == [Request.STOP, Request.STOP]


def test_one_rank_that_was_asked_is_enough() -> None:
    assert combined([0.0, 1.0, 0.0]) is Request.SAVE
    assert combined([2.0, 1.0]) is Request.STOP
    assert combined([0.0]) is Request.NONE


def test_a_rehearsed_crash_comes_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    requests = SignalRequests(kill_at=3)
    for step in (1, 2, 3, 4):
        requests.take(step)
        assert sent == ([(os.getpid(), signal.SIGKILL)] if step >= 3 else [])


def test_files_ask_by_being_there_and_go_when_it_is_done(tmp_path: Path) -> None:
    files = FileRequests(tmp_path)
    assert files.poll() is Request.NONE
    (tmp_path / "save").touch()
    assert files.poll() is Request.SAVE
    (tmp_path / "stop").touch()
    assert files.poll() is Request.STOP
    assert files.remove_handled() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_since_it_was_looked_for_stays(tmp_path: Path) -> None:
    files, save, stop = FileRequests(tmp_path), tmp_path / "save", tmp_path / "stop"
    save.touch()
    assert files.poll() is Request.SAVE
    os.utime(save, ns=(1, 1))  # touched again
    stop.touch()
    assert files.remove_handled() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save", "stop"]
    assert files.poll() is Request.STOP


def test_a_file_that_cannot_be_removed_does_not_ask_again(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    files = FileRequests(tmp_path)
    assert files.poll() is Request.SAVE
    assert "save cannot be removed" in files.remove_handled()
    assert files.poll() is Request.NONE
