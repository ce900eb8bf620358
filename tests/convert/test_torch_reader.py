"""Checkpoints of torch are read by readers that run nothing, unless somebody trusts the source.

The canary is a pickle that makes a folder where it is opened without restrictions.
"""

from __future__ import annotations

import io
import pickle
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import shardwise as sw
from shardwise.convert.torch_reader import METADATA_CLASSES, _MetadataUnpickler, read_torch


class OfZero(Enum):
    """A class of DeepSpeed, as it is in files of its optimizer."""

    OPTIMIZER = 1


class Canary:
    """Makes the folder ``fired`` where it is unpickled, and becomes the number 5."""

    def __init__(self, folder: Path) -> None:
        self.code = f"__import__('os').mkdir({str(folder / 'fired')!r}) or 5"

    def __reduce__(self) -> Any:
        return eval, (self.code,)


def dcp_folder(folder: Path, extra: Any = 3, planner_data: Any = None, file: str = "a.d") -> Path:
    """A DCP folder of one tensor in two chunks and one value, made by hand."""
    folder.mkdir()
    listed: dict[str, Any] = {"extra": BytesStorageMetadata()}
    chunks = [ChunkStorageMetadata(torch.Size([n]), torch.Size([2])) for n in (0, 2)]
    properties = TensorProperties(torch.float32)
    listed["w"] = TensorStorageMetadata(properties, torch.Size([4]), chunks)
    places, data = {}, b""
    parts = {
        MetadataIndex("w", torch.Size([0])): torch.tensor([0.0, 1.0]),
        MetadataIndex("w", torch.Size([2])): torch.tensor([2.0, 3.0]),
        MetadataIndex("extra"): extra,
    }
    for index, value in parts.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        places[index] = _StorageInfo(file, len(data), len(buffer.getvalue()))
        data += buffer.getvalue()
    (folder / "a.d").write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(listed, planner_data, places)))
    return folder


def hostile(kind: str, folder: Path) -> Path:
    """A checkpoint with a canary that is otherwise in order."""
    if kind == ".metadata":
        return dcp_folder(folder / "dcp", planner_data={"extra": Canary(folder)})
    if kind == "a value in a folder":
        return dcp_folder(folder / "dcp", extra=Canary(folder))
    torch.save({"w": torch.arange(4.0), "extra": Canary(folder)}, folder / "a.pt")
    return folder / "a.pt"


@pytest.mark.parametrize("kind", [".metadata", "a value in a folder", "a file"])
def test_without_trust_nothing_is_unpickled_that_is_not_known(kind: str, tmp_path: Path) -> None:
    source = hostile(kind, tmp_path)
    with pytest.raises(sw.CheckpointError, match=r"eval in it would .*--trust-source"):
        read_torch(source)
    assert not (tmp_path / "fired").exists()


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    "state",
    [
        {"module": {"w": torch.empty(0)}, "param_shapes": [{"w": torch.Size([4])}]},  # ZeRO-3
        {"module": {"w": torch.ones(4)}, "optimizer": {"optimizer_state_dict": {}}},  # no ZeRO
        {"optimizer_state_dict": {"single_partition_of_fp32_groups": [torch.ones(2)]}},
        {"optimizer_state_dict": {"zero_stage": OfZero(1)}},
    ],
)
def test_parts_of_deepspeed_are_no_whole_weights(
    state: Any, trust: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfZero, "__module__", "deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", sys.modules[__name__])
    torch.save({**state, "ds_version": "0.19.8"}, tmp_path / "a.pt")
    with pytest.raises(sw.CheckpointError, match=r"of DeepSpeed.* zero_to_fp32\.py"):
        read_torch(tmp_path / "a.pt", trust)


def test_deepspeed_without_zero_and_in_float32_is_whole(tmp_path: Path) -> None:
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    state = {"module": {"w": torch.ones(4)}, "optimizer": optimizer, "param_shapes": None}
    torch.save({**state, "ds_version": "0.19.8"}, tmp_path / "a.pt")
    assert read_torch(tmp_path / "a.pt")["module"]["w"].shape == (4,)


@pytest.mark.parametrize("kind", ["a value in a folder", "a file"])
def test_with_trust_everything_is(kind: str, tmp_path: Path) -> None:
    tree = read_torch(hostile(kind, tmp_path), trust=True)
    assert (tmp_path / "fired").exists()
    assert tree["extra"] == 5
    assert tree["w"].read().view(torch.float32).tolist() == [0, 1, 2, 3]


