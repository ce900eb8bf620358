"""What a forward pass writes to a parameter is kept, or it is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.gathered_parameter import GatheredParameter
from tests.ranks import run_sharing, run_threads
from tests.steps import STRATEGIES

RUNS = {"messages": run_threads, "memory": run_sharing}
BF16 = sw.Precision(param_dtype=torch.bfloat16)
Write = Callable[["Writing"], object]


class Writing(nn.Module):
    """Writes to a parameter of its own in each forward pass, as ``write`` says."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.linear = nn.Linear(4, 4)
        self.target = nn.Parameter(torch.arange(10.0), requires_grad=False)
        self.embed = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        out: Tensor = self.linear(x).sum() * self.target.mean()
        return out


def replace(model: Writing) -> None:
    model.target.data = model.target.data * 2


def add_in_place(model: Writing) -> None:
    model.target += 1  # type: ignore[misc]


def set_items(model: Writing) -> None:
    model.target[3:7] = -1.0


WRITES: dict[str, Write] = {
    "add_": lambda model: model.target.add_(1),
    "+=": add_in_place,
    "[] =": set_items,
    "data.add_": lambda model: model.target.data.add_(1),
    "data.clamp_": lambda model: model.linear.weight.data.clamp_(-0.1, 0.1),
    "data =": replace,
    "data = new": lambda model: setattr(model.target, "data", torch.arange(10.0) - 3),
    "detach().mul_": lambda model: model.target.detach().mul_(2),
    "nn.init": lambda model: nn.init.constant_(model.linear.weight, 0.25),
    "max_norm": lambda model: model.embed(torch.arange(4)),
    "reads only": lambda model: model.linear.weight.detach().sum() + model.target.data[0],
}


def trained(model: Writing, steps: int = 3) -> dict[str, Tensor]:
    """Whole values after a few forward and backward passes."""
    for _ in range(steps):
        model(torch.ones(4, 4)).backward()
        model.zero_grad()
    with torch.no_grad():
        model(torch.ones(4, 4))
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_kept(write: Write, run: Callable[..., object], **options: object) -> None:
    torch.manual_seed(0)
    model = Writing(write)
    expected = trained(copy.deepcopy(model))

    def rank(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        sw.shard(mine, comm=comm, wrap=sw.wrap.whole(), **options)  # type: ignore[arg-type]
        for name, value in trained(mine).items():
            torch.testing.assert_close(value, expected[name], msg=f"{name} of rank {comm.rank}")

    run(3, rank)


@pytest.mark.parametrize("transport", RUNS)
@pytest.mark.parametrize("write", WRITES)
def test_what_forward_writes_is_kept(write: str, transport: str) -> None:
    assert_kept(WRITES[write], RUNS[transport])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_full"])
def test_where_it_computes_in_a_narrow_dtype_only_what_was_written_is_rounded(
    strategy: str, world: int
) -> None:
    def rank(comm: Comm) -> None:
        model = Writing(WRITES["[] ="])
        with torch.no_grad():
            model.target.fill_(1 + 2**-20)  # which bfloat16 does not have
        model.target.requires_grad_()
        mesh: Any = {"mesh": (2, world)} if hybrid else {}
        sw.shard(model, strategy, comm=comm, precision=BF16, **mesh)
        model(torch.ones(4, 4)).backward()
        target = model.state_dict()["target"]
        assert target[3:7].tolist() == [-1.0] * 4
        assert target[:3].tolist() == [1 + 2**-20] * 3

    hybrid = strategy == "hybrid_full"
    run_threads(2 * world if hybrid else world, rank)


def test_a_function_that_writes_is_noticed_by_the_parameters_version() -> None:
    write: Write = lambda model: torch._foreach_add_([model.target], 1.0)  # noqa: E731
    assert_kept(write, run_threads)


def test_over_shared_memory_a_function_that_writes_is_an_error_that_says_how_to() -> None:
    def rank(comm: Comm) -> None:
        model = Writing(lambda model: torch._foreach_add_([model.target], 1.0))
        sw.shard(model, comm=comm)
        with pytest.raises(sw.ShardUseError, match=r"'target' was written .* 2 ranks map the same"):
            model(torch.ones(4, 4)).backward()

    run_sharing(2, rank)


def test_what_a_function_wrote_before_a_method_does_is_an_error_too() -> None:
    def rank(comm: Comm) -> None:
        model = Writing(lambda model: torch._foreach_add_([model.target], 1.0))
        sw.shard(model, comm=comm, wrap=sw.wrap.whole(), strategy="shard_grad_op")
        model.write = lambda _: None
        model(torch.ones(4, 4))
        with torch.no_grad():
            torch._foreach_add_([model.target], 1.0)
            with pytest.raises(sw.ShardUseError, match="2 ranks map the same"):
                model.target.mul_(2)

    run_sharing(2, rank)


MIXED: dict[str, Callable[[list[Tensor], list[Tensor]], object]] = {
    "foreach": lambda targets, sources: torch._foreach_lerp_(targets, sources, 0.25),
    "method": lambda targets, sources: [
        target.lerp_(source, 0.25) for target, source in zip(targets, sources, strict=True)
    ],
    "distance": lambda targets, sources: [
        target.mul_(1 + (target - source).norm())
        for target, source in zip(targets, sources, strict=True)
    ],
}


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("how", MIXED)
@pytest.mark.parametrize("run", [run_threads, run_sharing])
def test_a_target_follows_though_passes_have_left_units_whole(
    run: Callable[..., Any], how: str, between: bool
) -> None:
    """One that is frozen has no backward pass, and before one the last unit stays whole."""

    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2)]
    copies = [copy.deepcopy(models) for _ in range(2)]

    def followed(net: nn.Module, target: nn.Module) -> list[Tensor]:
        target.requires_grad_(False)
        for _ in range(2):
            loss = (net(torch.ones(2, 4)) - target(torch.ones(2, 4))).square().mean()
            if not between:
                loss.backward()
            with torch.no_grad():
                MIXED[how]([*target.parameters()], [*net.parameters()])
            if between:
                loss.backward()
        return [*target.state_dict().values()]

    def rank(comm: Comm) -> None:
        for model in copies[comm.rank]:
            sw.shard(model, comm=comm, wrap=sw.wrap.by_class(nn.Linear))
        for value, expected in zip(followed(*copies[comm.rank]), truth, strict=True):
            torch.testing.assert_close(value, expected)

    truth = followed(*models)
    run(2, rank)


