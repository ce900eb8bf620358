"""Where parameters, gradients and optimizer state are kept changes no bit of what is trained.

On a machine without an accelerator the host's memory is a second pool, so what is copied, what is
allocated and what is freed are the same as beside a device.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.host_memory import HostMemory
from shardwise.comm.protocol import Comm
from shardwise.config.options import Options
from shardwise.errors import ConfigError
from shardwise.plan.schedule.events import Event, Op
from tests import nets
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.parity.test_hybrid import batches, trained
from tests.ranks import run_sharing
from tests.steps import STRATEGIES, Recorder, assert_at_rest, train

MODES = ["optimizer", "everything"]
PLACES: dict[str, Any] = {name: {} for name in STRATEGIES}
PLACES |= {name: {"mesh": (2, 2)} for name in ("hybrid_shard", "hybrid_full")}


def world_of(strategy: str) -> int:
    return 4 if PLACES[strategy] else 2


def adamw(sharded: sw.Sharded) -> torch.optim.Optimizer:
    return torch.optim.AdamW(sharded.model.parameters(), lr=0.01)


def flat_adamw(sharded: sw.Sharded) -> torch.optim.Optimizer:
    return sw.optim.AdamW(sharded, lr=0.01, max_norm=0.4)


def host_of(sharded: sw.Sharded) -> HostMemory:
    return sharded.buckets[0].host


def shard_nbytes(sharded: sw.Sharded) -> int:
    return sum(bucket.shard.nbytes for bucket in sharded.buckets)


def run(comm: Comm, model: nn.Module, strategy: str, make: Any, **options: Any) -> Any:
    """Two clipped steps of two micro-batches each, and an evaluation between them."""
    sharded = sw.shard(model, strategy, comm=comm, **PLACES[strategy], **options)
    optimizer = make(sharded)
    first = trained(sharded, optimizer)
    with torch.no_grad():
        output = model(nets.decoder_batch(7, 2)[0]).clone()
    last = trained(sharded, optimizer)
    assert_at_rest(sharded)
    state = clones(sharded.optimizer_state_dict(optimizer)["state"]["embed.weight"])
    return {**first, **{f"last {n}": v for n, v in last.items()}, "output": output, **state}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("make", [adamw, flat_adamw])
@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("strategy", PLACES)
def test_training_is_bit_identical_wherever_things_are_kept(
    strategy: str, offload: str, make: Any, dtype: torch.dtype | None
) -> None:
    dtypes = sw.Precision(param_dtype=dtype)
    options: dict[str, Any] = {"strategy": strategy, "make": make, "precision": dtypes}
    of = partial(on_ranks, world_of(strategy), nets.decoder)
    states = of(partial(run, **options)), of(partial(run, offload=offload, **options))
    assert all(equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("offload", MODES)
def test_ranks_that_share_memory_train_alike(offload: Any) -> None:
    models = [seeded(nets.decoder) for _ in range(4)]

    def rank(comm: Comm, first: int, offload: Any) -> dict[str, Tensor]:
        sharded = sw.shard(models[first + comm.rank], comm=comm, offload=offload)
        return trained(sharded, adamw(sharded))

    [expected, *_] = run_sharing(2, rank, 0, "none")
    for state in run_sharing(2, rank, 2, offload):
        assert equal(state, expected)


@pytest.mark.parametrize("strategy", PLACES)
@pytest.mark.parametrize("offload", MODES)
def test_events_are_those_of_the_schedule_and_move_the_bytes_it_says(
    strategy: str, offload: Any
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        place, words = PLACES[strategy], Options(offload=offload).offload_words
        sharded = sw.shard(model, strategy, comm=comm, offload=offload, **place)
        host, optimizer = host_of(sharded), adamw(sharded)
        trained(sharded, optimizer)
        recorder, before = Recorder(sharded), dict(host.copied)
        train(model, batches(0, comm.size)[comm.rank])
        schedule = sharded.schedule
        assert recorder.events == list(schedule.events)
        moved = {op: host.copied[op] - before[op] for op in ("load", "store")}
        nbytes = schedule.nbytes
        loads = [nbytes[event.unit].loaded for event in schedule.events if event.op is Op.LOAD]
        stores = [nbytes[event.unit].stored for event in schedule.events if event.op is Op.STORE]
        assert moved == {"load": sum(loads), "store": sum(stores)}
        gathers = [event for event in schedule.events if event.op is Op.GATHER]
        each = len(gathers) if offload == "everything" else len(sharded.units)
        assert len(loads) == each
        assert len(stores) == len(sharded.units)
        assert words in str(schedule).splitlines()[0]
        assert words in str(sharded.units)

    on_ranks(world_of(strategy), nets.decoder, rank)


def test_host_memory_holds_what_it_is_to_hold_and_nothing_after_its_use() -> None:
    def rank(comm: Comm, model: nn.Module, offload: Any) -> None:
        sharded = sw.shard(model, comm=comm, offload=offload)
        host, nbytes = host_of(sharded), shard_nbytes(sharded)
        assert host.nbytes == nbytes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            train(model, batches(0, comm.size)[comm.rank])
            assert host.nbytes == 2 * nbytes
            optimizer.step()
            optimizer.zero_grad()
            assert host.nbytes == nbytes
            assert all(b.full.untyped_storage().nbytes() == 0 for b in sharded.buckets)
        sharded.unshard()
        assert host.nbytes == 0

    for offload in MODES:
        on_ranks(2, nets.decoder, partial(rank, offload=offload))


def device_nbytes(sharded: sw.Sharded) -> int:
    """What a device would hold of the parameters between two steps."""
    storages = {}
    for bucket in sharded.buckets:
        for tensor in (bucket.full, bucket._sent.piece):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("strategy", PLACES)
def test_a_device_keeps_no_offloaded_parameter_between_steps(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module, offload: Any) -> int:
        sharded = sw.shard(model, strategy, comm=comm, offload=offload, **PLACES[strategy])
        trained(sharded, adamw(sharded))
        return device_nbytes(sharded)

    of = partial(on_ranks, world_of(strategy), nets.decoder)
    assert of(partial(rank, offload="everything")) == [0] * world_of(strategy)
    assert all(nbytes > 0 for nbytes in of(partial(rank, offload="optimizer")))


class Wanders(nn.Module):
    """Its blocks run in an order that changes, one of them twice, and may stop half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order = [0, 1, 2]
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x).tanh()
        if self.stops:
            raise ValueError("half-way")
        return x


