"""The safetensors format, read with suspicion: headers, dtypes, names of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.safetensors_format import (
    BITS,
    CAP,
    DTYPES,
    PAGE,
    Stored,
    decode,
    encode,
    inside,
    is_plain,
    length_of,
)
from shardwise.comm.protocol import Comm
from shardwise.convert.catalogue import Catalogue
from shardwise.convert.export import export
from shardwise.errors import CheckpointError
from tests.copies import on_ranks

TENSORS = [
    ("a", "F32", (2, 3)),
    ("b.weight", "BF16", (5,)),
    ("none", "U8", (0, 4)),
    ("s", "U8", ()),
]


def read(data: bytes) -> dict[str, Stored]:
    length = length_of(data[:8], len(data), "file")
    return decode(data[8 : 8 + length], len(data), "file")


def test_safetensors_reads_what_is_encoded(tmp_path: Path) -> None:
    header = encode(TENSORS)
    assert len(header) % PAGE == 0
    data = bytes(range(24)) + bytes(10) + b"\7"
    (tmp_path / "x.safetensors").write_bytes(header + data)
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["a"].view(torch.uint8).flatten().tolist() == list(range(24))
    assert tensors["none"].shape == (0, 4)
    assert tensors["s"].item() == 7
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert read(header + data)["b.weight"] == Stored("BF16", (5,), PAGE + 24, PAGE + 34)


def test_what_safetensors_writes_is_decoded() -> None:
    tensors = {"x": torch.ones(3, 2), "y": torch.zeros(0), "z": torch.ones((), dtype=torch.int64)}
    data = save(tensors, {"format": "pt"})
    places = read(data)
    assert {name: stored.shape for name, stored in places.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    ones = data[places["x"].start : places["x"].stop]
    assert torch.frombuffer(bytearray(ones), dtype=torch.float32).tolist() == [1.0] * 6


def test_names_of_any_language_survive() -> None:
    header = encode([("größe/重み", "U8", (1,))])
    assert list(read(header + b"\0")) == ["größe/重み"]


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def file(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "it has 0 of the 8 bytes"),
        (b"\5\0\0", "it has 3 of the 8 bytes"),
        (bytes(64), "announces no header"),
        ((1 << 60).to_bytes(8, "little") + bytes(9), "announces a header of 1,152,921,504"),
        ((CAP + 1).to_bytes(8, "little") + bytes(9), "announces a header of 100,000,001"),
        (file(b"{"), "not JSON"),
        (file(b"\xff\xfe"), "not JSON"),
        (file(b'{"a": NaN}'), "no plain dtype"),
        (file(b"[" * 100_000), "not JSON"),
        (file(b"1" * 10_000), "not JSON"),
        (file([]), "a JSON list"),
        (file({"__metadata__": {"a": 1}}), "__metadata__"),
        (file({"__metadata__": []}), "__metadata__"),
        (file(b'{"a": {}, "a": {}}'), "occurs twice"),
        (file({"a": 1}), "no plain dtype"),
        (file({"a": {**entry(), "more": 1}}), "no plain dtype"),
        (file({"a": entry(dtype="F7")}), "'F7', which is not known"),
        (file({"a": entry(dtype=["F32"])}), "not known"),
        (file({"a": entry(shape=[-2])}), "no counts"),
        (file({"a": entry(shape=[2.0])}), "no counts"),
        (file({"a": entry(shape=[True, 2])}), "no counts"),
        (file({"a": entry(shape=[1 << 63])}), "no counts"),
        (file({"a": entry(shape=[1] * 65)}), "no counts"),
        (file({"a": entry(data_offsets=[0, 8, 8])}), "no counts"),
        (file({"a": entry(data_offsets=[8, 0])}), "which is not what F32"),
        (file({"a": entry(shape=[1 << 40, 1 << 40])}), "which is not what F32"),
        (file({"a": entry(data_offsets=[4, 12])}, 12), "leaves a hole"),
        (file({"a": entry(), "b": entry()}), "overlaps"),
        (file({"a": entry()}, 4), "the file at"),
        (file({"a": entry()}, 12), "the file at"),
    ],
)
def test_what_cannot_be_is_refused(data: bytes, fact: str) -> None:
    with pytest.raises(CheckpointError, match="not a complete safetensors file") as caught:
        read(data)
    assert fact in str(caught.value)


def test_a_header_that_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="readers accept 100,000,000"):
        encode([("x" * 60_000_000, "U8", (1,)), ("y" * 60_000_000, "U8", (1,))])


def test_a_file_without_its_header_is_refused_by_safetensors_too(tmp_path: Path) -> None:
    """What a crash leaves: the data without the header."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    data[: -3 * 4] = bytes(len(data) - 12)
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"(?i)header"):
        load_file(path)


