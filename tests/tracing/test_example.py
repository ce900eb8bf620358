"""The tutorial's script, as its reader runs it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.examples.run import torchrun
from tests.forked import forked

SCRIPT = Path(__file__).parents[2] / "examples" / "trace_zero2.py"


def test_the_script_prints_forward_a_line_of_stars_and_backward(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    forward, backward = capsys.readouterr().out.split("\n" + "*******" * 8 + "\n")
    assert forward.startswith("# forward of Sequential, shard_grad_op, rank 0 of 2")
    assert forward.count("all_gather_impl(") == forward.count("wait_impl(") == 2
    assert backward.count("reduce_scatter_impl(") == backward.count("wait_impl(") == 2
    assert "all_gather_impl(" not in backward
    assert backward.count("aten.div_.Scalar(summed_") == 2


@pytest.mark.spawn
@forked
def test_under_torchrun_programs_and_engine_do_the_same(tmp_path: Path) -> None:
    printed, nothing = torchrun(SCRIPT, folder=tmp_path)
    assert printed.count("*******" * 8) == 1
    assert printed[-1] == "program and engine: gradients equal True, collectives equal True"
    assert nothing == []
