"""The command as a user meets it: its help, its errors, and whole runs through both launchers."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from shardwise.cli import main
from shardwise.doctor.listeners import listeners
from shardwise.recipe.read import read_recipe, to_yaml
from shardwise.recipe.recipe import keys
from shardwise.train.job import Job
from tests.forked import forked
from tests.ranks import free_port
from tests.train.tiny import recipe_file

Two = tuple[Path, subprocess.CompletedProcess[str]]

STANDALONE = ("--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1")
SRC = str(Path(__file__).parents[2] / "src")


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def run(*command: str, by: str = "-m") -> subprocess.CompletedProcess[str]:
    """What it says on stderr is without the waiting of ranks, which depends on the machine."""
    done = subprocess.run(
        [sys.executable, by, *command],
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    lines = done.stderr.splitlines(keepends=True)
    waiting = (" waited ", "  rank ", "  stack of ")
    done.stderr = "".join(line for line in lines if not any(word in line for word in waiting))
    return done


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, *sys.path])}


def failed(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


# --- reading ---------------------------------------------------------------------------------


def test_help_shows_how_to_start_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed("--help") == 0
    text = capsys.readouterr().out
    assert "shardwise train demo --nproc 2" in text
    assert "torchrun --nproc-per-node 2 -m shardwise.cli train" in text
    assert "Ctrl-C, kill PID, or touch RUN/stop    save and exit with status 75" in text
    assert [key.name for key in keys() if f"{key.name}: " not in text] == []


def test_help_names_the_words_that_a_key_may_have_and_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert failed("--help") == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    words = {word for key in keys() for word in key.values}
    assert {"gaussian", "predivide", "optimizer", "float16"} <= words
    assert [word for word in words if word not in text] == []


def test_the_command_line_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.split("Commands:")[1].splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    assert names == [
        "bench",
        "convert-config",
        "data",
        "doctor",
        "explain",
        "export",
        "init",
        "inspect",
        "launch",
        "lint",
        "plan",
        "recipe",
        "report",
        "trace",
        "train",
        "watch",
    ]


def test_a_missing_recipe_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed() == 2
    assert "Missing argument 'RECIPE'" in capsys.readouterr().err


# --- errors before any process is started ----------------------------------------------------


def test_a_wrong_key_ends_with_one_message_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--nproc", "2", "--model.widht", "3") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: override --model.widht: there is no such key or option; did you mean model.width?"
    ]


def test_a_batch_that_does_not_divide_ends_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--nproc", "5") == 1
    assert (
        "batch.rows is 12, which is not divisible by 5 ranks; start 4 or 6 ranks"
        in capsys.readouterr().err
    )


def test_a_folder_in_use_ends_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(tmp_path)
    (tmp_path / "run").mkdir()
    before = to_yaml(read_recipe(recipe, ["run.seed=1"]))
    (tmp_path / "run" / "recipe.yaml").write_text(before, "utf-8")
    assert failed(str(recipe), "--nproc", "2") == 1
    text = capsys.readouterr().err
    assert "run.seed was 1 and is 0" in text
    assert "start over with --run.overwrite true, which deletes that run" in text


@pytest.mark.parametrize("text", ["1", "@3", "1@", "one@2", "1@-2"])
def test_a_crash_is_rehearsed_at_a_rank_and_a_step(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--kill-rank", text) == 2
    assert f"{text!r} does not have the form RANK@STEP" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1@2", "0@9", "0@0"])
def test_a_crash_that_would_never_happen_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--kill-rank", text) == 1
    assert f"--kill-rank {text} would never happen: ranks are 0 to 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("gpu", "run.device is 'gpu'; it must be 'cpu', 'cuda', 'xpu' or 'hpu'"),
        ("XPU", 'torch sees no xpu device on this machine. Pass device="cpu" (--run.device cpu)'),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_to_write(
    tmp_path: Path, device: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--run.device", device) == 1
    assert text in capsys.readouterr().err


def test_what_the_system_refuses_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failed(str(recipe_file(tmp_path)), "--run.folder", "/proc/x") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: /proc/x cannot be used: No such file or directory;")
    recipe = recipe_file(tmp_path)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text(to_yaml(read_recipe(recipe)), "utf-8")
    assert failed(str(recipe)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/run/metrics.jsonl cannot be used: Is a directory;")


def test_a_recipe_of_several_machines_is_not_trained_by_one_that_nobody_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text("launch: {nodes: 2, nproc: 8}\n", "utf-8")
    assert failed(str(tmp_path / "my.yaml")) == 1
    text = capsys.readouterr().err
    assert "launch.nodes is 2 in this recipe, and no launcher has started this process" in text
    assert f"Start with: shardwise launch {tmp_path}/my.yaml; or say" in text


@pytest.mark.parametrize(("words", "restarts"), [([], 3), (["--restarts", "0"], 0)])
def test_a_recipe_says_how_often_ranks_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], restarts: int
) -> None:
    (tmp_path / "my.yaml").write_text("launch: {nproc: 2, restarts: 3}\n", "utf-8")
    started: list[int] = []
    monkeypatch.setattr("shardwise.cli.train.start", lambda *given: started.append(given[2]))
    assert failed(str(tmp_path / "my.yaml"), *words) == 0
    assert started == [restarts]


def test_asking_for_processes_inside_a_launcher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert failed(str(recipe_file(tmp_path)), "--nproc", "2") == 1
    assert "--nproc is 2, but a launcher has already started " in capsys.readouterr().err


def test_a_rank_waits_for_the_others_as_long_as_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    assert failed(str(recipe_file(tmp_path)), "--timeout", "1") == 1
    assert "within 1 s: no program listens at port " in capsys.readouterr().err


# --- whole runs ------------------------------------------------------------------------------


def test_one_process_needs_no_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_file(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["train", str(recipe), "run.seed=3", "--run.steps", "3", "--run.eval_every=0"])
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "full_shard over 1 rank" in out
    assert "step 3/3" in out
    assert len(losses(tmp_path)) == 4


def test_an_empty_recipe_says_what_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.yaml").write_text("# later\n")
    recipe = tmp_path / "e.yaml"
    assert failed(str(recipe), "--kill-rank", "7@1") == 1
    assert capsys.readouterr().out == (
        f"note      {recipe} sets no key: this trains a new decoder of 4 layers on stdlib, into "
        "runs/train\n"
    )
    assert failed(str(recipe_file(tmp_path)), "--kill-rank", "7@1") == 1
    assert not capsys.readouterr().out


# --- stopped and gone on, in this process ----------------------------------------------------


def ended(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(["train", *arguments])
    return caught.value.code


def at_step(step: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do ``act`` while the gradients of ``step`` are computed."""
    gradients = Job.forward_backward

    def then(job: Job, number: int) -> Tensor:
        if number + 1 == step:
            act()
        return gradients(job, number)

    monkeypatch.setattr(Job, "forward_backward", then)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_end_saves_and_says_with_what_status_it_goes_on(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(recipe_file(tmp_path))
    with monkeypatch.context() as patch:
        at_step(3, lambda: os.kill(os.getpid(), number), patch)
        assert ended(recipe) == 75
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"saved {tmp_path}/run/checkpoints/step-3 (")
    assert lines[-1] == "stopped at step 3/4, checkpoint saved; rerun the same command to resume"
    assert ended(recipe) == 0
    goes_on = capsys.readouterr().out
    assert f"resumed at step 3, sample 36, from {tmp_path}/run/checkpoints/step-3" in goes_on
    assert ended(recipe) == 0
    assert "run is already complete (4 steps)" in capsys.readouterr().out


