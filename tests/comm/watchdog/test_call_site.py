"""From the stack of a thread to the line of the program that the user wrote."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.watchdog import call_site
from shardwise.comm.watchdog.call_site import joint_call, stack_of, user_call
from tests.fake import FakeComm


class Told(nn.Module):
    """Notes where its caller is, while it computes and in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.calls: list[str] = []

    def note(self, *_: object) -> None:
        self.calls.append(user_call(threading.get_ident()))

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        x.register_hook(self.note)
        out: Tensor = self.fc(x)
        return out


def called(lines: list[str]) -> list[str]:
    """The calls without the numbers of the lines, which change."""
    here = Path(__file__).name
    assert all(line.rpartition(":")[2].isdecimal() and f" at {here}:" in line for line in lines)
    return [line.partition(" at ")[0] for line in lines]


def test_the_call_of_torch_is_named_and_not_the_lines_that_torch_calls() -> None:
    model = Told()
    sw.shard(model, comm=FakeComm(0, 2))
    loss = nn.Sequential(model)(torch.ones(2, 2, requires_grad=True)).sum()
    loss.backward()
    expected = ["`loss = nn.Sequential(model)(torch.ones(2, 2, requires_grad=True)).sum()`"]
    assert called(model.calls) == [*expected, "`loss.backward()`"]


def test_functions_that_torch_wraps_are_named_where_they_are_called() -> None:
    model = Told()

    @torch.no_grad()
    def evaluate(model: nn.Module) -> None:
        model(torch.ones(2, 2).requires_grad_(False).clone())

    model.forward = lambda x: model.note()  # type: ignore[method-assign, assignment, return-value]
    evaluate(model)
    assert called(model.calls) == ["`evaluate(model)`"]


def test_a_program_without_source_has_a_number_all_the_same() -> None:
    model, scope = Told(), dict[str, object]()
    exec("def run(model, x):\n    model(x)", scope)
    run = scope["run"]
    assert isinstance(run, Callable)  # type: ignore[arg-type]
    run(model, torch.ones(2, 2, requires_grad=True))  # type: ignore[operator]
    assert model.calls == ["<string>:2"]


def test_a_thread_that_is_in_no_call_is_nowhere() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    assert user_call(thread.ident or 0) == ""
    may_end.set()
    thread.join()
    assert user_call(thread.ident or 0) == ""


def test_a_stack_begins_with_the_outermost_of_its_innermost_calls() -> None:
    def deep(calls: int) -> str:
        return deep(calls - 1) if calls else call_site.stack_of(threading.get_ident())

    calls = deep(30).split(" → ")
    assert len(calls) == 16
    assert calls[-1].startswith("watchdog/call_site.py:")
    assert calls[0].endswith(" deep")
    assert calls[0].startswith("watchdog/test_call_site.py:")


class Busy:
    def activity(self) -> str:
        return "step 2: forward of blocks.3"


def test_a_process_does_what_is_asked_while_it_lives() -> None:
    one, alike = Busy(), Busy()
    call_site.active.update((one, alike))
    assert call_site.activity().count("step 2: forward of blocks.3") == 1
    del one, alike
    assert "step 2: forward of blocks.3" not in call_site.activity()


@pytest.mark.parametrize(
    ("file", "call", "is_joint"),
    [
        (torch.__file__, "barrier(None)", True),
        (torch.__file__, "barrier(None, torch.zeros(9))", True),
        (torch.__file__, "barrier(None, torch.zeros(2**20))", False),  # it may still be sent
        (torch.__file__, "barrier('of some ranks')", False),
        (__file__, "barrier(None)", False),
    ],
)
def test_a_call_that_ends_when_all_ranks_have_made_it_is_seen(
    file: str, call: str, is_joint: bool
) -> None:
    text = "def barrier(group, tensor=None):\n    sleep(0.1)"
    names: dict[str, Any] = {"sleep": time.sleep, "torch": torch}
    exec(compile(text, file, "exec"), names)
    program = threading.Thread(target=eval, args=(call, names))
    program.start()
    seen = [joint_call(program.ident or 0) for _ in iter(program.is_alive, False)]
    assert any(seen) == is_joint


# ---- garbage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [user_call, stack_of])
def test_no_garbage_is_collected_while_stacks_are_read(read: Callable[[int], Any]) -> None:
    collections: list[str] = []

    def note(phase: str, _: object) -> None:
        if sys._getframe(1).f_code is walk_stack.__code__:
            collections.append(phase)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)  # so every allocation collects
    try:
        for _ in range(50):
            read(threading.main_thread().ident or 0)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert collections == []
    assert gc.isenabled()


def test_stacks_that_were_read_keep_nothing_alive() -> None:
    def call() -> weakref.ref[nn.Module]:
        local = nn.Linear(1, 1)
        assert stack_of(threading.get_ident())
        user_call(threading.get_ident())
        return weakref.ref(local)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
