"""What optimizers keep is stored for each of them and right for each rank, or nothing is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw
from tests.copies import error_text, on_ranks


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


class Keeping(torch.optim.Optimizer):
    """One state of a form of its own, made from a parameter and the rank."""

    elementwise = True

    def __init__(self, params: Any, make: Callable[[Tensor, int], Any], rank: int) -> None:
        super().__init__(params, {"lr": 1.0})
        for param in self.param_groups[0]["params"]:
            self.state[param]["kept"] = make(param.detach(), rank)


def refused(world: int, make: Callable[[Any, int], Any], folder: Path) -> list[str]:
    """The error on each rank when the optimizers that ``make(params, rank)`` gives are saved."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizers = make(list(model.parameters()), comm.rank)
        text = error_text(sw.CheckpointError, lambda: sharded.save(folder / "step-1", optimizers))
        sharded.save(folder / "step-2")  # the ranks are still together
        return text

    texts = on_ranks(world, small, rank)
    assert [path.name for path in sorted(folder.glob("step-*"))] == ["step-2"]
    return texts


@pytest.mark.parametrize("world", [1, 2])
def test_two_optimizers_over_the_same_parameters_are_refused(world: int, tmp_path: Path) -> None:
    def two(params: Any, _: int) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(params, lr=0.1), adamw(params[2:])]

    for text in refused(world, two, tmp_path):
        assert "optimizers 0 and 1 (SGD and AdamW) both hold '1.weight'" in text
        assert "sharded.optimizer_state_dict(optimizer)" in text


def test_one_optimizer_that_is_passed_twice_is_refused(tmp_path: Path) -> None:
    assert "both hold '0.weight'" in refused(1, lambda p, _: [adamw(p)] * 2, tmp_path)[0]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda p, _: [p.clone()],
        lambda p, _: (1, {"a": p.clone()}),
        lambda p, _: {"a": [(), [p.clone()]]},
    ],
    ids=["list", "tuple", "dict"],
)
def test_tensors_in_a_list_or_dict_are_refused(
    make: Callable[[Tensor, int], Any], world: int, tmp_path: Path
) -> None:
    texts = refused(world, lambda p, rank: Keeping(p, make, rank), tmp_path)
    assert all("optimizer state 'kept' of '0.weight' is a " in text for text in texts)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda _, rank: torch.tensor(float(rank)), "kept/0.weight: rank 0: 0.0; rank 1: 1.0"),
        (lambda _, rank: [rank, 2], '(Keeping): 0.bias: rank 0: {"kept": [0, 2]}; rank 1: {"kept"'),
    ],
    ids=["number", "list of numbers"],
)
def test_state_that_rank_0_stores_for_all_and_that_differs_is_refused(
    make: Callable[[Tensor, int], Any], fact: str, tmp_path: Path
) -> None:
    texts = refused(2, lambda params, rank: Keeping(params, make, rank), tmp_path)
    assert all(fact in text for text in texts)


def test_groups_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    texts = refused(2, lambda p, rank: torch.optim.SGD(p, lr=0.1 + rank), tmp_path)
    assert all("0 (SGD): lr of group 0: rank 0: 0.1; rank 1: 1.1" in text for text in texts)


@pytest.mark.parametrize("world", [1, 2])
def test_state_of_no_parameter_is_refused(world: int, tmp_path: Path) -> None:
    """MADGRAD counts its steps under the key ``"k"``."""

    def counting(params: Any, _: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.state["k"] = torch.tensor([1])  # type: ignore[index]
        return optimizer

    for text in refused(world, counting, tmp_path):
        assert "SGD keeps state of no parameter, under ['k'], which a checkpoint has no " in text


class Averaging(torch.optim.Optimizer):
    """Like Lookahead: it has state of its own beside that of the optimizer that it wraps."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("world", [1, 2])
def test_state_of_a_wrapped_optimizer_is_refused(world: int, tmp_path: Path) -> None:
    """Its moments were left out, and a resumed run began without them."""
    for text in refused(world, lambda params, _: Averaging(params), tmp_path):
        assert "Averaging keeps state of no parameter, under ['inner'], which a " in text
