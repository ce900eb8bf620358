"""Configuration and tokenizer go where the weights go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.convert import export as of_export
from shardwise.convert.export import ExportOptions, export
from shardwise.convert.writer import Converted
from tests.checkpoint.runs import saved
from tests.nets import NETS

DECODER = NETS[0]


def exported(source: Path, destination: Path, **options: Any) -> Converted:
    with CheckpointReader.open(source) as opened:
        return export(opened, destination, ExportOptions(**options))


def test_configuration_and_tokenizer_come_along(tmp_path: Path) -> None:
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32"}, "width": 3}
    save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("print('code of somebody')")
    result = exported(tmp_path, tmp_path / "out", dtype=torch.bfloat16)
    assert result.small == ("config.json", "tokenizer.json")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16"},
        "width": 3,
    }
    assert json.loads((tmp_path / "config.json").read_text()) == config
    exported(tmp_path, tmp_path / "same")
    assert (tmp_path / "same" / "config.json").read_text() == json.dumps(config)


def test_what_the_run_keeps_beside_its_checkpoints_comes_along(tmp_path: Path) -> None:
    saved(DECODER, 1, tmp_path / "run" / "checkpoints" / "step-1", files={"config.json": "{}"})
    (tmp_path / "run" / "tokenizer.json").write_text('{"of": "the run"}')
    (tmp_path / "run" / "config.json").write_text('{"of": "another model"}')
    (tmp_path / "run" / "metrics.jsonl").touch()
    exported(tmp_path / "run" / "checkpoints" / "step-1", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"of": "the run"}'
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_only_a_run_s_own_files_come_along(tmp_path: Path) -> None:
    """What lies beside an export is of another model, and a link may lead anywhere."""
    saved(DECODER, 1, tmp_path / "step-1")
    exported(tmp_path / "step-1", tmp_path / "out")
    (tmp_path / "config.json").write_text('{"of": "somebody else"}')
    assert exported(tmp_path / "out", tmp_path / "again").small == ()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(sw.CheckpointError, match="is a link out of its folder"):
        exported(tmp_path / "step-1", tmp_path / "never")


def test_one_file_that_is_called_as_a_model_s_brings_what_its_folder_holds(tmp_path: Path) -> None:
    for name in ("model.safetensors", "part.safetensors"):
        save_file({"x": torch.ones(3)}, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.json").write_text("{}")
    assert exported(tmp_path / "model.safetensors", tmp_path / "a").small == ("config.json",)
    assert exported(tmp_path / "part.safetensors", tmp_path / "b").small == ()


def test_code_and_pickles_stay_where_they_are_and_are_named(tmp_path: Path) -> None:
    files = {"modeling.py": "code", "pytorch_model.bin": "pickle", "config.json": "{}"}
    saved(DECODER, 1, tmp_path / "of" / "ours", files=files)
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    save_file({"x": torch.ones(3)}, foreign / "model.safetensors")
    for name, text in files.items():
        (foreign / name).write_text(text)
    (foreign / "pytorch_model.bin.index.json").write_text("{}")
    for source, more in (
        (tmp_path / "of" / "ours", []),
        (foreign, ["pytorch_model.bin.index.json"]),
    ):
        result = exported(source, tmp_path / f"out-{source.name}")
        assert result.small == ("config.json",)
        assert list(result.left_out) == ["modeling.py", "pytorch_model.bin", *more]
        names = {path.name for path in result.path.iterdir()}
        assert names == {"config.json", "manifest.json", "model.safetensors"}


def test_a_file_that_is_not_small_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in memory as a whole. Training state comes along whatever its size."""
    monkeypatch.setattr(of_export, "LARGEST", 10)
    saved(DECODER, 1, tmp_path / "step-1", files={"a.json": "{}", "b.json": "x" * 11})
    result = exported(tmp_path / "step-1", tmp_path / "out", with_optimizer=True)
    assert sorted(result.small) == ["a.json", "training.json"]
    assert result.left_out == ("b.json",)


def test_a_configuration_that_cannot_be_told_the_dtype_is_an_error(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(sw.CheckpointError, match=r"config\.json is not JSON"):
        exported(tmp_path, tmp_path / "out", dtype=torch.bfloat16)
    exported(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{"