def wander(comm: Comm, model: nn.Module, offload: Any) -> dict[str, Tensor]:
    assert isinstance(model, Wanders)
    wrap = sw.wrap.by_class(nn.Linear)
    sharded = sw.shard(model, wrap=wrap, comm=comm, offload=offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[Event] = []
    sharded.runtime.listeners.append(events.append)
    x = torch.linspace(-1, 1, 8).view(2, 4) + comm.rank
    for model.order in ([0, 1, 2], [2, 0, 0, 1], [1], [0, 1, 2]):
        model.stops = True
        with pytest.raises(ValueError, match="half-way"):
            model(x)
        model.stops = False
        outputs = model(x)
        outputs.register_hook(lambda _: 1 / 0)
        loss = outputs.sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_at_rest(sharded)
        resting = shard_nbytes(sharded) if offload != "none" else 0
        assert host_of(sharded).nbytes == resting
    assert any(event.reason == "on demand" for event in events)
    stored = [event.unit for event in events if event.op is Op.STORE]
    settled = [event.unit for event in events if event.op is Op.SETTLE]
    assert stored == (settled if offload != "none" else [])
    loaded = [event.unit for event in events if event.op is Op.LOAD]
    gathered = [event.unit for event in events if event.op is Op.GATHER]
    if offload == "everything":
        assert loaded == gathered
    return clones(model.state_dict())


@pytest.mark.parametrize("offload", MODES)
def test_steps_that_deviate_or_stop_half_way_load_and_store_alike(offload: Any) -> None:
    [expected, *_] = on_ranks(2, Wanders, partial(wander, offload="none"))
    [state, *_] = on_ranks(2, Wanders, partial(wander, offload=offload))
    assert equal(state, expected)


@pytest.mark.prove
@pytest.mark.parametrize("make", [adamw, flat_adamw])
def test_a_checkpoint_goes_on_with_and_without_offload(make: Any, tmp_path: Path) -> None:
    def save(comm: Comm, model: nn.Module, name: str, offload: Any) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, offload=offload)
        optimizer = make(sharded)
        trained(sharded, optimizer)
        sharded.save(tmp_path / name, optimizer)
        return trained(sharded, optimizer)

    def load(comm: Comm, model: nn.Module, name: str, offload: Any) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, offload=offload)
        optimizer = make(sharded)
        sharded.load(tmp_path / name, optimizer)
        return trained(sharded, optimizer)

    on_device, on_host = "none", "everything"
    [expected, *_] = on_ranks(2, nets.decoder, partial(save, name="device", offload=on_device))
    [saved, *_] = on_ranks(2, nets.decoder, partial(save, name="host", offload=on_host))
    assert equal(saved, expected)
    for name, offload in (("device", on_host), ("host", on_device)):
        [state, *_] = on_ranks(2, nets.decoder, partial(load, name=name, offload=offload))
        assert equal(state, expected)


def test_frozen_shards_are_in_host_memory_only_where_parameters_are() -> None:
    def rank(comm: Comm, model: nn.Module, offload: Any) -> dict[str, Tensor]:
        for param in model.get_submodule("blocks").parameters():
            param.requires_grad_(False)
        sharded = sw.shard(model, comm=comm, offload=offload)
        in_host = {bucket.unit for bucket in sharded.buckets if bucket.spec.in_host}
        blocks = {unit.name for unit in sharded.units if unit.name.startswith("blocks")}
        if offload != "none":
            trained_units = {unit.name for unit in sharded.units} - blocks
            assert in_host == (trained_units | blocks if offload == "everything" else trained_units)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = trained(sharded, optimizer)
        for param in model.get_submodule("blocks").parameters():
            param.requires_grad_(True)
        return {**first, **{f"then {n}": v for n, v in trained(sharded, optimizer).items()}}

    [expected, *_] = on_ranks(2, nets.decoder, partial(rank, offload="none"))
    for offload in MODES:
        [state, *_] = on_ranks(2, nets.decoder, partial(rank, offload=offload))
        assert equal(state, expected)


def test_what_cannot_be_offloaded_says_why() -> None:
    with pytest.raises(AttributeError, match='write offload="optimizer" or offload="everything"'):
        sw.Offload(parameters=True)  # type: ignore[attr-defined]
    words = error_text(ConfigError, lambda: sw.shard(nn.Linear(2, 2), offload=True))  # type: ignore[arg-type]
    assert "choose one of 'none', 'optimizer', 'everything'" in words