def test_a_finished_run_that_a_crash_left_partly_moved_is_whole_before_it_is_called_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = str(recipe_file(tmp_path)), tmp_path / "run"
    assert ended(recipe, "checkpoint.save_every=2") == 0
    before = sorted(path.name for path in folder.iterdir())
    (folder / ".replacing").mkdir()
    for name in ("metrics.jsonl", "checkpoints"):
        (folder / name).rename(folder / ".replacing" / name)
    capsys.readouterr()
    assert ended(recipe, "checkpoint.save_every=2", "--nproc", "2") == 0
    assert "run is already complete (4 steps)" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_request_to_save_is_no_death_before_there_is_anything_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(sys, "argv", ["shardwise", "train", "--version"])
    try:
        with pytest.raises(SystemExit):
            main()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_interrupt_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(3, twice, monkeypatch)
    assert ended(str(recipe_file(tmp_path))) == 130
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_whose_output_ends_saves_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with monkeypatch.context() as patch:
        at_step(2, lambda: patch.setattr("shardwise.cli.progress.format_record", broken), patch)
        assert ended(str(recipe_file(tmp_path)), "run.log_every=1") == 1
    assert capsys.readouterr().err == (
        "error: the standard output cannot be written: Broken pipe. The run is stopped at step 3 "
        "and saved; rerun the same command to resume.\n"
    )
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()


def test_a_last_checkpoint_that_could_not_be_saved_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run" / "checkpoints" / "step-4" / "thesis.txt"

    def take() -> None:
        file.parent.mkdir(parents=True)
        file.touch()

    at_step(3, take, monkeypatch)
    assert ended(str(recipe_file(tmp_path))) == 1
    out, err = capsys.readouterr()
    assert "warning   NOT SAVED, and the run goes on: " in out
    assert err.startswith(
        "error: the run is finished at step 4, and the last checkpoint could not "
    )
    assert file.exists()
    assert (tmp_path / "run" / "model.safetensors").is_file()


