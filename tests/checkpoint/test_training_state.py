"""What a run needs to go on, beside parameters and optimizer state."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.training_state import (
    Document,
    capture_rng,
    document,
    facts_of,
    restore_rng,
    values_of,
)


def encoded(training: sw.Training, *optimizers: Any, local: tuple[Any, ...] = (None,)) -> bytes:
    """The document that ranks with these values of their own make."""
    values = values_of(training)
    encoded = [values_of(sw.Training(local=one))["local"] for one in local]
    return document(training.step, values, optimizers, encoded)


class Counter:
    """Anything with a state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 3, "pairs": {1: (2, 3)}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    def __bool__(self) -> bool:
        return False  # as an empty container


def test_it_comes_back_as_it_was() -> None:
    position = {"rows": (1, 2), "seen": {5, 6}}
    training = sw.Training(7, Counter(), None, position, {"lr": 0.1})
    data = encoded(training, {"class": "X"}, local=(b"0", b"1"))
    assert Document.decode(data, "there") == Document(
        step=7,
        world=2,
        optimizers=[{"class": "X"}],
        scheduler=Counter().state,
        scaler=None,
        position=position,
        config={"lr": 0.1},
        local=[b"0", b"1"],
        classes={"scheduler": "Counter"},
    )


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(sw.CheckpointError, match=r"training.position\['model'\] is a builtins"):
        values_of(sw.Training(position={"model": object()}))
    with pytest.raises(sw.CheckpointError, match=r"training.local is a builtins.object"):
        values_of(sw.Training(local=object()))


@pytest.mark.parametrize("metric", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_cannot_be_ranked_is_refused(metric: float) -> None:
    with pytest.raises(sw.CheckpointError, match="Pass metric=None to save this checkpoint"):
        values_of(sw.Training(metric=metric))


def test_what_is_stored_once_is_compared_between_ranks() -> None:
    def facts(**values: Any) -> dict[str, str]:
        training = sw.Training(**values)
        return facts_of(training, values_of(training))

    assert facts(position={"a": 1, "b": {"x", "y"}}) == facts(position={"b": {"y", "x"}, "a": 1})
    assert facts(position=1)["training.position"] == "1"
    assert facts(position=list(range(100))) != facts(position=[*range(99), 0])  # cut, with a digest
    assert facts(local=1, config={"rank": 1}) == facts(local=2, config={"rank": 2})


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": 1}', b"[" * 99_999, b"\xff"])
def test_other_documents_are_refused(data: bytes) -> None:
    with pytest.raises(sw.CheckpointError, match="there is damaged"):
        Document.decode(data, "there")


def test_a_later_version_asks_for_a_later_shardwise() -> None:
    data = encoded(sw.Training())
    later = json.dumps({**json.loads(data), "version": 2}).encode()
    with pytest.raises(sw.CheckpointError, match="Install a later shardwise"):
        Document.decode(later, "there")


CPU = torch.device("cpu")


def drawn() -> list[float]:
    """An odd number of normals from each generator: they are made in pairs."""
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
    states = {name: state.clone() for name, state in capture_rng(CPU).items()}
    expected = [drawn(), drawn()]
    drawn()
    restore_rng(states, CPU)
    assert [drawn(), drawn()] == expected


def test_states_are_bytes_of_fixed_sizes() -> None:
    first = capture_rng(CPU)
    drawn()
    second = capture_rng(CPU)
    assert set(first) == {"torch", "python", "numpy"}
    assert [s.shape for s in first.values()] == [s.shape for s in second.values()]
    assert {state.dtype for state in first.values()} == {torch.uint8}


def test_another_generator_of_numpy_is_left_out() -> None:
    numpy: Any = np.random  # whose types leave these two out
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(np.random.PCG64(1))
    try:
        assert "numpy" not in capture_rng(CPU)
        restore_rng(capture_rng(CPU), CPU)
    finally:
        numpy.set_bit_generator(before)
