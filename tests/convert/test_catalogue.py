"""A checkpoint says what it holds, also where a part of it is broken."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.plan import BLOCK
from shardwise.convert.catalogue import Catalogue, Damage, damage_of, stem_of
from tests.checkpoint.runs import saved
from tests.copies import seeded
from tests.nets import NETS

pytestmark = pytest.mark.usefixtures("large_blocks")

TIED = NETS[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "step-2"
    saved(TIED, 2, folder, max_file_size=3_000, files={"note.txt": "hello"})
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(checkpoint, tmp_path / "step-2"))


def wide() -> nn.Module:
    return nn.Linear(1024, 3 * 1024)  # 12 MiB and a bias: four blocks


def test_everything_is_listed(checkpoint: Path) -> None:
    catalogue = Catalogue.read(checkpoint)
    model = TIED.build()
    assert (catalogue.problems, catalogue.strangers) == ((), ())
    assert catalogue.manifest is not None
    assert set(catalogue.groups) == {"model", "optimizer", "ranks"}
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    stored = {name: place.shape for name, (_, place) in catalogue.groups["model"].items()}
    assert shapes.items() <= stored.items()
    assert set(catalogue.aliases) == {n for n in model.state_dict() if n not in stored}
    assert catalogue.training is not None
    assert catalogue.training["optimizers"][0]["class"] == "AdamW"
    assert catalogue.scalars["optimizer"]["step/embed.weight"] == 2.0
    note = next(file for file in catalogue.files if file.name == "note.txt")
    assert (note.size, note.expected, note.blocks, note.is_whole) == (5, 5, 1, True)


def test_a_folder_of_somebody_else_needs_no_manifest(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    weights = {f"{n}": f"model-0000{k}-of-00002.safetensors" for k, n in ((1, "a"), (2, "b"))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    catalogue = Catalogue.read(tmp_path)
    assert (catalogue.problems, catalogue.manifest, catalogue.training) == ((), None, None)
    assert list(catalogue.groups["model"]) == ["a", "b"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    (problem,) = Catalogue.read(tmp_path).problems
    assert "model-00002-of-00002.safetensors is missing" in problem


def test_one_file_is_a_catalogue_of_its_own(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "x.safetensors")
    catalogue = Catalogue.read(tmp_path / "x.safetensors")
    assert list(catalogue.groups["model"]) == ["a"]
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    assert (
        "x.safetensors is not a complete safetensors file"
        in Catalogue.read(tmp_path / "x.safetensors").problems[0]
    )


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    assert "no safetensors files" in Catalogue.read(tmp_path).problems[0]
    with pytest.raises(sw.CheckpointError, match="no checkpoint here"):
        Catalogue.read(tmp_path / "nothing")


def test_what_is_of_torch_is_not_opened(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    for path in (tmp_path / "model.pt", tmp_path / "dcp"):
        (problem,) = Catalogue.read(path).problems
        assert "but pickles of torch" in problem


def test_what_is_left_of_a_broken_checkpoint_is_still_listed(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    first.unlink()
    cut = min(folder.glob("training/ranks-*.safetensors"))
    os.truncate(cut, 50)
    catalogue = Catalogue.read(folder)
    assert "is missing" in catalogue.problems[0]
    sizes = {file.name: file.size for file in catalogue.files}
    assert sizes[first.name] is None
    assert any(file == second.name for file, _ in catalogue.groups["model"].values())
    assert not any(file == first.name for file, _ in catalogue.groups["model"].values())
    assert any(cut.name in problem for problem in catalogue.problems[1:])


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_without_its_manifest_a_checkpoint_is_not_complete(folder: Path, what: str) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes().replace(b"full_shard", b"no_shard")
    path.unlink() if what == "missing" else path.write_bytes(data)
    catalogue = Catalogue.read(folder)
    assert catalogue.manifest is None
    assert "manifest.json" in catalogue.problems[0]
    assert len(catalogue.groups["model"]) > 1


def test_a_half_written_folder_is_no_folder_of_somebody_else(tmp_path: Path) -> None:
    partial = tmp_path / "model.partial-0123456789abcdef"
    partial.mkdir()
    save_file({"a": torch.zeros(3)}, partial / "model.safetensors")
    assert "not written to its end" in Catalogue.read(partial).problems[0]


def test_files_that_do_not_belong_there_are_named(folder: Path) -> None:
    (folder / "stranger.bin").touch()
    assert Catalogue.read(folder).strangers == ("stranger.bin",)


def test_a_whole_checkpoint_has_no_damage_and_all_of_it_is_read(checkpoint: Path) -> None:
    catalogue = Catalogue.read(checkpoint)
    results = list(damage_of(catalogue))
    assert [damage for _, damage in results if damage] == []
    assert sum(nbytes for nbytes, _ in results) == sum(file.size or 0 for file in catalogue.files)


def test_damage_names_file_and_tensors(tmp_path: Path) -> None:
    sw.shard(seeded(wide)).save(tmp_path / "step-1")
    path = tmp_path / "step-1" / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in (BLOCK + 7, size - 1):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    damages = [damage for _, damage in damage_of(Catalogue.read(tmp_path / "step-1")) if damage]
    assert damages == [Damage("model.safetensors", ("weight", "bias"))]


def test_a_damaged_header_is_read_as_it_is_and_said(folder: Path) -> None:
    path = min(folder.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    at = data.index(b"    ")  # the padding: the names are all still there
    data[at] = ord("\t")
    path.write_bytes(data)
    catalogue = Catalogue.read(folder)
    assert f"{path} is damaged" in catalogue.problems[0]
    (damage,) = [damage for _, damage in damage_of(catalogue) if damage]
    assert damage.tensors == tuple(
        name for name, (file, _) in catalogue.groups["model"].items() if file == path.name
    )


def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path) -> None:
    sw.shard(seeded(wide)).save(tmp_path / "step-1")
    os.truncate(tmp_path / "step-1" / "model.safetensors", 2 * BLOCK)
    catalogue = Catalogue.read(tmp_path / "step-1")
    (damage,) = [damage for _, damage in damage_of(catalogue) if damage]
    assert (damage.file, damage.unreadable) == ("model.safetensors", "")


def test_files_are_grouped_by_what_they_hold() -> None:
    assert stem_of("model-00001-of-00003.safetensors") == "model"
    assert stem_of("adapter-model.safetensors") == "adapter-model"
    assert stem_of("model.safetensors.index.json") == ""


def test_what_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.shard(seeded(wide)).save(tmp_path / "step-1")
    catalogue, real = Catalogue.read(tmp_path / "step-1"), os.preadv

    def preadv(file: int, views: list[memoryview], at: int) -> int:
        if at == BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    (damage,) = [damage for _, damage in damage_of(catalogue) if damage]
    assert damage.tensors == ("weight", "bias")
    assert "the disk fails" in damage.unreadable


def test_a_file_that_cannot_be_opened_is_one_damage_and_the_others_are_read(folder: Path) -> None:
    catalogue = Catalogue.read(folder)
    path = folder / "training/optimizer.safetensors"
    path = path if path.exists() else min(folder.glob("training/optimizer-*.safetensors"))
    path.rename(folder.parent / "elsewhere")
    path.symlink_to("../../elsewhere")
    results = list(damage_of(catalogue))
    (damage,) = [damage for _, damage in results if damage]
    assert damage.file == f"training/{path.name}"
    assert "link out of its folder" in damage.unreadable
    assert sum(nbytes for nbytes, _ in results) == sum(file.size or 0 for file in catalogue.files)


def test_a_manifest_that_ties_what_is_not_there_is_a_problem(folder: Path) -> None:
    manifest = Manifest.decode((folder / "manifest.json").read_bytes(), "x")
    tied = manifest.model_copy(update={"aliases": {"head": "gone"}})
    (folder / "manifest.json").write_bytes(tied.encode())
    (problem,) = Catalogue.read(folder).problems
    assert "ties 'head' to 'gone'" in problem


def test_a_device_and_a_pipe_are_no_catalogue(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(sw.CheckpointError, match="neither a folder nor a file"):
            Catalogue.read(path)


def test_a_manifest_that_is_a_link_to_itself_is_a_problem(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("manifest.json")
    assert "could not be looked at" in Catalogue.read(folder).problems[0]
