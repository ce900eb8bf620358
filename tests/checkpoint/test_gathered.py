"""Kind ``"full"``: the same files as ever, and rank 0 alone touches the disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import load, segments, writer
from shardwise.checkpoint.manifest import Manifest
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw, names, same, saved, steps, tensors
from tests.copies import clones, error_text, on_ranks
from tests.nets import NETS, Net

DECODER = NETS[0]


@pytest.mark.parametrize("net", NETS, ids=str)
def test_the_files_are_those_that_all_ranks_write(net: Net, tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        saved(net, 3, tmp_path / kind, kind=kind)
    written = {*names(tmp_path / "full")}
    assert written == {*names(tmp_path / "sharded")}
    for name in written - {"manifest.json", "training/ranks.safetensors"}:  # these differ by save
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "sharded" / name).read_bytes()


def test_only_rank_0_opens_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    turn_to = writer.Writer._turn_to

    def watched(self: writer.Writer, name: str) -> None:
        if name:
            ranks.append(self.rank)
        turn_to(self, name)

    monkeypatch.setattr(writer.Writer, "_turn_to", watched)
    saved(DECODER, 3, tmp_path / "step-2", kind="full")
    assert {*ranks} == {0}


def test_little_is_on_its_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    rounds, exchange = segments.rounds, segments.exchange_edges

    def small(moves: Any, world: int) -> Any:
        return rounds(moves, world, 2000)

    def watched(comm: Comm, files: Any) -> None:
        exchange(comm, files)
        most.append(sum(move.stop - move.start for file in files for move in file.plan.moves))

    monkeypatch.setattr(segments, "rounds", small)
    monkeypatch.setattr(segments, "exchange_edges", watched)
    saved(DECODER, 2, tmp_path / "step-2", kind="full")
    assert len(most) > 6
    assert sum(most) > 2 * 3 * 4 * 2000


def test_the_manifest_says_who_wrote_it(tmp_path: Path) -> None:
    for kind in ("sharded", "full"):
        saved(DECODER, 2, tmp_path / kind, kind=kind)
    lines = [
        Manifest.decode((tmp_path / kind / "manifest.json").read_bytes(), kind).line
        for kind in ("sharded", "full")
    ]
    assert lines == [
        "sharded safetensors, written by 2 ranks; any number of ranks loads it",
        "full safetensors, written by one of 2 ranks; any number of ranks loads it",
    ]


def test_a_manifest_from_before_there_were_kinds_is_sharded(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    fields = json.loads((tmp_path / "step-2" / "manifest.json").read_text())
    del fields["kind"], fields["digest"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    again = Manifest.decode(json.dumps({**fields, "digest": digest}).encode(), "manifest.json")
    assert again.kind == "sharded"


def test_a_disk_that_refuses_is_said_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write_at", fails)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        text = error_text(sw.CheckpointError, lambda: sharded.save(tmp_path / "a", kind="full"))
        steps(model, adamw(model.parameters()), DECODER, comm.rank, range(1))  # it goes on
        return text

    texts = on_ranks(2, DECODER.build, rank)
    assert all("the disk is full" in text for text in texts)
    assert list(tmp_path.iterdir()) == []


def loaded_on(world: int, seen: Path, unseen: Path, strategy: str, kind: Any) -> Any:
    """What ``world`` ranks have after loading what rank 0 alone sees."""

    def rank(comm: Comm, model: nn.Module) -> Any:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = adamw(model.parameters())
        path = unseen if comm.rank else seen
        if kind is not None:
            return error_text(kind, lambda: sharded.load(path, optimizer, sw.Training()))
        report = sharded.load(path, optimizer, sw.Training())
        assert (report.step, report.checked, report.missing) == (2, True, ())
        assert sharded._background.loaded_token
        moments = sharded.optimizer_state_dict(optimizer)["state"]
        return {"model": clones(model.state_dict()), "moments": moments}

    states: list[Any] = on_ranks(world, seeded_otherwise, rank)
    assert all(type(state) is type(states[0]) for state in states)
    return states[-1]


def seeded_otherwise() -> nn.Module:
    model = DECODER.build()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


@pytest.mark.parametrize(("world", "strategy"), [(3, "full_shard"), (2, "zero1")])
def test_rank_0_reads_what_it_alone_sees_for_all(world: int, strategy: str, tmp_path: Path) -> None:
    state = saved(DECODER, 3, tmp_path / "step-2", kind="full", max_file_size=30_000)
    loaded = loaded_on(world, tmp_path / "step-2", tmp_path / "other" / "step-2", strategy, None)
    assert same(loaded["model"], state)
    stored = tensors(tmp_path / "step-2", "optimizer")
    named = {f"{k}/{n}": v for n, one in loaded["moments"].items() for k, v in one.items()}
    assert same(named, stored)


def test_what_rank_0_finds_damaged_is_told_on_every_rank(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2", kind="full")
    with (tmp_path / "step-2" / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"else")
    args = tmp_path / "step-2", tmp_path / "other", "full_shard", sw.DamagedCheckpoint
    assert "model.safetensors is damaged" in str(loaded_on(2, *args))


def test_a_shared_folder_is_read_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(DECODER, 2, tmp_path / "step-2", kind="full")
    monkeypatch.setattr(load, "read_from_rank_0", None)
    loaded_on(2, tmp_path / "step-2", tmp_path / "step-2", "full_shard", None)


def test_not_in_the_background(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.ConfigError, lambda: sharded.save_async(tmp_path / "a", kind="full"))

    assert "call save()" in on_ranks(2, DECODER.build, rank)[0]
