"""torchrun on several machines: the command for each node.

Its rendezvous is the static one, in which each node has the rank that its line says: torchrun's
other one unpickles what anybody sends to its port.
"""

from __future__ import annotations

from hashlib import sha256

from shardwise.launch.plan import RUN_TOKEN, LaunchPlan, shell


def words(plan: LaunchPlan, node: int) -> list[str]:
    """The command for node ``node``."""
    options = {
        "nnodes": plan.nodes,
        "node-rank": node,
        "nproc-per-node": plan.nproc,
        "master-addr": plan.address or "127.0.0.1",
        "master-port": plan.port,
        "rdzv-id": sha256(plan.token.encode()).hexdigest()[:8],
        "max-restarts": plan.restarts,
    }
    return ["torchrun", *(f"--{name}={value}" for name, value in options.items()), *plan.train]


def environment(plan: LaunchPlan) -> dict[str, str]:
    """Variables for the command of every node."""
    return {RUN_TOKEN: plan.token, **plan.variables}


def line(plan: LaunchPlan, node: int) -> str:
    """The line to paste on node ``node``."""
    return shell(*words(plan, node), **environment(plan))
