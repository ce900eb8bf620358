"""What some ranks saved is what others resume from, to the bit, whatever happened to its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.random_checkpoints import case, run


@pytest.mark.parametrize(
    "seed", [*range(14), *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(14, 200))]
)
def test_a_random_pair_of_saving_and_resuming_is_exact_or_refused(
    seed: int, tmp_path: Path
) -> None:
    verdict = run(case(seed), tmp_path / "run")
    assert verdict.word in ("equal", "refused"), f"{verdict}\n{case(seed)}"