def test_a_folder_of_dcp_needs_no_trust(tmp_path: Path) -> None:
    paths = {"w": ("model", "w"), "extra": ("groups", 0, "lr")}
    tree = read_torch(dcp_folder(tmp_path / "dcp", 0.5, paths))
    assert tree["groups"] == {0: {"lr": 0.5}}
    tensor = tree["model"]["w"]
    assert (tensor.name, tensor.dtype, tensor.shape) == ("w", "F32", (4,))
    assert tensor.read().view(torch.float32).tolist() == [0, 1, 2, 3]


def test_what_metadata_is_made_of_is_told_by_its_whole_name() -> None:
    unpickler = _MetadataUnpickler(io.BytesIO(), trust=False)
    for module, names in METADATA_CLASSES.items():
        assert all(unpickler.find_class(module, name) for name in names)
    assert unpickler.find_class("torch", "bfloat16") is torch.bfloat16
    assert unpickler.find_class("pathlib._local", "PosixPath")  # as Python 3.13 calls it
    metadata = "torch.distributed.checkpoint.metadata"
    for module, name in ((metadata, "os.system"), ("torch", "load"), ("os", "system")):
        with pytest.raises(Exception, match=name):
            unpickler.find_class(module, name)


def test_a_folder_cannot_name_a_file_outside_of_it(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp", file="../a.d")
    (folder / "a.d").rename(tmp_path / "a.d")
    with pytest.raises(sw.CheckpointError, match="no plain file name"):
        read_torch(folder)


def test_chunks_that_leave_holes_are_an_error(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(sw.CheckpointError, match=r"'w' could not be read: .*do not make up"):
        read_torch(folder)["w"].read()


def test_chunks_that_overlap_leave_a_hole_as_well(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks[1].offsets = torch.Size([1])
    index = MetadataIndex("w", torch.Size([1]))
    metadata.storage_data[index] = metadata.storage_data[MetadataIndex("w", torch.Size([2]))]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(sw.CheckpointError, match=r"'w' could not be read: .*do not make up"):
        read_torch(folder)["w"].read()


@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(2).long()], ids=["shape", "dtype"])
def test_a_chunk_that_would_be_spread_or_cast_is_an_error(value: Any, tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp", extra=value)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    of_extra = metadata.storage_data[MetadataIndex("extra")]
    metadata.storage_data[MetadataIndex("w", torch.Size([2]))] = of_extra
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(sw.CheckpointError, match=r"'w' could not be read: .*not as described"):
        read_torch(folder)["w"].read()


@pytest.mark.parametrize("value", [torch.ones(2), 5, {}], ids=["a tensor", "a number", "nothing"])
def test_a_file_without_names_is_said(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(sw.CheckpointError, match="and no names"):
        read_torch(tmp_path / "a.pt")


def test_a_file_of_torch_before_1_6_is_read_whole(tmp_path: Path) -> None:
    states = {"a": torch.tensor([1, 2]), "n": [1, (2, 3)], "list": [{"x": 1}]}
    torch.save(states, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    tree = read_torch(tmp_path / "a.pt")
    assert tree["a"].read().view(torch.int64).tolist() == [1, 2]
    assert (tree["n"], tree["list"]) == ([1, (2, 3)], {0: {"x": 1}})


def test_one_element_of_a_column_is_read(tmp_path: Path) -> None:
    column = torch.arange(6.0).view(2, 3)[1:, 2]  # whose stride is that of the rows
    torch.save({"w": column}, tmp_path / "a.pt")
    assert read_torch(tmp_path / "a.pt")["w"].read().view(torch.float32).tolist() == [5.0]


@pytest.mark.filterwarnings("ignore:(Sparse|Validating sparse) ")  # torch 2.11; 2.14 and 2.15
def test_what_is_no_dense_tensor_is_said(tmp_path: Path) -> None:
    torch.save({"inner": {"a": torch.eye(2).to_sparse()}}, tmp_path / "a.pt")
    with pytest.raises(sw.CheckpointError, match=r"'inner\.a' is no dense tensor .*sparse"):
        read_torch(tmp_path / "a.pt")


@pytest.mark.parametrize("data", [b"", b"no pickle at all", b"PK\x03\x04 half a zip"])
def test_what_is_broken_is_one_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(sw.CheckpointError, match=r"a\.pt"):
        read_torch(tmp_path / "a.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    with pytest.raises(sw.CheckpointError, match=r"dcp: it cannot be read"):
        read_torch(tmp_path / "dcp")
    with pytest.raises(sw.CheckpointError, match="no complete DCP folder"):
        read_torch(tmp_path)
