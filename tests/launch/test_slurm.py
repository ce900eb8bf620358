from __future__ import annotations

import subprocess
from pathlib import Path

from shardwise.launch.plan import LaunchPlan
from shardwise.launch.slurm import sbatch

PLAN = LaunchPlan(
    ("my recipe.yaml",), "my", nodes=2, nproc=8, device="cuda", variables={"A": "x y"}
)


def lines(plan: LaunchPlan = PLAN) -> list[str]:
    return sbatch(plan, "/venv/bin/python").splitlines()


def test_the_job_is_described_in_its_head() -> None:
    assert [line for line in lines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=my",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --gpus-per-node=8",
    ]
    cpu = LaunchPlan(("my.yaml",), "my", nodes=2, nproc=8)
    assert not [line for line in lines(cpu) if "gpu" in line]


def test_one_srun_starts_every_rank() -> None:
    [line] = [line for line in lines() if line.startswith("srun")]
    assert line.endswith("/venv/bin/python -m shardwise.cli train 'my recipe.yaml' &")
    assert "export A='x y'" in lines()


def test_the_script_has_no_secret_and_is_bash() -> None:
    plan = LaunchPlan(("my.yaml",), "my", nodes=2, nproc=8, token="secret")
    assert "secret" not in sbatch(plan, "python")
    subprocess.run(["bash", "-n"], input=sbatch(plan, "python"), text=True, check=True)


STAND_INS = """
scontrol() { case $1 in show) printf 'n1\\nn2\\n';; *) echo "$@";; esac; }
scancel() { kill -TERM $(cat step); }
srun() { exec python3 -c 'import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ["STATUS"])))
print(os.environ["MASTER_ADDR"], len(os.environ["SHARDWISE_RUN_TOKEN"]), "RANK" in os.environ)
sys.stdout.flush()
open("step.new", "w").write(str(os.getpid())); os.rename("step.new", "step")
time.sleep(60)'; }
(while [ ! -e step ]; do sleep 0.05; done; kill -USR1 $$) &
"""


def test_before_the_time_is_up_ranks_save_and_the_job_is_queued_again(tmp_path: Path) -> None:
    def run(status: int) -> tuple[list[str], int]:
        text = STAND_INS + sbatch(PLAN, "python")
        environ = {
            "PATH": "/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "RANK": "3",
            "STATUS": str(status),
        }
        done = subprocess.run(
            ["bash"],
            input=text,
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        (tmp_path / "step").unlink()
        return done.stdout.splitlines(), done.returncode

    assert run(75) == (["nodes     n1 n2, start 0", "n1 32 False", "requeue 7"], 0)
    assert run(0) == (["nodes     n1 n2, start 0", "n1 32 False"], 0)  # it had just finished
    # A job that could not save would start again for ever.
    assert run(143) == (["nodes     n1 n2, start 0", "n1 32 False"], 143)
