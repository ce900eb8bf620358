"""A mean's memory is used again, and never while somebody holds what is in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.memory.mean import KeptMean
from tests.fake import FakeComm

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda view: view,
    "detached": lambda view: view.detach(),
    "an array": lambda view: view.numpy(),
    "a slice": lambda view: view[:1],
    "a graph": lambda view: torch.ones(3, requires_grad=True) * view,
    "its storage": lambda view: view.untyped_storage(),
}


def cut(flat: Tensor) -> list[Tensor]:
    return [flat[:3], flat[3:]]


@pytest.mark.parametrize("kind", HOLDERS)
def test_it_is_used_again_when_nobody_holds_it_any_more(kind: str) -> None:
    kept, mean = KeptMean(cut, keeps=True), torch.arange(5.0)
    param = nn.Parameter(torch.zeros(3))
    param.grad = kept.views(mean)[0]
    assert kept.unheld() is None
    holder: Any = HOLDERS[kind](param.grad)
    param.grad = None
    assert kept.unheld() is None, holder
    del holder
    assert kept.unheld() is mean
    assert kept.views(mean)[0] is kept.views(mean)[0]


def test_a_view_that_was_given_other_memory_ends_it() -> None:
    kept, mean = KeptMean(cut, keeps=True), torch.arange(5.0)
    kept.views(mean)[0].data = torch.zeros(3)
    assert kept.unheld() is None


def test_it_may_keep_none() -> None:
    kept, mean = KeptMean(cut, keeps=False), torch.arange(5.0)
    assert kept.views(mean)[0] is not kept.views(mean)[0]
    assert kept.unheld() is None


def test_who_keeps_a_gradient_keeps_the_values_of_its_step() -> None:
    model = nn.Linear(4, 4)
    sw.shard(model, comm=FakeComm(0, 2))
    kept, values, places = [], [], set()
    for step in range(4):
        model.zero_grad()
        (model(torch.ones(1, 4)).sum() * (step + 1.0)).backward()
        assert model.weight.grad is not None
        local = model.weight.grad.to_local()  # type: ignore[attr-defined]
        places.add(local.data_ptr())
        values.append(local.flatten().tolist())
        if step < 2:
            kept.append(local)
        del local
    assert [grad.flatten().tolist() for grad in kept] == values[:2]
    assert values[3][0] == 4 * values[0][0]
    assert len(places) == 3  # of the fourth step those of the third
