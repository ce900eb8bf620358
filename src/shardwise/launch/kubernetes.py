"""Kubernetes: a TrainJob of Kubeflow Trainer, with what it mounts.

Its operator sets the variables from which torchrun reads nodes, ranks and address.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.launch.plan import RUN_TOKEN, LaunchPlan
from shardwise.launch.yaml_text import dump

RUNTIME = "torch-distributed"  # it comes with Kubeflow Trainer
RESOURCES = {"cuda": "nvidia.com/gpu", "xpu": "gpu.intel.com/i915", "hpu": "habana.ai/gaudi"}
GRACE = 120  # seconds in which a pod that is evicted may save


def manifests(plan: LaunchPlan, recipe: tuple[str, str], image: str) -> str:
    """Kubernetes' objects as one YAML file: secret, recipe, claim, job.

    Args:
        recipe: the name and text of the recipe's file.
        image: with shardwise, such as the Dockerfile makes.
    """
    name = _name(plan.name)
    objects = [
        _object("v1", "Secret", f"{name}-token", stringData={RUN_TOKEN: plan.token}),
        _object("v1", "ConfigMap", f"{name}-recipe", data=dict([recipe])),
        _object("v1", "PersistentVolumeClaim", f"{name}-runs", spec=_CLAIM),
        _object(
            *("trainer.kubeflow.org/v1alpha1", "TrainJob", name),
            spec={
                "runtimeRef": {"name": RUNTIME},
                "trainer": _trainer(plan, f"/recipe/{recipe[0]}", f"{name}-token", image),
                "runtimePatches": [_patch(name)],
            },
        ),
    ]
    return dump(*objects)


_CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}}


def _name(text: str) -> str:
    """A name that Kubernetes accepts."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "shardwise"


def _object(version: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}


def _trainer(plan: LaunchPlan, recipe: str, secret: str, image: str) -> dict[str, Any]:
    others = [*plan.arguments[1:], "--run.folder", f"/runs/{plan.name}"]
    train = ["-m", "shardwise.cli", "train", recipe, *others]
    key = {"secretKeyRef": {"name": secret, "key": RUN_TOKEN}}
    variables = [{"name": each, "value": value} for each, value in plan.variables.items()]
    trainer = {
        "image": image,
        "numNodes": plan.nodes,
        "command": ["torchrun"],
        "args": [f"--nproc-per-node={plan.nproc}", f"--max-restarts={plan.restarts}", *train],
        "env": [{"name": RUN_TOKEN, "valueFrom": key}, *variables],
    }
    if plan.device in RESOURCES:
        trainer["resourcesPerNode"] = {"limits": {RESOURCES[plan.device]: str(plan.nproc)}}
    return trainer


def _patch(name: str) -> dict[str, Any]:
    """The recipe at ``/recipe``, the claim at ``/runs``, and time to save."""
    volumes = [
        {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs"}},
    ]
    mounts = [{"name": each["name"], "mountPath": f"/{each['name']}"} for each in volumes]
    pod = {
        "terminationGracePeriodSeconds": GRACE,
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {"manager": "shardwise.launch/user", "trainingRuntimeSpec": runtime}
