from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train import folder as of_folder
from shardwise.train.folder import RECIPE, RESULTS, Folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoint(folder: Path, name: str) -> Path:
    """The least that looks like a checkpoint."""
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    (path / "manifest.json").touch()
    return path


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    with Folder.locked(tmp_path / "a" / "b") as folder:
        assert folder.path.is_dir()


def test_nobody_else_holds_it_while_the_block_lasts(tmp_path: Path) -> None:
    second = Folder.locked(tmp_path, timeout=0.0)
    with Folder.locked(tmp_path), pytest.raises(ConfigError, match="is in use by another"), second:
        pass
    with Folder.locked(tmp_path, timeout=0.0):
        pass


def test_a_new_folder_in_which_nothing_was_written_goes_again(tmp_path: Path) -> None:
    place = tmp_path / "new"
    with Folder.locked(place) as folder:
        assert folder.path.is_dir()
    assert not place.exists()
    place.mkdir()
    with Folder.locked(place):
        pass
    assert place.is_dir()
    with Folder.locked(tmp_path / "used") as folder:
        folder.write_text("a", "")
    assert (tmp_path / "used" / "a").exists()


def test_a_lock_that_went_with_its_folder_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, attempts = tmp_path / "new", []

    def acquire(_lock: int, path: Path, _until: float) -> None:
        attempts.append(path)
        if len(attempts) == 1:  # who had it before was the one who made the folder
            (path / ".lock").unlink()
            path.rmdir()

    monkeypatch.setattr(of_folder, "_acquire", acquire)
    with Folder.locked(place) as folder:
        folder.write_text("a", "")
    assert attempts == [place, place]
    assert (place / "a").exists()


def test_it_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Folder.locked(tmp_path):
        raise KeyError
    with Folder.locked(tmp_path, timeout=0.0):
        pass


def earlier_run(folder: Path) -> dict[str, str]:
    """A run with two checkpoints, beside a file of somebody's; all files and their text."""
    for name in (RECIPE, *RESULTS, "notes.txt"):
        (folder / name).write_text(f"old {name}", "utf-8")
    checkpoint(folder, "step-4")
    checkpoint(folder, "step-8")
    checkpoint(folder, "broken-step-6-1")
    (folder / "checkpoints" / "latest").symlink_to("step-8")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def test_an_earlier_run_is_moved_and_goes_only_when_that_is_said(tmp_path: Path) -> None:
    before, folder = earlier_run(tmp_path), Folder(tmp_path)
    with folder.replacing_run():
        folder.write_text(RECIPE, "new")
    assert names(tmp_path) == ["notes.txt", RECIPE, "replaced-1"]
    moved = contents(tmp_path / "replaced-1")
    assert moved == {name: text for name, text in before.items() if name != "notes.txt"}
    folder.remove_replaced()
    assert contents(tmp_path) == {"notes.txt": "old notes.txt", RECIPE: "new"}


def test_of_what_lies_with_a_replaced_run_only_the_run_is_removed(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    thesis = tmp_path / "checkpoints" / "step-12" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.touch()
    folder = Folder(tmp_path)
    with folder.replacing_run():
        pass
    folder.remove_replaced()
    assert contents(tmp_path / "replaced-1") == {"checkpoints/step-12/thesis.txt": ""}
    with folder.replacing_run():
        pass
    assert (tmp_path / "replaced-2" / RECIPE).exists()


def test_a_run_whose_checkpoints_lie_behind_a_link_is_not_moved(tmp_path: Path) -> None:
    for name in ("run", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / RECIPE).touch()
    (tmp_path / "run" / "checkpoints").symlink_to("../scratch")
    folder = Folder(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a link, so its run cannot be moved"):
        folder.replacing_run().__enter__()
    assert names(tmp_path / "run") == ["checkpoints", RECIPE]


def test_a_beginning_that_fails_leaves_the_earlier_run_as_it_was(tmp_path: Path) -> None:
    before, folder = earlier_run(tmp_path), Folder(tmp_path)

    def fails() -> None:
        with folder.replacing_run():
            folder.write_text(RECIPE, "new")
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - nothing more is known of it
        fails()
    assert contents(tmp_path) == before


def test_a_crash_at_any_moment_of_moving_leaves_the_earlier_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def crashes(folder: Folder, at: int) -> bool:
        """Nothing more happens after ``at`` renames; false if all was done before."""
        left, rename = [at], Path.rename

        def counted(path: Path, target: Path) -> Path:
            if not left[0]:
                raise Crash
            left[0] -= 1
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", counted)
            try:
                with folder.replacing_run():
                    folder.write_text(RECIPE, "new")
                    folder.write_text("tokenizer.json", "new")
            except Crash:
                return True
        return False

    for at in range(20):
        place = tmp_path / str(at)
        place.mkdir()
        before = earlier_run(place)
        if not crashes(Folder(place), at):
            assert at == len(RESULTS) + 2  # with the checkpoints; and what holds all gets its name
            return
        with Folder.locked(place):
            after = contents(place)
        assert {name: after[name] for name in before} == before
        assert set(after) - set(before) <= {".lock", "tokenizer.json"}
    pytest.fail("it was never done")


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write_text("a.txt", "old")

    def interrupted() -> None:
        with folder.atomic_write("a.txt") as path:
            path.write_text("ne", "utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert folder.read_text("a.txt") == "old"
    assert names(tmp_path) == ["a.txt"]


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert Folder(tmp_path).read_text("a.txt") is None
