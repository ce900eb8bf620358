"""Kind ``"local"`` where each host sees only its own folder: saved, resumed, and after a crash.

A host is a folder here, and a rank's path leads into that of its host. All ranks call it by one
name, as they do where a disk of each host's own is mounted at one place.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint import points
from shardwise.checkpoint.complete import check_complete
from shardwise.checkpoint.run import survey
from shardwise.comm.protocol import Comm
from shardwise.convert.catalogue import Catalogue, damage_of
from tests.checkpoint.runs import adamw, steps
from tests.checkpoint.test_accumulated import MICRO, micro_batches, waiting
from tests.checkpoint.test_optimizer_dict import same
from tests.copies import clones, on_ranks, said, seeded
from tests.nets import NETS, Net
from tests.ranks import in_group, outcomes_of

DECODER, CONVNET = NETS[0], NETS[2]
LAYOUTS = ((0, 1), (0, 0, 1, 1), (0, 1, 0, 2, 1))  # by rank, the number of its host
TWO = (0, 0, 1, 1)


@dataclass(frozen=True)
class Called(os.PathLike[str]):
    """A path by the name that all ranks use; where it leads, depends on the host."""

    name: str
    host: Path

    def __str__(self) -> str:
        return self.name

    def __fspath__(self) -> str:
        return str(self.host / self.name)


@dataclass(frozen=True)
class Hosts:
    """Folders that stand for hosts, and where each rank runs."""

    root: Path
    of: tuple[int, ...]

    def run(self, host: int) -> Path:
        return self.root / f"host-{host}" / "run"

    def path(self, rank: int, name: str = "run") -> Any:  # str | Path is what types ask for
        return Called(name, self.root / f"host-{self.of[rank]}")

    def names(self, host: int) -> list[str]:
        return sorted(path.name for path in self.run(host).iterdir())

    def train(self, *numbers: int, **options: Any) -> list[State]:
        """Take one step and save it, for each number, from the newest checkpoint on."""

        def act(seat: Seat) -> State:
            seat.resume()
            for number in numbers:
                seat.step(number)
                seat.save(number, **options)
            return seat.state()

        return self.each(act)

    def each(self, act: Callable[[Seat], Any], net: Net = DECODER) -> list[Any]:
        """``act`` on every rank, with a model that begins anew."""

        def rank(comm: Comm, model: nn.Module) -> Any:
            sharded = sw.shard(model, comm=comm)
            return act(Seat(self, sharded, adamw(model.parameters()), net))

        return on_ranks(len(self.of), net.build, rank)


class State(NamedTuple):
    """A rank's parameters, buffers, and state of the optimizer."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class Seat:
    """One rank of a run."""

    hosts: Hosts
    sharded: sw.Sharded
    optimizer: Optimizer
    net: Net

    @property
    def rank(self) -> int:
        return self.sharded.comm.rank

    def step(self, number: int) -> None:
        steps(self.sharded.model, self.optimizer, self.net, self.rank, range(number, number + 1))

    def save(self, number: int, metric: float | None = None, **options: Any) -> sw.Saved:
        path = self.hosts.path(self.rank, f"run/step-{number}")
        training = sw.Training(step=number, metric=metric)
        return self.sharded.save(path, self.optimizer, training, **{"kind": "local", **options})

    def resume(self) -> int | None:
        found = self.sharded.resume(self.hosts.path(self.rank), self.optimizer, sw.Training())
        return None if found is None else found.step

    def load(self, name: str) -> Any:
        path = self.hosts.path(self.rank, f"run/{name}")
        return self.sharded.load(path, self.optimizer, sw.Training())

    def state(self) -> State:
        whole = self.sharded.optimizer_state_dict(self.optimizer)
        return State(clones(self.sharded.state_dict()), whole)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, TWO)


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[str, int], None]], None]]:
    """Listen to the points of saves, until the test ends."""
    before = list(points.listeners)
    yield points.listeners.append
    points.listeners[:] = before


