"""Bytes come from a folder checked, and blocks are read once."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.read_requests import read_into, request_for
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.plan.layout.layout import cut_at_multiples
from tests.copies import seeded

pytestmark = pytest.mark.usefixtures("large_blocks")

HANDLES = Path("/proc/self/fd")


def open_files(folder: Path) -> list[str]:
    """Those of this process in ``folder``; others may be closed meanwhile, as garbage."""
    files = (str(handle.readlink()) for handle in HANDLES.iterdir() if handle.is_symlink())
    return [file for file in files if file.startswith(str(folder))]


def wide() -> nn.Module:
    return nn.Linear(1024, 3 * 1024)  # 12 MiB and a bias: four blocks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sw.shard(seeded(wide)).save(tmp_path / "out", files={"note.txt": "größe", "list.json": "[1"})
    return tmp_path / "out"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each read: its place, and its bytes."""
    calls: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(file: int, views: list[memoryview], at: int) -> int:
        calls.append((at, len(views[0])))
        return real(file, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    return calls


def test_small_files_are_read_whole(folder: Path) -> None:
    with CheckpointReader.open(folder) as source:
        assert source.bytes("note.txt").decode() == "größe"
        with pytest.raises(sw.CheckpointError, match=r"list.json is not JSON"):
            source.json("list.json")
        assert source.names("optimizer") == []


def test_any_range_is_what_the_file_has(folder: Path) -> None:
    data = np.fromfile(folder / "model.safetensors", np.uint8)
    ranges = [(0, 1), (5, BLOCK + 5), (BLOCK - 3, BLOCK + 3), (100, 3 * BLOCK), (0, len(data))]
    for start, stop in ranges:
        with CheckpointReader.open(folder) as source:
            into = np.empty(stop - start, np.uint8)
            source.read_into("model.safetensors", start, into)
            assert np.array_equal(into, data[start:stop])


def test_neighbours_read_the_block_between_them_once(
    folder: Path, reads: list[tuple[int, int]]
) -> None:
    with CheckpointReader.open(folder) as source:
        place = source.tensors("model")["weight"]
        out = torch.empty(3 * 1024 * 1024)
        reads.clear()
        wants = [request_for(place, k, out[k : k + 300_000]) for k in range(0, len(out), 300_000)]
        read_into(source, reversed(wants))
    assert torch.equal(out.view(3072, 1024), seeded(wide).get_parameter("weight"))
    assert [at for at, _ in reads] == [BLOCK, 2 * BLOCK, 3 * BLOCK]  # and block 0 with the header


def test_whole_blocks_go_straight_to_their_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointReader.open(folder) as source:
        place = source.tensors("model")["weight"]
        out = torch.empty(3 * 1024 * 1024)
        copied: list[int] = []
        file = source._file("model.safetensors")
        real = file._block

        def block(number: int) -> Any:
            copied.append(number)
            return real(number)

        monkeypatch.setattr(file, "_block", block)
        read_into(source, [request_for(place, 0, out)])
    assert copied == [0, 3]  # the first and the last


def damaged(source: CheckpointReader, name: str) -> list[int]:
    """Numbers of the blocks whose bytes are not those that were written."""
    assert source.manifest is not None
    blocks = cut_at_multiples(0, source.manifest.files[name].size, BLOCK)
    numbers = []
    for number, block in enumerate(blocks):
        try:
            source.check(name, *block)
        except sw.DamagedCheckpoint:
            numbers.append(number)
    return numbers


def test_damaged_blocks_are_found(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        for at in (BLOCK + 7, 3 * BLOCK):
            file.seek(at)
            file.write(b"!?")
    with CheckpointReader.open(folder) as source:
        assert damaged(source, "model.safetensors") == [1, 3]
        assert damaged(source, "note.txt") == []


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    with CheckpointReader.open(folder) as source:
        source.header("model.safetensors")
        os.truncate(folder / "model.safetensors", 2 * BLOCK)
        with pytest.raises(
            sw.CheckpointError, match=r"ends at byte 8,388,608, 4,194,304 bytes too early"
        ):
            source.read_into("model.safetensors", 0, np.empty(3 * BLOCK, np.uint8))


def test_an_empty_file_says_how_many_bytes_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with (
        pytest.raises(sw.CheckpointError, match="it has 0 of the 8 bytes that announce the header"),
        CheckpointReader.open(tmp_path) as reader,
    ):
        reader.weights()


def test_a_file_that_the_manifest_does_not_list_is_not_there(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "y.safetensors"}}')
    with CheckpointReader.open(folder) as source:
        assert source.names("model") == ["model.safetensors"]


def test_however_many_files_one_block_is_kept(tmp_path: Path) -> None:
    sw.shard(seeded(lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))))).save(
        tmp_path / "out", max_file_size=4 << 20
    )
    tracemalloc.start()
    try:
        with CheckpointReader.open(tmp_path / "out") as source:
            assert len(source.names("model")) >= 6
            assert len(source.tensors("model")) == 12
            assert sum(len(damaged(source, name)) for name in source.names("model")) == 0
        assert tracemalloc.get_traced_memory()[1] < 2 * BLOCK
    finally:
        tracemalloc.stop()


