"""SkyPilot: a task that rents the nodes, and goes on elsewhere when they are taken away."""

from __future__ import annotations

import shlex
from typing import Any

from shardwise.launch.launcher import EXIT_STOPPED
from shardwise.launch.plan import RUN_TOKEN, LaunchPlan
from shardwise.launch.yaml_text import dump


def task(plan: LaunchPlan, accelerator: str) -> str:
    """The task as YAML; the token is a secret that its command line carries.

    Args:
        accelerator: SkyPilot's name of the device, such as ``H100``; ``""`` for machines without.
    """
    resources: dict[str, Any] = {
        **({"accelerators": f"{accelerator}:{plan.nproc}"} if accelerator else {"cpus": "4+"}),
        "job_recovery": {
            "max_restarts_on_errors": plan.restarts,
            "recover_on_exit_codes": [EXIT_STOPPED],
        },
    }
    tree = {
        "name": plan.name,
        "num_nodes": plan.nodes,
        "resources": resources,
        "workdir": ".",
        "file_mounts": {"/runs": {"name": f"{plan.name}-runs", "mode": "MOUNT_CACHED"}},
        "envs": dict(plan.variables),
        "secrets": {RUN_TOKEN: None},
        "setup": "pip install 'shardwise[train]'\n",
        "run": _run(plan),
    }
    return dump(tree)


def _run(plan: LaunchPlan) -> str:
    train = shlex.join([*plan.train, "--run.folder", f"/runs/{plan.name}"])
    return f"""\
torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" \\
  --master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n1)" --master-port={plan.port} \\
  --nproc-per-node={plan.nproc} --max-restarts={plan.restarts} {train}
"""