# --- there and back --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "of"), [*((CONVNET, of) for of in LAYOUTS), (DECODER, LAYOUTS[-1])], ids=str
)
def test_every_rank_gets_its_own_back(net: Net, of: tuple[int, ...], tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, of)

    def before(seat: Seat) -> State:
        seat.step(1)
        seat.save(1)
        return seat.state()

    def after(seat: Seat) -> State:
        with torch.no_grad():
            for value in (*seat.sharded.model.parameters(), *seat.sharded.model.buffers()):
                value.add_(1)
        assert seat.resume() == 1
        return seat.state()

    assert same(hosts.each(before, net), hosts.each(after, net))


def test_a_host_has_what_its_own_ranks_need(hosts: Hosts) -> None:
    hosts.train(1)
    for host, ranks in enumerate(([0, 1], [2, 3])):
        folder = hosts.run(host) / "step-1"
        made = check_complete(folder)
        stems = ("model", "optimizer", "ranks")
        own = {f"{stem}.rank{rank}.safetensors" for stem in stems for rank in ranks}
        assert set(made.files) == own | {"layout.json", "training.json"}
        assert {path.name for path in folder.iterdir()} == {*made.files, "manifest.json"}
        assert made.ranks == ranks
        assert hosts.names(host) == ["latest", "step-1"]
    assert len({check_complete(hosts.run(host) / "step-1").token for host in (0, 1)}) == 1


def test_a_folder_that_all_share_is_kept_by_rank_0_alone(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, (0, 0, 0))
    assert len({id(state) for state in hosts.train(1)}) == 3
    made = check_complete(hosts.run(0) / "step-1")
    assert made.ranks is None
    assert sum(name.startswith("model") for name in made.files) == 3


def test_training_goes_on_to_the_last_bit(hosts: Hosts) -> None:
    def through(seat: Seat) -> State:
        for number in (1, 2, 3):
            seat.step(number)
        return seat.state()

    hosts.train(1)
    hosts.train(2)
    assert same(hosts.train(3), hosts.each(through))


def test_a_step_goes_on_between_two_micro_batches(hosts: Hosts) -> None:
    def whole(seat: Seat) -> State:
        seat.step(1)
        micro_batches(seat.sharded, DECODER, range(MICRO), waiting)
        seat.optimizer.step()
        return seat.state()

    def first(seat: Seat) -> None:
        seat.step(1)
        micro_batches(seat.sharded, DECODER, range(2), waiting)
        training = sw.Training(step=1, accumulating=True)
        path = seat.hosts.path(seat.rank, "run/step-1")
        seat.sharded.save(path, seat.optimizer, training, kind="local")

    def rest(seat: Seat) -> State:
        assert seat.resume() == 1
        micro_batches(seat.sharded, DECODER, range(2, MICRO), waiting)
        seat.optimizer.step()
        return seat.state()

    hosts.each(first)
    assert same(hosts.each(rest), hosts.each(whole))


def test_folders_may_move_and_ranks_may_not(hosts: Hosts) -> None:
    state = hosts.train(1)
    moved = Hosts(hosts.root, (1, 1, 0, 0))
    texts = moved.each(lambda seat: said(sw.CheckpointError, lambda: seat.load("step-1")))
    assert len(set(texts)) == 1
    assert "holds the shards of ranks 2, 3, and rank 0 loads it" in texts[0]
    first, other = hosts.run(0), hosts.run(1)
    first.rename(hosts.root / "aside")
    other.rename(first)
    (hosts.root / "aside").rename(other)
    assert same(moved.train(), state)


def test_other_worlds_are_refused_as_ever(hosts: Hosts) -> None:
    hosts.train(1)
    fewer = Hosts(hosts.root, (0, 1))
    texts = fewer.each(lambda seat: said(sw.CheckpointError, lambda: seat.load("step-1")))
    assert "only the same layout can take them back. It was saved by 4 ranks" in texts[0]


# --- old ones go -----------------------------------------------------------------------------


def test_each_host_keeps_as_many(hosts: Hosts) -> None:
    hosts.train(1, 2, 3, 4, save_total_limit=2)
    for host in (0, 1):
        assert hosts.names(host) == ["latest", "step-3", "step-4"]
        assert (hosts.run(host) / "latest").resolve().name == "step-4"


