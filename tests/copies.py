"""The same model on every rank, and what each rank has to say.

Models are built before the threads start: these share one random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Comm
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from tests.ranks import run_threads

T = TypeVar("T")


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def on_ranks(
    world: int,
    build: Callable[[], nn.Module],
    fn: Callable[[Comm, nn.Module], T],
    timeout: float = 60.0,
) -> list[T]:
    """``fn(comm, model)`` on threads, each with its own model, all with equal values."""
    models = [seeded(build) for _ in range(world)]
    return run_threads(world, lambda comm: fn(comm, models[comm.rank]), timeout=timeout)


def error_text(kind: type[Exception], do: Callable[[], object]) -> str:
    """The message of the error that ``do`` must raise here, on this rank."""
    try:
        do()
    except kind as error:  # and no longer held, for its frames hold the graph of a loss
        return str(error)
    pytest.fail(f"no {kind.__name__} here")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """The same names in the same order, with the same bits."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def assert_near(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """As near as ``tolerance`` of each tensor's largest magnitude: sums in another order round so.

    Args:
        actual: a tensor, or tensors by name or in order, like ``expected``.
    """
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        actual, expected = list(actual.values()), list(expected.values())
    elif isinstance(expected, Tensor):
        actual, expected = [actual], [expected]
    for at, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), at
        if other.numel():
            wide = torch.complex128 if other.is_complex() else torch.float64
            far = (one.to(wide) - other.to(wide)).abs().max().item()
            largest = other.to(wide).abs().max().item()
            assert far <= tolerance * largest, f"tensor {at}: off by {far:.1e} of {largest:.1e}"


def local(value: Tensor | None) -> Tensor:
    """This rank's part, plain; for a gradient that must be there."""
    assert value is not None
    return value.to_local() if isinstance(value, ShardTensor) else value


def clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}
