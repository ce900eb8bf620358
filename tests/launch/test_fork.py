"""Ranks that are forks of their launcher are what new processes would be."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli.train import _imported_once
from shardwise.errors import ShardwiseError
from shardwise.launch.fork import Fork
from shardwise.launch.launcher import start
from shardwise.recipe.read import read_recipe
from tests.forked import forked
from tests.train.tiny import recipe_file

SRC = str(Path(__file__).parents[2] / "src")


def start_forks(main: Callable[[], object], restarts: int = 0) -> list[str]:
    """Two forks that run ``main``; returns what was said at restarts."""
    messages: list[str] = []
    start(["a-rank", "of-two"], 2, restarts, messages.append, prepare=lambda: main)
    return messages


def reason_for(main: Callable[[], object]) -> str:
    with pytest.raises(ShardwiseError) as caught:
        start_forks(main)
    return str(caught.value)


def note(folder: Path) -> None:
    facts = {
        "environ": dict(os.environ),
        "session": [os.getpid(), os.getsid(0), os.getpgrp(), os.getppid()],
        "command": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "name": Path("/proc/self/comm").read_text().strip(),
        "random": [random.random(), float(np.random.random())],  # noqa: NPY002
        "handled": [n for n in signal.valid_signals() if callable(signal.getsignal(n))],
        "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "files": open_files(),
    }
    (folder / os.environ["RANK"]).write_text(json.dumps(facts), "utf-8")


def open_files() -> list[str]:
    """What is open, without the standard ones and that of this list."""
    listed = [path for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2]
    return [str(path.readlink()) for path in listed if path.is_symlink()]


@forked
def test_a_fork_is_to_its_launcher_what_a_new_process_is(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w", encoding="utf-8"):  # noqa: PTH123 - it stays open
        os.environ["OF_THE_USER"] = "1"
        start_forks(partial(note, tmp_path))
    ranks: list[dict[str, Any]] = [
        json.loads((tmp_path / rank).read_text("utf-8")) for rank in ("0", "1")
    ]
    assert [rank["environ"]["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["environ"]["OF_THE_USER"] for rank in ranks} == {"1"}
    assert "RANK" not in os.environ
    of_shells = (signal.SIGHUP, signal.SIGQUIT)  # by nohup, and of what goes on in the background
    before = [each for each in of_shells if signal.getsignal(each) == signal.SIG_IGN]
    for rank in ranks:
        pid, session, group, parent = rank["session"]
        assert (pid, pid, os.getpid()) == (session, group, parent)
        assert (rank["command"], rank["name"]) == (["a-rank", "of-two"], "a-rank")
        assert rank["handled"] == [signal.SIGINT]  # Python's own handler
        ignored = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1, *before}
        assert set(rank["ignored"]) == ignored
        assert rank["blocked"] == []
        assert [file.partition(":")[0] for file in rank["files"]] == ["pipe"]  # of its launcher
    assert not {*ranks[0]["random"]} & {*ranks[1]["random"]}


def end(how: str) -> None:
    if os.environ["RANK"] == "0":
        signal.pause()
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "status":
        sys.exit(7)
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("signal", "was killed by SIGSEGV."),
        ("status", "rank 1 ended with status 7 and left no reason; see above."),
        ("error", "rank 1 ended with status 1 and left no reason; see above."),
    ],
)
@forked
def test_its_end_is_told_as_of_a_new_process(how: str, message: str) -> None:
    assert reason_for(partial(end, how)).endswith(message)


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (3, 3), ("a reason", 1)], ids=["none", "number", "text"]
)
@forked
def test_it_exits_with_the_status_of_an_interpreter(code: Any, status: int) -> None:
    ended = Fork(partial(sys.exit, code), ["a-fork"], os.environ, -1)
    assert (ended.wait(), ended.poll()) == (status, status)
    ended.send_signal(signal.SIGKILL)  # nobody gets it


def program(code: str, *arguments: str) -> str:
    """What a new interpreter writes."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, *sys.path])}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_it_ends_as_an_interpreter_does_after_its_threads() -> None:
    code = """
import atexit, os, threading
from shardwise.launch.fork import Fork
def main():
    atexit.register(print, "at its end", flush=True)
    threading.Timer(0.1, print, ["in a thread"], {"flush": True}).start()
    print("in the fork", flush=True)
print("before", flush=True)
Fork(main, ["a-fork"], os.environ, -1).wait()
print("after")
"""
    lines = program(code).splitlines()
    assert lines == ["before", "in the fork", "in a thread", "at its end", "after"]