class Around(nn.Module):
    """Writes to a parameter of its part outside the calls of that part."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write, self.seen = write, list[float]()
        self.part = Writing(lambda part: self.seen.append(part.target.float().sum().item()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        for _ in range(2):
            with torch.no_grad():
                self.write(self.part)
            out = out + self.part(x)
        with torch.no_grad():
            self.write(self.part)
        return out


def seen(model: Around) -> list[float]:
    """Sums over the target: in each call of a few steps, and at the end."""
    for _ in range(2):
        model(torch.ones(4, 4)).backward()
        model.zero_grad()
    model(torch.ones(4, 4))
    return [*model.seen, model.state_dict()["part.target"].sum().item()]


@pytest.mark.parametrize("precision", [sw.Precision(), BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("transport", RUNS)
@pytest.mark.parametrize("write", ["+=", "data.add_", "data =", "detach().mul_"])
def test_what_a_module_around_it_writes_is_kept(
    write: str, transport: str, precision: sw.Precision
) -> None:
    """In every strategy: the unit may still be whole. Integers are exact in any dtype."""
    expected = seen(Around(WRITES[write]))

    def rank(comm: Comm) -> None:
        for strategy in STRATEGIES:
            model = Around(WRITES[write])
            sw.shard(model, strategy, sw.wrap.by_class(Writing), comm, precision=precision)
            assert seen(model) == expected, strategy

    RUNS[transport](2, rank)


def test_a_replacement_that_the_shard_cannot_hold_is_an_error() -> None:
    """As bitsandbytes packs its weights anew on a CPU in evaluation."""

    def pack(model: Writing) -> None:
        model.target.data = torch.zeros(3)

    def rank(comm: Comm) -> None:
        model = Writing(pack)
        sw.shard(model, comm=comm)
        with pytest.raises(sw.ConfigError, match=r"'target' was replaced by .* shape \(3,\)"):
            model(torch.ones(4, 4)).backward()

    run_threads(2, rank)


def test_every_method_that_writes_tells_first() -> None:
    """So a method that a later torch brings is not forgotten."""
    own = vars(GatheredParameter)
    names = [n for n in dir(Tensor) if n.endswith("_") and not n.startswith("_")]
    assert {n for n in names if n not in own} == {"requires_grad_", "share_memory_"}
    assert {"__iadd__", "__setitem__", "data", "detach"} <= own.keys()
    assert not {"add", "sum", "_is_view", "__add__"} & own.keys()  # which cost nothing


def test_a_detached_read_in_a_backward_pass_is_no_write_and_a_write_there_is_one() -> None:
    """``torch.utils.checkpoint`` detaches every parameter that it recomputes with."""
    param = nn.Parameter(torch.ones(3))
    calls: list[str] = []

    def look(gradient: Tensor) -> None:
        param.detach()
        calls.append("detached")
        param.zero_()

    param.__class__ = GatheredParameter
    param.before_write = lambda: calls.append("told")  # type: ignore[attr-defined]
    output = (param * 2).sum()
    output.register_hook(torch.no_grad()(look))
    output.backward()
    assert calls == ["detached", "told"]
    param.detach()
    assert calls == ["detached", "told", "told"]


class Named(nn.Parameter):
    """A user's own kind of parameter, whose class stays."""


def test_a_replaced_parameter_of_a_users_own_class_is_kept_too() -> None:
    def rank(comm: Comm) -> list[float]:
        model = Writing(replace)
        model.target = Named(model.target.detach(), requires_grad=False)
        sharded = sw.shard(model, comm=comm)
        for _ in range(2):
            model(torch.ones(4, 4)).backward()
        with sharded.full_params():
            return list(model.target.tolist())

    assert run_threads(2, rank) == [[4.0 * number for number in range(10)]] * 2


def set_to_itself(model: Writing) -> None:
    model.target.set_(model.target)  # type: ignore[call-overload]


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_what_is_set_to_itself_is_not_written(strategy: str, tmp_path: Path) -> None:
    """As ``parametrize`` does, and so adapters of experts: no save in the background held."""

    def rank(comm: Comm) -> None:
        model = Writing(set_to_itself)
        sharded = sw.shard(model, strategy, comm=comm)
        for step in range(2):
            saving = sharded.save_async(tmp_path / f"step-{step}")
            assert saving is not None
            model(torch.ones(2, 4)).backward()
            saving.wait()

    run_threads(2, rank)
