"""Modules and parameters that are put into a model, or taken out of it, after it was sharded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.runtime import structure_check as registered
from tests.copies import clones, equal, error_text, on_ranks, seeded
from tests.nets import Block, decoder, decoder_batch
from tests.steps import train

BATCH = decoder_batch(0, 2)


def head(model: nn.Module) -> None:
    model.lm_head = nn.Linear(16, 37, bias=False)


def bare(model: nn.Module) -> None:
    model.gain = nn.Parameter(torch.ones(37))
    model.register_forward_hook(lambda module, args, out: out * module.gain)


def weight(model: nn.Module) -> None:
    model.get_submodule("norm").weight = nn.Parameter(torch.ones(16))


def blocks(model: nn.Module) -> nn.ModuleList:
    module = model.get_submodule("blocks")
    assert isinstance(module, nn.ModuleList)
    return module


class Around(nn.Module):
    """The parameters of ``inner``, under other names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def around(model: nn.Module) -> None:
    blocks(model)[1] = Around(blocks(model)[1])


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a head": (head, "'lm_head.weight' was replaced"),
    "a parameter of the root": (bare, "'gain' was added"),
    "a parameter": (weight, "'norm.weight' was replaced"),
    "a block": (lambda m: blocks(m).append(Block(16)), "'blocks.3.norm1.weight' was added"),
    "a block at first": (
        lambda m: blocks(m).insert(0, Block(16)),
        "'blocks.0.norm1.weight' was replaced",
    ),
    "a module around a block": (around, "'blocks.1.inner.norm1.weight' was added"),
    "nothing for a block": (lambda m: blocks(m).pop(1), "'blocks.1.norm1.weight' was replaced"),
    "nothing for the last block": (
        lambda m: blocks(m).__delitem__(-1),
        "'blocks.2.norm1.weight' was removed",
    ),
    "None for a module": (lambda m: setattr(m, "norm", None), "'norm.weight' was removed"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_put_in_or_taken_out_is_named_at_the_next_step(what: str) -> None:
    change, text = CHANGES[what]

    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sharded = sw.shard(model, comm=comm)
        train(model, BATCH)
        optimizer = torch.optim.SGD(model.parameters())
        change(model)
        calls: list[Callable[[], object]] = [
            lambda: model(BATCH[0]),
            torch.no_grad()(lambda: model(BATCH[0])),
            optimizer.step,
            lambda: sharded.clip_grad_norm_(1.0),
            model.state_dict,
            sharded.local_state_dict,
        ]
        texts = [error_text(sw.ConfigError, do) for do in calls]
        sharded.unshard()
        return texts

    for texts in on_ranks(2, decoder, rank):
        assert len(set(texts)) == 1
        assert texts[0].startswith(f"parameter {text} after shard(): ")
        assert "call sharded.relayout() now" in texts[0]


def test_what_goes_without_a_word_is_named_before_a_checkpoint_holds_it(tmp_path: Path) -> None:
    """A step without it is right: nothing is entered, gathered or reduced."""
    model = decoder()
    model.spare = nn.Linear(2, 2)
    sharded = sw.shard(model, comm=LocalComm())
    del model.spare
    train(model, BATCH)
    assert "spare.weight" not in model.state_dict()
    for do in (lambda: sharded.save(tmp_path / "step-1"), sharded.state_dict):
        assert error_text(sw.ConfigError, do).startswith(
            "parameter 'spare.weight' was removed after shard(): checkpoints still contain it"
        )


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_after_relayout_the_new_head_is_trained_and_the_rest_keeps_its_state(strategy: str) -> None:
    def program(model: nn.Module, shard: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        handle = shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, BATCH)
        optimizer.step(), optimizer.zero_grad()
        new = nn.Linear(16, 37)
        with torch.no_grad():
            new.weight.fill_(0.25), new.bias.zero_()
        model.lm_head = new
        if isinstance(handle, sw.Sharded):
            if handle.comm.rank:
                new.bias.data.fill_(9.0)  # rank 0's are taken
            handle.relayout()
        optimizer.add_param_group({"params": list(new.parameters())})
        for _ in range(2):
            train(model, BATCH)
            optimizer.step(), optimizer.zero_grad()
        return clones(model.state_dict())

    plain = program(seeded(decoder), lambda model: None)

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        return program(model, lambda m: sw.shard(m, strategy, comm=comm))

    for state in on_ranks(2, decoder, rank):
        assert equal(state, plain)


def test_what_changes_no_parameter_is_no_change() -> None:
    """A weight that is tied again, a module without parameters, a model inside another."""
    model = decoder()
    sharded = sw.shard(model, comm=LocalComm())
    lm_head = model.get_submodule("lm_head")
    lm_head.weight = lm_head.weight
    model.drop = nn.Dropout(0.0)
    train(Around(model), BATCH)
    sharded.state_dict()


def test_names_are_compared_once_after_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs a look at a flag."""
    compare, compared = registered.StructureCheck.compare, list[int]()

    def counted(check: registered.StructureCheck) -> None:
        compared.append(step)
        compare(check)

    monkeypatch.setattr(registered.StructureCheck, "compare", counted)
    model = decoder()
    sw.shard(model, comm=LocalComm())
    for step in range(4):
        if step == 2:
            model.drop = nn.Dropout(0.0)
        train(model, BATCH)
    assert compared == [2]


def test_after_unshard_and_for_a_model_that_is_gone_nobody_listens() -> None:
    gc.collect()  # models of other tests
    before = len(registered._watched)
    model = decoder()
    sharded = sw.shard(model, comm=LocalComm())
    assert len(registered._watched) > before
    sharded.unshard()
    head(model)
    train(model, BATCH)
    sharded = sw.shard(model, comm=LocalComm())
    del model, sharded
    gc.collect()
    assert len(registered._watched) <= before  # a model of another test may end late
