"""A step that stops between two micro-batches goes on from a checkpoint, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, same, steps, tensors
from tests.copies import clones, on_ranks
from tests.nets import NETS, Net
from tests.steps import STRATEGIES, train

NET = NETS[0]
MICRO = 4  # micro-batches of the step that is interrupted


Make = Callable[[sw.Sharded], Optimizer]


def torchs(sharded: sw.Sharded) -> Optimizer:
    return adamw(sharded.model.parameters())


def flat(sharded: sw.Sharded) -> Optimizer:
    return sw.optim.AdamW(sharded, lr=1e-2)


def micro_batches(
    sharded: sw.Sharded, net: Net, numbers: range, waits: Callable[[int], bool]
) -> None:
    """Backward passes of one step; those that wait keep their gradients on the rank."""
    for number in numbers:
        with sharded.accumulate(last=not waits(number)):
            train(sharded.model, net.batch(1_000 * number + sharded.comm.rank, 2))


def waiting(number: int) -> bool:
    """The last one reduces."""
    return number < MICRO - 1


def at_once(number: int) -> bool:
    """Every one reduces."""
    return False


def now_and_then(number: int) -> bool:
    """The first and the last reduce."""
    return number in (1, 2)


KINDS = (waiting, at_once, now_and_then)


def whole(world: int, strategy: str, waits: Callable[[int], bool], make: Make) -> dict[str, Tensor]:
    """The run that nothing interrupts: one step, and one of several micro-batches."""

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(sharded)
        steps(model, optimizer, NET, comm.rank, range(1))
        micro_batches(sharded, NET, range(MICRO), waits)
        optimizer.step()
        return clones(model.state_dict())

    return on_ranks(world, NET.build, rank)[0]


def saved(
    path: Path,
    world: int,
    strategy: str,
    waits: Callable[[int], bool],
    stop: int,
    make: Make = torchs,
) -> None:
    """The same, but saved when ``stop`` micro-batches are done."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(sharded)
        steps(model, optimizer, NET, comm.rank, range(1))
        micro_batches(sharded, NET, range(stop), waits)
        place = sw.Training(step=1, position={"micro": stop}, accumulating=True)
        sharded.save(path, optimizer, place)

    on_ranks(world, NET.build, rank)


def resumed(
    path: Path,
    world: int,
    strategy: str,
    waits: Callable[[int], bool],
    make: Make = torchs,
) -> dict[str, Tensor]:
    """What the rest of the step gives, in a model and an optimizer that begin anew."""

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = make(sharded)
        report = sharded.load(path, optimizer, sw.Training())
        assert report.inexact == ()
        micro_batches(sharded, NET, range(report.position["micro"], MICRO), waits)
        optimizer.step()
        return clones(model.state_dict())

    return on_ranks(world, NET.build, rank)[0]


