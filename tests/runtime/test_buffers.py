"""Buffers by policy: a convolutional net with batch norm does what it does in DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.copies import assert_near, clones, equal, error_text, on_ranks, seeded
from tests.ranks import run_processes
from tests.steps import STRATEGIES, train

BUILD, BATCH = nets.odd_convnet, nets.odd_convnet_batch
STATISTICS = ("running_mean", "running_var")


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return clones(dict(model.named_buffers()))


def steps(model: nn.Module, comm: Comm, count: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(count):
        train(model, BATCH(10 * step + comm.rank, 4))
        optimizer.step()
        optimizer.zero_grad()


# ---- beside DDP ----------------------------------------------------------------------------------


@pytest.mark.prove
@pytest.mark.spawn
def test_local_and_broadcast_are_ddps_two_behaviours() -> None:
    """After two steps: the same statistics, and the same outputs in a validation."""
    run_processes(2, _beside_ddp)


def _beside_ddp(comm: Comm) -> None:
    inputs = BATCH(99, 5)[0]
    for policy in ("local", "broadcast"):
        reference = DistributedDataParallel(seeded(BUILD), broadcast_buffers=policy == "broadcast")
        steps(reference, comm)
        with torch.no_grad():
            expected = reference.eval()(inputs)  # before which DDP broadcasts
        for strategy in STRATEGIES:
            model = seeded(BUILD)
            sw.shard(model, strategy, comm=comm, buffers=policy)
            steps(model, comm)
            assert equal(statistics(model), statistics(reference.module)), (policy, strategy)
            with torch.no_grad():
                assert_near(model.eval()(inputs), expected)


# ---- each policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_full"])
@pytest.mark.parametrize("policy", ["local", "broadcast", "average"])
def test_after_a_step_buffers_are_each_ranks_own_rank_0s_or_the_mean(
    policy: Any, strategy: str
) -> None:
    world, own = (4 if strategy == "hybrid_full" else 3), []
    for seed in range(world):
        plain = seeded(BUILD)
        train(plain, BATCH(seed, 4))
        own.append(statistics(plain))

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        mesh = (2, 2) if world == 4 else None
        sw.shard(model, strategy, comm=comm, buffers=policy, mesh=mesh)
        train(model, BATCH(comm.rank, 4))
        return statistics(model)

    for mine, after in enumerate(on_ranks(world, BUILD, rank)):
        if policy != "average":
            assert equal(after, own[mine if policy == "local" else 0])
            continue
        for name, value in after.items():
            mean = torch.stack([buffers[name].double() for buffers in own]).mean(0)
            assert_near(value.double(), mean, 1e-6)
            assert value.dtype == own[0][name].dtype  # the counts of batches stay integers


def test_a_buffer_of_8_bit_numbers_is_averaged() -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sw.shard(model, comm=comm, buffers="average")
        scale = torch.tensor([1.0, comm.rank + 1.0]).to(torch.float8_e4m3fn)
        model.register_buffer("scale", scale)
        train(model, BATCH(comm.rank, 4))
        return model.get_buffer("scale").float()

    assert all(scale.tolist() == [1.0, 1.5] for scale in on_ranks(2, BUILD, rank))


def test_one_collective_for_each_dtype_when_gradients_are_reduced() -> None:
    def rank(comm: Comm, model: nn.Module, policy: Any) -> None:
        sharded = sw.shard(model, comm=comm, buffers=policy)
        comm.counters.reset()
        with sharded.accumulate(last=False):
            train(model, BATCH(comm.rank, 4))
        assert "buffers" not in comm.counters.calls
        train(model, BATCH(comm.rank, 4))
        assert comm.counters.calls.get("buffers", 0) == (0 if policy == "local" else 2)
        comm.counters.reset()
        with torch.no_grad():
            model.eval()(BATCH(9, 4)[0])
        assert "buffers" not in comm.counters.calls
        printed = [str(sharded.schedule_of(mode)) for mode in ("last", "accumulate")]
        phrase = f"; buffers: {policy}\n"
        assert [phrase in text for text in printed] == [policy != "local", False]

    for policy in ("local", "broadcast", "average"):
        on_ranks(2, BUILD, lambda comm, model: rank(comm, model, policy))  # noqa: B023


@pytest.mark.parametrize("policy", ["local", "broadcast", "average"])
def test_a_checkpoint_has_each_ranks_buffers_only_where_they_differ(
    policy: Any, tmp_path: Path
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, buffers=policy)
        steps(model, comm)
        sharded.save(tmp_path / "step-2", training=sw.Training(step=2))
        stored = {n: v for n, v in model.state_dict().items() if n.endswith(STATISTICS)}
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        sharded.load(tmp_path / "step-2", training=sw.Training())
        local_values = {n: v for n, v in model.state_dict().items() if n.endswith(STATISTICS)}
        assert local_values
        assert equal(local_values, stored)

    on_ranks(2, BUILD, rank)
    own = (tmp_path / "step-2" / "training/ranks.safetensors").read_bytes()
    assert (b"buffer/" in own) is (policy == "local")


# ---- SyncBatchNorm -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_sync_batch_norm_is_refused_where_torch_has_none_and_validates_there(world: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        message = error_text(sw.ConfigError, lambda: sw.shard(converted, comm=comm))
        assert message.startswith("'features.0.norm' is a SyncBatchNorm, which torch has for acc")
        assert f"on several CPU ranks (now {world}) a training step would fail" in message
        assert 'Keep nn.BatchNorm and pass buffers="average"' in message
        sw.shard(converted.eval(), comm=comm)
        with torch.no_grad():
            output: Tensor = converted(BATCH(0, 4)[0])
        return output.clone()

    plain = seeded(BUILD).eval()
    with torch.no_grad():
        expected = plain(BATCH(0, 4)[0])
    for output in on_ranks(world, BUILD, rank):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("sends", [True, False], ids=["sent", "compared"])
@pytest.mark.parametrize("policy", ["broadcast", "average"])
def test_a_buffer_that_was_expanded_has_memory_for_each_element(policy: Any, sends: bool) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model.register_buffer("scale", torch.ones(1).expand(3))
        return model

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, buffers=policy, sync_module_states=sends)
        model(torch.ones(2, 4) * comm.rank).sum().backward()
        sharded.load_state_dict(sharded.state_dict())
        assert torch.equal(model.get_buffer("scale"), torch.ones(3))

    on_ranks(2, build, rank)


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        sw.ConfigError, match="buffers is 'mean'; choose one of 'local', 'broadcast'"
    ):
        sw.shard(nn.Linear(2, 2), buffers="mean")  # type: ignore[arg-type]
    with pytest.raises(sw.ConfigError, match='that is buffers= here: "broadcast" for True'):
        sw.shard(nn.Linear(2, 2), broadcast_buffers=True)  # type: ignore[call-arg]


# ---- graphs that are used again ------------------------------------------------------------------


def penalty(model: nn.Module, batch: nets.Batch) -> None:
    inputs = batch[0].clone().requires_grad_()
    loss = nets.loss(model, (inputs, *batch[1:]))
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.square().sum()).backward()


def two_passes(model: nn.Module, batch: nets.Batch) -> None:
    loss = nets.loss(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def kept_for_nothing(model: nn.Module, batch: nets.Batch) -> None:
    nets.loss(model, batch).backward(retain_graph=True)


@pytest.mark.parametrize("passes", [penalty, two_passes, kept_for_nothing])
@pytest.mark.parametrize("policy", ["broadcast", "average"])
def test_buffers_are_made_alike_when_no_graph_of_the_step_reads_them_any_more(
    policy: Any, passes: Callable[[nn.Module, nets.Batch], None]
) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm, buffers=policy)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            passes(model, BATCH(10 * step + comm.rank, 4))
            optimizer.step()
            optimizer.zero_grad()
        return statistics(model)

    first, second = on_ranks(2, BUILD, rank)
    assert equal(first, second)
