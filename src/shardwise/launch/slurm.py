"""SLURM: a batch script whose one ``srun`` starts every rank, and which goes on after its time.

Before the time limit SLURM signals the script, which asks the ranks to save and stop. They end with
status 75, and the script puts the job into the queue again, where the run resumes.
"""

from __future__ import annotations

import shlex

from shardwise.launch.launcher import EXIT_STOPPED
from shardwise.launch.plan import OF_A_RANK, RUN_TOKEN, LaunchPlan

GRACE = 120  # seconds before the time limit at which the ranks are asked to save


def sbatch(plan: LaunchPlan, python: str) -> str:
    """The text of the script.

    Args:
        python: the interpreter on every node, with shardwise.
    """
    gpus = [f"#SBATCH --gpus-per-node={plan.nproc}"] * (plan.device != "cpu")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in plan.variables.items()]
    return "\n".join([*_head(plan), *gpus, *_environment(), *exports, *_step(plan, python), ""])


def _head(plan: LaunchPlan) -> list[str]:
    return [
        "#!/bin/bash",
        "# Options of sbatch take precedence over these, and others can be added:",
        f"#   sbatch --time=12:00:00 --partition=NAME --cpus-per-task=8 {plan.name}.sbatch",
        f"#SBATCH --job-name={plan.name}",
        f"#SBATCH --nodes={plan.nodes}",
        f"#SBATCH --ntasks-per-node={plan.nproc}",
        f"#SBATCH --signal=B:USR1@{GRACE}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
    ]


def _environment() -> list[str]:
    return [
        "",
        f"unset {' '.join(OF_A_RANK)}  # srun tells each rank; those of a shell mislead",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR=${hosts%%[[:space:]]*}",
        f"export {RUN_TOKEN}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
        'echo "nodes     ${hosts//[[:space:]]/ }, start ${SLURM_RESTART_COUNT:-0}"',
    ]


def _step(plan: LaunchPlan, python: str) -> list[str]:
    cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
    return [
        "",
        "again=no",
        # srun would kill the ranks if it were signalled itself.
        "trap 'again=yes; scancel --signal=TERM $SLURM_JOB_ID' USR1  # the ranks save and end",
        "trap : TERM  # of scancel and preemption: the ranks get it, too",
        f"srun {cpus} {shlex.join([python, *plan.train])} &",
        "step=$!",
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; status=$?; done',
        # Ranks that could not save end with another status: the job would start for ever.
        f'if [ "$again" = yes ] && [ "$status" = {EXIT_STOPPED} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID" && exit',
        "fi",
        'exit "$status"',
    ]