# --- on several processes --------------------------------------------------------------------


@forked
def train_on_two(folder: Path) -> None:
    options = ("--nproc", "2", "--verbose")
    done = run("shardwise.cli", "train", str(recipe_file(folder)), *options)
    result = [done.returncode, done.stdout, done.stderr]
    (folder / "said.json").write_text(json.dumps(result), "utf-8")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """The folder of a run on two processes, and what it said."""
    folder = tmp_path_factory.mktemp("two")
    train_on_two(folder=folder)
    result = json.loads((folder / "said.json").read_text("utf-8"))
    return folder, subprocess.CompletedProcess([], *result)


@pytest.mark.spawn
def test_two_processes_train_and_only_one_speaks(two: Two) -> None:
    _, done = two
    assert done.returncode == 0
    labels = [line.split()[0] for line in done.stderr.splitlines()]
    assert labels == ["states", "saved"]  # --verbose: what begins alike, and the model's file
    assert done.stdout.count("step 4/4") == 1
    assert "micro-batch 1 × 6 accumulation steps × 2 ranks" in done.stdout


@pytest.mark.spawn
def test_verbose_shows_who_each_rank_is(two: Two) -> None:
    head, _, *ranks = two[1].stdout.splitlines()[:4]
    assert head.split() == ["rank", "local", "rank", "world", "size", "device", "host"]
    assert [rank.split() for rank in ranks] == [
        [str(rank), str(rank), "2", "cpu", platform.node()] for rank in range(2)
    ]


@pytest.mark.spawn
def test_two_processes_train_as_one_does(two: Two, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(recipe_file(tmp_path))])
    assert losses(two[0]) == pytest.approx(losses(tmp_path), rel=1e-5)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.prove
def test_new_interpreters_under_torchrun_are_as_good(two: Two, tmp_path: Path) -> None:
    command = ("-m", "shardwise.cli", "train", str(recipe_file(tmp_path)))
    done = run("torch.distributed.run", *STANDALONE, *command)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(two[0]), rel=1e-5)


