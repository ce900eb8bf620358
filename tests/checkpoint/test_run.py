"""What a run's folder holds: whole checkpoints, broken ones, and what a crash left."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.checkpoint.folder import Partial, resolve
from shardwise.checkpoint.run import checkpoint_of, folder_of_run, meant, survey
from tests.checkpoint.runs import saved
from tests.nets import NETS

TOKEN = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two whole checkpoints and a third that lost its manifest, the newest."""
    saved(NETS[1], 2, tmp_path / "step-2")
    saved(NETS[1], 1, tmp_path / "step-10", strategy="no_shard")
    saved(NETS[1], 1, tmp_path / "step-11")
    (tmp_path / "step-11" / "manifest.json").unlink()
    return tmp_path


def test_checkpoints_are_listed_newest_first_with_who_wrote_them(run: Path) -> None:
    found = survey(run)
    assert [listed.path.name for listed in found.checkpoints] == ["step-11", "step-10", "step-2"]
    broken, ten, two = found.checkpoints
    assert (broken.step, broken.manifest) == (11, None)
    assert "step-11 has no manifest.json" in broken.problem
    assert ten.manifest is not None
    assert (ten.manifest.world, ten.manifest.strategy, ten.problem) == (1, "no_shard", "")
    assert two.nbytes == sum(file.stat().st_size for file in (run / "step-2").iterdir())
    assert (found.latest, found.leftovers) == ("step-11", ())


@pytest.mark.parametrize("said", ["../elsewhere", "", "x" * 10_000, "\udcff"])
def test_whatever_latest_says_the_run_is_listed(run: Path, said: str) -> None:
    (run / "latest").unlink()
    (run / "latest").write_bytes(said.encode(errors="surrogateescape"))
    found = survey(run)
    assert len(found.checkpoints) == 3
    assert found.latest == said[:4096].replace("\udcff", "\ufffd")
    with pytest.raises(sw.CheckpointError, match="latest"):
        resolve(run / "latest")


def test_a_file_that_is_cut_off_is_the_reason_why(run: Path) -> None:
    os.truncate(run / "step-2" / "model.safetensors", 100)
    problem = survey(run).checkpoints[2].problem
    assert "model.safetensors has 100 of" in problem


def test_what_is_being_written_is_told_from_what_a_crash_left(run: Path) -> None:
    written = Partial.make(run / "step-20", TOKEN)
    Partial.make(run / "step-21", TOKEN).close()  # as a process does that dies
    (run / f"step-1.removing-{TOKEN}").mkdir()
    found = survey(run).leftovers
    written.close()
    assert [(one.kind, one.name, now) for one, now in found] == [
        ("removing", "step-1", False),
        ("partial", "step-20", True),
        ("partial", "step-21", False),
    ]


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_a_run_is_a_folder_with_checkpoints_in_it(tmp_path: Path, inner: str) -> None:
    saved(NETS[1], 1, tmp_path / inner / "step-1")
    (tmp_path / "model.safetensors").touch()  # a run leaves the trained model beside them
    assert folder_of_run(tmp_path) == tmp_path / inner
    assert folder_of_run(tmp_path / inner / "step-1") is None
    assert folder_of_run(tmp_path / "nothing") is None
    assert folder_of_run(tmp_path / "model.safetensors") is None


def test_the_newest_whole_checkpoint_stands_for_its_run(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert checkpoint_of(run) == run / "step-10"
    assert f"SKIPPED {run / 'step-11'}" in caplog.text
    assert checkpoint_of(run / "step-2") == run / "step-2"


def test_a_run_without_a_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(sw.CheckpointError, match=r"holds no complete checkpoint: 1 are broken"):
        checkpoint_of(tmp_path)


def test_a_checkpoint_that_may_not_be_looked_at_does_not_hide_the_others(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "step-10":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    _, ten, two = survey(run).checkpoints
    assert "may not read there" in ten.problem
    assert (ten.nbytes, two.problem) == (0, "")


def test_a_checkpoint_that_a_crash_left_without_its_name_is_listed(tmp_path: Path) -> None:
    saved(NETS[1], 1, tmp_path / "step-6")
    (tmp_path / "step-6").rename(tmp_path / f"step-6.replaced-{TOKEN}")
    (listed,) = survey(tmp_path).checkpoints
    assert (listed.name, listed.step, listed.problem) == ("step-6", 6, "")
    assert listed.path.name == f"step-6.replaced-{TOKEN}"


def test_a_checkpoint_is_found_by_its_run(tmp_path: Path) -> None:
    inner = tmp_path / "run" / "checkpoints"
    saved(NETS[1], 1, inner / "step-1")
    assert meant(tmp_path / "run" / "step-1") == inner / "step-1"
    assert checkpoint_of(tmp_path / "run" / "latest") == inner / "latest"
    assert meant(inner / "step-1") == inner / "step-1"
    assert meant(tmp_path / "run" / "other") == tmp_path / "run" / "other"
    (tmp_path / "run" / "step-1").mkdir()
    assert meant(tmp_path / "run" / "step-1") == tmp_path / "run" / "step-1"
