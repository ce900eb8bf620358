"""Random programs train as one plain process does, or are refused; `python -m tests.programs`."""

from __future__ import annotations

import pytest

from shardwise.plan import in_slot
from tests.programs.__main__ import Transport, judged
from tests.programs.processes import Verdict

KNOWN = {  # reasons, by the verdict's word
    "refused": (
        "which safetensors has no name for",  # complex numbers in a checkpoint
        "unsharded=800 has no effect",
        "'_weight_norm' needs the full tensor",  # a weight that is computed when it is read
    ),
    "impossible": (
        "use_reentrant=True",
        "flash_attention_for_cpu_backward is not implemented",
        "clamp is not supported for complex",
        "register a hook on a tensor that doesn't require gradient",
        "`fused=True` requires all the params to be floating point",
    ),
}


def is_right(verdict: Verdict) -> bool:
    known = any(reason in verdict.why for reason in KNOWN.get(verdict.word, ()))
    return known or verdict.word == "equal"


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(15, 300))]
)
def test_a_random_program_is_equal_to_one_process_or_refused(seed: int) -> None:
    verdict, text = judged(seed)
    assert is_right(verdict), f"{verdict}\n\n{text}"


@pytest.mark.parametrize(
    "seed",
    [*range(5, 30, 6), *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(300))],
)
def test_so_it_is_where_every_weights_gradient_is_computed_in_its_slot(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done for large matrices alone, done for all."""
    monkeypatch.setattr(in_slot, "LARGE", 1)
    test_a_random_program_is_equal_to_one_process_or_refused(seed)


@pytest.mark.parametrize("transport", ["memory", "messages"])
@pytest.mark.parametrize(
    "seed", [1, 5, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(300, 400))]
)
def test_so_it_is_on_ranks_that_are_processes(seed: int, transport: Transport) -> None:
    verdict, text = judged(seed, transport)
    assert is_right(verdict), f"{verdict}\n\n{text}"


@pytest.mark.parametrize("transport", ["memory", "messages"])
@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(400, 440))]
)
def test_so_it_is_on_a_grid_of_four_processes(seed: int, transport: Transport) -> None:
    verdict, text = judged(seed, transport, world=4)
    assert is_right(verdict), f"{verdict}\n\n{text}"
