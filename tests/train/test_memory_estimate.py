from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.train import memory_estimate as estimate
from shardwise.train.decoder import Decoder
from shardwise.train.memory_estimate import check_memory, predict, state_bytes
from tests.train.tiny import tiny_recipe

CPU = torch.device("cpu")
NUMBERS = 0.03  # padding, and the step's number beside each parameter's state


def whole_of(recipe: Recipe) -> int:
    """Bytes of all parameters, of a vocabulary of 300 tokens."""
    with torch.device("meta"):
        model = Decoder(recipe.model, 300, recipe.data.context)
    return sum(param.nbytes for param in model.parameters())


def state(recipe: Recipe, local_ranks: int) -> list[float]:
    """Bytes of these of four ranks, in sizes of all parameters."""
    in_bytes = state_bytes(predict(recipe, 4, 300), recipe, local_ranks)
    return [nbytes / whole_of(recipe) for nbytes in in_bytes]


@pytest.mark.parametrize(
    ("strategy", "here", "states"),
    [
        ("no_shard", 1, 4),
        ("no_shard", 4, 16),  # each rank has all of it
        ("zero1", 1, 1 + 3 / 4),
        ("shard_grad_op", 4, 1 + 3),
        ("full_shard", 1, 4 / 4),
        ("full_shard", 4, 4),
        ("hybrid_shard", 1, 4 / 2),
        ("hybrid_shard", 4, 8),  # two copies
        ("hybrid_shard_zero2", 1, 1 + 3 / 2),
        ("hybrid_full", 1, 1 / 2 + 3 / 4),
    ],
)
def test_the_state_of_the_ranks_in_one_memory(
    tmp_path: Path, strategy: str, here: int, states: float
) -> None:
    mesh = ["sharding.mesh=[2, 2]"] if strategy.startswith("hybrid") else []
    recipe = tiny_recipe(tmp_path, f"sharding.strategy={strategy}", *mesh)
    assert state(recipe, here) == pytest.approx([states, 0], rel=NUMBERS)


@pytest.mark.parametrize(
    ("strategy", "offload", "device", "host"),
    [
        ("full_shard", "optimizer", 1 / 4, 4 / 4),  # a copy of the shard
        ("full_shard", "everything", 0, 4 / 4),
        ("shard_grad_op", "everything", 1, 4 / 4),
        ("hybrid_full", "optimizer", 1 / 2, 4 / 4),
        ("no_shard", "optimizer", 1, 4),
    ],
)
def test_what_is_in_host_memory_is_not_in_the_devices(
    tmp_path: Path, strategy: str, offload: str, device: float, host: float
) -> None:
    mesh = ["sharding.mesh=[2, 2]"] if strategy.startswith("hybrid") else []
    overrides = [f"sharding.strategy={strategy}", f"sharding.offload={offload}", *mesh]
    recipe = tiny_recipe(tmp_path, *overrides)
    assert state(recipe, 1) == pytest.approx([device, host], rel=NUMBERS)


def test_a_hybrid_without_a_mesh_has_a_copy_on_each_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    recipe = tiny_recipe(tmp_path, "sharding.strategy=hybrid_full")
    assert state(recipe, 2) == pytest.approx([1 + 3 / 2, 0], rel=NUMBERS)


def test_what_cannot_fit_is_refused_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tiny_recipe(tmp_path, "model.width=8192", "model.layers=64", "model.hidden=22016")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(estimate, "machine_memory", lambda **_: 24_000_000_000)
    with pytest.raises(ConfigError) as caught:
        check_memory(large, CPU, 2)
    text = str(caught.value)
    assert text.startswith("with gradients and optimizer state, the model of 64 layers of width")
    assert "full_shard over 2 ranks takes 708.0 GiB for the 2 of them on this cpu" in text
    assert "which has 22.4 GiB. Choose a smaller model, more machines or sharding.p" in text
    check_memory(large, CPU, 128)
    keys = "sharding.strategy=zero1", "sharding.precision.stored_dtype=bfloat16"
    narrow = tiny_recipe(tmp_path, "model.width=8192", "model.layers=64", *keys)
    with pytest.raises(ConfigError, match=r"more machines or sharding.strategy full_shard\.$"):
        check_memory(narrow, CPU, 2, 300)


def test_the_host_memory_of_a_machine_is_that_of_all_ranks_that_any_launcher_started_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, "sharding.offload=everything")
    needed = state_bytes(predict(recipe, 4, 300), recipe, 4).host
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    monkeypatch.setattr(estimate, "machine_memory", lambda **_: needed - 1)
    monkeypatch.setattr(estimate, "memory_of", lambda _: 0)
    with pytest.raises(
        ConfigError,
        match=r"GiB for the 4|MiB for the 4|KiB for the 4 of them in host memory, which has",
    ):
        check_memory(recipe, torch.device("cuda"), 4, 300)
    with pytest.raises(ConfigError, match=r"for the 4 of them on this cpu"):
        check_memory(recipe, CPU, 4, 300)
    monkeypatch.setattr(estimate, "machine_memory", lambda **_: needed)
    check_memory(recipe, torch.device("cuda"), 4, 300)
    plain = tiny_recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"for the 1 of them on this cuda, which has 0 B"):
        check_memory(plain, torch.device("cuda"), 4, 300)
