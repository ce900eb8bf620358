"""What runs after what: guessed from registration, rehearsed on the meta device, then recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.plan.order import guess, mirror, on_meta, rehearse
from shardwise.plan.schedule.events import Cue, Op, Order, Phase
from shardwise.plan.units.units import choose_units
from tests.fake import FakeComm
from tests.nets import NETS, Batch, Net, decoder, encoder_decoder, numbers, tied_decoder
from tests.ranks import run_threads
from tests.steps import Recorder, train


def unit_names(model: nn.Module) -> dict[nn.Module, str]:
    return {module: unit.name for unit in choose_units(model) for module in unit.modules}


def read(cues: Iterable[Cue]) -> str:
    """``enter blocks.0`` as ``(blocks.0``, its exit as ``)``."""
    return " ".join(f"({cue.unit}" if cue.op is Op.ENTER else ")" for cue in cues)


# ---- the guess -----------------------------------------------------------------------------------


def test_a_decoder_is_guessed_in_the_order_of_registration() -> None:
    model = decoder()
    assert read(guess(model, unit_names(model)).forward) == (
        "(embed ) (blocks.0 ) (blocks.1 ) (blocks.2 ) (norm+lm_head ) (norm+lm_head )"
    )


def test_a_tied_unit_is_guessed_wherever_one_of_its_modules_stands() -> None:
    model = tied_decoder()
    tied = "embed+norm+lm_head"
    assert read(guess(model, unit_names(model)).forward) == (
        f"({tied} ) (blocks.0 ) (blocks.1 ) (blocks.2 ) ({tied} ) ({tied} )"
    )


def test_a_root_with_parameters_of_its_own_is_open_around_all_others() -> None:
    model = encoder_decoder()
    listed = read(guess(model, unit_names(model)).forward)
    assert listed.startswith("( (encoder.embed+...+lm_head ) (encoder.blocks.0 )")
    assert listed.endswith(") )")


# ---- the mirror ----------------------------------------------------------------------------------


def test_backward_enters_what_forward_left_and_leaves_what_it_entered() -> None:
    forward = (
        Cue(Op.ENTER, "root", Phase.FORWARD),
        Cue(Op.ENTER, "a", Phase.FORWARD),
        Cue(Op.EXIT, "a", Phase.FORWARD),
        Cue(Op.ENTER, "b", Phase.FORWARD),
        Cue(Op.EXIT, "b", Phase.FORWARD),
        Cue(Op.EXIT, "root", Phase.FORWARD),
    )
    assert read(mirror(forward)) == "(root (b ) (a ) )"
    assert {cue.phase for cue in mirror(forward)} == {Phase.BACKWARD}


# ---- the rehearsal -------------------------------------------------------------------------------


def recorded(model: nn.Module, batch: Batch) -> Order:
    """What a real step does, as the runtime records it."""
    sharded = sw.shard(model, comm=LocalComm())
    recorder = Recorder(sharded)
    train(model, batch)
    cues = [Cue(*event[:3]) for event in recorder.take() if event.op in (Op.ENTER, Op.EXIT)]
    return Order(
        tuple(cue for cue in cues if cue.phase is Phase.FORWARD),
        tuple(cue for cue in cues if cue.phase is Phase.BACKWARD),
    )


VALUE_FREE = [net for net in NETS if str(net) != "unused_expert"]


@pytest.mark.parametrize("net", VALUE_FREE, ids=str)
def test_a_rehearsal_sees_the_forward_order_of_a_real_step(net: Net) -> None:
    model, batch = net.build(), net.batch(0, 2)
    rehearsed = rehearse(model, choose_units(model), batch[:-1], {})
    assert rehearsed.forward == recorded(model, batch).forward


class Backwards(nn.Module):
    """Registered in one order, used in another; the arguments are passed by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        for _ in range(times):
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
        out: Tensor = self.last(x)
        return out


WRAP = sw.wrap.by_class(nn.Linear)


