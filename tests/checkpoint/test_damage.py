"""Whatever happens to the bytes of a checkpoint: a clear error, or the checkpoint before.

Three checkpoints stand for all: with everything in it, cut into many files; weights alone, with
small files of others beside them; and one that was written in the background.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.folder import Partial, new_token
from shardwise.checkpoint.lock import LOCK
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, names, same, steps, tensors
from tests.copies import clones, error_text, on_ranks
from tests.nets import NETS

DECODER = NETS[0]
KINDS = ("everything", "weights", "background")
MUST_HAVE = {
    "everything": {
        "config.json",
        "model.safetensors.index.json",
        "training/optimizer.safetensors.index.json",
    },
    "weights": {"config.json", "manifest.json", "model.safetensors"},
    "background": {"training/ranks.safetensors", "training.json"},
}


def write(kind: str, run: Path) -> None:
    """Two checkpoints of two ranks, one step apart."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        for step in (1, 2):
            steps(model, optimizer, DECODER, comm.rank, range(step, step + 1))
            path = run / f"step-{step}"
            if kind == "everything":
                files = {"config.json": '{"width": 16}'}
                training = sw.Training(position={"row": step})
                sharded.save(path, optimizer, training, max_file_size=30_000, files=files)
            elif kind == "weights":
                sharded.save(path, files={"config.json": '{"width": 16}'})
            else:
                saving = sharded.save_async(path, optimizer, sw.Training())
                assert saving is not None
                saving.wait()

    on_ranks(2, DECODER.build, rank)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for kind in KINDS:
        write(kind, folder / kind)
        assert MUST_HAVE[kind] <= set(names(folder / kind / "step-2"))
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run, by its kind, to do harm to."""

    def copied(kind: str) -> Path:
        return Path(shutil.copytree(whole / kind, tmp_path / kind, symlinks=True))

    return copied


class Rank:
    """One rank's model and optimizer, and what it asks of a checkpoint of this kind."""

    def __init__(self, kind: str, comm: Comm, model: nn.Module) -> None:
        self.model, self.sharded = model, sw.shard(model, comm=comm)
        self.training = None if kind == "weights" else sw.Training()
        self.optimizer = None if kind == "weights" else adamw(model.parameters())
        # Gradients that were not reduced belong to as many ranks as there were.
        self.strict = kind != "background" or comm.size == 2

    def load(self, path: Path) -> str | None:
        """What it says; ``None`` if it loads."""
        try:
            self.sharded.load(path, self.optimizer, self.training, strict=self.strict)
        except sw.DamagedCheckpoint as error:
            return str(error)
        return None

    def resume(self, run: Path) -> str:
        """The checkpoint that it goes on with."""
        report = self.sharded.resume(run, self.optimizer, self.training)
        assert report is not None
        state = clones(self.model.state_dict())
        stored = tensors(report.path, "model")
        assert same(stored, {name: state[name] for name in stored})
        return report.path.name


def loaded(kind: str, path: Path) -> str | None:
    """What loading says, on one rank; ``None`` if it loads."""
    return on_ranks(1, DECODER.build, lambda comm, model: Rank(kind, comm, model).load(path))[0]


def resumed(kind: str, run: Path) -> str:
    """The checkpoint that a run goes on with, on as many ranks as wrote it."""
    return on_ranks(2, DECODER.build, lambda comm, model: Rank(kind, comm, model).resume(run))[0]


# --- one bit ---------------------------------------------------------------------------------


@pytest.mark.prove
def test_flipped_bits_in_any_file_are_found(copy: Callable[[str], Path]) -> None:
    chance = random.Random(4)
    runs = {kind: copy(kind) for kind in KINDS}
    files = {kind: names(run / "step-2") for kind, run in runs.items()}
    for kind in KINDS:
        assert loaded(kind, runs[kind] / "step-2") is None
    for _ in range(30):
        kind = chance.choice(KINDS)
        name = chance.choice(files[kind])
        path = runs[kind] / "step-2" / name
        good = path.read_bytes()
        bad = bytearray(good)
        at = chance.randrange(len(bad))
        bad[at] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        text = loaded(kind, runs[kind] / "step-2")
        assert text is not None, (kind, name, at)
        assert str(path) in text
        assert "oad another" in text or "a later shardwise" in text, text
        path.write_bytes(good)


# --- whole files -----------------------------------------------------------------------------


def keep(share: float, less: int = 0) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data)) - less])

    return cut


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swap_steps(path: Path) -> None:
    """Swap it with the file of the same name of the checkpoint before."""
    other = Path(str(path).replace("step-2", "step-1"))
    own, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(own)


