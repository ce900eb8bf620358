"""What makes a folder a checkpoint, and what is no part of one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from shardwise.checkpoint import folder
from shardwise.checkpoint.folder import checkpoints
from shardwise.checkpoint.recognise import files_in, is_ours, step_of, strangers
from tests.checkpoint.test_folder import checkpoint


def ours(path: Path, strategy: str = "full_shard") -> Path:
    fields = {"format": "shardwise", "strategy": strategy, "digest": "1f"}
    return checkpoint(path, json.dumps(fields))


def test_a_step_is_a_number_with_or_without_zeros_before_it() -> None:
    steps = {"step-0": 0, "step-12": 12, "step-00000012": 12, "step-000": 0}
    others = dict.fromkeys(("step-", "step--1", "step-1a", "step_1", "x", "step-" + 19 * "1"))
    assert {name: step_of(name) for name in steps | others} == steps | others


def test_a_manifest_makes_a_checkpoint_whatever_its_name(tmp_path: Path) -> None:
    for name in ("final", "epoch-3", "ckpt_100", "step-00000100", "größe 1"):
        ours(tmp_path / name)
    (tmp_path / "step-9").mkdir()  # which was begun, by its name
    lost = checkpoint(tmp_path / "cut", "{")
    (lost / "model.safetensors").touch()
    named = {"final", "epoch-3", "ckpt_100", "step-00000100", "größe 1", "step-9", "cut"}
    assert {path.name for path in checkpoints(tmp_path)} == named
    assert [path.name for path in checkpoints(tmp_path)][:2] == ["step-00000100", "step-9"]


def test_what_is_no_checkpoint_of_a_run_is_not_among_them(tmp_path: Path) -> None:
    for name in ("latest", ".hidden", "broken-step-4-1", "step-2.partial-0123456789abcdef"):
        ours(tmp_path / name)
    ours(tmp_path / "exported", "export")
    for name, text in (("site", '{"name": "pwa"}'), ("list", "[]"), ("empty", "")):
        checkpoint(tmp_path / name, text)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "training.json").touch()
    (tmp_path / "step-7").write_text("a file")
    assert checkpoints(tmp_path) == []


def test_what_may_not_be_looked_at_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> str:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return "full_shard"

    (tmp_path / "lost+found").mkdir()
    (tmp_path / "final").mkdir()
    monkeypatch.setattr(folder, "writer_of", refused)
    assert checkpoints(tmp_path) == [tmp_path / "final"]


def test_one_that_the_disk_does_not_show_now_is_an_error_and_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would go on from the one before, and lose the steps since."""
    newest, lstat = ours(tmp_path / "step-9"), Path.lstat

    def fails(path: Path) -> os.stat_result:
        if path == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return lstat(path)

    ours(tmp_path / "step-8")
    monkeypatch.setattr(Path, "lstat", fails)
    monkeypatch.setattr(Path, "is_dir", lambda path: path != newest)  # as in Python 3.14
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "beside", "expected"),
    [
        ("epoch-3", '{"format": "shardwise", "strategy": "export", "digest": "1"}', "x", True),
        ("epoch-3", '{"name": "pwa"}', "model.safetensors", False),
        ("epoch-3", "{", "model.safetensors", True),
        ("epoch-3", "{", "index.html", False),
        ("step-3", "[]", "x", True),
    ],
)
def test_what_shardwise_wrote_is_known_by_its_manifest(
    tmp_path: Path, name: str, text: str, beside: str, expected: bool
) -> None:
    (checkpoint(tmp_path / name, text) / beside).touch()
    assert is_ours(tmp_path / name) is expected


def test_what_a_manifest_does_not_list_is_strange(tmp_path: Path) -> None:
    for name in (
        "manifest.json",
        ".lock",
        "a",
        "notes.txt",
        "training/o",
        "training/mine",
        "ema/a",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {*files_in(tmp_path)} == {
        *("manifest.json", ".lock", "a", "notes.txt", "training/o", "training/mine")
    }
    assert strangers(tmp_path, ["a", "training/o"]) == ["ema", "notes.txt", "training/mine"]
    assert strangers(tmp_path, ["a"]) == ["ema", "notes.txt", "training"]
