"""Real launchers: each starts the same run, which has the losses of one machine's two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.hosts import Host, child, hosts, problem
from tests.launch import slurm_cluster
from tests.launch.mpi_hosts import over
from tests.launch.slurm_cluster import output_of
from tests.ranks import free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.spawn, pytest.mark.slow]

RECIPE = """\
model: {width: 32, layers: 1, heads: 2, kv_heads: 2, hidden: 64, tied: true}
tokenizer: {vocabulary: 300}
data: {source: stdlib, max_bytes: 100_000, context: 32, validation: 0.1}
batch: {rows: 8, micro: 4}
checkpoint: {save_every: 50}
sample: {tokens: 0}
run: {folder: run, device: cpu, steps: 200, eval_rows: 8, plan: false}
launch: {nodes: 2, nproc: 1, restarts: 1}
"""
ENVIRON = {
    **{name: value for name, value in os.environ.items() if name != "SHARDWISE_RUN_TOKEN"},
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}

KILL_RANK_1 = (
    "kill -KILL $(grep -lsz ^OMPI_COMM_WORLD_RANK=1 /proc/[0-9]*/environ | cut --delimiter=/ -f3)"
)


def needs(problem: str) -> pytest.MarkDecorator:
    """CI installs what is needed, and is not to pass without it; what it may not do is skipped."""
    is_left = "CI" in os.environ and problem.startswith("not installed")
    return pytest.mark.skipif(bool(problem) and not is_left, reason=problem)


def shardwise(*words: str, folder: Path, on: Host | None = None) -> str:
    command = [sys.executable, "-m", "shardwise.cli", *words]
    if on is not None:
        command = on.command(*command, folder=folder)
    done = subprocess.run(
        command, cwd=folder, env=ENVIRON, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(host: Host, folder: Path, line: str) -> subprocess.Popen[bytes]:
    return host.start("bash", "-c", line, folder=folder, env=ENVIRON)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(RECIPE, "utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Those of two ranks that our own launcher has started, without an interruption."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "tiny.yaml").write_text(RECIPE, "utf-8")
    shardwise("train", "tiny.yaml", "--nproc", "2", folder=folder)
    return losses_in(folder)


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses_in(folder: Path) -> dict[int, float]:
    losses = {int(r["step"]): r["loss"] for r in records(folder) if r["record"] == "stepped"}
    assert sorted(losses) == [*range(1, 201)]
    return losses


def has_come_to(step: int, output: Path) -> bool:
    return output.exists() and bool(re.search(rf"step +{step}/", output.read_text()))


@needs("" if shutil.which("mpirun") else "not installed: mpirun (openmpi-bin)")
def test_mpirun_binds_two_ranks_and_its_status_is_ours(
    folder: Path, losses: dict[int, float]
) -> None:
    printed = shardwise(
        "launch", "tiny.yaml", "--mpi", "--nodes", "1", "--nproc", "2", folder=folder
    )
    assert printed.startswith("mpirun -n 2 --bind-to ")
    assert "done      saved in run" in printed
    assert losses_in(folder) == losses
    wrong = [sys.executable, "-m", "shardwise.cli", "launch", "tiny.yaml", "--mpi", "--nodes", "1"]
    done = subprocess.run(
        [*wrong, "--nproc", "2", "--batch.rows", "7"],
        cwd=folder,
        env=ENVIRON,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "error: " in done.stderr


@needs(problem() or "not installed: mpirun (openmpi-bin)" * (shutil.which("mpirun") is None))
def test_mpirun_over_two_hosts_ends_with_a_killed_rank_and_the_same_command_resumes(
    folder: Path, losses: dict[int, float]
) -> None:
    outputs = [folder / "first", folder / "second"]
    with hosts(3) as machines:
        enter, variables = over(machines, folder)
        words = (sys.executable, "-m", "shardwise.cli", "launch", "tiny.yaml", "--mpi")

        def start(output: Path) -> subprocess.Popen[bytes]:
            with output.open("w") as file:
                command = [*enter, *words, "--hostfile", "hosts"]
                environ = variables | ENVIRON
                return subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file)

        with start(outputs[0]) as mpirun:
            wait_for(lambda: has_come_to(60, outputs[0]))
            subprocess.run(machines[1].command("sh", "-c", KILL_RANK_1), check=True)
            assert mpirun.wait(60) != 0
        with start(outputs[1]) as mpirun:
            assert mpirun.wait(200) == 0, outputs[1].read_text()
    assert "resumed at step 50" in outputs[1].read_text()
    assert losses_in(folder) == losses


@needs(slurm_cluster.problem())
def test_a_job_of_slurm_saves_before_its_time_is_up_and_resumes_to_the_same_loss(
    folder: Path, losses: dict[int, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    printed = shardwise("launch", "tiny.yaml", "--slurm", folder=folder)
    assert "tiny.sbatch: sbatch tiny.sbatch" in printed
    output = folder / "tiny-1.out"
    ports = [free_port() for _ in range(3)]
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm"), ports) as environ:
        # What a shell has set reaches every process of the job.
        environ |= {"RANK": "3", "WORLD_SIZE": "9", "PATH": ENVIRON["PATH"]}
        assert "job 1" in output_of("sbatch", "tiny.sbatch", environment=environ, folder=folder)
        wait_for(lambda: has_come_to(10, output))
        # The signal that SLURM sends 120 s before the job's time is up.
        output_of("scancel", "--batch", "--signal=USR1", "1", environment=environ)
        wait_for(lambda: not output_of("squeue", "--noheader", environment=environ).strip())
    text = output.read_text()
    assert re.search(r"stopped at step \d+/200, checkpoint saved", text), text
    assert "nodes     n1 n2, start 1" in text
    assert "resumed at step" in text
    assert losses_in(folder) == losses


@needs(problem())
def test_the_printed_lines_join_two_hosts_and_a_killed_rank_starts_again(
    folder: Path, losses: dict[int, float]
) -> None:
    with hosts(2) as pair:
        printed = shardwise("launch", "tiny.yaml", folder=folder, on=pair[0])
        lines = [line.strip() for line in printed.splitlines() if " torchrun " in line]
        outputs = [folder / "first", folder / "second"]
        agents = [
            started(host, folder, f"exec env {line} >{output} 2>&1")
            for host, line, output in zip(pair, lines, outputs, strict=True)
        ]
        try:
            wait_for(lambda: has_come_to(60, outputs[0]))
            os.kill(child(child(agents[1].pid)), signal.SIGKILL)  # nsenter, torchrun, rank
            statuses = [agent.wait(120) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert statuses == [0, 0], outputs[0].read_text() + outputs[1].read_text()
    assert any(record["record"] == "resumed" for record in records(folder))
    assert losses_in(folder) == losses


@needs(problem())
def test_one_line_is_for_both_hosts(folder: Path, losses: dict[int, float]) -> None:
    with hosts(2) as pair:
        printed = shardwise("launch", "tiny.yaml", folder=folder, on=pair[0])
        [line] = [line.strip() for line in printed.splitlines() if line.endswith("--start")]
        nodes = [started(host, folder, f"exec env {line} >/dev/null") for host in pair]
        try:
            assert [node.wait(200) for node in nodes] == [0, 0]
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    assert losses_in(folder) == losses


@needs("" if shutil.which("ray") else "not installed: ray (pip install 'ray[train]')")
def test_ray_train_runs_two_workers(folder: Path, losses: dict[int, float]) -> None:
    shardwise("launch", "tiny.yaml", "--ray", folder=folder)
    environ = {**ENVIRON, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "tiny.ray.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_in(folder) == losses
