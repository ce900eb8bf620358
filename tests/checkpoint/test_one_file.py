"""One file that plain torch reads: whole, or what was there before."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import one_file
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.writer import Chunk, Writer
from shardwise.comm.protocol import Comm
from tests import nets
from tests.checkpoint.runs import adamw
from tests.copies import clones, equal, error_text, on_ranks
from tests.nets import NETS
from tests.ranks import run_processes
from tests.steps import train

TIED = NETS[1]


class Digits(nn.Module):
    """The convolutional net of the MNIST example, for 8 × 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        out: Tensor = self.fc2(torch.relu(self.fc1(nn.functional.max_pool2d(x, 2).flatten(1))))
        return out


def digits(seed: int, rows: int) -> nets.Batch:
    return nets.numbers(seed, (rows, 1, 8, 8)), nets.tokens(seed, (rows,), 10)


# Without shardwise, and without this file: the class is written out once more.
PLAIN = """
import sys, torch
from torch import nn

class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)
    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.fc2(torch.relu(self.fc1(nn.functional.max_pool2d(x, 2).flatten(1))))

path, inputs, outputs = sys.argv[1:]
model = Digits()
model.load_state_dict(torch.load(path, weights_only=True))
with torch.no_grad():
    torch.save(model(torch.load(inputs, weights_only=True)), outputs)
assert "shardwise" not in sys.modules
"""


def trained_and_saved(comm: Comm, path: str) -> tuple[str, Tensor]:
    """Train a little, save one file, and say what was saved and what the model answers."""
    torch.manual_seed(0)
    model = Digits()
    sharded = sw.shard(model, comm=comm)
    optimizer = adamw(model.parameters())
    for number in range(3):
        train(model, digits(10 * number + comm.rank, 4))
        optimizer.step()
        optimizer.zero_grad()
    saved = sharded.save_file(path)
    assert saved.path.is_file()  # for every rank: it is there when this returns
    with torch.no_grad():
        return str(saved), model(digits(99, 5)[0]).clone()


@pytest.mark.prove
def test_a_process_without_shardwise_loads_mnist_cnn_pt_and_answers_alike(tmp_path: Path) -> None:
    path = tmp_path / "mnist_cnn.pt"
    (line, answer), (other_line, _) = run_processes(2, trained_and_saved, str(path))
    assert line == other_line == f"mnist_cnn.pt (8 tensors, {path.stat().st_size:,} bytes)"
    torch.save(digits(99, 5)[0], tmp_path / "inputs.pt")
    files = [path, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    command = [sys.executable, "-c", PLAIN, *map(str, files)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=240)
    assert torch.equal(torch.load(tmp_path / "outputs.pt", weights_only=True), answer)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_the_suffix_says_which_kind_of_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"model{suffix}"

    def rank(comm: Comm, model: nn.Module) -> tuple[dict[str, Tensor], sw.SavedFile]:
        sharded = sw.shard(model, comm=comm)
        return clones(model.state_dict()), sharded.save_file(path)

    (state, saved), *_ = on_ranks(2, TIED.build, rank)
    read = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    if suffix == ".safetensors":  # a tied tensor once, by its first name
        assert set(state) - set(read) == {"lm_head.weight"}
        state = {name: state[name] for name in sorted(read)}
        read = dict(sorted(read.items()))
    assert equal(dict(read), dict(state))
    assert (saved.nbytes, [p.name for p in path.parent.iterdir()]) == (
        path.stat().st_size,
        [path.name],
    )


def test_every_rank_writes_its_own_bytes_and_nothing_is_gathered(tmp_path: Path) -> None:
    """A kibibyte in all: names, digests, and what lies at the edges of pages."""

    def rank(comm: Comm, model: nn.Module) -> tuple[int, bool]:
        sharded = sw.shard(model, comm=comm)
        comm.counters.reset()
        saved = sharded.save_file(tmp_path / "model.safetensors")
        gathers = "whole" in comm.counters.calls
        return saved.nbytes - sum(comm.counters.bytes_sent.values()), gathers

    for more, gathers in on_ranks(2, lambda: nn.Linear(512, 1024), rank):
        assert more > 2 << 20
        assert not gathers


def test_where_the_disk_is_rank_0s_alone_the_file_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Comm, model: nn.Module) -> bytes:
        saved = sw.shard(model, comm=comm).save_file(tmp_path / "model.safetensors")
        return saved.path.read_bytes()

    written, *_ = on_ranks(3, TIED.build, rank)

    def seen(comm: Comm, value: object, what: str) -> list[object]:
        values = all_gather_object(comm, value, what)
        return [True, False, False] if what == "folders of a file" else values

    monkeypatch.setattr(one_file, "all_gather_object", seen)
    assert on_ranks(3, TIED.build, rank)[0] == written
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_it_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm).save_file(tmp_path / "mnist_cnn.pt")

    with caplog.at_level(logging.INFO, "shardwise"):
        on_ranks(2, Digits, rank)
    size = (tmp_path / "mnist_cnn.pt").stat().st_size
    assert [r.message for r in caplog.records if "saved" in r.message] == [
        f"saved mnist_cnn.pt (8 tensors, {size:,} bytes)"
    ]


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"before")

    def fails(states: object, file: Path) -> None:
        file.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.save_file(path))

    texts = on_ranks(2, TIED.build, rank)
    assert all("the disk is full" in text for text in texts)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[str] = []
    synced, renamed = os.fsync, Path.replace

    def sync(file: int) -> None:
        acts.append("sync")
        synced(file)

    def rename(self: Path, target: Path) -> Path:
        acts.append("rename")
        return renamed(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    one_file.write_one_file(tmp_path / "model.pt", {"a": torch.zeros(3)})
    assert acts == ["sync", "rename", "sync"]  # the file, its name, the folder


def test_a_file_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.save_file(tmp_path / "model"))

    assert "(torch.load) or .safetensors" in on_ranks(2, TIED.build, rank)[1]


def test_a_full_disk_leaves_what_was_there_and_every_rank_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"before")

    def fails(self: Writer, chunk: Chunk) -> None:
        raise sw.CheckpointError("the disk is full")

    monkeypatch.setattr(Writer, "write", fails)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(
            sw.CheckpointError, lambda: sharded.save_file(tmp_path / "model.safetensors")
        )

    assert all("the disk is full" in text for text in on_ranks(2, TIED.build, rank))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_names_that_choose_nothing_are_refused(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        path = tmp_path / "m.safetensors"
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.save_file(path, names="other".__eq__))

    assert "chose none of the model's tensors" in on_ranks(2, Digits, rank)[1]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_of_a_tied_tensor_the_wanted_name_is_stored(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm).save_file(path, names="lm_head.weight".__eq__)

    on_ranks(2, TIED.build, rank)
    read = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert list(read) == ["lm_head.weight"]


def test_chosen_names_alone(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        return (
            sw.shard(model, comm=comm).save_file(tmp_path / "m.pt", names="fc1.bias".__eq__).tensors
        )

    assert on_ranks(2, Digits, rank) == [1, 1]
