"""Other engines around a sharded model, and inside one that is to be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from sys import getrefcount
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.optim.optimizer_hooks import OptimizerHooks
from shardwise.runtime.other_engines import trained_by_others
from tests.copies import clones, equal, error_text
from tests.fake import FakeComm
from tests.nets import decoder, decoder_batch
from tests.steps import train

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    """torch's own group of two ranks, of which one is here."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=CPU)


class AbstractGradSampleModule(nn.Module):
    """As opacus's wrapper is."""

    __module__ = "opacus.grad_sample.gsm_base"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module


class GradSampleModule(AbstractGradSampleModule):
    """The one that ``PrivacyEngine.make_private`` makes."""


AROUND: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "DDP": (
        DistributedDataParallel,
        "DistributedDataParallel was put around a Decoder that is sharded: it",
    ),
    "DataParallel": (
        DataParallel,
        "DataParallel was put around a Decoder that is sharded: it would",
    ),
    "FSDP1": (fsdp1, "FullyShardedDataParallel was put around a Decoder that is sharded: it"),
    "FSDP2": (fully_shard, "fully_shard() was called on a module of a sharded model, so shards"),
    "opacus": (GradSampleModule, "GradSampleModule of opacus keeps the gradient of each sample"),
    "FSDP2 on a block": (
        lambda model: fully_shard(model.get_submodule("blocks.0")),
        "fully_shard() was called on a module of a sharded model, so shards would be sharded again",
    ),
}


@pytest.mark.filterwarnings("ignore:Trying to ignore the top-level module:UserWarning")
@pytest.mark.parametrize("comm", [LocalComm(), FakeComm(0, 2)], ids=["alone", "two"])
@pytest.mark.parametrize("what", AROUND)
def test_an_engine_around_a_sharded_model_is_refused_and_changes_nothing(
    what: str, comm: Comm, group: None
) -> None:
    wrap, text = AROUND[what]
    model = decoder()
    sharded = sw.shard(model, comm=comm)
    before = clones(sharded.local_state_dict())
    assert error_text(sw.ConfigError, lambda: wrap(model)).startswith(text)
    assert equal(sharded.local_state_dict(), before)
    train(model, decoder_batch(0, 2))
    sharded.unshard()
    wrap(model)


def on_a_block(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], nn.Module]:
    def wrapped(model: nn.Module) -> nn.Module:
        blocks = model.get_submodule("blocks")
        blocks.register_module("0", wrap(blocks.get_submodule("0")))
        return model

    return wrapped


WRAPPED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "DDP": (DistributedDataParallel, "the model is managed by DistributedDataParallel already"),
    "in another": (
        lambda model: nn.Sequential(DataParallel(model)),
        "module '0' is managed by DataParallel already, so its gradients would be averaged twice",
    ),
    "DDP on a block": (
        on_a_block(DistributedDataParallel),
        "module 'blocks.0' is managed by DistributedDataParallel already, so its gradients would",
    ),
    "FSDP2 on a block": (
        on_a_block(fully_shard),
        "module 'blocks.0' is managed by fully_shard() already, so its gradients would be averaged",
    ),
    "opacus": (GradSampleModule, "GradSampleModule of opacus keeps the gradient of each sample"),
    "FSDP1": (fsdp1, "the model is managed by FullyShardedDataParallel already"),
    "FSDP2": (fully_shard, "the model is managed by fully_shard() already"),
    "DTensor": (
        lambda model: distribute_module(model, init_device_mesh("cpu", (2,))),
        "parameter 'embed.weight' is a DTensor, which is sharded already",
    ),
}


@pytest.mark.parametrize("what", WRAPPED)
def test_a_model_that_another_engine_manages_is_not_sharded(what: str, group: None) -> None:
    wrap, text = WRAPPED[what]
    model = wrap(decoder())
    assert error_text(sw.ConfigError, lambda: sw.shard(model, comm=LocalComm())).startswith(text)


# ---- beside a sharded model ------------------------------------------------------------------

BESIDE: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": DistributedDataParallel,
    "DDP on a block": on_a_block(DistributedDataParallel),
    "FSDP1": fsdp1,
    "FSDP2": fully_shard,
    "DTensor": lambda model: distribute_module(model, init_device_mesh("cpu", (2,))),
}


@pytest.fixture
def no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other tests that are still there look at every optimizer, too."""
    monkeypatch.setattr(OptimizerHooks, "_of_models", [])


@pytest.mark.usefixtures("group", "no_other_models")
@pytest.mark.parametrize("what", BESIDE)
def test_parameters_that_another_engine_trains_are_not_warned_of(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In an optimizer of their own or in one for both; those that nobody averages are named."""
    model, aux = decoder(), nn.Parameter(torch.ones(3))
    sw.shard(model, comm=FakeComm(0, 2))
    wrapped = BESIDE[what](decoder())
    named = wrapped.named_parameters()
    moved: list[nn.Parameter] = [p for name, p in named if "blocks.0." in name or "flat" in name]
    assert moved
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": moved}]
    both, own = torch.optim.SGD(groups, lr=0.1), torch.optim.SGD([*moved, aux], lr=0.1)
    for step in range(3):
        train(model, decoder_batch(0, 2))
        for param in (*moved, aux) if step else moved:
            param.grad = torch.ones_like(param)
        both.step()
        own.step()
        assert bool(caplog.messages) <= bool(step)
    [text] = caplog.messages
    assert text.startswith(
        "SGD holds 1 parameters that are in no sharded model (one of shape (3,)), beside one that"
    )


@pytest.mark.usefixtures("group")
def test_what_no_engine_averages_over_the_ranks_is_not_theirs() -> None:
    """DataParallel has one process, and DDP leaves out what it is told to ignore."""
    plain, ignoring = DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["bias"])
    wrapped = DistributedDataParallel(ignoring)
    params = [*plain.parameters(), *wrapped.parameters()]
    assert {id(param) for param in params} & trained_by_others(params) == {id(ignoring.weight)}


@pytest.mark.usefixtures("group")
def test_the_search_holds_nothing_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises SystemError where a tuple grows of which somebody else holds a reference."""
    wrapped, owners = DistributedDataParallel(nn.Linear(2, 2)), list[int]()
    growing = (owners,)  # as another thread would be making one
    named, params = wrapped.named_parameters, list(wrapped.parameters())

    def counted() -> Iterator[tuple[str, nn.Parameter]]:
        owners.append(getrefcount(growing))
        return named()

    monkeypatch.setattr(wrapped, "named_parameters", counted)
    before = getrefcount(growing)
    assert {id(param) for param in params} <= trained_by_others(params)
    assert owners == [before]


def test_what_torch_registers_for_other_ends_stays(group: None) -> None:
    """A composable API that was applied before is there while the model is sharded, and after."""
    model = decoder()
    checkpoint(model.get_submodule("blocks.0"))
    sharded = sw.shard(model, comm=LocalComm())
    for done in (lambda: None, sharded.unshard):
        done()
        with pytest.raises(AssertionError, match="checkpoint has already been applied"):
            checkpoint(model.get_submodule("blocks.0"))
    assert list(get_model_state_dict(model)) == list(model.state_dict())
