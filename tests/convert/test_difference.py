"""Two checkpoints are compared by name and by value."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

import shardwise as sw
from shardwise.convert.catalogue import Catalogue
from shardwise.convert.difference import ABSENT, Change, Difference, changes_between, compare
from tests.checkpoint.runs import loaded_and_saved, saved
from tests.nets import NETS

DECODER = NETS[0]


def compared(one: Path, other: Path, weights_only: bool = False) -> Difference:
    return compare(Catalogue.read(one), Catalogue.read(other), weights_only)


def files(folder: Path, one: dict[str, Tensor], other: dict[str, Tensor]) -> Difference:
    """Two plain files, without checksums."""
    save_file(one, folder / "one.safetensors")
    save_file(other, folder / "other.safetensors")
    return compared(folder / "one.safetensors", folder / "other.safetensors")


def test_a_checkpoint_equals_its_copy(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    shutil.copytree(tmp_path / "step-2", tmp_path / "copy")
    assert compared(tmp_path / "step-2", tmp_path / "copy").is_empty


def test_other_ranks_and_files_make_no_difference_to_tensors(tmp_path: Path) -> None:
    saved(DECODER, 3, tmp_path / "a")
    loaded_and_saved(DECODER, 2, tmp_path / "a", tmp_path / "b", "no_shard")
    found = compared(tmp_path / "a", tmp_path / "b")
    assert {one.kind for one in found.tensors} == {"ranks"}  # each rank's generators
    assert {change.place for change in found.training} == {"world", "local"}
    assert compared(tmp_path / "a", tmp_path / "b", weights_only=True).is_empty


def test_the_largest_difference_is_measured(tmp_path: Path) -> None:
    one = torch.linspace(1, 2, 500_000)  # two pieces
    other = one.clone()
    other[3] += 0.5
    other[400_000] *= 0.5
    few = torch.arange(9)
    difference = files(tmp_path, {"w": one, "same": few}, {"w": other, "same": few})
    (unequal,) = difference.tensors
    assert (unequal.kind, unequal.name) == ("model", "w")
    assert unequal.max_abs_diff == pytest.approx(float(one[400_000]) / 2)
    assert difference.equal == 1


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.uint16,
        torch.uint8,
        torch.bool,
    ],
    ids=str,
)
def test_every_dtype_can_be_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    one = torch.tensor([0, 1, 1, 0]).to(dtype)
    other = torch.tensor([0, 1, 0, 0]).to(dtype)
    (unequal,) = files(tmp_path, {"x": one}, {"x": other}).tensors
    assert unequal.max_abs_diff == 1.0
    assert files(tmp_path, {"x": one}, {"x": one}).is_empty


def test_a_nan_equals_only_itself(tmp_path: Path) -> None:
    one = torch.tensor([math.nan, 1.0, math.inf, 0.0])
    other = torch.tensor([math.nan, math.nan, math.inf, -0.0])
    (unequal,) = files(tmp_path, {"x": one}, {"x": other}).tensors
    assert unequal.max_abs_diff == math.inf
    (alike,) = files(tmp_path, {"x": one[2:]}, {"x": other[2:]}).tensors  # 0 and -0
    assert alike.max_abs_diff == 0.0


def test_a_cast_is_a_difference_even_where_values_are_equal(tmp_path: Path) -> None:
    exact = torch.tensor([1.0, 0.5])
    (unequal,) = files(tmp_path, {"x": exact}, {"x": exact.bfloat16()}).tensors
    assert (unequal.dtypes, unequal.max_abs_diff) == (("F32", "BF16"), 0.0)
    third = torch.tensor([1.0, 1 / 3])
    (unequal,) = files(tmp_path, {"x": third}, {"x": third.bfloat16()}).tensors
    assert 0 < unequal.max_abs_diff < 2**-9


def test_names_and_shapes_that_differ_are_told(tmp_path: Path) -> None:
    found = files(
        tmp_path,
        {"a": torch.zeros(2), "x": torch.zeros(2, 3)},
        {"b": torch.zeros(2), "x": torch.zeros(3, 2)},
    )
    assert found.only == ({"model": ["a"]}, {"model": ["b"]})
    (unequal,) = found.tensors
    assert (unequal.shapes, unequal.max_abs_diff) == (((2, 3), (3, 2)), math.inf)


def fast(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def slow(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def test_training_state_is_compared(tmp_path: Path) -> None:
    saved(DECODER, 1, tmp_path / "a", make=fast)
    saved(DECODER, 1, tmp_path / "b", make=slow)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.training == (Change("optimizers[0].groups[0].options.lr", 1e-2, 1e-3),)
    assert not compared(tmp_path / "a", tmp_path / "b", weights_only=True).training


def test_training_state_is_not_compared_with_a_folder_of_weights(tmp_path: Path) -> None:
    saved(DECODER, 1, tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "b")
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found.only_tensors
    assert not found.training


def test_damage_is_an_error_and_no_difference(tmp_path: Path) -> None:
    saved(DECODER, 1, tmp_path / "a")
    loaded_and_saved(DECODER, 2, tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b" / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"!")
    with pytest.raises(sw.CheckpointError, match="is damaged"):
        compared(tmp_path / "a", tmp_path / "b")


def test_fields_are_named_by_their_place() -> None:
    one = {"a": [1, {"b": 2}], "c": None, "d": [1], "f": 1}
    other = {"a": [1, {"b": 3}], "e": 5, "d": [1, 2], "f": True}
    assert list(changes_between(one, other)) == [
        ("a[1].b", 2, 3),
        ("c", None, ABSENT),
        ("d", [1], [1, 2]),
        ("f", 1, True),
        ("e", ABSENT, 5),
    ]


def folders(at: Path, name: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> Difference:
    """Two plain folders with one file each, of this name."""
    for folder, values in ((at / "a", one), (at / "b", other)):
        folder.mkdir()
        save_file(values, folder / name)
    return compared(at / "a", at / "b")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model-00001-of-00001.safetensors"])
def test_tensors_are_found_whatever_their_file_is_called(tmp_path: Path, name: str) -> None:
    found = folders(tmp_path, name, {"x": torch.zeros(2)}, {"x": torch.ones(2)})
    assert [unequal.name for unequal in found.tensors] == ["x"]
    assert found.only_tensors
    assert not compared(tmp_path / "a", tmp_path / "b", weights_only=True).is_empty


def test_where_there_are_no_tensors_nothing_is_equal(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    for one, other in (("a", "b"), ("a", "x.safetensors"), ("x.safetensors", "b")):
        with pytest.raises(sw.CheckpointError, match="holds no "):
            compared(tmp_path / one, tmp_path / other)
