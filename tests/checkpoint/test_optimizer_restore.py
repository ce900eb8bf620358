"""A parameter gets the whole of its stored state or none of it, and the report says which."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import Make, adamw, saved, steps
from tests.copies import clones, error_text, on_ranks
from tests.nets import NETS, Decoder

DECODER, TIED = NETS[0], NETS[1]

OTHERS: dict[str, Make] = {
    "adamw": adamw,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=3e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=3e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=3e-3, momentum=0.9),
}


def restored(
    path: Path,
    build: Callable[[], nn.Module] = DECODER.build,
    make: Callable[[nn.Module], Optimizer] = lambda model: adamw(model.parameters()),
    schedule: Callable[[Optimizer], Any] | None = None,
    **how: Any,
) -> tuple[sw.Loaded, dict[str, Any], list[dict[str, Any]]]:
    """The report, the state by name, and the groups of an optimizer that then takes a step."""

    def rank(comm: Comm, model: nn.Module) -> tuple[sw.Loaded, dict[str, Any], Any]:
        sharded = sw.shard(model, comm=comm)
        optimizer = make(model)
        training = sw.Training(scheduler=schedule(optimizer)) if schedule else None
        report = sharded.load(path, optimizer, training, **how)
        states = sharded.optimizer_state_dict(optimizer)
        model(torch.zeros(1, 2, dtype=torch.int64)).square().mean().backward()
        optimizer.step()
        return report, states["state"], states["param_groups"]

    return on_ranks(2, build, rank)[0]


def refusal(
    path: Path,
    make: Callable[[nn.Module], Optimizer],
    schedule: Callable[[Optimizer], Any] | None = None,
    build: Callable[[], nn.Module] = DECODER.build,
) -> str:
    """What a strict load says, which leaves model, optimizer and scheduler as they were."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = make(model)
        owner = schedule(optimizer) if schedule else None
        steps(model, optimizer, DECODER, comm.rank, range(1))

        def everything() -> dict[str, Tensor]:
            states = sharded.optimizer_state_dict(optimizer)
            some = {f"{n}/{k}": v for n, s in states["state"].items() for k, v in s.items()}
            rates = {f"rate {k}": torch.tensor(g["lr"]) for k, g in enumerate(_groups(states))}
            return clones({**model.state_dict(), **some, **rates})

        before, of_owner = everything(), str(owner and owner.state_dict())
        text = error_text(
            sw.CheckpointError, lambda: sharded.load(path, optimizer, sw.Training(scheduler=owner))
        )
        after = everything()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert str(owner and owner.state_dict()) == of_owner
        return text

    return on_ranks(2, build, rank)[0]


def _groups(states: dict[str, Any]) -> list[dict[str, Any]]:
    return list(states["param_groups"])


# --- another model, another class ------------------------------------------------------------


@pytest.mark.parametrize("kind", OTHERS)
def test_a_parameter_of_another_shape_keeps_its_own_state(kind: str, tmp_path: Path) -> None:
    make = OTHERS[kind]
    saved(DECODER, 2, tmp_path / "step-2", make=make)
    report, states, _ = restored(
        tmp_path / "step-2",
        lambda: Decoder(vocabulary=41, tied=False),
        lambda model: make(model.parameters()),
        strict=False,
    )
    fresh = {"step", "sum"} if kind == "adagrad" else set()  # made with the optimizer
    assert set(states.get("embed.weight", {})) == fresh
    assert states["norm.weight"]
    assert sum("of embed.weight: stored as (37, 16), the" in line for line in report.inexact) > 0


