from __future__ import annotations

import pytest

from shardwise.train.config import OptimizerConfig
from shardwise.train.learning_rate import learning_rate

CONFIG = OptimizerConfig(lr=1.0, warmup=4, floor=0.1)


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    drawn = [round(learning_rate(step, 9, CONFIG), 3) for step in range(9)]
    assert drawn == [0.2, 0.4, 0.6, 0.8, 1.0, 0.868, 0.55, 0.232, 0.1]


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    assert learning_rate(0, 9, OptimizerConfig(lr=3.0, warmup=0)) == 3.0


def test_the_last_step_is_at_the_floor() -> None:
    assert learning_rate(99, 100, OptimizerConfig(lr=2.0, warmup=10, floor=0.25)) == pytest.approx(
        0.5
    )


def test_a_floor_of_one_is_a_constant_rate() -> None:
    constant = OptimizerConfig(lr=2.0, warmup=0, floor=1.0)
    assert {learning_rate(step, 10, constant) for step in range(10)} == {2.0}
    warmed = OptimizerConfig(lr=2.0, warmup=2, floor=1.0)
    assert learning_rate(0, 10, warmed) < 1
    assert {learning_rate(step, 10, warmed) for step in range(2, 10)} == {2.0}


def test_a_run_of_one_step_is_at_the_peak() -> None:
    assert learning_rate(0, 1, OptimizerConfig(lr=2.0, warmup=0)) == 2.0
