"""After unshard() the model is everything, and its handle says so in one sentence."""

from __future__ import annotations

import pytest
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import error_text, on_ranks
from tests.nets import decoder, decoder_batch
from tests.steps import train

CALLS = [name for name in vars(sw.Sharded) if not name.startswith("_")]


@pytest.mark.parametrize("world", [1, 2])
def test_every_call_and_property_of_a_handle_says_so(world: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        assert sharded.unshard() is model
        for name in CALLS:
            text = error_text(sw.ConfigError, lambda: getattr(sharded, name))  # noqa: B023 - called here
            assert text.startswith(f"{name} of a handle whose Decoder is not sharded any more")
        assert (sharded.model, sharded.comm) == (model, comm)
        assert repr(sharded) == "Sharded(Decoder, after unshard())"
        assert isinstance(sharded, sw.Sharded)

    assert {"save", "load", "clip_grad_norm_", "accumulate", "any", "layout"} <= set(CALLS)
    on_ranks(world, decoder, rank)


def test_a_handle_of_a_model_that_is_sharded_again_is_another() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        first = sw.shard(model, comm=comm)
        first.unshard()
        second = sw.shard(model, comm=comm)
        train(model, decoder_batch(0, 2))
        second.clip_grad_norm_(1.0)
        second.relayout()  # which takes the model apart, too
        assert second.numel() == sum(p.numel() for p in second.unshard().parameters())
        assert "sw.shard() returns" in error_text(sw.ConfigError, lambda: first.layout)

    on_ranks(2, decoder, rank)