def swap_names(path: Path) -> None:
    """Swap it with another file of the same checkpoint."""
    other = next(p for p in sorted(path.parent.iterdir()) if p.name not in (path.name, LOCK))
    own, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(own)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS = {
    "empty": keep(0.0),
    "half": keep(0.5),
    "all but one byte": keep(1.0, less=1),
    "one byte more": grow,
    "missing": Path.unlink,
    "swapped with the step before": swap_steps,
    "swapped with another file": swap_names,
    "a folder of that name": become_folder,
}
HARMLESS = "all but one byte"  # of the manifest, which ends with a line feed


@dataclass
class Outcome:
    """What became of harm to one file: what loading said, what the run went on with, the log."""

    text: str | None
    taken: str
    log: str


def restore(files: Mapping[Path, bytes], step: str) -> None:
    for path, data in files.items():
        if step in path.parts:
            if path.is_dir():
                path.rmdir()
            path.write_bytes(data)


def harmed(kind: str, harm: str, run: Path, log: pytest.LogCaptureFixture) -> dict[str, Outcome]:
    """Do this harm to each file of ``step-2`` in turn, and load, and resume, on two ranks."""
    paths = (run / step / name for step in ("step-1", "step-2") for name in names(run / step))
    files = {path: path.read_bytes() for path in paths}

    def rank(comm: Comm, model: nn.Module) -> dict[str, Outcome]:
        mine, outcomes = Rank(kind, comm, model), {}
        for path in (path for path in files if "step-2" in path.parts):
            if comm.rank == 0:
                log.clear()
                HARMS[harm](path)
            all_gather_object(comm, "", "harmed")
            alike = path.is_file() and path.read_bytes() == files[path]
            text = mine.load(run / "step-2")
            if comm.rank == 0:
                restore(files, "step-1")  # which an exchange harmed, too
            taken = mine.resume(run)
            if not alike:
                outcomes[path.name] = Outcome(text, taken, log.text)
            all_gather_object(comm, "", "looked")
            if comm.rank == 0:
                if (marked := run / "broken-step-2-1").exists():
                    marked.rename(run / "step-2")
                restore(files, "step-2")
            all_gather_object(comm, "", "restored")
        return outcomes

    one, other = on_ranks(2, DECODER.build, rank, timeout=60.0)
    assert [outcomes.text for outcomes in one.values()] == [
        outcomes.text for outcomes in other.values()
    ]
    return one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", HARMS)
def test_harm_to_any_file_is_an_error_and_the_run_goes_on_with_the_one_before(
    harm: str, kind: str, copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    run = copy(kind)
    outcomes = harmed(kind, harm, run, caplog)
    assert {"manifest.json"} < set(outcomes)
    for name, outcome in outcomes.items():
        if name == "manifest.json" and harm == HARMLESS:
            assert (outcome.text, outcome.taken) == (None, "step-2")
        elif name == "manifest.json" and harm == "missing" and kind == "weights":
            assert (outcome.text, outcome.taken) == (
                None,
                "step-1",
            )  # a folder as others write them …
            assert "so its bytes could not be checked" in outcome.log  # … which is said
        else:
            assert outcome.text is not None, name
            assert "step-2" in outcome.text
            assert "oad another" in outcome.text
            assert outcome.taken == "step-1", name
            assert "SKIPPED" in outcome.log


def test_files_that_nobody_listed_are_not_read(copy: Callable[[str], Path]) -> None:
    """Left by another tool, or put there: neither an index nor a tensor of it counts."""
    run = copy("background")
    folder = run / "step-2"
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "y.safetensors"}}')
    (folder / "y.safetensors").write_bytes(b"nothing")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    assert resumed("background", run) == "step-2"


# --- what is not damage ----------------------------------------------------------------------


def refused(run: Path) -> str:
    """What loading ``step-2`` and resuming both say, on both ranks; nothing changes on the disk."""
    before = sorted(run.rglob("*"))

    def rank(comm: Comm, model: nn.Module) -> str:
        mine = Rank("everything", comm, model)
        text = error_text(
            sw.CheckpointError, lambda: mine.sharded.load(run / "step-2", mine.optimizer)
        )
        assert error_text(sw.CheckpointError, lambda: mine.resume(run)) in (text, f"rank 0: {text}")
        return text

    [text] = set(on_ranks(2, DECODER.build, rank))
    assert sorted(run.rglob("*")) == before
    return text


def test_a_link_out_of_the_folder_is_not_passed_over(copy: Callable[[str], Path]) -> None:
    run = copy("everything")
    path = run / "step-2" / "training.json"
    path.unlink()
    path.symlink_to(Path("..") / "step-1" / path.name)
    assert "is a link out of its folder" in refused(run)