def plain(folder: Path, weight_map: Any) -> Path:
    save_file({"a": torch.zeros(2)}, folder / "x.safetensors")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_an_index_names_only_what_is_there(tmp_path: Path) -> None:
    with CheckpointReader.open(plain(tmp_path, {"a": "x.safetensors"})) as source:
        assert list(source.tensors("model")) == ["a"]
    with CheckpointReader.open(
        plain(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    ) as source:
        says = r"the index says that 'b' is in 'x.safetensors', and it is not"
        with pytest.raises(sw.CheckpointError, match=says):
            source.tensors("model")


@pytest.mark.parametrize("value", [["x"], {"x": 1}, None, 3], ids=str)
def test_an_index_of_no_names_is_an_error(tmp_path: Path, value: object) -> None:
    refused = pytest.raises(sw.CheckpointError, match="no plain file name")
    with CheckpointReader.open(plain(tmp_path, {"a": value})) as source, refused:
        source.tensors("model")


@pytest.mark.parametrize(
    ("aliases", "fact"),
    [({"bias": "weight"}, "'bias' is stored, too"), ({"tied": "gone"}, "that is not stored")],
    ids=str,
)
def test_names_are_tied_to_what_is_stored(folder: Path, aliases: Any, fact: str) -> None:
    with CheckpointReader.open(folder) as source:
        assert source.manifest is not None
        tied = source.manifest.model_copy(update={"aliases": aliases})
    with CheckpointReader(folder, tied) as source, pytest.raises(sw.CheckpointError, match=fact):
        source.tensors("model")


def test_what_the_disk_refuses_is_not_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with CheckpointReader.open(folder) as source:
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(sw.CheckpointError, match="the disk fails"):
            damaged(source, "model.safetensors")


def test_a_stale_handle_is_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, opened, stale = os.preadv, os.open, list[Any]()

    def once(*what: Any) -> int:
        if not stale:
            stale.append("handle")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(*what)

    def noted(*how: Any) -> int:
        stale.append(how[0])
        return opened(*how)

    with CheckpointReader.open(folder) as source:
        source.header("model.safetensors")
        monkeypatch.setattr(os, "preadv", once)
        monkeypatch.setattr(os, "open", noted)
        assert damaged(source, "model.safetensors") == []
    assert stale == ["handle", str(folder / "model.safetensors")]


def test_one_file_is_open_at_a_time(tmp_path: Path) -> None:
    """However many there are, and when they are read in turns."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    sw.shard(model).save(tmp_path / "out", max_file_size=1)
    with CheckpointReader.open(tmp_path / "out") as source:
        for _ in range(2):
            for name in source.names("model"):
                source.header(name)
                assert len(open_files(tmp_path)) <= 1
    assert open_files(tmp_path) == []


def test_a_folder_that_cannot_be_looked_at_is_not_one_without_a_manifest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as damaged, or be loaded unchecked."""

    def fails(path: object, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(os, "scandir", fails)
    monkeypatch.setattr(os, "lstat", fails)
    with pytest.raises(sw.CheckpointError, match="Input/output error") as raised:
        CheckpointReader.open(folder)
    assert type(raised.value) is sw.CheckpointError  # and no DamagedCheckpoint


def test_a_device_is_not_opened() -> None:
    with pytest.raises(sw.CheckpointError, match="neither a folder nor a file"):
        CheckpointReader.open("/dev/null")


def test_files_are_listed_by_the_manifest_or_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "stranger").touch()
    with CheckpointReader.open(folder) as source:
        assert "stranger" not in source.listed()
        assert "model.safetensors" in source.listed()
    with CheckpointReader.open(plain(tmp_path, {})) as source:
        assert source.listed() == ["model.safetensors.index.json", "x.safetensors"]
    with CheckpointReader.open(tmp_path / "x.safetensors") as source:
        assert source.listed() == []
