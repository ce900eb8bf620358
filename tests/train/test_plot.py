from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from shardwise.train.plot import plot_loss, smoothed
from shardwise.train.records import Evaluated, Record, Stepped


def run(steps: int) -> list[Record]:
    losses = [7 - 3 * step / steps for step in range(steps)]
    return [
        *(Stepped(i + 1, steps, loss, 1e-3, 1.0, 1.0, 1, 1.0) for i, loss in enumerate(losses)),
        *(Evaluated(at, losses[at - 1], 0.1, 6.0, 9, 1.0) for at in (steps // 2, steps)),
    ]


@pytest.mark.parametrize("records", [[], run(2), run(200)])
def test_the_picture_is_drawn_whatever_there_is(records: list[Record], tmp_path: Path) -> None:
    plot_loss(records, "a run", tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").shape[:2] == (675, 1200)


def test_the_same_run_gives_the_same_picture(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plot_loss(run(50), "a run", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_smoothing_does_not_lag_behind() -> None:
    line = [10.0 - 0.1 * i for i in range(100)]
    means, first = smoothed(line)
    assert means == pytest.approx(line[first : first + len(means)])
    assert (first, len(means)) == (2, 96)


def test_smoothing_flattens_noise_to_its_end() -> None:
    noisy = [(-1.0) ** i for i in range(400)]
    assert max(map(abs, smoothed(noisy)[0])) < 0.1


def test_the_last_loss_does_not_bend_the_smooth_curve() -> None:
    assert smoothed([2.0] * 199 + [3.0])[0][-1] == pytest.approx(2 + 1 / 11)


def test_a_short_run_is_shown_as_it_is() -> None:
    assert smoothed([3.0, 2.0, 1.0]) == ([3.0, 2.0, 1.0], 0)
    assert smoothed([]) == ([], 0)