def test_a_checkpoint_of_a_later_version_is_not_passed_over(copy: Callable[[str], Path]) -> None:
    run = copy("everything")
    path = run / "step-2" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 3', 1))
    assert "Install a later shardwise" in refused(run)


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], list[str]]:
    """``opening(name, number, times)``: the file is refused with this error as many times."""
    real = os.open

    def refuse(name: str, number: int, times: int) -> list[str]:
        refusals: list[str] = []

        def opened(path: Any, *how: Any) -> int:
            if str(path).endswith(name) and len(refusals) < times:
                refusals.append(str(path))
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *how)

        monkeypatch.setattr(os, "open", opened)
        return refusals

    return refuse


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
def test_what_the_disk_refuses_once_is_tried_again(
    number: int, copy: Callable[[str], Path], opening: Callable[[str, int, int], list[str]]
) -> None:
    refusals = opening("step-2/training.json", number, 1)
    assert resumed("everything", copy("everything")) == "step-2"
    assert len(refusals) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_what_the_disk_refuses_for_good_is_not_damage(
    number: int, copy: Callable[[str], Path], opening: Callable[[str, int, int], list[str]]
) -> None:
    run = copy("everything")
    opening("step-2/training.json", number, 1000)
    assert os.strerror(number) in refused(run)


def test_a_mount_that_rank_0_lacks_is_not_a_new_run(tmp_path: Path, whole: Path) -> None:
    runs = (tmp_path / "not mounted", whole / "weights")

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.resume(runs[comm.rank]))

    [text] = set(on_ranks(2, DECODER.build, rank))
    assert text.startswith("rank 1: ")
    assert "shows step-2, step-1, latest, and rank 0 finds no checkpoint there" in text


def test_a_run_whose_latest_leads_to_nothing_is_not_a_new_run(tmp_path: Path) -> None:
    sharded = sw.shard(nn.Linear(2, 2))
    assert sharded.resume(tmp_path / "new") is None
    (tmp_path / "latest").symlink_to("step-7")
    with pytest.raises(sw.CheckpointError, match="shows latest, and rank 0 finds no checkpoint"):
        sharded.resume(tmp_path)


def test_nothing_is_renamed_before_a_start_has_succeeded(copy: Callable[[str], Path]) -> None:
    run = copy("weights")
    os.truncate(run / "step-2" / "model.safetensors", 100)
    before = sorted(run.rglob("*"))
    text = error_text(sw.CheckpointError, lambda: sw.shard(nn.Linear(2, 2)).resume(run))
    assert "step-1 does not fit what is to be loaded" in text
    assert sorted(run.rglob("*")) == before
    assert resumed("weights", run) == "step-1"
    assert names_of(run) == ["broken-step-2-1", "latest", "step-1"]
    assert (run / "latest").resolve() == run / "step-1"


def names_of(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


# --- folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alive", [False, True], ids=["its writer died", "it is being written"])
def test_a_folder_that_was_not_finished_is_not_loaded(
    alive: bool, kind: str, copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    run = copy(kind)
    partial = Partial.make(run / "step-3", new_token())
    shutil.copytree(run / "step-2", partial.path, dirs_exist_ok=True)
    (partial.path / "manifest.json").unlink()
    if not alive:
        partial.lock.close()
    text = loaded(kind, partial.path)
    assert text is not None
    assert "has no manifest.json, and shardwise began it" in text
    assert resumed(kind, run) == "step-2"
    assert "SKIPPED" not in caplog.text
    write(kind, run)  # the next save removes what the dead left
    assert partial.path.exists() == alive
    if alive:
        partial.lock.close()


def test_latest_that_leads_nowhere_is_an_error_and_does_not_stop_a_run(
    copy: Callable[[str], Path],
) -> None:
    run = copy("everything")
    (run / "latest").unlink()
    (run / "latest").symlink_to("step-7")

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.load(run / "latest"))

    text = on_ranks(2, DECODER.build, rank)[0]
    assert "latest" in text
    assert "beside it are latest, step-1, step-2. Name one" in text
    assert resumed("everything", run) == "step-2"


def test_a_run_in_which_all_are_broken_does_not_start_anew(copy: Callable[[str], Path]) -> None:
    run = copy("everything")
    for step in ("step-1", "step-2"):
        os.truncate(run / step / "training.json", 5)

    def rank(comm: Comm, model: nn.Module) -> str:
        before = clones(model.state_dict())
        sharded, optimizer = sw.shard(model, comm=comm), adamw(model.parameters())
        text = error_text(sw.DamagedCheckpoint, lambda: sharded.resume(run, optimizer))
        assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())
        return text

    one, other = on_ranks(2, DECODER.build, rank)
    assert one == other
    assert "holds 2 checkpoints, none of them complete" in one
    assert "step-1 is not complete" in one
    assert names_of(run) == ["latest", "step-1", "step-2"]
