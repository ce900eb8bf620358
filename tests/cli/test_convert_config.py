"""``shardwise convert-config``: the report, and the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from shardwise.cli import main
from shardwise.train.recipe import read_recipe
from tests.dialects.test_interpret import ASKED_V1, GAUDI


def convert(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, code: int = 0
) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["convert-config", *arguments, *(() if code else ("--strict",))])
    out, error = capsys.readouterr()
    assert caught.value.code == code, error
    return out + error


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp_config.json").write_text(GAUDI, "utf-8")
    (tmp_path / "default_config.yaml").write_text(ASKED_V1, "utf-8")
    return tmp_path


def test_gaudis_file_becomes_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = convert(capsys, here, "fsdp_config.json").splitlines()
    assert len(lines) == 1 + len(json.loads(GAUDI)) + 1
    words = "translated fsdp_sharding_strategy 1 sharding.strategy: full_shard"
    assert " ".join(lines[5].split()).startswith(words)
    recipe = read_recipe(here / "fsdp_config.recipe.yaml")
    assert recipe.sharding.wrap == ["GaudiLlamaDecoderLayer"]
    assert recipe.sharding.prefetch.forward == 0
    text = convert(capsys, here, "fsdp_config.json", code=1)
    assert "fsdp_config.recipe.yaml exists; name another --output, or pass --overwrite." in text


def test_accelerates_file_also_says_how_to_start(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(capsys, here, "default_config.yaml", "--output", "r.yaml")
    assert read_recipe(here / "r.yaml").sharding.strategy == "shard_grad_op"
    assert (
        "# Start: torchrun --nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr 10.0.0.1 "
        "--master-port 29500 -m shardwise.cli train r.yaml\n"
    ) in (here / "r.yaml").read_text("utf-8")


def test_from_dialect_to_dialect_by_way_of_the_environment(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(capsys, here, "fsdp_config.json", "--to", "environment")
    text = (here / "fsdp_config.environment.env").read_text("utf-8")
    assert "FSDP_SHARDING_STRATEGY=FULL_SHARD\n" in text
    convert(
        capsys, here, "fsdp_config.environment.env", "--to", "fsdp_config", "--output", "b.json"
    )
    back = json.loads((here / "b.json").read_text("utf-8"))
    assert back == json.loads(GAUDI) | {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}


def test_what_cannot_be_followed_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"fsdp_sharding_stratgy": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    (here / "c.yaml").write_text(yaml.safe_dump(keys), "utf-8")
    text = convert(capsys, here, "c.yaml", code=1)
    assert "did you mean fsdp_sharding_strategy?" in text
    assert "is contradictory: units by size need a min_num_params" in text
    assert not (here / "c.recipe.yaml").exists()
    assert "nearest is 'accelerate'" in convert(capsys, here, "c.yaml", "--to", "acelerate", code=1)
