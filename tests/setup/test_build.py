"""Messages while a model is cut."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.plan.draw import draw
from shardwise.setup import build
from tests.copies import error_text, on_ranks
from tests.ranks import run_threads


@pytest.mark.parametrize(
    ("strategy", "world"), [("no_shard", 2), ("no_shard", 1), ("full_shard", 2), ("full_shard", 1)]
)
def test_copies_of_a_large_model_are_warned_of_where_there_are_any(
    strategy: str, world: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(comm: Comm) -> None:
        sw.shard(nn.Linear(4, 4), strategy, comm=comm)

    monkeypatch.setattr(build, "LARGE", 20)
    with caplog.at_level(logging.WARNING, "shardwise"):
        run_threads(world, rank)
    assert ("no_shard holds all" in caplog.text) is (strategy == "no_shard" and world > 1)


@pytest.mark.parametrize(("numel", "warns"), [(10**9 - 1, False), (10**9, True)])
def test_a_model_is_large_from_a_billion_parameters(
    numel: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    blueprint = draw(nn.Linear(numel, 1, bias=False, device="meta"), "no_shard")
    with caplog.at_level(logging.WARNING, "shardwise"):
        build.warn_of_copies(blueprint.specs, blueprint.grid.size)
    warning = (
        "no_shard holds all 1.0 billion parameters, their gradients and optimizer state on every"
    )
    assert (warning in caplog.text) is warns


@pytest.mark.parametrize("world", [1, 2])
def test_a_sparse_buffer_is_refused_by_its_name_before_anything_changes(world: int) -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("graph", torch.eye(3).to_sparse())
        return model

    def rank(comm: Comm, model: nn.Module) -> str:
        text = error_text(sw.ConfigError, lambda: sw.shard(model, comm=comm))
        assert {tuple(param.shape) for param in model.parameters()} == {(4, 4), (4,)}
        return text

    for text in on_ranks(world, build, rank):
        assert text.startswith("'graph' is torch.sparse_coo, and ranks exchange and store dense")


class Layers(nn.Module):
    """Layers of three shapes, so that nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.b(self.a(x)))
        return out


@pytest.mark.parametrize(
    ("strategy", "world", "wrap", "warns"),
    [
        ("full_shard", 2, None, True),
        ("full_shard", 1, None, False),
        ("shard_grad_op", 2, None, False),
        ("full_shard", 2, sw.wrap.whole(), False),
        ("full_shard", 2, sw.wrap.by_size(min_num_params=10), False),
    ],
)
def test_a_model_of_several_layers_in_one_unit_is_said_once(
    strategy: str,
    world: int,
    wrap: sw.wrap.Wrap | None,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def sharded(comm: Comm) -> None:
        sw.shard(Layers(), strategy, comm=comm, wrap=wrap)

    with caplog.at_level(logging.WARNING, "shardwise"):
        run_threads(world, sharded)
    assert caplog.text.count("Layers is one unit, since no blocks repeat in it: all 78") == warns
    assert warns == ("wrap=sw.wrap.by_size(min_num_params=100)" in caplog.text)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_a_scripted_layer_may_be_there_without_parameters_alone() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Gate()), nn.Linear(4, 2))
    model, x = copy.deepcopy(plain), torch.ones(2, 4)
    sw.shard(model, comm=LocalComm())
    assert torch.equal(model(x), plain(x))
    model.load_state_dict(model.state_dict())
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 2)))
    with pytest.raises(sw.ConfigError, match=r"'1' is scripted or traced by torch\.jit"):
        sw.shard(scripted, comm=LocalComm())