@pytest.mark.parametrize("kinds", [("adamw", "rmsprop"), ("rmsprop", "adamw"), ("adamw", "sgd")])
def test_another_class_gets_no_state_and_no_options(
    kinds: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(DECODER, 2, tmp_path / "step-2", make=OTHERS[kinds[0]])
    make = OTHERS[kinds[1]]
    with caplog.at_level(logging.WARNING, "shardwise"):
        report, states, (group,) = restored(
            tmp_path / "step-2", make=lambda model: make(model.parameters()), strict=False
        )
    assert not states
    assert group["lr"] == make([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
    assert all("its state is of" in line for line in report.inexact)
    (record,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert f"{len(report.inexact)} things were left out or converted, such as: embed.w" in record


def test_state_of_a_parameter_that_is_not_asked_for_stays(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")

    def rank(comm: Comm, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = sw.shard(model.bfloat16(), comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, DECODER, comm.rank, range(1))
        before = sharded.optimizer_state_dict(optimizer)["state"]
        names = before.keys() - {"embed.weight"}
        sharded.load(tmp_path / "step-2", optimizer, cast=True, names={*names}.__contains__)
        after = sharded.optimizer_state_dict(optimizer)["state"]
        steps(model, optimizer, DECODER, comm.rank, range(1))
        return before, after

    for before, after in on_ranks(2, DECODER.build, rank):
        for name in before:
            alike = torch.equal(before[name]["exp_avg"], after[name]["exp_avg"])
            assert alike == (name == "embed.weight"), name


def test_a_refused_load_changes_nothing(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    text = refusal(tmp_path / "step-2", lambda model: OTHERS["sgd"](model.parameters()))
    assert "its state is of AdamW, and SGD holds it now" in text


# --- groups and schedulers -------------------------------------------------------------------


def grouped(model: nn.Module, swapped: bool = False) -> Optimizer:
    """Matrices at 0.1 and the rest at 0.001, in this order or the other."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.001},
    ]
    return torch.optim.AdamW(groups[::-1] if swapped else groups)


def halving(optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def with_schedule(path: Path, schedule: Callable[[Optimizer], Any] | None) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = grouped(model)
        training = sw.Training(scheduler=schedule(optimizer) if schedule else None)
        steps(model, optimizer, DECODER, comm.rank, range(1))
        sharded.save(path, optimizer, training)

    on_ranks(2, DECODER.build, rank)


def test_a_scheduler_is_not_given_to_groups_in_another_order(tmp_path: Path) -> None:
    with_schedule(tmp_path / "step-1", halving)
    text = refusal(tmp_path / "step-1", lambda model: grouped(model, swapped=True), halving)
    assert "scheduler: group 0 of AdamW was group 1 when it was saved" in text
    report, _, groups = restored(
        tmp_path / "step-1",
        make=lambda model: grouped(model, swapped=True),
        schedule=halving,
        strict=False,
    )
    assert [group["lr"] for group in groups] == [0.001, 0.1]
    assert len(report.inexact) == 2
    assert restored(tmp_path / "step-1", make=grouped, schedule=halving)[0].inexact == ()


def test_a_scheduler_of_another_class_is_left_out(tmp_path: Path) -> None:
    with_schedule(tmp_path / "step-1", lambda optimizer: StepLR(optimizer, 3))
    cosine: Callable[[Optimizer], Any] = lambda optimizer: CosineAnnealingLR(optimizer, 9)  # noqa: E731
    fact = "scheduler: its state is of StepLR, not of CosineAnnealingLR"
    assert fact in refusal(tmp_path / "step-1", grouped, cosine)
    report, *_ = restored(tmp_path / "step-1", make=grouped, schedule=cosine, strict=False)
    assert report.inexact == (fact,)


def test_merged_groups_keep_the_options_that_differed_and_no_scheduler_says_so(
    tmp_path: Path,
) -> None:
    with_schedule(tmp_path / "step-1", None)
    report, states, (group,) = restored(
        tmp_path / "step-1",
        make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.7, weight_decay=0.3),
        schedule=halving,
        strict=False,
    )
    assert (group["lr"], group["weight_decay"]) == (0.7, 0.01)
    assert states["norm.weight"]["step"] == 1
    assert "saved with lr=0.001, and embed.weight, now in the same group" in report.inexact[0]
    assert report.inexact[1:] == ("scheduler: its state is not stored",)


# --- several optimizers, tied weights, values of ranks ---------------------------------------


def test_two_optimizers_over_the_same_parameters_get_no_state(tmp_path: Path) -> None:
    saved(DECODER, 1, tmp_path / "step-2")

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        two = [adamw(model.parameters()), adamw(model.parameters())]
        return error_text(sw.CheckpointError, lambda: sharded.load(tmp_path / "step-2", two))

    assert "both hold 'embed.weight'" in on_ranks(1, DECODER.build, rank)[0]


def test_state_of_weights_that_are_tied_now_is_left_out_and_said(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    report, states, _ = restored(tmp_path / "step-2", TIED.build)
    fact = "lm_head.weight: its optimizer state is left out, since it is tied to embed.weight now"
    assert report.inexact == (fact,)
    assert states["embed.weight"]["step"] == 2


def test_local_values_of_another_number_of_ranks_are_said_to_be_elsewhere(tmp_path: Path) -> None:
    def save(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm).save(tmp_path / "step-1", None, sw.Training(local=comm.rank))

    on_ranks(3, DECODER.build, save)
    load = lambda comm, model: sw.shard(model, comm=comm).load(tmp_path / "step-1")  # noqa: E731
    report = on_ranks(2, DECODER.build, load)[0]
    assert report.local is None
    assert "local values of 3 ranks are not those of 2" in report.inexact[0]
    assert report.document is not None
    assert report.document.local == [0, 1, 2]
    assert on_ranks(3, DECODER.build, load)[1].inexact == ()