FOUR, SCALE = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


def four_bits(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(FOUR)


class Quantised(nn.Module):
    """Weights of 4 bits with a scale for each row, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        values = four_bits(*range(12)).view(3, 4)
        self.packed = nn.Parameter(values, requires_grad=False)
        scales = torch.tensor([1.0, 2.0, 4.0]).to(SCALE)
        self.scale = nn.Parameter(scales, requires_grad=False)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def others(path: Path, **tensors: tuple[str, list[int], int]) -> Path:
    """One file with these: ``(dtype, shape, bytes)``."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


def raw(value: Tensor) -> Tensor:
    return value.detach().view(torch.uint8)


def test_all_that_safetensors_knows_is_known(tmp_path: Path) -> None:
    for code, bits in BITS.items():
        with safe_open(others(tmp_path / code, x=(code, [8], bits)), "pt") as opened:
            assert list(opened.keys()) == ["x"]
        with CheckpointReader.open(tmp_path / code) as source:
            assert source.header(code)["x"].dtype == code
    assert set(BITS) - set(DTYPES) == {"F6_E2M3", "F6_E3M2"}


def test_tensors_for_microscaling_are_saved_and_loaded(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "step-1")
        for bucket in sharded.buckets:
            bucket.shard.detach().view(torch.uint8).zero_()
        sharded.load(tmp_path / "step-1")
        return sharded.state_dict()

    loaded, whole = on_ranks(2, Quantised, rank), Quantised().state_dict()
    for state in (*loaded, load_file(tmp_path / "step-1" / "model.safetensors")):
        assert {name: value.dtype for name, value in state.items()} == {
            name: value.dtype for name, value in whole.items()
        }
        assert all(torch.equal(raw(state[name]), raw(value)) for name, value in whole.items())


def test_what_torch_lacks_is_named_only_if_it_is_wanted(tmp_path: Path) -> None:
    path = others(
        tmp_path / "model.safetensors",
        weight=("F32", [4, 4], 64),
        six=("F6_E2M3", [4, 8], 24),
        odd=("F4", [2, 3], 3),
        scale=("F8_E8M0", [4], 4),
    )
    model = nn.Linear(4, 4, bias=False)
    report = sw.shard(model).load(path, strict=False)
    assert report.unexpected == ("six", "odd", "scale")
    assert not model.state_dict()["weight"].any()
    wanting = nn.Linear(8, 4, bias=False)
    others(path, weight=("F6_E2M3", [4, 8], 24))
    with pytest.raises(sw.CheckpointError, match=r"weight: stored as F6_E2M3, the model has F32"):
        sw.shard(wanting).load(path, cast=True)
    refused = pytest.raises(
        sw.CheckpointError, match=r"'weight' is stored as F6_E2M3, and torch has"
    )
    with CheckpointReader.open(path) as source, refused:
        export(source, tmp_path / "out")
    assert Catalogue.read(path).problems == ()


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "größe"])
def test_plain_names(name: str) -> None:
    assert is_plain(name)
    assert inside(Path("/folder"), name) == Path("/folder") / name


HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "C:x",
    "x\0",
    "x\n",
    "x" * 256,
    None,
    3,
    ["x"],
]


@pytest.mark.parametrize("name", HOSTILE)
def test_other_names_are_refused(name: object) -> None:
    assert not is_plain(name)
    with pytest.raises(CheckpointError, match="no plain file name"):
        inside(Path("/folder"), name)


def test_a_link_may_stay_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert inside(tmp_path, "link").read_text() == "x"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    for target in ("../secret", str(tmp_path / "secret"), "../folder/../secret"):
        link = folder / "model.safetensors"
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match="link out of its folder"):
            inside(folder, "model.safetensors")
        link.unlink()


def test_hugging_faces_own_store_of_files_is_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x--y" / "snapshots" / "abc"
    blobs = tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "d00d").write_text("x")
    (snapshot / "model.safetensors").symlink_to("../../blobs/d00d")
    assert inside(snapshot, "model.safetensors").read_text() == "x"
    (snapshot / "other").symlink_to("../../refs")
    with pytest.raises(CheckpointError, match="link out"):
        inside(snapshot, "other")


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match="could not be looked at"):
        inside(tmp_path, "model.safetensors")


def test_so_is_a_folder_that_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(CheckpointError, match=r"could not be looked at: .*Permission denied"):
        inside(tmp_path, "model.safetensors")