def test_the_best_is_that_of_rank_0(hosts: Hosts) -> None:
    def act(seat: Seat) -> tuple[str, ...]:
        for number, metric in ((1, 0.5), (2, 0.1), (3, 0.7)):
            mine = metric if seat.rank == 0 else 9.0 - number
            saved = seat.save(number, mine, save_total_limit=2, keep_best="lowest")
        return saved.removed

    assert hosts.each(act) == 4 * [("step-1",)]
    assert hosts.names(0) == hosts.names(1) == ["latest", "step-2", "step-3"]


def test_what_one_host_lacks_does_not_count(hosts: Hosts) -> None:
    hosts.train(1, 2)
    shutil.rmtree(hosts.run(1) / "step-2")

    def act(seat: Seat) -> tuple[str, ...]:
        return seat.save(3, save_total_limit=2).removed

    assert hosts.each(act) == 4 * [()]
    assert hosts.names(1) == ["latest", "step-1", "step-3"]


# --- the newest that is whole on every host --------------------------------------------------


@pytest.mark.parametrize("host", [0, 1])
def test_one_that_a_host_lacks_is_passed_over(host: int, hosts: Hosts) -> None:
    state = hosts.train(1)
    hosts.train(2)
    shutil.rmtree(hosts.run(host) / "step-2")
    assert hosts.each(lambda seat: seat.resume()) == 4 * [1]
    assert same(hosts.train(), state)


@pytest.mark.parametrize("host", [0, 1])
def test_one_that_is_damaged_on_a_host_is_passed_over(host: int, hosts: Hosts) -> None:
    hosts.train(1, 2)
    path = hosts.run(host) / "step-2" / f"model.rank{2 * host + 1}.safetensors"
    data = bytearray(path.read_bytes())
    data[20] ^= 1  # in its header
    path.write_bytes(data)
    texts = hosts.each(lambda seat: said(sw.DamagedCheckpoint, lambda: seat.load("step-2")))
    assert len(set(texts)) == 1
    assert f"rank {2 * host + 1}: " in texts[0]
    assert "is damaged" in texts[0]
    assert hosts.each(lambda seat: seat.resume()) == 4 * [1]


def test_one_that_is_not_there_is_named_on_all_ranks(hosts: Hosts) -> None:
    hosts.train(1)
    shutil.rmtree(hosts.run(1) / "step-1")
    texts = hosts.each(lambda seat: said(sw.CheckpointError, lambda: seat.load("step-1")))
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks 2, 3: ")
    assert "there is no checkpoint here" in texts[0]


def test_two_saves_of_one_name_are_not_mixed(hosts: Hosts) -> None:
    hosts.train(1, 2)
    shutil.copytree(hosts.run(1) / "step-2", hosts.root / "before")

    def again(seat: Seat) -> None:
        seat.save(2)

    hosts.each(again)
    shutil.rmtree(hosts.run(1) / "step-2")
    (hosts.root / "before").rename(hosts.run(1) / "step-2")
    texts = hosts.each(lambda seat: said(sw.CheckpointError, lambda: seat.load("step-2")))
    assert "the ranks opened different checkpoints" in texts[0]
    assert hosts.each(lambda seat: seat.resume()) == 4 * [1]


def test_an_empty_disk_of_rank_0_is_no_new_run(hosts: Hosts) -> None:
    hosts.train(1)
    shutil.rmtree(hosts.run(0))
    texts = hosts.each(lambda seat: said(sw.CheckpointError, seat.resume))
    assert "rank 0 finds no checkpoint there" in texts[0]


# --- what goes wrong between two hosts -------------------------------------------------------


class Crash(BaseException):
    """What no handler takes for an error of ours."""


LATE = ("manifest written", "about to publish", "published", "latest moved")


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("point", LATE)
def test_after_a_crash_all_hosts_have_one_in_common(
    point: str, who: int, tmp_path: Path, listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path, (0, 1))
    hosts.train(1)
    other = threading.Event()

    def crash(at: str, rank: int) -> None:
        if (at, rank) == ("published", 1 - who):
            other.set()
        if (at, rank) == (point, who):
            assert other.wait(60)  # the other host has published
            raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("shardwise.checkpoint.save.give_up", lambda task: None)
        listen(crash)
        with pytest.raises(Crash):
            hosts.train(2, save_total_limit=1)
        points.listeners.remove(crash)
    [found] = set(hosts.each(lambda seat: seat.resume()))
    assert found == (1 if point in LATE[:2] else 2)
    through = Hosts(tmp_path / "through", (0, 1)).train(1, 2)
    assert same(hosts.train(*range(found + 1, 3), save_total_limit=2), through)


