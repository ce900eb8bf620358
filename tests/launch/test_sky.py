from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.launch.plan import LaunchPlan
from shardwise.launch.sky import task

SCHEMA = Path(__file__).parent / "skypilot.json"  # of SkyPilot itself; its head says which
PLAN = LaunchPlan(("my.yaml",), "my", nodes=2, nproc=8, device="cuda", token="secret", restarts=3)


def written(accelerator: str = "H100") -> dict[str, Any]:
    tree = yaml.safe_load(task(PLAN, accelerator))
    assert isinstance(tree, dict)
    return tree


def test_a_run_that_saved_and_stopped_goes_on_elsewhere() -> None:
    assert written()["resources"] == {
        "accelerators": "H100:8",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
    }
    assert written("")["resources"]["cpus"] == "4+"


def test_the_token_is_not_in_the_file() -> None:
    assert "secret" not in task(PLAN, "").replace("secrets:", "")
    assert written()["secrets"] == {"SHARDWISE_RUN_TOKEN": None}


@pytest.mark.parametrize("accelerator", ["H100", ""])
def test_skypilots_own_schema_accepts_it(accelerator: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text("utf-8"))["schema"]
    jsonschema.validate(written(accelerator), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written() | {"num_node": 2}, schema)


def test_each_node_starts_torchrun_with_what_skypilot_tells_it() -> None:
    environ = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3",
        "PATH": "/usr/bin:/bin",
    }
    text = f'torchrun() {{ echo "$@"; }}\n{written()["run"]}'
    done = subprocess.run(
        ["bash"], input=text, env=environ, capture_output=True, check=True, text=True
    )
    assert done.stdout == (
        "--nnodes=2 --node-rank=1 --master-addr=10.0.0.2 --master-port=29500 --nproc-per-node=8 "
        "--max-restarts=3 -m shardwise.cli train my.yaml --run.folder /runs/my\n"
    )