@pytest.mark.spawn
@forked
def test_a_rank_s_error_is_all_that_is_said(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    done = run("shardwise.cli", "train", str(recipe), "--nproc", "2", "data.source=/nowhere")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: rank 0: data.source '/nowhere' does not exist")


@pytest.mark.prove
@pytest.mark.spawn
@forked
def test_a_rank_s_error_is_said_under_torchrun_too(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path)
    command = ("-m", "shardwise.cli", "train", str(recipe), "data.source=/nowhere")
    done = run("torch.distributed.run", *STANDALONE, *command)
    assert done.returncode == 1
    assert "data.source '/nowhere' does not exist" in done.stderr


# --- stopped, killed and gone on, on several processes ---------------------------------------

# What the launcher starts in place of the command: as it is, but for what stands before it.
LAUNCHER = """
import sys
from shardwise.launch.launcher import start
start([sys.executable, "-c", *sys.argv[1:]], 2, 1, lambda fact: print("crashed", fact, flush=True))
"""
SLOW = """
import time
from shardwise.train.job import Job
gradients = Job.forward_backward
Job.forward_backward = lambda job, step: (time.sleep(0.1), gradients(job, step))[1]
from shardwise.cli import main
main()
"""
KILLED = """
import os
from shardwise.train.job import Job
loss, calls = Job._loss, []
def dying(job, batch, in_host):
    calls.append(batch)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and job.sharded.comm.rank == 1 and len(calls) == 2 * 6 + 3:  # of six in step 3
        os.kill(os.getpid(), 9)
    return loss(job, batch, in_host)
Job._loss = dying
from shardwise.cli import main
main()
"""


@pytest.mark.spawn
@forked
def test_killed_in_the_middle_of_a_step_all_ranks_start_again_and_go_on_exactly(
    two: Two, tmp_path: Path
) -> None:
    recipe = str(recipe_file(tmp_path))
    done = run(LAUNCHER, KILLED, "train", recipe, "checkpoint.save_every=1", by="-c")
    assert (done.returncode, done.stderr) == (0, "")
    restarts = [
        line for line in done.stdout.splitlines() if line.startswith(("crashed", "resumed"))
    ]
    assert "was killed by SIGKILL; all ranks start again (1 of 1)" in restarts[0]
    assert restarts[1].startswith("resumed at step 2, sample 24, from ")
    assert done.stdout.count("tokens/s  over all ranks") == 1  # what is known is not said again
    assert losses(tmp_path) == losses(two[0])


@pytest.mark.spawn
def test_ranks_that_are_forks_of_the_launcher_crash_and_go_on_as_exactly(
    two: Two, tmp_path: Path
) -> None:
    crash = ("--nproc", "2", "--restarts", "1", "--kill-rank", "1@3")
    save = "checkpoint.save_every=2"
    done = run("shardwise.cli", "train", str(recipe_file(tmp_path)), save, *crash)
    assert (done.returncode, done.stderr) == (0, "")
    assert "was killed by SIGKILL; all ranks start again (1 of 1)" in done.stdout
    assert "resumed at step 2, sample 24, from " in done.stdout
    assert losses(tmp_path) == losses(two[0])


@pytest.mark.spawn
@pytest.mark.prove
@forked
def test_torchruns_agent_starts_all_ranks_again_and_they_go_on_exactly(
    two: Two, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = ("torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    place = ("--master-addr=127.0.0.1", f"--master-port={port}")
    command = (str(program), "train", str(recipe_file(tmp_path)), "checkpoint.save_every=1")
    done = run(*agent, *place, *command)
    assert done.returncode == 0, done.stderr
    assert "resumed at step 2, sample 24, from " in done.stdout
    assert losses(tmp_path) == losses(two[0])


@pytest.mark.spawn
@pytest.mark.prove
@forked
def test_a_rehearsed_crash_costs_what_was_not_saved_and_the_same_command_goes_on(
    two: Two, tmp_path: Path
) -> None:
    command = ("shardwise.cli", "train", str(recipe_file(tmp_path)), "checkpoint.save_every=2")
    done = run(*command, "--nproc", "2", "--kill-rank", "1@3")
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 (process ")
    assert "was killed by SIGKILL" in done.stderr
    again = run(*command)  # on one process: the ranks may be others
    assert again.returncode == 0
    assert "resumed at step 2, sample 24" in again.stdout
    assert losses(tmp_path) == pytest.approx(losses(two[0]), rel=1e-5)


@pytest.mark.prove
@pytest.mark.spawn
@forked
def test_what_is_replaced_is_replaced_once_and_not_again_after_a_crash(
    two: Two, tmp_path: Path
) -> None:
    command = ("train", str(recipe_file(tmp_path)), "checkpoint.save_every=2")
    assert ended(*command[1:], "run.seed=1") == 0
    crash = ("--nproc", "2", "--restarts", "1", "--kill-rank", "1@3")
    done = run("shardwise.cli", *command, *crash, "--run.overwrite", "true")
    assert (done.returncode, done.stderr) == (0, "")
    assert "crashed   rank 1 (process " in done.stdout
    assert "resumed at step 2, sample 24" in done.stdout
    assert losses(tmp_path) == losses(two[0])


@pytest.mark.spawn
def family(pid: int) -> list[int]:
    """A process, and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    return [pid, *(one for child in children for one in family(int(child)))]


@forked
def test_signals_to_the_launcher_save_and_stop_all_ranks_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    changes = ("run.steps=40", "run.log_every=1", "checkpoint.save_every=0", "sample.tokens=0")
    command = ("train", str(recipe_file(tmp_path)), *changes, "run.eval_every=0", "batch.micro=6")
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SLOW, *command],
        env=environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    output: list[str] = []
    waited_for: list[tuple[str, int]] = []
    with process:
        for line in process.stdout or ():
            output.append(line.strip())
            saves = sum(earlier.startswith("saved") for earlier in output) * line.startswith(
                "saved"
            )
            if line.startswith("step  2/40"):
                waited_for += [(one.address, one.port) for one in listeners(family(process.pid))]
                process.send_signal(signal.SIGUSR1)
            elif saves == 1:
                (tmp_path / "run" / "save").touch()
            elif saves == 2:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 75, "\n".join(output)
    assert {address for address, _ in waited_for} == {"127.0.0.1"}  # the store's, and gloo's
    assert not (tmp_path / "run" / "save").exists()
    assert sum(line.startswith("saved") for line in output) == 3
    stopped = output[-1]
    assert stopped.startswith("stopped at step ")
    assert stopped.endswith("/40, checkpoint saved; rerun the same command to resume")
    step = int(stopped.split()[3].partition("/")[0])
    again = run("shardwise.cli", *command)  # on one process: the ranks may be others
    assert again.returncode == 0
    assert f"resumed at step {step}, sample {12 * step}" in again.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records if r["record"] == "stepped"] == list(range(1, 41))


@pytest.mark.spawn
@pytest.mark.prove
@forked
def test_under_torchrun_a_run_that_is_told_to_end_saves_too(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW, "utf-8")
    command = ("train", str(recipe_file(tmp_path)), "run.steps=200", "run.log_every=1")
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *STANDALONE, str(script), *command],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines: list[str] = []
    with process:
        for line in process.stdout or ():
            lines.append(line.strip())
            if line.startswith("step   2/200"):
                process.send_signal(signal.SIGTERM)
    assert lines[-1].startswith("stopped at step ")
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
