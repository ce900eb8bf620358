from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.folder import RECIPE, Folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoint(folder: Path, name: str) -> Path:
    """As little as looks like one."""
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "manifest.json").touch()
    return path


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    with Folder.held(tmp_path / "a" / "b") as folder:
        assert folder.path.is_dir()


def test_nobody_else_holds_it_while_the_block_lasts(tmp_path: Path) -> None:
    second = Folder.held(tmp_path, patience=0.0)
    with Folder.held(tmp_path), pytest.raises(ConfigError, match="is in use by another"), second:
        pass
    with Folder.held(tmp_path, patience=0.0):
        pass


def test_it_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Folder.held(tmp_path):
        raise KeyError
    with Folder.held(tmp_path, patience=0.0):
        pass


def test_clearing_removes_results_and_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    for name in (RECIPE, "metrics.jsonl", "loss.png", "model.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    checkpoint(tmp_path, "step-4")
    checkpoint(tmp_path, "step-8")
    (tmp_path / "checkpoints" / "latest").symlink_to("step-8")
    Folder(tmp_path).clear()
    assert names(tmp_path) == ["notes.txt", RECIPE]


def test_clearing_leaves_what_is_no_checkpoint_where_it_is_in_nobody_s_way(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, "step-4")
    (tmp_path / "checkpoints" / "step-8").mkdir()
    (tmp_path / "checkpoints" / "step-8" / "thesis.txt").touch()
    (tmp_path / "checkpoints" / "mine").mkdir()
    Folder(tmp_path).clear()
    assert names(tmp_path / "checkpoints") == ["broken-step-8-1", "mine"]
    assert names(tmp_path / "checkpoints" / "broken-step-8-1") == ["thesis.txt"]


def test_broken_checkpoints_make_room_for_those_that_will_come(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        checkpoint(tmp_path, f"step-{step}")
    assert Folder(tmp_path).set_aside(4) == [
        ("step-12", "broken-step-12-1"),
        ("step-8", "broken-step-8-1"),
    ]
    checkpoint(tmp_path, "step-8")
    assert Folder(tmp_path).set_aside(4) == [("step-8", "broken-step-8-2")]
    assert "step-4" in names(tmp_path / "checkpoints")


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write_text("a.txt", "old")

    def interrupted() -> None:
        with folder.replacing("a.txt") as path:
            path.write_text("ne", "utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert folder.read_text("a.txt") == "old"
    assert names(tmp_path) == ["a.txt"]


def test_json_is_readable(tmp_path: Path) -> None:
    Folder(tmp_path).write_json("a.json", {"é": 1})
    assert (tmp_path / "a.json").read_text("utf-8") == '{\n  "é": 1\n}\n'


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert Folder(tmp_path).read_text("a.txt") is None
