"""Random programs train as one plain process does, or are refused; `python -m tests.programs`."""

from __future__ import annotations

import pytest

from tests.programs.__main__ import judged

REFUSED = (
    "which safetensors has no name for",  # complex numbers in a checkpoint
    "unsharded=800 has no effect",
)


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(40, 300))]
)
def test_a_random_program_is_equal_to_one_process_or_refused(seed: int) -> None:
    verdict, text = judged(seed)
    known = verdict.word == "refused" and any(reason in verdict.why for reason in REFUSED)
    assert known or verdict.word == "equal", f"{verdict}\n\n{text}"
