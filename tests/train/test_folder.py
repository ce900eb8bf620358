from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.folder import RECIPE, Folder, check


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    Folder.open(tmp_path / "a" / "b", overwrite=False)
    assert (tmp_path / "a" / "b").is_dir()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert Folder.open(tmp_path, overwrite=False).path == tmp_path


def test_an_earlier_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / RECIPE).touch()
    with pytest.raises(ConfigError, match=r"holds an earlier run; .* --run\.overwrite true"):
        Folder.open(tmp_path, overwrite=False)


def test_replacing_a_run_removes_its_results_and_nothing_else(tmp_path: Path) -> None:
    for name in (RECIPE, "metrics.jsonl", "loss.png", "model.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    Folder.open(tmp_path, overwrite=True)
    assert names(tmp_path) == ["notes.txt", RECIPE]


def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="holds 1 entries"):
        Folder.open(tmp_path, overwrite=True)
    assert names(tmp_path) == ["config.json"]


def test_a_hidden_file_does_not_make_a_folder_used(tmp_path: Path) -> None:
    (tmp_path / ".recipe.123.yaml").touch()
    check(tmp_path, overwrite=False)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        check(tmp_path / "run", overwrite=True)


def test_checking_writes_nothing(tmp_path: Path) -> None:
    check(tmp_path / "run", overwrite=False)
    assert names(tmp_path) == []


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
