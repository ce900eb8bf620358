"""Ray Train: a program in which each worker is a rank."""

from __future__ import annotations

import json

from shardwise.launch.plan import RUN_TOKEN, LaunchPlan

PROGRAM = '''\
"""{nodes} nodes of {nproc} ranks of `shardwise train` on Ray: python {name}.ray.py

On a cluster: ray job submit --working-dir . -- python {name}.ray.py
"""

import os
import secrets

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

ARGUMENTS = {arguments}


def rank(variables: dict[str, str]) -> None:
    """One worker: Ray has set its rank, and made the process group."""
    os.environ.update(variables)
    from shardwise.cli import main

    try:
        main(["train", *ARGUMENTS])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"this rank ended with status {{end.code}}") from None


if __name__ == "__main__":
    TorchTrainer(
        rank,
        train_loop_config={{{token}: secrets.token_hex(16), **{variables}}},
        scaling_config=ScalingConfig(
            num_workers={ranks}, use_gpu={use_gpu}, placement_strategy="PACK"
        ),
        run_config=RunConfig(
            name={title}, failure_config=FailureConfig(max_failures={restarts})
        ),
    ).fit()
'''


def program(plan: LaunchPlan) -> str:
    """The text of the program."""
    return PROGRAM.format(
        nodes=plan.nodes,
        nproc=plan.nproc,
        name=plan.name,
        arguments=json.dumps(plan.arguments),
        token=json.dumps(RUN_TOKEN),
        variables=json.dumps(dict(plan.variables)),
        ranks=plan.ranks,
        use_gpu=plan.device == "cuda",
        title=json.dumps(plan.name),
        restarts=plan.restarts,
    )
