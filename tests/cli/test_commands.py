"""What the command line answers without torch, and how it ends while it imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = str(Path(__file__).parents[2] / "src")

ANSWERED = """
import os, sys
from shardwise.cli import main
os.environ.pop("_SHARDWISE_COMPLETE", None)
for arguments in (
    ["--version"],
    ["--help"],
    ["train", "--help"],
    ["inspect", "--verfy"],
    ["train", "nowhere.yaml"],
    ["train", sys.argv[1], "--model.widht", "3", "--nproc", "2"],
):
    try:
        main(arguments)
    except SystemExit as ended:
        print(arguments[0], ended.code)
print("torch" in sys.modules)
"""


def python(*arguments: str, path: str = SRC) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, SRC, *sys.path])}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_version_help_and_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").touch()
    done = python("-c", ANSWERED, str(tmp_path / "r.yaml"))
    ends = [line for line in done.stdout.splitlines() if line[:2] != "  " and line[-1:].isdigit()]
    assert ends[1:] == ["--version 0", "--help 0", "train 0", "inspect 2", "train 1", "train 1"]
    assert done.stdout.endswith("False\n")


def test_a_launcher_starts_its_ranks_without_torch() -> None:
    done = python("-c", "import sys, shardwise.cli.train; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_no_garbage_is_looked_for_when_the_process_ends() -> None:
    """It takes a second in a process with torch; the last that is registered is called first."""
    program = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); "
        "from shardwise.cli import main; main()"
    )
    done = python("-c", program, "--version")
    assert (done.stdout.splitlines()[-1], done.stderr) == ("True", "")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_an_encoding_lacks_is_replaced(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    rich = "from rich.console import Console; Console().print('▇')"
    command = "import sys; sys.argv[1:] = ['doctor', '--help']\nfrom shardwise.cli import main"
    done = python("-c", f"{command}\ntry: main()\nfinally: {rich}")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "?"), done.stderr


def test_the_package_itself_is_the_command() -> None:
    done = python("-m", "shardwise", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("shardwise ")


def test_a_source_tree_that_is_not_installed_says_so_in_place_of_a_version() -> None:
    not_installed = "import importlib.metadata as m; m.version = lambda _: m.distribution('none')"
    done = python("-c", f"{not_installed}; import shardwise; print(shardwise.__version__)")
    assert (done.stdout, done.stderr) == ("0+source\n", "")


def test_an_interrupt_while_torch_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 2)", "utf-8")
    done = python("-m", "shardwise", "inspect", "run", path=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_an_output_that_is_full_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", "--help"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([SRC, *sys.path])},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=100,
        )
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the standard output cannot be used: No space left on device;")
    assert done.returncode == 1
