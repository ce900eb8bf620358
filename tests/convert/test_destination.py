"""What an export may replace, and that nothing of a killed one stays for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.convert.export import ExportOptions, export
from shardwise.convert.writer import Destination, workplace
from tests.checkpoint.runs import names, saved
from tests.forked import forked
from tests.nets import NETS

DECODER = NETS[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved(DECODER, 1, tmp_path / "run" / "step-2")
    return tmp_path / "run" / "step-2"


def exported(source: Path, destination: Path, **options: Any) -> None:
    with CheckpointReader.open(source) as opened:
        export(opened, destination, ExportOptions(**options))


def test_a_web_site_with_a_manifest_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "manifest.json").write_text('{"name": "pwa"}')
    (site / "index.html").write_text("<p>")
    with pytest.raises(sw.CheckpointError, match="is no checkpoint of shardwise"):
        exported(checkpoint, site, overwrite=True)
    assert names(site) == ["index.html", "manifest.json"]


def test_what_a_manifest_does_not_list_is_not_removed(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "notes.md").write_text("mine")
    with pytest.raises(
        sw.CheckpointError, match=r"also holds notes\.md, which is not part of the export"
    ):
        exported(checkpoint, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"


def test_weights_alone_are_no_step_of_a_run(checkpoint: Path) -> None:
    with pytest.raises(sw.CheckpointError, match="which `resume` would load"):
        exported(checkpoint, checkpoint.with_name("step-9"))
    exported(checkpoint, checkpoint.with_name("step-9"), with_optimizer=True)
    with pytest.raises(sw.CheckpointError, match="which `resume` would load"):
        Destination(checkpoint.with_name("step-10"), "dcp", whole=True).check()  # of torch


def test_weights_alone_do_not_replace_training_state(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out", with_optimizer=True)
    with pytest.raises(sw.CheckpointError, match="weights alone would replace it"):
        exported(checkpoint, tmp_path / "out", overwrite=True)
    exported(checkpoint, tmp_path / "out", with_optimizer=True, overwrite=True)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, exists: bool
) -> None:
    if exists:
        (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to("elsewhere")
    for form in ("hf", "dcp", "pt"):
        with pytest.raises(sw.CheckpointError, match="is a link"):
            Destination(link, form, overwrite=True).check()
    with pytest.raises(sw.CheckpointError, match="is a link"):
        exported(checkpoint, link, overwrite=True)
    assert link.is_symlink()


def test_a_workplace_that_is_in_use_stays(tmp_path: Path) -> None:
    with workplace(tmp_path / "out") as one, workplace(tmp_path / "out") as other:
        assert one.is_dir()
        assert other.is_dir()
    assert names(tmp_path) == []


@pytest.mark.spawn
@forked
def test_what_killed_exports_left_the_next_ones_remove(checkpoint: Path, tmp_path: Path) -> None:
    """Each is killed when all but the last name is there."""
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    before = names(tmp_path)
    command = [
        sys.executable,
        "-m",
        "tests.convert.test_destination",
        str(checkpoint),
        str(tmp_path),
    ]
    subprocess.run(command, check=True)
    hidden = [name for name in names(tmp_path) if name not in before]
    assert sorted(name.partition(".unfinished")[0] for name in hidden) == [".dcp", ".k.pt", ".of"]
    run(checkpoint, tmp_path, lambda act: act())
    assert [name for name in names(tmp_path) if name not in before] == ["dcp", "k.pt", "of"]


def run(checkpoint: Path, folder: Path, do: Callable[[Callable[[], object]], object]) -> None:
    """One export of each kind that is written in a hidden folder first."""
    from shardwise.cli import export as cli
    from shardwise.convert.dcp_export import export_dcp
    from shardwise.convert.export import export_torch_file

    def torch_file() -> None:
        with CheckpointReader.open(checkpoint) as source:
            export_torch_file(source, folder / "k.pt")

    do(torch_file)
    do(lambda: export_dcp(checkpoint, folder / "dcp"))
    do(lambda: cli.run_export(folder / "x.pt", folder / "of", cli.ExportArguments()))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(act: Callable[[], object]) -> None:
    """Act in a process that is killed at the last moment before the result has its name."""
    from shardwise.cli import export as cli
    from shardwise.convert import dcp_export as exported
    from shardwise.convert import export as torch_file

    child = os.fork()
    if child == 0:
        last: tuple[tuple[Any, str], ...] = (
            (torch_file, "write_one_file"),
            (exported, "sync_folder"),
            (cli, "_to_files"),
        )
        for module, name in last:
            setattr(module, name, die)
        act()
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), killed)
