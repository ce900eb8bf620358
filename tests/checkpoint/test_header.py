"""Headers as safetensors itself writes and reads them, and nothing that only looks like one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from shardwise.checkpoint.header import CAP, PAGE, Stored, decode, encode, length_of
from shardwise.errors import CheckpointError

TENSORS = [
    ("a", "F32", (2, 3)),
    ("b.weight", "BF16", (5,)),
    ("none", "U8", (0, 4)),
    ("s", "U8", ()),
]


def read(data: bytes) -> dict[str, Stored]:
    length = length_of(data[:8], len(data), "file")
    return dict(decode(data[8 : 8 + length], len(data), "file").tensors)


def test_safetensors_reads_what_is_encoded(tmp_path: Path) -> None:
    header = encode(TENSORS, {"format": "pt"})
    assert len(header) % PAGE == 0
    data = bytes(range(24)) + bytes(10) + b"\7"
    (tmp_path / "x.safetensors").write_bytes(header + data)
    found = load_file(tmp_path / "x.safetensors")
    assert found["a"].view(torch.uint8).flatten().tolist() == list(range(24))
    assert found["none"].shape == (0, 4)
    assert found["s"].item() == 7
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert read(header + data)["b.weight"] == Stored("BF16", (5,), PAGE + 24, PAGE + 34)


def test_what_safetensors_writes_is_decoded() -> None:
    tensors = {"x": torch.ones(3, 2), "y": torch.zeros(0), "z": torch.ones((), dtype=torch.int64)}
    data = save(tensors, {"format": "pt"})
    found = read(data)
    assert {name: stored.shape for name, stored in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    ones = data[found["x"].start : found["x"].stop]
    assert torch.frombuffer(bytearray(ones), dtype=torch.float32).tolist() == [1.0] * 6


def test_names_of_any_language_survive() -> None:
    header = encode([("größe/重み", "U8", (1,))], {})
    assert list(read(header + b"\0")) == ["größe/重み"]


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def file(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (b"", "0 bytes, fewer than the 8"),
        (b"\5\0\0", "3 bytes, fewer than the 8"),
        (bytes(64), "announces no header"),
        ((1 << 60).to_bytes(8, "little") + bytes(9), "announces a header of 1,152,921,504"),
        ((CAP + 1).to_bytes(8, "little") + bytes(9), "announces a header of 100,000,001"),
        (file(b"{"), "not JSON"),
        (file(b"\xff\xfe"), "not JSON"),
        (file(b'{"a": NaN}'), "NaN is no number"),
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
    with pytest.raises(CheckpointError, match="not a whole safetensors file") as caught:
        read(data)
    assert fact in str(caught.value)


def test_a_thousand_broken_headers_are_errors_or_harmless() -> None:
    """Whatever bytes change, what is accepted lies inside the file and does not overlap."""
    chance = random.Random(0)
    good = save({"a": torch.ones(7, 3), "b": torch.zeros(5, dtype=torch.int64)}, {"format": "pt"})
    refused = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 5])):
            end = len(data) if chance.random() < 0.1 else int.from_bytes(good[:8], "little") + 8
            at = chance.randrange(max(1, min(end, len(data))))
            kind = chance.choice(["flip", "byte", "digit", "cut", "insert"])
            if kind == "flip":
                data[at] ^= 1 << chance.randrange(8)
            elif kind == "byte":
                data[at] = chance.randrange(256)
            elif kind == "digit":
                data[at] = ord(chance.choice('0123456789-.eE[]{}",:'))
            elif kind == "cut":
                del data[chance.randrange(len(data)) :]
            else:
                data[at:at] = chance.randbytes(3)
            if not data:
                break
        try:
            found = read(bytes(data))
        except CheckpointError:
            refused += 1
            continue
        at = min((s.start for s in found.values()), default=len(data))
        for stored in found.values():
            assert stored.start == at
            assert stored.stop <= len(data)
            at = stored.stop
        assert at == len(data)
    assert refused > 700


def test_a_header_that_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="readers accept 100,000,000"):
        encode([("x" * 60_000_000, "U8", (1,)), ("y" * 60_000_000, "U8", (1,))], {})


def test_a_file_without_its_header_is_refused_by_safetensors_too(tmp_path: Path) -> None:
    """What a crash leaves: the data without the header."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    data[: -3 * 4] = bytes(len(data) - 12)
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"(?i)header"):
        load_file(path)
