"""What is observed does not import the compiler, and who needs the compiler gets it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from shardwise.plan.forecast import absent_compiler
from shardwise.plan.forecast.absent_compiler import COMPILER, AbsentCompiler, without_compiler


@pytest.fixture
def _not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    monkeypatch.delitem(vars(torch), "_dynamo", raising=False)


def twice(x: int) -> int:
    return 2 * x


@pytest.mark.usefixtures("_not_imported")
def test_a_function_that_graphs_leave_out_is_called_as_it_is_and_left_out_later() -> None:
    left_out = torch._disable_dynamo(twice)  # type: ignore[attr-defined] # as of meta kernels
    with without_compiler():
        assert left_out(3) == 6
        assert vars(twice) == {absent_compiler.KEPT_OUT: twice}
    assert COMPILER not in sys.modules
    assert vars(twice) == {}


@pytest.mark.usefixtures("_not_imported")
def test_who_asks_for_more_gets_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimpleNamespace(is_compiling=lambda: False)
    monkeypatch.setattr(absent_compiler, "import_module", {COMPILER: real}.__getitem__)
    with without_compiler():
        assert isinstance(sys.modules[COMPILER], AbsentCompiler)
        assert sys.modules[COMPILER].is_compiling is real.is_compiling
        assert COMPILER not in sys.modules


def test_a_compiler_that_is_there_stays() -> None:
    before = sys.modules.setdefault(COMPILER, torch._dynamo)
    with without_compiler():
        assert sys.modules[COMPILER] is before


STEP = """
import sys, torch, shardwise as sw
from shardwise.plan.forecast.observe import observe
from shardwise.plan.units.units import choose_units
model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
optimizer, ids = sw.optim.AdamW(sw.shard(model)), torch.zeros(2, 4, dtype=torch.int64)
model(ids).sum().backward()
optimizer.step()
optimizer.zero_grad()
plain = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
observe(plain, choose_units(plain), (ids,), {})
print(model[0].weight.grad, "torch._dynamo" in sys.modules)
"""


def test_neither_a_step_nor_its_plan_imports_the_compiler() -> None:
    """It takes seconds of each start; torch's ``zero_grad`` and its meta kernels do."""
    command = [sys.executable, "-c", STEP]
    assert subprocess.check_output(command, text=True, timeout=240) == "None False\n"
