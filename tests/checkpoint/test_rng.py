"""Generators go on exactly where they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.checkpoint.rng import capture, restore

CPU = torch.device("cpu")


def drawn() -> list[float]:
    """From each generator, an odd number of normals: they are made in pairs."""
    return [
        *torch.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        *np.random.randn(3).tolist(),  # noqa: NPY002 - the global one
        float(np.random.rand()),  # noqa: NPY002 - the same
    ]


@pytest.mark.parametrize("before", range(3))
def test_generators_go_on_where_they_were(before: int) -> None:
    for _ in range(before):
        drawn()
    states = {name: state.clone() for name, state in capture(CPU).items()}
    expected = [drawn(), drawn()]
    drawn()
    restore(states, CPU)
    assert [drawn(), drawn()] == expected


def test_states_are_bytes_of_fixed_sizes() -> None:
    first = capture(CPU)
    drawn()
    second = capture(CPU)
    assert set(first) == {"torch", "python", "numpy"}
    assert [s.shape for s in first.values()] == [s.shape for s in second.values()]
    assert {state.dtype for state in first.values()} == {torch.uint8}


def test_another_generator_of_numpy_is_left_out() -> None:
    numpy: Any = np.random  # whose types leave these two out
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.PCG64(1))
    try:
        assert "numpy" not in capture(CPU)
        restore(capture(CPU), CPU)
    finally:
        numpy.set_bit_generator(before)
