from __future__ import annotations

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.outer import wire

VALUES = torch.linspace(-1, 1, 1000).pow(3) * 1e-5  # parameters hardly move in a round


@pytest.mark.parametrize(
    ("kind", "error"), [("float32", 0.0), ("float16", 5e-4), ("int8", 1 / 254)]
)
def test_values_come_back_as_exactly_as_their_dtype_says(kind: str, error: float) -> None:
    data = wire.encode(VALUES, kind)
    assert len(data) == wire.nbytes(1000, kind)
    back = wire.decode(data, 1000, kind)
    assert (back - VALUES).abs().max() <= error * VALUES.abs().max()


@pytest.mark.parametrize("values", [torch.zeros(3), torch.empty(0), torch.tensor([3e38, -1e37])])
def test_zeros_nothing_and_the_largest_numbers_survive_halves(values: torch.Tensor) -> None:
    back = wire.decode(wire.encode(values, "float16"), len(values), "float16")
    torch.testing.assert_close(back, values, rtol=1e-3, atol=0)


def test_a_mean_is_that_of_all_parts() -> None:
    parts = [wire.encode(VALUES * k, "float32") for k in (1, 2, 6)]
    torch.testing.assert_close(
        wire.decode(wire.mean(parts, 1000, "float32"), 1000, "float32"), 3 * VALUES
    )


def test_what_is_not_finite_stays_so() -> None:
    data = wire.encode(torch.tensor([float("nan"), 1.0]), "float16")
    assert wire.decode(data, 2, "float16").isnan().any()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="float32, float16, int8"):
        wire.check_wire("fp8")
