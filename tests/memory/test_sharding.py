"""A shard's place in its parameter, and what it asks of the engine before it is written."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.sharding import Sharding, sharding_of
from tests.copies import local
from tests.fake import FakeComm
from tests.ranks import run_threads


class Engine:
    """Records the calls that shards make."""

    def __init__(self) -> None:
        self.computing, self.calls = False, list[str]()
        self.comm: Comm = FakeComm(0, 2)

    def rest(self) -> None:
        self.calls.append("rest")

    def make_whole(self, unit: str) -> None:
        self.calls.append(f"make {unit!r} whole")

    def was_read(self, whole: Any, result: Any) -> list[Tensor]:
        raise NotImplementedError

    def before_write(self, unit: str) -> None:
        self.calls.append(f"write {unit!r}")

    def call(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def of(param: Tensor) -> Sharding:
    sharding = sharding_of(param)
    assert sharding is not None
    return sharding


def watched() -> tuple[nn.Linear, Engine]:
    model, engine = nn.Linear(4, 6), Engine()
    sw.shard(model, comm=FakeComm(0, 2))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
        of(param).engine = weakref.ref(engine)
    return model, engine


@pytest.mark.parametrize(("strategy", "whole"), [("full_shard", False), ("no_shard", True)])
def test_it_says_which_elements_this_rank_holds(strategy: str, whole: bool) -> None:
    values = torch.arange(24.0).view(6, 4)
    shardings = []
    for rank in range(2):
        model = nn.Linear(4, 6)
        sw.shard(model, strategy, comm=FakeComm(rank, 2))
        shardings += [of(model.weight)]
        assert of(model.weight).shape == values.shape
    parts = [s.cut(values, torch.Size([s.stop - s.start])) for s in shardings]
    assert torch.equal(torch.cat(parts), torch.cat([values.flatten()] * (1 + whole)))
    assert {s.placement for s in shardings} == {"replicated" if whole else "fully_sharded"}


@torch.no_grad()
def test_who_writes_a_parameter_asks_first() -> None:
    model, engine = watched()
    weight, gradient = model.weight, model.weight.grad
    assert gradient is not None
    asks = ["write ''"]
    writes: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: weight.mul_(2), asks),
        (lambda: torch._foreach_mul_([weight, gradient], 2), asks),
        (lambda: weight.data.mul_(2), asks),
        (weight.zero_, asks),
        (lambda: setattr(weight, "data", torch.zeros_like(weight)), asks),
        (lambda: gradient.mul_(2), []),
        (lambda: gradient.data.mul_(2), []),
        (lambda: (weight.detach() * 2).mul_(2), []),
        (gradient.zero_, []),
        (lambda: weight * 2, []),
    ]
    for write, calls in writes:
        write()
        assert engine.take() == calls


def test_where_no_engine_is_left_a_shard_is_written_freely() -> None:
    model, engine = watched()
    assert of(model.weight).serving is None
    engine.computing = True
    assert of(model.weight).serving is engine
    del engine
    assert of(model.weight).serving is None
    with torch.no_grad():
        model.weight.mul_(2)
        of(model.weight).engine = lambda: None
        model.weight.mul_(2)


def test_an_alias_keeps_its_values_when_the_shard_gets_others() -> None:
    model, _ = watched()
    alias, sharding = model.weight.data, of(model.weight)
    before = local(alias).clone()
    assert list(sharding.aliases.values()) == [alias]
    model.weight.data = torch.zeros_like(alias)
    assert torch.equal(local(alias), before)
    assert not local(model.weight.detach()).any()
    assert not sharding.aliases


def test_parts_are_cut_and_put_together() -> None:
    def rank(comm: Comm) -> None:
        model, other = nn.Linear(4, 6), nn.Linear(4, 6)
        sw.shard(model, comm=comm), sw.shard(other, comm=comm)
        sharding = of(model.weight)
        whole = torch.arange(24.0).view(6, 4)
        part = sharding.cut(whole, model.weight.shape)
        assert part.flatten().tolist() == list(range(sharding.start, sharding.stop))
        assert torch.equal(sharding.whole(part), whole)
        assert sharding.cuts_like(of(other.weight))
        assert not sharding.cuts_like(of(model.bias))

    run_threads(3, rank)