@pytest.mark.parametrize("waits", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_goes_on_between_any_two_micro_batches(
    strategy: str, waits: Callable[[int], bool], tmp_path: Path
) -> None:
    expected = whole(3, strategy, waits, torchs)
    for stop in range(1, MICRO):
        saved(tmp_path / f"step-{stop}", 3, strategy, waits, stop)
        assert same(resumed(tmp_path / f"step-{stop}", 3, strategy, waits), expected), stop


@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_any_number_of_ranks(world: int, tmp_path: Path) -> None:
    saved(tmp_path / "step-1", world, "full_shard", waiting, 2)
    expected = whole(world, "full_shard", waiting, torchs)
    assert same(resumed(tmp_path / "step-1", world, "full_shard", waiting), expected)


def test_another_strategy_can_go_on_with_what_was_not_reduced(tmp_path: Path) -> None:
    """Whole gradients of a rank are the same under every strategy."""
    saved(tmp_path / "step-1", 2, "full_shard", waiting, 2)
    expected = whole(2, "full_shard", waiting, torchs)
    assert same(resumed(tmp_path / "step-1", 2, "no_shard", waiting), expected)


def test_flat_optimizers_go_on_too(tmp_path: Path) -> None:
    expected = whole(2, "full_shard", at_once, flat)

    saved(tmp_path / "step-1", 2, "full_shard", at_once, 2, flat)
    assert same(resumed(tmp_path / "step-1", 2, "full_shard", at_once, flat), expected)


def test_reduced_gradients_are_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    """Saved on 3, loaded and saved on 2: the same tensors."""
    saved(tmp_path / "step-1", 3, "full_shard", at_once, 2)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        sharded.load(tmp_path / "step-1", training=sw.Training())
        sharded.save(tmp_path / "again", training=sw.Training(step=1, accumulating=True))

    on_ranks(2, NET.build, rank)
    before, after = (tensors(tmp_path / name, "gradients") for name in ("step-1", "again"))
    assert set(before) == {f"reduced/{name}" for name, _ in NET.build().named_parameters()}
    assert same(before, after)


def test_what_was_not_reduced_needs_as_many_ranks(tmp_path: Path) -> None:
    saved(tmp_path / "step-1", 3, "full_shard", waiting, 2)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        with pytest.raises(sw.CheckpointError, match="3 ranks stored gradients that they had not"):
            sharded.load(tmp_path / "step-1", training=sw.Training())
        report = sharded.load(tmp_path / "step-1", training=sw.Training(), strict=False)
        assert any("3 ranks stored gradients" in reason for reason in report.inexact)
        assert all(bucket.gradients.full is None for bucket in sharded.buckets)
        sharded.load(tmp_path / "step-1")  # the weights alone

    on_ranks(2, NET.build, rank)


def test_loading_drops_the_gradients_of_the_run_before(tmp_path: Path) -> None:
    """Else the first step after a rollback would add them."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "step-0", training=sw.Training(step=0))
        micro_batches(sharded, NET, range(1), waiting)
        sharded.load(tmp_path / "step-0", training=sw.Training())
        assert all(bucket.gradients.full is None for bucket in sharded.buckets)
        train(model, NET.batch(comm.rank, 2))
        sharded.load(tmp_path / "step-0", training=sw.Training())
        assert all(param.grad is None for param in model.parameters())

    on_ranks(2, NET.build, rank)


class Choosy(nn.Module):
    """Which of two layers is used depends on the sign of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) if float(x.detach().sum()) < 0 else self.right(x)
        return out


def test_each_rank_goes_on_with_the_parameters_that_it_had_used(tmp_path: Path) -> None:
    """What one rank used and the other did not is the first one's alone."""
    torch.manual_seed(0)
    first, second = torch.rand(2, 4), torch.rand(2, 4)

    def rank(comm: Comm, model: nn.Module, resumes: bool) -> dict[str, Tensor | None]:
        sharded = sw.shard(model, "no_shard", comm=comm)
        if resumes:
            sharded.load(tmp_path / "step-1", training=sw.Training())
        else:
            with sharded.accumulate(last=False):
                model(first if comm.rank else -first).sum().backward()
            sharded.save(tmp_path / "step-1", training=sw.Training(step=1, accumulating=True))
        with sharded.accumulate(last=True):
            model(second).sum().backward()
        return {name: param.grad for name, param in model.named_parameters()}

    expected = on_ranks(2, Choosy, lambda comm, model: rank(comm, model, resumes=False))
    found = on_ranks(2, Choosy, lambda comm, model: rank(comm, model, resumes=True))
    for one, other in zip(expected, found, strict=True):
        for name, grad in one.items():
            assert grad is not None
            assert torch.equal(grad, other[name]), name  # type: ignore[arg-type]


def test_a_background_save_stores_them_as_they_were(tmp_path: Path) -> None:
    """What is collected afterwards is not in it."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        micro_batches(sharded, NET, range(1), waiting)
        place = sw.Training(step=0, accumulating=True)
        sharded.save(tmp_path / "at-once", training=place)
        saving = sharded.save_async(tmp_path / "later", training=place)
        micro_batches(sharded, NET, range(1, MICRO), waiting)
        assert saving is not None
        saving.wait()

    on_ranks(2, NET.build, rank)
    before, after = (tensors(tmp_path / name, "gradients") for name in ("at-once", "later"))
    assert "arrived" in before
    assert same(before, after)
