"""``shard(compile=…)``: each unit is a graph of its own, and the numbers are those without."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.machine.accelerators import ROWS
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.setup import compiler
from tests.copies import assert_near
from tests.fake import FakeComm
from tests.nets import decoder, decoder_batch, mostly_frozen, mostly_frozen_batch, tied_decoder
from tests.ranks import run_threads
from tests.steps import STRATEGIES, play, train

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own

BATCHES = [decoder_batch(rank, 2) for rank in range(2)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> Iterator[None]:
    """Graphs are shared by the tests of this file, which is most of what they cost."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(steps: Callable[[], None]) -> dict[str, int]:
    """Graphs, breaks and recompilations of ``steps``, as torch counts them."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    steps()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiled": sum(counters["recompiles"].values()),
    }


# ---- what is computed --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_a_plain_model_bit_for_bit(strategy: str) -> None:
    taken = play(decoder(), [train] * 2, BATCHES, strategy=strategy, compile="aot_eager")
    assert all(step.follows for step in taken)


@pytest.mark.prove
@pytest.mark.parametrize("offload", [False, True])
def test_with_checkpointing_too(offload: bool) -> None:
    policy = sw.ActivationCheckpointing(offload=offload)
    options = {"compile": "aot_eager", "activation_checkpointing": policy}
    assert all(step.follows for step in play(decoder(), [train] * 2, BATCHES, **options))


@pytest.mark.prove
def test_and_where_most_is_frozen_or_tied() -> None:
    batches = [mostly_frozen_batch(rank, 2) for rank in range(2)]
    play(mostly_frozen(), [train] * 2, batches, compile="aot_eager")
    play(tied_decoder(), [train] * 2, BATCHES, compile="aot_eager")


def trained(model: nn.Module, comm: Comm, **options: Any) -> dict[str, torch.Tensor]:
    """The shards of a copy of ``model`` after three steps of SGD."""
    model = deepcopy(model)
    sharded = sw.shard(model, comm=comm, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        train(model, decoder_batch(comm.rank + number, 2))
        optimizer.step()
        optimizer.zero_grad()
    return {name: shard.detach().clone() for name, shard in sharded.local_state_dict().items()}


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"])
def test_hybrid_meshes(strategy: str) -> None:
    model, options = decoder(), {"strategy": strategy, "mesh": (2, 2)}

    def rank(comm: Comm) -> bool:
        plain = trained(model, comm, **options)
        compiled = trained(model, comm, **options, compile="aot_eager")
        return all(torch.equal(shard, compiled[name]) for name, shard in plain.items())

    assert run_threads(4, rank) == [True] * 4


# ---- graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_each_unit_is_one_graph_and_steps_compile_nothing_more(
    recomputes: bool, accumulates: bool
) -> None:
    torch._dynamo.reset()
    model, batch = decoder(), decoder_batch(0, 2)
    sharded = sw.shard(
        model, comm=FakeComm(0, 3), compile="aot_eager", activation_checkpointing=recomputes
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with sharded.accumulate(last=not accumulates):
            train(model, batch)
        train(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    # Three blocks share one graph; the last unit is a norm and a head, which are called apart.
    assert counted(step) == {"graphs": 4, "breaks": 0, "recompiled": 0}
    assert not any(counted(step).values())
    assert not any(counted(step).values())


def test_a_model_that_is_one_unit_is_one_graph() -> None:
    torch._dynamo.reset()
    tower = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # a part that could be called alone
    model = nn.Sequential(tower, nn.LayerNorm(4))
    sw.shard(model, wrap=sw.wrap.whole(), comm=FakeComm(0, 3), compile="aot_eager")
    counts = counted(lambda: model(torch.ones(2, 4)).sum().backward())
    assert counts == {"graphs": 1, "breaks": 0, "recompiled": 0}


@pytest.mark.prove
def test_many_classes_of_torch_do_not_exhaust_the_graphs_of_one_function() -> None:
    """torch.compile wraps each forward of its own modules in one function, and keeps 8 graphs."""
    torch._dynamo.reset()
    modules: list[nn.Module] = [
        nn.Linear(6, 6), nn.Bilinear(6, 6, 6), nn.LayerNorm(6), nn.RMSNorm(6), nn.PReLU(),
        nn.GroupNorm(2, 6), nn.BatchNorm1d(6), nn.Conv1d(6, 6, 1), nn.Embedding(6, 6),
        nn.ConvTranspose1d(6, 6, 1), nn.InstanceNorm1d(6, affine=True),
    ]  # fmt: skip
    model = nn.ModuleDict({str(index): module for index, module in enumerate(modules)})
    model.forward = lambda calls: [call() for call in calls]
    names = [str(index) for index in range(len(modules))]
    sw.shard(model, wrap=sw.wrap.by_hand(*names), comm=LocalComm(), compile="eager")
    flat, rows = torch.ones(2, 6), torch.ones(2, 6, 3)
    inputs: dict[str, Any] = {"7": (rows,), "9": (rows,), "10": (rows,), "8": (flat.long(),)}
    inputs["1"] = (flat, flat)
    calls = [
        lambda name=name, module=module: module(*inputs.get(name, (flat,)))
        for name, module in zip(names, modules, strict=True)
    ]
    assert counted(lambda: model(calls))["graphs"] == len(modules)


def test_a_graph_of_the_whole_model_is_refused_with_the_reason() -> None:
    model = decoder()
    sw.shard(model, comm=LocalComm())
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gathers and frees a unit here") as e:
        whole(decoder_batch(0, 2)[0])
    assert "let shard(model, compile=True) compile the units" in str(e.value)


def test_the_users_own_compile_sees_recomputed_units() -> None:
    """Of a ``partial`` of torch's ``checkpoint`` it would compile nothing, without a word."""
    torch._dynamo.reset()
    model: Any = decoder()
    sw.shard(model, comm=LocalComm(), activation_checkpointing=True)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert counted(lambda: train(model, decoder_batch(0, 2)))["graphs"] == 1


