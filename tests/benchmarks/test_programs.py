"""Programs as users write them, under every engine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.programs.program import PROGRAMS
from benchmarks.programs.run import Config, difference, report_of, run


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


@pytest.mark.spawn
def test_a_program_that_ends_badly_does_not_stop_the_next() -> None:
    spoken: list[str] = []
    config = Config(only=("weight_penalty", "sgd"), engines=("shardwise",))
    (report,) = run(config, spoken.append)
    assert [row[1] for row in report.tables[0].rows] == ["refused", "equal"]
    assert len(spoken) == 2


def test_the_table_has_a_row_for_each_program_and_says_what_went_wrong() -> None:
    verdicts = {"shardwise": {"sgd": ("equal", "")}, "fsdp2": {"sgd": ("error", "mixed")}}
    report = report_of(verdicts, world=2)
    assert report.tables[0].rows == (("sgd: SGD with momentum", "equal", "error"),)
    assert report.notes == (
        "shardwise: 1 programs: 1 equal",
        "fsdp2: 1 programs: 1 error",
        "fsdp2, sgd: error: mixed",
    )
