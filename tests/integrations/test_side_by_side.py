"""One model under each strategy, beside DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.config.precision import Precision
from shardwise.errors import ConfigError
from shardwise.integrations.side_by_side import ENGINES, Subject, measure, with_values

CPU = torch.device("cpu")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def subject(**arguments: Any) -> Subject:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    return Subject(model, (torch.zeros(4, 512),), {}, torch.Tensor.sum, arguments)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "param_dtype", [pytest.param(None, marks=pytest.mark.prove), torch.bfloat16]
)
def test_every_engine_trains_the_model(param_dtype: torch.dtype | None) -> None:
    messages: list[str] = []
    model_and_batch = subject(precision=Precision(param_dtype=param_dtype))
    measured = measure(model_and_batch, ENGINES, 2, messages.append)
    assert [one.engine for one in measured] == list(ENGINES)
    assert all(one.milliseconds > 0 for one in measured)
    assert [one.engine for one in measured if one.sent is None] == ["ddp", "fsdp2"]
    assert messages[-1] == "round 2 of 2"


@pytest.mark.usefixtures("one_rank")
def test_an_engine_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"called 'zero9'.*full_shard.*fsdp2"):
        measure(subject(), ["zero9"], 1, lambda _: None)


def test_values_are_new_and_ties_are_kept() -> None:
    with torch.device("meta"):
        table, head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    head.weight = table.weight
    copied = with_values(nn.Sequential(table, head), CPU)
    assert len(list(copied.parameters())) == 1
    assert all(param.isfinite().all() for param in copied.parameters())
    assert head.weight.is_meta


def test_codes_are_not_made_up() -> None:
    model = nn.Linear(4, 4)
    codes = torch.zeros(4, 2, dtype=torch.uint8)
    model.weight = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(ConfigError, match="4 or 8 bits"):
        with_values(model, CPU)
