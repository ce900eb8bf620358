"""One file that ``torch.load`` reads, without a copy of the model in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.convert.export import ExportOptions, export_torch_file
from tests.checkpoint.recorded import record
from tests.checkpoint.runs import same, saved
from tests.nets import NETS

TIED = NETS[1]


def test_a_plain_model_loads_the_file(tmp_path: Path) -> None:
    whole = saved(TIED, 2, tmp_path / "step-2", max_file_size=2_000)
    with CheckpointReader.open(tmp_path / "step-2") as source:
        exported = export_torch_file(source, tmp_path / "model.pt")
    states = torch.load(tmp_path / "model.pt", weights_only=True)
    model = TIED.build()
    model.load_state_dict(states)
    assert same(model.state_dict(), whole)
    assert exported.nbytes == (tmp_path / "model.pt").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "latest") == [
        "model.pt",
        "step-2",
    ]


def test_tied_weights_share_memory_in_it(tmp_path: Path) -> None:
    saved(TIED, 1, tmp_path / "step-2")
    with CheckpointReader.open(tmp_path / "step-2") as source:
        assert source.manifest is not None
        aliases = source.manifest.aliases
        export_torch_file(source, tmp_path / "model.pt", ExportOptions(dtype=torch.bfloat16))
    states = torch.load(tmp_path / "model.pt", weights_only=True)
    assert aliases
    for alias, name in aliases.items():
        assert states[alias].data_ptr() == states[name].data_ptr()
    assert {value.dtype for value in states.values()} == {torch.bfloat16}


def test_the_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(TIED, 1, tmp_path / "step-2")
    calls = record(monkeypatch)
    with CheckpointReader.open(tmp_path / "step-2") as source:
        export_torch_file(source, tmp_path / "model.pt")
    named = calls.index("rename model.pt")
    assert any(".unfinished-" in one and one.startswith("fsync ") for one in calls[:named])
    assert calls[named + 1] == f"fsync {tmp_path}"


def test_a_disk_that_is_full_is_told_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(TIED, 1, tmp_path / "step-2")

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    with CheckpointReader.open(tmp_path / "step-2") as source:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            with pytest.raises(sw.CheckpointError, match=r"unexpected pos.*the disk is full"):
                export_torch_file(source, tmp_path / "model.pt")
        nbytes = sum(p.stored.stop - p.stored.start for p in source.tensors("model").values())
        monkeypatch.setattr("shardwise.checkpoint.disk.free_bytes", lambda folder: 2 * nbytes - 1)
        with pytest.raises(sw.CheckpointError, match="while it is written"):
            export_torch_file(source, tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


def test_what_is_there_stays_unless_told_otherwise(tmp_path: Path) -> None:
    saved(TIED, 1, tmp_path / "step-2")
    (tmp_path / "model.pt").write_text("mine")
    with CheckpointReader.open(tmp_path / "step-2") as source:
        with pytest.raises(sw.CheckpointError, match="is there already"):
            export_torch_file(source, tmp_path / "model.pt")
        assert (tmp_path / "model.pt").read_text() == "mine"
        export_torch_file(source, tmp_path / "model.pt", ExportOptions(overwrite=True))
        with pytest.raises(sw.CheckpointError, match="holds weights alone"):
            export_torch_file(source, tmp_path / "o.pt", ExportOptions(with_optimizer=True))
    assert "embed.weight" in torch.load(tmp_path / "model.pt", weights_only=True)
