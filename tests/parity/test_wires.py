"""Training with 8-bit wires: what is computed with, what is stored, and what is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.codec import Codec
from shardwise.comm.protocol import Comm
from tests import nets
from tests.copies import on_ranks
from tests.ranks import run_sharing
from tests.steps import Recorder, train

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
POLICIES = {
    "int8": sw.Precision(reduce_dtype=INT8),
    "fp8": sw.Precision(reduce_dtype=FP8),
    "int8, bf16 compute": sw.Precision(param_dtype=BF16, reduce_dtype=INT8),
}
SHARDED = ("zero1", "shard_grad_op", "full_shard")
COUNTED = ("gather", "update", "reduce", "spread")
HYBRIDS = ("hybrid_shard", "hybrid_full")


def trained(comm: Comm, model: nn.Module, strategy: str, precision: sw.Precision) -> list[float]:
    """The losses of six steps of two micro-batches; the schedule's bytes are those sent."""
    sharded = sw.shard(
        model,
        strategy,
        comm=comm,
        precision=precision,
        mesh=(2, 2) if strategy in HYBRIDS else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    axes = {comm for bucket in sharded.buckets for comm in bucket.mesh}
    losses, recorder = [], Recorder(sharded)
    batches = [nets.decoder_batch(10 * part + comm.rank, 4) for part in range(2)]
    for _ in range(6):
        for ranks in axes:
            ranks.counters.reset()
        recorder.events.clear()
        for part, batch in enumerate(batches):
            with sharded.accumulate(last=part == 1):
                loss = nets.loss(model, batch)
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        sent = sum(sharded.schedule.sent(event) for event in recorder.events)
        counted = [ranks.counters.bytes_sent.get(op, 0) for ranks in axes for op in COUNTED]
        assert sent == sum(counted) > 0
    return losses


@pytest.mark.prove
@pytest.mark.parametrize("policy", POLICIES)
def test_strategies_that_shard_round_alike_and_train_like_wide_wires(policy: str) -> None:
    exact = on_ranks(2, nets.decoder, lambda c, m: trained(c, m, "full_shard", sw.Precision()))
    runs = [
        on_ranks(2, nets.decoder, lambda c, m, s=s: trained(c, m, s, POLICIES[policy]))  # type: ignore[misc]
        for s in SHARDED
    ]
    assert runs[0] == runs[1] == runs[2] != exact
    for losses, expected in zip(runs[0], exact, strict=True):
        assert losses == pytest.approx(expected, rel=0.05)
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["hybrid_full", "no_shard", "hybrid_shard"])
def test_so_do_those_with_copies(strategy: str) -> None:
    policy = POLICIES["fp8"]
    world = 4 if strategy in HYBRIDS else 2
    exact = on_ranks(world, nets.decoder, lambda c, m: trained(c, m, strategy, sw.Precision()))
    runs = on_ranks(world, nets.decoder, lambda c, m: trained(c, m, strategy, policy))
    assert runs != exact
    for mine, expected in zip(runs, exact, strict=True):
        assert mine == pytest.approx(expected, rel=0.05)


def test_the_layout_and_the_schedule_show_them() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, wrap=sw.wrap.whole(), comm=comm, precision=POLICIES["fp8"])
        title = str(sharded.layout).splitlines()[0]
        assert "computed in float32, gradients sent in float8_e4m3fn" in title
        [bucket] = sharded.buckets
        sent = Codec(FP8).nbytes(bucket.layout.numel // 2) / 1024
        assert f"sends {sent:.1f} KiB: " in str(sharded.schedule)

    on_ranks(2, nets.decoder, rank)


def test_ranks_that_map_the_same_memory_send_gradients_in_blocks_too() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]

    def rank(comm: Comm) -> None:
        sw.shard(models[comm.rank], comm=comm, precision=sw.Precision(reduce_dtype=INT8))
        train(models[comm.rank], (nets.numbers(0, (2, 4)), nets.numbers(1, (2, 4))))

    run_sharing(2, rank)
