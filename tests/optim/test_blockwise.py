"""8-bit AdamW of bitsandbytes on shards has the bits of one process: values, codes and scales.

The parameters are smaller than those that it usually quantises, and so is ``min_8bit_size``: a
shard of the embedding has fewer elements than that, the embedding has more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.sharding import sharding_of
from tests import nets
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.hf.quantising import updating_alone
from tests.steps import STRATEGIES, averaged, train

optim = pytest.importorskip("bitsandbytes").optim

KINDS = ("AdamW8bit", "PagedAdamW8bit")
LEAST = 1000  # elements of a parameter that is quantised
State = dict[str, dict[str, Any]]

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def net() -> nn.Module:
    return nets.Decoder(width=24, depth=2, vocabulary=101, tied=False)


def batch(step: int, rank: int) -> nets.Batch:
    return nets.next_tokens(100 * step + rank, 2, 9, 101)


def optimizer_of(
    model: nn.Module, kind: str = "AdamW8bit", lr: float = 0.01
) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(optim, kind)(
        model.parameters(), lr=lr, eps=1e-4, min_8bit_size=LEAST
    )
    return updating_alone(optimizer)  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: nets.Batch) -> None:
    train(model, data)
    optimizer.step()
    optimizer.zero_grad()


@cache
def one_process(
    ranks: Sequence[int], steps: int = 3, kind: str = "AdamW8bit"
) -> tuple[list[dict[str, Tensor]], dict[str, dict[str, Any]]]:
    """The states of a plain model after each step on the ranks' batches, and its optimizer's."""
    model, states = seeded(net), []
    optimizer = optimizer_of(model, kind)
    for number in range(steps):
        gradients = averaged(model, train, [batch(number, rank) for rank in ranks])
        for name, param in model.named_parameters():
            param.grad = gradients[name]
        optimizer.step()
        states.append(clones(model.state_dict()))
    return states, {name: optimizer.state[param] for name, param in model.named_parameters()}


def assert_parts(model: nn.Module, optimizer: torch.optim.Optimizer, whole: State) -> None:
    """This rank has its part of the whole state."""
    for name, param in model.named_parameters():
        sharding, state = sharding_of(param), optimizer.state[param]
        assert sharding is not None
        assert set(state) == set(whole[name])
        assert state["step"] == whole[name]["step"]
        blocks = slice(-(-sharding.start // 256), -(-sharding.stop // 256))
        for key in ("state1", "state2"):
            assert torch.equal(state[key], sharding.cut(whole[name][key], param.shape)), name
        for key in {"absmax1", "absmax2"} & set(state):
            assert torch.equal(state[key], whole[name][key][blocks]), name


CASES = [
    *((1 + k, "full_shard", None, KINDS[k % 2]) for k in range(5)),
    *((3, strategy, None, "AdamW8bit") for strategy in STRATEGIES if strategy != "full_shard"),
    *((4, hybrid, (2, 2), "AdamW8bit") for hybrid in ("hybrid_shard", "hybrid_full")),
]


@pytest.mark.parametrize(("world", "strategy", "grid", "kind"), CASES)
def test_ranks_equal_one_process_bit_for_bit(
    world: int, strategy: str, grid: tuple[int, int] | None, kind: str
) -> None:
    """Ranks of a grid have one batch: they sum gradients in another order than one axis does."""
    expected, whole = one_process((0,) if grid else tuple(range(world)))
    mesh: dict[str, Any] = {"mesh": grid} if grid else {}

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, strategy, comm=comm, blocksize=256, **mesh)
        optimizer = optimizer_of(model, kind)
        for number, after in enumerate(expected):
            step(model, optimizer, batch(number, 0 if grid else comm.rank))
            assert equal(model.state_dict(), after)
        assert_parts(model, optimizer, whole)

    on_ranks(world, net, rank)


@pytest.mark.parametrize("kind", ["AdamW", "PagedAdamW32bit"])
def test_in_32_bits_shards_may_be_cut_anywhere(kind: str) -> None:
    expected, _ = one_process((0, 1, 2), kind=kind)

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        optimizer = optimizer_of(model, kind)
        for number, after in enumerate(expected):
            step(model, optimizer, batch(number, comm.rank))
            assert equal(model.state_dict(), after)

    on_ranks(3, net, rank)


def test_a_shard_is_quantised_if_the_whole_parameter_would_be() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[int, torch.dtype, torch.dtype]:
        sw.shard(model, comm=comm, blocksize=256)
        optimizer = optimizer_of(model)
        step(model, optimizer, batch(0, 0))
        embed, query = model.get_parameter("embed.weight"), "blocks.0.attention.query.weight"
        states = optimizer.state[embed], optimizer.state[model.get_parameter(query)]
        return math.prod(embed.shape), *(state["state1"].dtype for state in states)

    for numel, of_embedding, of_query in on_ranks(4, net, rank):
        assert numel < LEAST <= 101 * 24
        assert (of_embedding, of_query) == (torch.uint8, torch.float32)


def test_shards_that_cut_blocks_are_refused_with_the_way_out() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        optimizer = optimizer_of(model)
        train(model, batch(0, comm.rank))
        return error_text(sw.OptimizerError, optimizer.step)

    for text in on_ranks(3, net, rank):
        assert text.startswith("AdamW8bit keeps one scale for each 256 elements, and parameter '")
        assert "is cut at [" in text
        assert "Pass blocksize=256 to sw.shard(); if " in text


def with_adapters() -> nn.Module:
    """Adapters that are large enough to be quantised, on a frozen model."""
    model = nets.Decoder(width=24, depth=1, vocabulary=101, tied=False).requires_grad_(False)
    head = model.get_submodule("lm_head")
    assert isinstance(head, nn.Linear)
    model.set_submodule("lm_head", nets.LowRank(head, rank=48))
    return model


def test_adapters_are_trained_on_a_frozen_base_that_is_cut_inside_blocks() -> None:
    plain = seeded(with_adapters)
    optimizer = optimizer_of(plain)
    for number in range(2):
        step(plain, optimizer, batch(number, 0))
    expected = clones(plain.state_dict())

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm, blocksize=256)
        optimizer = optimizer_of(model)
        for number in range(2):
            step(model, optimizer, batch(number, 0))
        assert equal(model.state_dict(), expected)
        assert (
            optimizer.state[model.get_parameter("lm_head.up.weight")]["state1"].dtype is torch.uint8
        )
        sharded.model.requires_grad_(True)
        train(model, batch(2, 0))
        text = error_text(sw.OptimizerError, optimizer.step)
        sharded.relayout()
        train(model, batch(2, 0))
        optimizer.step()
        return text

    for text in on_ranks(4, with_adapters, rank):
        assert "inside such blocks" in text
        assert text.endswith("was frozen then, call sharded.relayout() once it is trained.")


def test_a_negative_blocksize_is_refused() -> None:
    text = error_text(sw.ConfigError, lambda: sw.shard(seeded(net), blocksize=-1))
    assert text == "blocksize is -1; set 256, or 0 to cut between rows."


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    """With one batch for all ranks, so that means over 4, 2 and 1 of them are equal."""
    expected, whole = one_process((0,), steps=6)

    def rank(comm: Comm, model: nn.Module, first: int) -> None:
        sharded = sw.shard(model, comm=comm, blocksize=256)
        optimizer = optimizer_of(model, lr=0.5 if first else 0.01)
        if first:
            sharded.load(tmp_path / str(first), optimizer)
        for number in range(first, first + 2):
            step(model, optimizer, batch(number, 0))
            assert equal(model.state_dict(), expected[number])
        sharded.save(tmp_path / str(first + 2), optimizer)
        if first == 4:
            assert_parts(model, optimizer, whole)

    for first, world in ((0, 4), (2, 2), (4, 1)):
        on_ranks(world, net, lambda comm, model: rank(comm, model, first))  # noqa: B023

    def cut_elsewhere(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(
            sw.OptimizerError, lambda: sharded.load(tmp_path / "2", optimizer_of(model))
        )

    def frozen(comm: Comm, model: nn.Module) -> str:
        """Whose optimizer has no state yet: the loaded state would be cut, with wrong scales."""
        sharded, optimizer = sw.shard(model, comm=comm), optimizer_of(model.requires_grad_(False))
        return error_text(sw.CheckpointError, lambda: sharded.load(tmp_path / "2", optimizer))

    for rank_fn in (cut_elsewhere, frozen):
        assert all("inside such blocks" in text for text in on_ranks(3, net, rank_fn))


def test_its_whole_state_by_name_is_that_of_one_process_and_can_be_loaded() -> None:
    _, whole = one_process((0,), steps=2)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, blocksize=256)
        optimizer, other = optimizer_of(model), optimizer_of(model)
        for number in range(2):
            step(model, optimizer, batch(number, 0))
        states = sharded.optimizer_state_dict(optimizer)
        for name, state in states["state"].items():
            assert all(torch.equal(v, whole[name][k]) for k, v in state.items() if k != "step")
            assert set(state) == set(whole[name]) - {"qmap1", "qmap2"}
        sharded.load_optimizer_state_dict(other, states)
        step(model, other, batch(2, 0))  # which makes what is in no state dict
        assert {len(other.state[param]) for param in model.parameters()} == {3, 7}

    on_ranks(2, net, rank)


def test_an_optimizer_that_has_stepped_is_cut_with_the_model_and_made_whole_again() -> None:
    expected, whole = one_process((0,), steps=6)

    def rank(comm: Comm, model: nn.Module) -> None:
        optimizer = optimizer_of(model)

        def steps(first: int, last: int) -> None:
            for number in range(first, last):
                step(model, optimizer, batch(number, 0))

        steps(0, 2)
        sharded = sw.shard(model, comm=comm, blocksize=256)
        steps(2, 4)
        sharded.unshard()
        steps(4, 6)
        assert equal(clones(model.state_dict()), expected[-1])
        for name, param in model.named_parameters():
            state = optimizer.state[param]
            assert all(torch.equal(state[k], v) for k, v in whole[name].items() if k != "step")

    on_ranks(4, net, rank)
