"""On a device that is not there, every access waits for what it needs, and no fault goes unseen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ScheduleError
from tests.nets import loss
from tests.recorder.clocks import DEVICE
from tests.recorder.faults import FAULTS
from tests.recorder.programs import Program, batch, plainly, recorded
from tests.steps import STRATEGIES

HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
BF16 = sw.Precision(param_dtype=torch.bfloat16)
WIDE = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BYTES = sw.Precision(reduce_dtype=torch.int8)

ALL = {"offload": "everything"}
HALF = {"offload": "optimizer"}
ROWS = {"mesh": (2, 2)}
PROGRAMS = {
    "full_shard": Program(),
    "flat optimizer": Program("full_shard", ALL, flat=True),
    "hybrid": Program("hybrid_full", ROWS | ALL | {"precision": BF16}, raises="forward"),
    "whole copies": Program("hybrid_full", {"mesh": (2, 1)}),
    "backward raises": Program("shard_grad_op", raises="backward"),
}
QUICK = ("flat optimizer", "hybrid", "whole copies")
MORE = {
    "reentrant": Program(recomputes="reentrant", ahead=7),
    "compiled": Program("zero1", {"compile": "eager", "precision": BYTES}),
    "checkpointed": Program("hybrid_shard", ROWS | {"activation_checkpointing": True}),
    "no_shard": Program("no_shard", HALF | {"precision": WIDE}),
}
MORE |= {
    f"{strategy} {offload} {flat=} {raises}": Program(
        strategy,
        {"offload": offload} | (ROWS if strategy in HYBRIDS else {}),
        "",
        flat=flat,
        raises=raises,
    )
    for strategy in (*STRATEGIES, *HYBRIDS)
    for offload in ("none", "optimizer", "everything")
    for flat in (False, True)
    for raises in ("", "forward", "backward")
}
MORE |= {
    f"{kind} {strategy} {precision}": Program(strategy, {"precision": precision}, kind)
    for kind in ("", "reentrant", "kept")
    for strategy in STRATEGIES
    for precision in (BF16, WIDE, BYTES)
}


SOME = list(FAULTS)[::3]
OTHERS = [name for name in FAULTS if name not in SOME]
prove = pytest.mark.prove


def check(program: Program, own_stream: bool = False) -> None:
    """It waits for all that it needs, and computes what it computes where nothing is late."""
    expected = plainly(program)
    results, device = recorded(program, own_stream)
    assert device.faults == []
    assert [name for name in expected if not torch.equal(results[name], expected[name])] == []


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=() if n in QUICK else prove) for n, p in PROGRAMS.items()],
    ids=PROGRAMS,
)
def test_a_program_waits_for_all_that_it_needs(program: Program) -> None:
    check(program)


@prove
@pytest.mark.parametrize("program", MORE.values(), ids=MORE)
def test_so_does_one_of_every_kind(program: Program) -> None:
    check(program)


@prove
@pytest.mark.parametrize("ahead", range(64))
def test_so_does_a_recomputation_wherever_the_numbers_of_the_thread_are(ahead: int) -> None:
    check(Program(recomputes="reentrant", ahead=ahead, micro=1))


def test_a_program_may_compute_in_a_stream_of_its_own() -> None:
    check(Program(options=ALL), own_stream=True)


@pytest.mark.parametrize("name", [*SOME, *[pytest.param(name, marks=prove) for name in OTHERS]])
def test_a_planted_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    with fault.plant():
        _, device = recorded(fault.program)
    assert any(fault.shows in text for text in device.faults)


class Elsewhere(Program):
    """Its model is called in another stream."""

    def _step(self, sharded: sw.Sharded, model: nn.Module, step: int) -> Tensor:
        super()._step(sharded, model, step)
        given = batch(step)
        with torch.Stream(DEVICE):
            return loss(model, given)


def test_a_call_in_another_stream_is_refused() -> None:
    with pytest.raises(ScheduleError, match="is called in copy"):
        recorded(Elsewhere())
