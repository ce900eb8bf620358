from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardwise.recipe.recipe import OptimizerConfig
from shardwise.train.learning_rate import learning_rate, preview

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


def test_the_rate_falls_in_a_line_to_its_floor() -> None:
    config = OptimizerConfig(lr=1.0, warmup=1, floor=0.2, schedule="linear")
    drawn = [learning_rate(step, 6, config) for step in range(6)]
    assert drawn == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_constant_has_no_warm_up_and_with_warmup_has() -> None:
    constant = OptimizerConfig(lr=2.0, schedule="constant")
    assert [learning_rate(step, 4, constant) for step in range(4)] == [2.0] * 4
    warmed = OptimizerConfig(lr=2.0, schedule="constant_with_warmup", warmup=1)
    assert [learning_rate(step, 4, warmed) for step in range(4)] == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0.03, 3), (0.031, 4), (0.07, 7), (0, 0), (1, 1), (7, 7)]
)
def test_a_warm_up_below_one_is_a_fraction_of_all_steps(warmup: float, steps: int) -> None:
    assert OptimizerConfig(warmup=warmup).warmup_steps(100) == steps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedule": "constant", "warmup": 0.03},
            "has no warmup, and warmup is 0.03; .* constant_wi",
        ),
        ({"schedule": "constant", "floor": 0.1}, "has no floor, and .* 0.1; .* cosine or linear"),
        ({"schedule": "constant_with_warmup", "floor": 0.1}, "has no floor"),
        ({"warmup": 2.5}, "a number of steps, or a fraction below 1"),
    ],
)
def test_what_a_schedule_would_not_read_is_an_error(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig.model_validate(fields)


def test_a_schedule_that_is_written_with_its_defaults_reads_the_same() -> None:
    for schedule in ("cosine", "linear", "constant", "constant_with_warmup"):
        config = OptimizerConfig.model_validate({"schedule": schedule})
        assert OptimizerConfig.model_validate(config.model_dump()) == config


def test_a_preview_has_the_first_step_the_peak_the_middle_and_the_last() -> None:
    shown = preview(9, CONFIG)
    assert [step for step, _ in shown] == [1, 5, 7, 9]
    assert [round(rate, 3) for _, rate in shown] == [0.2, 1.0, 0.55, 0.1]
    assert preview(1, OptimizerConfig(lr=2.0, warmup=0)) == ((1, 2.0),)
