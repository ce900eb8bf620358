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

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

ARGUMENTS = {arguments}


def rank(config: dict[str, str]) -> None:
    """One worker: Ray has set its rank, and made the process group."""
    os.chdir(config.pop("folder"))
    os.environ.update(config)
    if torch.cuda.is_available():
        torch.cuda.set_device(get_device())
    from shardwise.cli import main

    try:
        main(["train", *ARGUMENTS])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"this rank ended with status {{end.code}}") from None


if __name__ == "__main__":
    TorchTrainer(
        rank,
        train_loop_config={config} | {{{token}: secrets.token_hex(16), "folder": os.getcwd()}},
        scaling_config=ScalingConfig(num_workers={ranks}, use_gpu={use_gpu}),
        run_config=RunConfig(failure_config=FailureConfig(max_failures={restarts})),
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
        config=json.dumps(plan.variables),
        ranks=plan.ranks,
        use_gpu=plan.device == "cuda",
        restarts=plan.restarts,
    )
