"""A process that may be hostile has a line's length, an answer's time, and no life afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardwise.convert import talk
from shardwise.convert.talk import Silent, Talk


@contextmanager
def talking(code: str) -> Iterator[Talk]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", f"import os, sys, time\n{code}"]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
    ) as process:
        found = Talk(process)
        try:
            yield found
        finally:
            found.end()


def test_lines_and_bytes_come_in_order() -> None:
    with talking("os.write(1, b'one\\ntwo\\n12345678' + sys.stdin.readline().encode())") as said:
        said.ask("asked\n")
        assert [said.line(), said.line()] == [b"one", b"two"]
        found = np.empty(8, np.uint8)
        said.fill(found)
        assert found.tobytes() == b"12345678"
        assert said.line() == b"asked"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sys.exit(3)", "ended with status 3"),
        ("os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("os.write(1, b'x' * 3000); time.sleep(60)", "more than 2,000 bytes"),
        ("os.write(1, b'half'); time.sleep(60)", "in time"),
        ("os.fork() and os._exit(0); time.sleep(60)", "ended with status 0"),  # the pipe stays open
    ],
)
def test_why_there_is_no_line(code: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "in time":
        monkeypatch.setattr(talk, "QUIET", 0.5)
    monkeypatch.setattr(talk, "CAP", 2000)
    with talking(code) as said, pytest.raises(Silent, match=why):
        said.line()


def test_who_does_not_listen_is_not_waited_for() -> None:
    with talking("time.sleep(60)") as said:

        def keeps_asking() -> None:
            for _ in range(100):
                said.ask("x" * 4095 + "\n")

        with pytest.raises(Silent, match="does not listen"):
            keeps_asking()


def test_what_it_started_ends_with_it() -> None:
    code = "child = os.fork()\nif child: os.write(1, b'%d\\n' % child)\ntime.sleep(60)"
    with talking(code) as said:
        child = Path(f"/proc/{int(said.line())}/stat")
        assert state(child) in "RSD"
    while state(child) in "RD":  # it has been told, and is about to
        pass
    assert state(child) in "ZX"


def state(process: Path) -> str:
    """Its letter in ``ps``; ``X`` where it is gone."""
    try:
        return process.read_text("utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
