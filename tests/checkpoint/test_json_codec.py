"""Python's values go to JSON and come back as what they were."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.json_codec import decode, encode
from shardwise.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@settings(max_examples=20)
@given(VALUES)
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    decoded = there_and_back(value)
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({30: 1, 60: 2}),
        deque([1, 2]),
        {"$tuple": [1]},
        {"$": 1},
        {"a": {"$float": "x"}},
        float("inf"),
        -0.0,
        1 << 80,
        b"\0\xff",
    ],
)
def test_what_json_lacks(value: Any) -> None:
    decoded = there_and_back(value)
    assert decoded == value
    assert type(decoded) is type(value)


def test_dictionaries_of_other_classes_become_plain() -> None:
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert there_and_back(defaultdict(int, a=2)) == {"a": 2}


def test_not_a_number_stays_one() -> None:
    assert math.isnan(there_and_back(float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_small_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(dtype)
    decoded = there_and_back({"x": value})["x"]
    assert decoded.dtype == dtype
    assert torch.equal(decoded, value)


def test_arrays_and_numbers_of_numpy() -> None:
    value = np.arange(6.0).reshape(2, 3)
    decoded = there_and_back(value)
    assert isinstance(decoded, np.ndarray)
    assert decoded.dtype == value.dtype
    assert np.array_equal(decoded, value)
    assert there_and_back(np.float64(0.1)) == 0.1


@pytest.mark.parametrize("value", [np.array(3.0), np.arange(6).reshape(2, 3).T, np.arange(4)[::-2]])
def test_arrays_keep_their_shape_however_they_lie(value: np.ndarray[Any, Any]) -> None:
    decoded = there_and_back(value)
    assert decoded.shape == value.shape
    assert np.array_equal(decoded, value)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, 2.0])[::2],
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(6.0).view(2, 3).t(),
    ],
    ids=["one strided element", "conjugate", "negative", "transposed"],
)
def test_tensors_however_they_lie(value: torch.Tensor) -> None:
    assert torch.equal(there_and_back(value), value)


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), Odd, print, lambda: 0, {"a": [Odd()]}, object()])
def test_nothing_that_only_pickle_could_write(value: Any) -> None:
    with pytest.raises(CheckpointError, match="only pickle could store"):
        encode(value, "training.position")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.longdouble(1.5), "numpy.longdouble"),
        (np.zeros(2, np.longdouble), "numpy.ndarray of float128"),
        (np.zeros(2, ">f8"), "numpy.ndarray of >f8"),
        (np.zeros(2, complex), "numpy.ndarray of complex128"),
        (torch.eye(2).to_sparse(), "torch.Tensor of torch.float32"),
        (torch.ones(1, device="meta"), "torch.Tensor of torch.float32"),
    ],
    ids=str,
)
def test_values_that_no_file_has_are_named(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"training.position is a {kind}, which only pickle"):
        encode(value, "training.position")


def test_the_error_names_the_place() -> None:
    with pytest.raises(CheckpointError, match=r"training.position\['rows'\]\[1\] is a "):
        encode({"rows": [1, Odd()]}, "training.position")


def test_a_large_tensor_does_not_belong_here() -> None:
    with pytest.raises(CheckpointError, match="1,048,577 elements"):
        encode(torch.zeros((1 << 20) + 1), "training.position")


@pytest.mark.parametrize(
    "encoded",
    [
        {"$pickle": "x"},
        {"$tensor": {"dtype": "F32", "shape": [3], "data": "AAAA"}},
        {"$tensor": {"dtype": "F32", "shape": [1], "data": "!"}},
        {"$tensor": {"dtype": "F32", "shape": [1 << 40], "data": ""}},
        {"$tensor": {}},
        {"$tuple": 3},
        {"$dict": [1]},
        {"$dict": [[[1], 2]]},
        {"$float": "x"},
        {"$bytes": "*"},
    ],
)
def test_what_nobody_encoded_is_refused(encoded: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(encoded)
