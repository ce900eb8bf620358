from __future__ import annotations

from typing import Any

import pytest
import yaml

from shardwise.launch.kubernetes import manifests
from shardwise.launch.plan import LaunchPlan

PLAN = LaunchPlan(
    ("my_run.yaml", "--run.steps", "10"),
    "my_run",
    nodes=2,
    nproc=8,
    device="cuda",
    token="secret",
    restarts=3,
    variables={"GLOO_SOCKET_IFNAME": "eth0"},
)
RECIPE = "# a recipe\nrun: {steps: 5}\n"


def objects() -> dict[str, dict[str, Any]]:
    text = manifests(PLAN, ("my_run.yaml", RECIPE), "registry/shardwise")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_recipe_and_the_token_are_mounted_and_not_in_the_job() -> None:
    by_kind = objects()
    assert by_kind["ConfigMap"]["data"] == {"my_run.yaml": RECIPE}
    assert by_kind["Secret"]["stringData"] == {"SHARDWISE_RUN_TOKEN": "secret"}
    assert "secret'" not in str(by_kind["TrainJob"]).replace("'secretKeyRef'", "")
    assert {each["metadata"]["name"] for each in by_kind.values()} == {
        *("my-run", "my-run-token", "my-run-recipe", "my-run-runs")
    }


def test_every_node_runs_torchrun_which_kubeflow_tells_the_rest() -> None:
    trainer = objects()["TrainJob"]["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert " ".join([*trainer["command"], *trainer["args"]]) == (
        "torchrun --nproc-per-node=8 --max-restarts=3 -m shardwise.cli train /recipe/my_run.yaml "
        "--run.steps 10 --run.folder /runs/my_run"
    )


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("TrainJob", "trainer_v1alpha1_train_job"),
        ("Secret", "io_k8s_api_core_v1_secret"),
        ("ConfigMap", "io_k8s_api_core_v1_config_map"),
        ("PersistentVolumeClaim", "io_k8s_api_core_v1_persistent_volume_claim"),
    ],
)
def test_kubernetes_own_models_know_every_key(kind: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    name = "".join(part[:1].upper() + part[1:] for part in model.split("_"))
    written = objects()[kind]
    assert getattr(models, name).from_dict(written).to_dict() == written
