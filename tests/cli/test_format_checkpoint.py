"""What is read of a run or a checkpoint fits a terminal, whatever the size of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.folder import Leftover
from shardwise.cli.format_checkpoint import (
    dtype_name,
    format_checkpoint,
    format_damage,
    format_run,
    shorten,
)
from shardwise.cli.runs import Run, survey
from shardwise.convert.catalogue import Catalogue, Damage
from tests.checkpoint.runs import saved
from tests.nets import NETS

TOKEN = "0123456789abcdef"


def llama(layers: int) -> dict[str, torch.Tensor]:
    """The names of a decoder of 9 tensors a layer, and no values to speak of."""
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    shapes = {part: (2,) if part.endswith("norm") else (2, 2) for part in parts}
    tensors = {
        f"model.layers.{n}.{part}.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for n in range(layers)
        for part, shape in shapes.items()
    }
    ends = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return tensors | {name: torch.zeros(2) for name in ends}


def test_a_model_of_300_tensors_is_a_dozen_lines(tmp_path: Path) -> None:
    save_file(llama(33), tmp_path / "model.safetensors")
    lines = format_checkpoint(Catalogue.read(tmp_path))
    rows = [line for line in lines if line.startswith("  ")]
    assert len(rows) == 12
    assert max(map(len, rows)) <= 100
    assert "  model.layers.{0…32}.mlp.up_proj.weight" in "\n".join(rows)
    assert "33 × [2, 2]  bfloat16" in "\n".join(rows)
    assert len(format_checkpoint(Catalogue.read(tmp_path), list_all=True)) > 300


def test_parameters_with_unlike_state_are_told_apart(tmp_path: Path) -> None:
    net = NETS[0]

    def only_some(params: object) -> torch.optim.Optimizer:
        listed = list(params)  # type: ignore[call-overload]
        groups = [{"params": listed[:-1], "momentum": 0.9}, {"params": listed[-1:]}]
        return torch.optim.RMSprop(groups, lr=0.01)

    saved(net, 1, tmp_path / "step-2", make=only_some)
    text = "\n".join(format_checkpoint(Catalogue.read(tmp_path / "step-2")))
    assert "for each of 42 parameters:\n    momentum_buffer, square_avg: in its shape" in text
    assert "for 1 parameter:\n    square_avg: in its shape" in text
    assert "      lm_head.weight" in text
    assert "group 1: 1 parameter, " in text


def test_what_a_crash_left_is_explained(tmp_path: Path) -> None:
    saved(NETS[1], 1, tmp_path / "step-1")
    listing = survey(tmp_path)
    leftovers = (
        (Leftover(tmp_path / f"step-2.partial-{TOKEN}", "partial", "step-2"), True),
        (Leftover(tmp_path / f"step-3.partial-{TOKEN}", "partial", "step-3"), False),
        (Leftover(tmp_path / f"step-1.replaced-{TOKEN}", "replaced", "step-1"), False),
        (Leftover(tmp_path / f"step-0.replaced-{TOKEN}", "replaced", "step-0"), False),
    )
    run = Run(listing.folder, listing.checkpoints, "step-9", leftovers)
    text = [line.split(": ")[1] for line in format_run(run)[-4:]]
    assert text == [
        "is being written",
        "left by an interrupted save; the next save removes it",
        "a replaced checkpoint whose removal was interrupted; the next save removes it",
        "the only copy of its checkpoint, which is loaded by name; a rename was interrupted",
    ]
    assert "latest points at step-9, which is not a checkpoint of the run" in format_run(run)


def test_damage_says_whose_bytes() -> None:
    layers = tuple(f"h.{n}.w" for n in range(4))
    assert format_damage([Damage("m.safetensors", layers)]) == [
        "DAMAGED m.safetensors: bytes do not match their checksums; they are of",
        "    h.{0…3}.w",
    ]
    assert "    no tensors" in format_damage([Damage("config.json")])


def test_long_values_are_cut() -> None:
    assert shorten("x" * 200, 10) == "xxxxxxxxx…"
    assert shorten("a\nb", 10) == "a\\x0ab"


@pytest.mark.parametrize(("code", "name"), [("BF16", "bfloat16"), ("F8_E5M2", "float8_e5m2")])
def test_dtypes_have_torch_s_names(code: str, name: str) -> None:
    assert dtype_name(code) == name


def test_what_could_not_be_read_is_not_called_damaged() -> None:
    damage = Damage("m.safetensors", ("a",), unreadable="the disk fails.")
    (first, second) = format_damage([damage])
    assert first.startswith("NOT READ m.safetensors: bytes could not be read")
    assert "the disk fails. They are of" in first
    assert second == "    a"


def test_no_tensors_and_a_name_of_nothing_are_words(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors")
    assert "weights: 0 tensors, 0 B" in format_checkpoint(
        Catalogue.read(tmp_path / "none.safetensors")
    )
    save_file({"": torch.zeros(2)}, tmp_path / "one.safetensors")
    for list_all in (False, True):
        lines = format_checkpoint(Catalogue.read(tmp_path / "one.safetensors"), list_all)
        assert "weights: 1 tensor, 8 B (1 float32 8 B)" in lines
        assert lines[-1].startswith('  ""  ')