def test_a_rehearsed_model_follows_its_schedule_from_the_first_step() -> None:
    models = [Backwards(), Backwards()]

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], wrap=WRAP, comm=comm)
        x = numbers(comm.rank, (3, 4))
        guessed = sharded.schedule.events
        rehearsed = sharded.rehearse(x, times=2)
        assert rehearsed.events == sharded.schedule.events != guessed
        recorder = Recorder(sharded)
        comm.counters.reset()
        sharded.model(x, times=2).sum().backward()
        assert recorder.take() == rehearsed.events
        with torch.no_grad():
            forward = sharded.schedule_of("forward").events
            sharded.model(x, times=2)
        assert recorder.take() == forward

    run_threads(2, rank)


def test_every_mode_has_an_order_of_its_own() -> None:
    sharded = sw.shard(Backwards(), wrap=WRAP, comm=LocalComm())
    x = numbers(0, (3, 4))
    with torch.no_grad():
        sharded.model(x, times=2)
    sharded.model(x).sum().backward()
    orders = sharded.runtime.schedules.orders
    once = "(layers.2 ) (layers.1 ) (layers.0 ) (last )"
    assert read(orders["train"].forward) == once
    assert read(orders["forward"].forward) == f"{once[:-8]} {once}"
    assert orders["forward"].backward == ()
    assert read(orders["accumulate"].forward).startswith("(last )")  # still the guess


class Real(TorchDispatchMode):
    """Notes tensors that were made anywhere but on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta and result.numel():
            self.operations.append(func.name())
        return result


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_a_rehearsal_allocates_nothing_sends_nothing_and_changes_nothing(strategy: str) -> None:
    model = decoder()
    ids = torch.randint(37, (4, 9))
    sharded = sw.shard(model, strategy, comm=FakeComm(1, 3))
    sharded.comm.counters.reset()
    before = {name: (id(p), p._version, p.shape) for name, p in model.named_parameters()}
    with Real() as real:
        sharded.rehearse(ids)
    assert real.operations == []
    assert sharded.comm.counters.calls == {}
    assert {name: (id(p), p._version, p.shape) for name, p in model.named_parameters()} == before
    assert all(param.grad is None for param in model.parameters())
    assert not any(bucket.gathered for bucket in sharded.buckets)


def test_a_model_larger_than_memory_can_be_rehearsed() -> None:
    """A trillion parameters: 4 TB."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(500_000, 500_000, bias=False) for _ in range(4)])
    order = rehearse(model, choose_units(model), (torch.empty(1, 500_000, device="meta"),), {})
    assert read(order.forward) == "(0 ) (1 ) (2 ) (3 )"


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if x.sum().item() > 0 else -out


def test_a_model_that_looks_at_values_is_told_to_let_the_first_step_record() -> None:
    sharded = sw.shard(Looking(), comm=LocalComm())
    before = sharded.schedule.events
    with pytest.raises(sw.ShardwiseError, match=r"depends on values.*the first step records"):
        sharded.rehearse(numbers(0, (2, 4)))
    assert sharded.schedule.events == before
    train(sharded.model, (numbers(0, (2, 4)), numbers(1, (2, 4))))


def test_after_a_rehearsal_that_stopped_nothing_listens_any_more() -> None:
    model = Looking()
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(sw.ShardwiseError):
        rehearse(model, choose_units(model), (numbers(0, (2, 4)),), {})
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before


def test_a_mistake_of_the_caller_is_not_taken_for_a_look_at_values() -> None:
    model = decoder()
    with pytest.raises(TypeError, match="forward"):
        rehearse(model, choose_units(model), (), {})


def test_on_the_meta_device_what_requires_a_gradient_still_does() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model.register_buffer("trained", torch.ones(2, requires_grad=True))
    tensors = on_meta(model, choose_units(model))
    requires_grad = {name: tensor.requires_grad for name, tensor in tensors.items()}
    assert requires_grad == {"weight": True, "bias": False, "trained": True}
    assert [name for name in requires_grad if isinstance(tensors[name], nn.Parameter)] == [
        "weight",
        "bias",
    ]
