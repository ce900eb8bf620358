"""Programs as users write them, under every engine."""

from __future__ import annotations

import torch

from benchmarks.harness.machine import this_machine
from benchmarks.programs.program import PROGRAMS
from benchmarks.programs.report import Outcome, Report, lines
from benchmarks.programs.run import difference, run


def test_each_program_says_what_it_does_in_a_line() -> None:
    assert len(PROGRAMS) >= 45
    assert all(program.about and "\n" not in program.about for program in PROGRAMS.values())


def test_a_difference_is_named_and_a_small_one_is_none() -> None:
    plain = {"losses": [1.0, 2.0], "parameters": {"a": torch.ones(2)}}
    close = {"losses": [1.0, 2.0 + 1e-6], "parameters": {"a": torch.ones(2)}}
    other = {"losses": [1.0, 2.0], "parameters": {"a": torch.tensor([1.0, 1.5])}}
    assert difference(plain, close, 2e-5) == ""
    assert "item ['parameters']['a']" in difference(plain, other, 2e-5)
    assert "length" in difference(plain, plain | {"losses": [1.0]}, 2e-5)


def test_a_program_that_ends_badly_does_not_stop_the_next() -> None:
    spoken: list[str] = []
    report = run(2, ["weight_penalty", "sgd"], ["shardwise"], spoken.append)
    assert [outcome.verdict for outcome in report.outcomes] == ["refused", "equal"]
    assert len(spoken) == 2


def test_the_table_has_a_line_for_each_program_and_says_what_went_wrong() -> None:
    outcomes = (
        Outcome("shardwise", "sgd", "loops", "SGD", "equal"),
        Outcome("fsdp2", "sgd", "loops", "SGD", "error", "RuntimeError: mixed"),
    )
    report = Report(this_machine(), 2, outcomes)
    text = lines(report)
    assert "sgd  equal          error          SGD" in text
    assert "fsdp2: 1 programs: 1 error" in text
    assert text[-1] == "fsdp2, sgd: error: RuntimeError: mixed"
