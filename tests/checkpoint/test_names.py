"""Names from somebody else's index never lead out of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.checkpoint.names import inside, is_plain
from shardwise.errors import CheckpointError


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
    def refused(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_symlink", refused)
    with pytest.raises(CheckpointError, match=r"could not be looked at: .*Permission denied"):
        inside(tmp_path, "model.safetensors")
