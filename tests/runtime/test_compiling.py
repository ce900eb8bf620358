"""torch.compile around a sharded model, or inside it: the same numbers as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.plan import in_slot
from tests.fake import FakeComm
from tests.nets import numbers
from tests.ranks import run_sharing, run_threads

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own

Shard = Callable[[Any], object]
Way = Callable[[Any, Shard, Any], Any]
"""Shards a model and compiles it, before or after; returns what is called."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gain


def net() -> Net:
    """The same one for every rank: where ranks are threads, they share the random generator."""
    model = Net()
    for number, param in enumerate(model.parameters()):
        param.data = numbers(number, param.shape) / 2
    return model


def trained(model: Any, rank: int, batches: tuple[int, ...] = (2, 2, 3)) -> list[float]:
    """Losses: of steps, also of another batch size while gradients are there, and without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows in batches:
        loss = model(numbers(rank, (rows, 6))).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    if len(batches) > 1:
        with torch.no_grad():
            losses.append(model(numbers(rank, (4, 6))).float().sum())
    return [float(loss.detach()) for loss in losses]


def block_before(model: Any, shard: Shard, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    shard(model)
    return model


def block_after(model: Any, shard: Shard, backend: Any) -> Any:
    shard(model)
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def layer(model: Any, shard: Shard, backend: Any) -> Any:
    shard(model)
    for block in model.blocks:
        block.up.forward = torch.compile(block.up.forward, backend=backend)
    return model


def model_before(model: Any, shard: Shard, backend: Any) -> Any:
    compiled = torch.compile(model, backend=backend)
    shard(model)
    return compiled


def model_after(model: Any, shard: Shard, backend: Any) -> Any:
    shard(model)
    return torch.compile(model, backend=backend)


def compiled_model(model: Any, shard: Shard, backend: Any) -> Any:
    compiled = torch.compile(model, backend=backend)
    shard(compiled)
    return compiled


WAYS: Sequence[Way] = (
    block_before, block_after, layer, model_before, model_after, compiled_model
)  # fmt: skip


def losses(comm: Comm, way: Way | None, backend: Any = "eager", **options: Any) -> list[float]:
    def shard(model: nn.Module) -> object:
        return sw.shard(model, comm=comm, **options)

    model = net()
    if way is None:
        shard(model)
        return trained(model, comm.rank)
    return trained(way(model, shard, backend), comm.rank)


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_model_that_is_not_compiled(way: Way) -> None:
    assert losses(FakeComm(0, 3), way) == losses(FakeComm(0, 3), None)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("strategy", "way", "run", "backend"),
    [
        ("no_shard", compiled_model, run_threads, "eager"),
        ("zero1", block_after, run_sharing, "eager"),
        ("shard_grad_op", model_before, run_threads, "eager"),
        ("full_shard", model_before, run_sharing, "aot_eager"),
    ],
)
def test_so_they_are_over_real_ranks_in_bf16(
    strategy: str, way: Way, run: Any, backend: str
) -> None:
    precision = sw.Precision(param_dtype=torch.bfloat16)

    def rank(comm: Comm, way: Way | None) -> list[float]:
        return losses(comm, way, backend, strategy=strategy, precision=precision)

    assert run(2, rank, way) == run(2, rank, None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_rank_alone_may_compile_though_ranks_map_the_same_memory(backend: str) -> None:
    """Gradients step aside and come back, and what is compiled looks at parameters' ``data``."""

    def rank(comm: Comm, way: Way | None) -> list[float]:
        return losses(comm, way if comm.rank == 0 else None, backend)

    assert run_sharing(2, rank, layer) == run_sharing(2, rank, None)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="inductor's code for CPUs does not compile without vector instructions",
)
@pytest.mark.parametrize("batches", [(2,), pytest.param((2, 2, 3), marks=pytest.mark.prove)])
def test_inductor(batches: tuple[int, ...]) -> None:
    """Its compiler of C++ takes seconds for each graph; processes for that would import torch."""
    plain, compiled = net(), net()
    for model in (plain, compiled):
        model.blocks = model.blocks[:1]
    sw.shard(plain, comm=FakeComm(0, 3))
    block_after(compiled, lambda model: sw.shard(model, comm=FakeComm(0, 3)), "inductor")
    with torch._inductor.config.patch(compile_threads=1):
        of_compiled = trained(compiled, 0, batches)
    assert of_compiled == pytest.approx(trained(plain, 0, batches), rel=1e-5)


@pytest.mark.parametrize("large", [1 << 18, 1])
def test_blocks_share_one_graph_and_the_engine_is_in_none(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine computes their gradients in place."""
    monkeypatch.setattr(in_slot, "LARGE", large)
    graphs: list[torch.fx.GraphModule] = []
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)

        def called(*inputs: Any) -> Any:
            calls.append(len(inputs))
            return graph(*inputs)

        return called

    model = net()
    sw.shard(model, comm=FakeComm(0, 3))
    compiled: Any = torch.compile(model, backend=backend)
    x = numbers(0, (2, 6)).requires_grad_()
    compiled(x).sum().backward()
    compiled(x).sum().backward()
    assert len(calls) == 6  # three blocks, twice
    assert len(graphs) == 1


class Asking(Net):
    """Its forward reads what a parameter of another unit is, and not its values."""

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.blocks[2]
        weight = last.up.weight
        return super().forward(x.to(weight.dtype) * weight.shape[0] / weight.ndim)


def test_a_forward_may_ask_what_the_parameters_of_other_units_are() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(len(of_compiled))
        return graph.forward

    of_compiled: list[float] = []
    plain, model = net(), net()
    plain.__class__ = model.__class__ = Asking
    for each in (plain, model):
        sw.shard(each, comm=FakeComm(0, 3))
    compiled: Any = torch.compile(model, backend=backend)
    for _ in range(4):
        of_compiled += trained(compiled, 0, (2,))
    assert of_compiled == [loss for _ in range(4) for loss in trained(plain, 0, (2,))]
    assert set(graphs) <= {0, 1}  # the first steps compile, and no other


def by_sgd(model: nn.Module, _: sw.Sharded) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return step


def by_hand(model: nn.Module, _: sw.Sharded) -> Callable[[], object]:
    @torch.no_grad()
    def step() -> None:
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]

    return step


def by_buckets(_: nn.Module, sharded: sw.Sharded) -> Callable[[], object]:
    return sw.optim.AdamW(sharded, lr=0.1, max_norm=0.5).step


@pytest.mark.parametrize("optimizer", [by_sgd, by_hand, by_buckets])
def test_a_whole_step_may_be_compiled(optimizer: Callable[..., Callable[[], object]]) -> None:
    def run(compiles: Callable[[Any], Any]) -> list[float]:
        model = net()
        update = optimizer(model, sw.shard(model, comm=FakeComm(0, 3)))

        def step() -> Tensor:
            loss: Tensor = model(numbers(0, (2, 6))).square().mean()
            loss.backward()
            update()
            model.zero_grad()
            return loss

        step = compiles(step)
        return [float(step().detach()) for _ in range(3)]

    compiled = run(torch.compile(backend="eager"))
    assert compiled == pytest.approx(run(lambda step: step), rel=1e-6)  # equal, but in torch 2.11
