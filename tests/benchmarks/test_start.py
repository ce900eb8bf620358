"""The benchmark of the first step: a line ends each phase, and the last one the command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.start.run import OURS, TRAINER, Program, program_of, recipe_of, seconds
from shardwise.recipe.read import read_recipe

SAYS = "import time; print('imports is over', flush=True); time.sleep(0.2); print('data is over')"


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["", "in the background"])
def _sigquit(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGQUIT, request.param)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.mark.usefixtures("_sigquit")
def test_a_phase_lasts_from_the_line_before_until_its_own_and_the_command_no_longer() -> None:
    ends = {phase: TRAINER[phase] for phase in ("imports", "data")}
    code = f"{SAYS}; import sys; sys.stdout.flush(); time.sleep(600)"
    times = seconds(Program([sys.executable, "-c", code], ends))
    assert list(times) == ["imports", "data", "CPU s"]
    assert 0.15 < times["data"] < 60


def test_a_command_that_ends_before_its_first_step_is_an_error_with_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"ended before model: imports is over\ndata is over"):
        seconds(Program([sys.executable, "-c", SAYS], TRAINER))


def test_both_fine_tunings_read_the_same_model_and_pairs(tmp_path: Path) -> None:
    model, pairs = tmp_path / "model", tmp_path / "pairs.jsonl"
    ours = program_of("ours", model, pairs, str(tmp_path / "run"))
    trainer = program_of("trainer ddp", model, pairs, str(tmp_path / "run"))
    recipe = read_recipe(tmp_path / "run.yaml")
    assert (recipe.model.source, recipe.data.source) == (str(model), str(pairs))
    assert {str(model), str(pairs)} < {*trainer.command}
    assert ours.weights == trainer.weights == model
    assert (tmp_path / "run.yaml").read_text("utf-8") == recipe_of(model, pairs)
    assert [*ours.ends] == [*trainer.ends] == [*OURS]
