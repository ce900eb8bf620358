"""What runs in place of units' forwards: shown in the table of units, and undone as it was."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.transports.local import LocalComm
from tests.nets import decoder, decoder_batch
from tests.steps import train

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own

EVERYTHING: dict[str, Any] = {
    "compile": "eager",
    "activation_checkpointing": sw.ActivationCheckpointing(every=2, offload=True),
}


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_the_table_of_units_shows_what_each_forward_does() -> None:
    sharded = sw.shard(decoder(), comm=LocalComm(), **EVERYTHING)
    head, *lines = str(sharded.units).splitlines()
    assert head.endswith("forward")
    shown = [line.partition(" sharded ")[2].strip() for line in lines[:-1]]
    both = "recomputed (non-reentrant), eager, inputs on the host"
    assert shown == ["eager", "eager", both, "eager", "eager"]


def test_without_any_of_it_the_table_has_no_such_column() -> None:
    assert "forward" not in str(sw.shard(decoder(), comm=LocalComm()).units)


def test_unsharding_puts_back_what_was_there_also_a_forward_of_the_users() -> None:
    model: Any = decoder()
    block = model.blocks[1]
    plain = block.forward

    def own(x: Tensor) -> Tensor:
        out: Tensor = plain(x)
        return out

    block.forward = own
    sharded = sw.shard(model, comm=LocalComm(), **EVERYTHING)
    assert set(replaced(model)) > {"blocks.0", "blocks.1"}
    train(model, decoder_batch(0, 2))
    sharded.relayout()
    train(model, decoder_batch(0, 2))
    sharded.unshard()
    assert replaced(model) == ["blocks.1"]
    assert block.forward is own


def test_a_copy_is_plain_and_a_rehearsal_compiles_nothing() -> None:
    torch._dynamo.reset()
    model, batch = decoder(), decoder_batch(0, 2)
    sharded = sw.shard(model, comm=LocalComm(), **EVERYTHING)
    torch._dynamo.utils.counters.clear()
    sharded.rehearse(batch[0])
    assert not torch._dynamo.utils.counters["stats"]
    assert not replaced(deepcopy(model))
    assert [*model.state_dict()] == [*decoder().state_dict()]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation_checkpointing": 2}, "activation_checkpointing is 2, and not a bool or Activ"),
        ({"compile": ["inductor"]}, "compile is a list, and not a bool or string"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(sw.ConfigError, match=text):
        sw.shard(decoder(), comm=LocalComm(), **options)