def die_once(folder: Path) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / (attempt + os.environ["RANK"])).touch()
    while not {attempt + "0", attempt + "1"} <= {path.name for path in folder.iterdir()}:
        pass
    if attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else signal.pause()


@forked
def test_after_a_crash_the_ranks_are_forked_again(tmp_path: Path) -> None:
    (message,) = start_forks(partial(die_once, tmp_path), restarts=1)
    assert message.endswith("was killed by SIGKILL; all ranks start again (1 of 1)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00", "01", "10", "11"]
    with pytest.raises(ChildProcessError):  # the stores of both attempts have ended
        os.waitpid(-1, os.WNOHANG)


def kill_the_store_once(meets: bool) -> None:
    """Rank 0 kills the store: before it can be reached, or when both ranks have met."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        return
    if meets:
        with sw.connect(timeout=60) as comm:
            end_the_store()
            comm.agree({"a": "fact"})
    end_the_store()
    with sw.connect(timeout=60):
        pass


def end_the_store() -> None:
    if os.environ["RANK"] == "1":
        return
    siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    while True:
        for pid in siblings.read_text("ascii").split():
            if Path(f"/proc/{pid}/comm").read_text("ascii") == "shardwise-store\n":
                os.kill(int(pid), signal.SIGKILL)
                return


@pytest.mark.parametrize("meets", [False, True])
@forked
def test_a_store_that_is_killed_ends_the_ranks_and_is_named(meets: bool) -> None:
    main, begin = partial(kill_the_store_once, meets), time.monotonic()
    (restarted,) = start_forks(main, restarts=1)
    named = (
        r"the store at which the ranks meet \(shardwise-store, process \d+\) was killed by SIGKILL"
    )
    assert re.fullmatch(rf"{named}\.", reason_for(main))
    assert re.fullmatch(rf"{named}; all ranks start again \(1 of 1\)", restarted)
    assert time.monotonic() - begin < 30  # and nobody waited for a minute


# --- where new processes are started, as before ----------------------------------------------


def test_a_process_with_another_thread_cannot_be_forked() -> None:
    code = """
import threading
from shardwise.launch.fork import can_fork
print(can_fork())
ended = threading.Event()
threading.Thread(target=ended.wait).start()
print(can_fork())
ended.set()
"""
    assert program(code).split() == ["True", "False"]


IMPORTED = """
import json, os, sys
from shardwise.cli.train import _imported_once
from shardwise.recipe.read import read_recipe
before = dict(os.environ)
recipe = read_recipe(sys.argv[1], sys.argv[2:])
print(_imported_once(recipe, 2, lambda: True), "torch" in sys.modules, os.environ == before)
"""


@pytest.mark.parametrize(
    ("override", "imported"),
    [("run.device=cpu", "True True True"), ("run.device=null", "False False True")],
)
def test_only_ranks_of_the_cpu_are_forked(tmp_path: Path, override: str, imported: str) -> None:
    assert program(IMPORTED, str(recipe_file(tmp_path)), override).strip() == imported


def test_a_program_that_has_imported_torch_is_not_forked(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_file(tmp_path), ["run.device=cpu"])
    assert "torch" in sys.modules
    assert not _imported_once(recipe, 2, lambda: True)
