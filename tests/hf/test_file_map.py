"""What is stored and what the model has, compared before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.comm.protocol import Comm
from shardwise.hf.weights import _whole
from tests.copies import error_text
from tests.hf.folders import tiny
from tests.ranks import run_threads

Stored = dict[str, Tensor]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def changed(folder: Path, change: Callable[[Stored], object]) -> Path:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("architecture", "change", "line"),
    [
        ("llama", lambda s: s.pop("model.norm.weight"), "model.norm.weight: not stored; nearest"),
        ("llama", lambda s: s.pop("lm_head.weight"), "lm_head.weight: not stored"),
        (
            "llama",
            lambda s: s.update({"model.norm.weight": torch.zeros(5)}),
            "model.norm.weight: stored as (5,), the model has (32,)",
        ),
        (
            "qwen3_moe",
            lambda s: s.pop(EXPERT.replace("up", "down")),
            "experts.down_proj: stored as (3, 32, 16), the model has (4, 32, 16)",
        ),
        ("qwen3_moe", lambda s: s.pop(EXPERT), "experts.gate_up_proj cannot be made from what is"),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_rank(
    tmp_path: Path, architecture: str, change: Callable[[Stored], object], line: str
) -> None:
    folder = changed(tiny(architecture, tmp_path), change)

    def rank(comm: Comm) -> str:
        return error_text(sw.CheckpointError, lambda: sw.hf.load(folder, comm=comm))

    for text in run_threads(2, rank):
        assert line in text


def test_what_only_the_files_have_is_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = changed(tiny("llama", tmp_path), lambda s: s.update({"extra": torch.zeros(2)}))
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"  # of former versions; no news to anybody
    changed(folder, lambda s: s.update({old: torch.zeros(4)}))
    assert "  in the files, left out: extra" in str(sw.hf.load(folder)).splitlines()
    assert "in the files, left out: extra" in caplog.text


@pytest.mark.parametrize("stored_name", ["lm_head.weight", "transformer.wte.weight"])
def test_a_tied_weight_is_read_by_either_name(tmp_path: Path, stored_name: str) -> None:
    def rename(stored: Stored) -> None:
        stored[stored_name] = stored.pop("transformer.wte.weight")

    folder = tiny("gpt2", tmp_path)
    before = sw.hf.load(folder).model.state_dict()
    changed(folder, rename)
    after = sw.hf.load(folder).model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_tied_weight_that_is_stored_twice_must_be_the_same_one(tmp_path: Path) -> None:
    def twice(last: float) -> Callable[[Stored], object]:
        def change(stored: Stored) -> None:
            stored["lm_head.weight"] = stored["transformer.wte.weight"].clone()
            stored["lm_head.weight"][-1, -1] += last

        return change

    folder = changed(tiny("gpt2", tmp_path), twice(0.0))
    text = str(sw.hf.load(folder))
    assert "lm_head.weight = transformer.wte.weight" in text
    assert "left out" not in text
    changed(folder, twice(1.0))

    def rank(comm: Comm) -> str:
        return error_text(sw.CheckpointError, lambda: sw.hf.load(folder, comm=comm))

    for text in run_threads(2, rank):  # the difference lies in rank 1's part
        assert "the files hold two different ones. Set tie_word_embeddings to false" in text


def test_of_experts_each_rank_reads_those_in_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tiny("mixtral", tmp_path, num_experts=16), list[str]()

    def watched(reader: CheckpointReader, place: TensorLocation) -> Tensor:
        read.append(str(place))
        return _whole(reader, place)

    monkeypatch.setattr("shardwise.hf.weights._whole", watched)
    run_threads(4, lambda comm: sw.hf.load(folder, comm=comm))
    experts = 2 * 3 * 16  # layers × matrices × experts
    assert len({*read}) == experts
    assert experts <= len(read) < 1.5 * experts  # one on the border of two shards is read by both
