from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from shardwise.train.plot import _plot_validation, plot_loss, smoothed
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
    assert imread(tmp_path / "loss.png").shape[:2] == (975, 1200)


def test_a_baseline_far_from_the_losses_leaves_them_their_room() -> None:
    def drawn(entropy: float) -> tuple[float, float]:
        axes = Figure().add_subplot()
        _plot_validation(axes, [Evaluated(s, 1.0 + s / 10, 0.1, entropy, 9, 1.0) for s in (1, 2)])
        assert f"unigram baseline ({entropy:.3f})" in axes.get_legend_handles_labels()[1]
        return axes.get_ylim()

    assert drawn(1.12)[1] < 1.3 > drawn(6.0)[1]
    assert drawn(1.24)[1] > 1.235


@pytest.mark.prove
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