# ---- backends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("known", ROWS, ids=lambda known: known.device)
def test_each_accelerators_row_names_its_backend(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "list_backends", lambda **_: ["inductor", "hpu_backend"])
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    chosen = compiler.backend_of(True, torch.device(known.device))
    assert chosen == ("hpu_backend" if known.device == "hpu" else "inductor")


def test_without_a_cpp_compiler_the_fallback_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert compiler.backend_of(True, CPU) == "aot_eager"
    assert "'no-such-compiler' is not on the PATH: units are compiled by aot_eager" in caplog.text
    with pytest.raises(sw.ConfigError, match='set CXX, or pass compile="aot_eager"'):
        compiler.backend_of("inductor", CPU)


def test_a_backend_that_is_not_there_is_refused_nearest_first() -> None:
    with pytest.raises(sw.ConfigError, match=r"no backend 'inducter'\. Nearest first: inductor,"):
        sw.shard(decoder(), comm=LocalComm(), compile="inducter")
    with pytest.raises(sw.ConfigError, match="import the plug-in that registers it"):
        compiler.backend_of(True, torch.device("hpu"))


def test_a_backend_of_another_device_falls_back_to_this_ones_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert compiler.backend_of("hpu_backend", CPU) == "inductor"
    assert "hpu_backend is another device's: units are compiled by inductor" in caplog.text


@pytest.mark.parametrize("way", ["block", "forward", "model"])
def test_compiling_twice_is_refused(way: str) -> None:
    model: Any = decoder()
    if way == "block":
        model.blocks[0].compile()
    elif way == "forward":
        model.blocks[0].forward = torch.compile(model.blocks[0].forward)
    else:
        model = torch.compile(model)
    name = "the model" if way == "model" else r"'blocks\.0'"
    with pytest.raises(sw.ConfigError, match=f"{name} was compiled already: only one of the two"):
        sw.shard(model, comm=LocalComm(), compile=True)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inductor(strategy: str, recomputes: bool) -> None:
    model, comm, compiled = decoder(), FakeComm(0, 2), dict[str, torch.Tensor]()
    options: dict[str, Any] = {"strategy": strategy, "activation_checkpointing": recomputes}
    plain = trained(model, comm, **options)
    counts = counted(lambda: compiled.update(trained(model, comm, **options, compile=True)))
    assert counts["breaks"] == 0
    for name, shard in plain.items():
        assert_near(compiled[name], shard)