def test_what_one_host_cannot_publish_the_other_takes_back(hosts: Hosts, listen: Any) -> None:
    hosts.train(1)
    before = (hosts.names(0), hosts.names(1))
    other = threading.Event()

    def fail(point: str, rank: int) -> None:
        if (point, rank) == ("published", 0):
            other.set()
        if (point, rank) == ("about to publish", 2):
            assert other.wait(60)
            raise OSError(5, "the disk is gone")

    def act(seat: Seat) -> str:
        seat.resume()
        seat.step(2)
        text = said(sw.CheckpointError, lambda: seat.save(2))
        seat.step(3)  # training can go on
        return text

    listen(fail)
    texts = hosts.each(act)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 2: publishing step-2 failed")
    assert (hosts.names(0), hosts.names(1)) == before
    assert hosts.each(lambda seat: seat.resume()) == 4 * [1]


def test_a_host_without_room_stops_all(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    there = "shardwise.checkpoint.writer.free_bytes"
    monkeypatch.setattr(there, lambda folder: 10 if "host-1" in str(folder) else 1 << 40)

    def act(seat: Seat) -> str:
        return said(sw.CheckpointError, lambda: seat.save(1))

    texts = hosts.each(act)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 2: this checkpoint needs ")
    assert hosts.names(0) == hosts.names(1) == []


def killed(rank: int, world: int, folder: str, root: str) -> None:
    """Two steps with a save each; rank 1 is killed before it publishes the second."""
    here = Path(root) / f"host-{rank}"
    here.mkdir()
    os.chdir(here)

    def die(point: str, who: int) -> None:
        if (point, who) == ("about to publish", 1) and (here / "run" / "step-1").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    points.listeners.append(die)
    in_group(rank, world, folder, _two_steps)


def _two_steps(comm: Comm) -> None:
    model = seeded(DECODER.build)
    sharded = sw.shard(model, comm=comm)
    optimizer = adamw(model.parameters())
    for number in (1, 2):
        steps(model, optimizer, DECODER, comm.rank, range(number, number + 1))
        training = sw.Training(step=number)
        sharded.save(f"run/step-{number}", optimizer, training, kind="local", save_total_limit=1)


@pytest.mark.spawn
def test_killed_before_its_host_publishes(tmp_path: Path) -> None:
    dead = outcomes_of(2, killed, str(tmp_path))
    assert dead[1].exitcode == -signal.SIGKILL
    hosts = Hosts(tmp_path, (0, 1))
    assert hosts.each(lambda seat: seat.resume()) == 2 * [1]
    through = Hosts(tmp_path / "through", (0, 1)).train(1, 2)
    assert same(hosts.train(2, save_total_limit=1), through)
    assert hosts.names(0) == hosts.names(1) == ["latest", "step-1", "step-2"]


# --- what else there is ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_what_needs_one_folder_says_so(kind: str, hosts: Hosts) -> None:
    def act(seat: Seat) -> str:
        path = seat.hosts.path(seat.rank, "run/step-1")
        save = seat.sharded.save if kind == "sharded" else seat.sharded.save_async
        return said(sw.CheckpointError, lambda: save(path, seat.optimizer, kind=kind))

    texts = hosts.each(act)
    assert "kind='local'" in texts[0]
    assert "local to each host" in texts[0]
    assert hosts.names(0) == []
    if kind == "local":
        assert hosts.names(1) == []
        assert "save_async() has no word from other hosts" in texts[0]


def test_a_folder_of_one_host_is_not_called_incomplete(hosts: Hosts) -> None:
    hosts.train(1)
    for host, ranks in enumerate(("0, 1", "2, 3")):
        [listed] = survey(hosts.run(host)).checkpoints
        found = Catalogue.read(listed.path)
        assert (listed.problem, found.problems, found.strangers) == ("", (), ())
        assert not any(damage for _, damage in damage_of(found))
        assert found.manifest is not None
        assert f"local shards of ranks {ranks} of 4 ranks" in found.manifest.line
