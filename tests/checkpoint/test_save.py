"""A saved folder is plain safetensors, complete or not there, whoever wrote it."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import math
import os
import resource
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import checksum, failpoints, save_plan, writer
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.plan import BLOCK, LEAST, FilePlan
from shardwise.checkpoint.run_folder import check_complete
from shardwise.checkpoint.safetensors_format import PAGE, Stored
from shardwise.checkpoint.writer import Chunk, Writer
from shardwise.comm.protocol import Comm
from tests import nets
from tests.checkpoint.recorded import record
from tests.checkpoint.runs import adamw, names, same, saved, tensors
from tests.copies import clones, error_text, on_ranks, seeded
from tests.nets import NETS, Net
from tests.ranks import outcomes_of, run_processes
from tests.steps import STRATEGIES

DECODER = NETS[0]


# --- what is in it ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_safetensors_reads_what_the_model_has(net: Net, strategy: str, tmp_path: Path) -> None:
    state = saved(net, 3, tmp_path / "step-2", strategy)
    stored = tensors(tmp_path / "step-2", "model")
    manifest = check_complete(tmp_path / "step-2")
    assert set(stored) | set(manifest.aliases) == set(state)
    assert not set(stored) & set(manifest.aliases)  # tied weights once
    assert same(stored, {name: state[name] for name in stored})
    for alias, name in manifest.aliases.items():
        assert torch.equal(state[alias], stored[name])


def test_the_folder_holds_no_pickle_and_nothing_hidden(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    assert names(tmp_path / "step-2") == [
        "manifest.json",
        "model.safetensors",
        "training.json",
        "training/optimizer.safetensors",
        "training/ranks.safetensors",
    ]
    assert names(tmp_path) == ["latest", "step-2"]
    manifest = check_complete(tmp_path / "step-2")
    assert (manifest.step, manifest.world, manifest.strategy) == (2, 2, "full_shard")
    assert set(manifest.files) == set(names(tmp_path / "step-2")) - {"manifest.json"}


def test_no_garbage_is_collected_while_it_is_planned_to_save_or_to_load(tmp_path: Path) -> None:
    """A look at every object of a process that has torch takes longer than the plan."""
    was_on = list[bool]()

    def names(name: str) -> bool:
        was_on.append(gc.isenabled())
        return True

    sharded = sw.shard(DECODER.build())
    sharded.save(tmp_path / "step-1", names=names)
    saving = sharded.save_async(tmp_path / "step-2", names=names)
    assert saving is not None
    saving.wait()
    sharded.load(tmp_path / "step-2", names=names)
    assert set(was_on) == {False}
    assert gc.isenabled()


def test_weights_alone_are_a_plain_hugging_face_folder(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> sw.Saved:
        return sw.shard(model, comm=comm).save(tmp_path / "out", files={"README.md": "# mine"})

    report = on_ranks(2, DECODER.build, rank)[0]
    assert names(tmp_path / "out") == ["README.md", "manifest.json", "model.safetensors"]
    assert names(tmp_path) == ["latest", "out"]
    assert report.path == tmp_path / "out"
    assert report.nbytes > 30_000


def test_many_files_have_an_index(tmp_path: Path) -> None:
    state = saved(DECODER, 3, tmp_path / "step-2", max_file_size=9_000)
    folder = tmp_path / "step-2"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == set(state)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert same(tensors(folder, "model"), state)
    assert not (folder / "model.safetensors").exists()


class Buffered(nn.Linear):
    """A layer with one buffer."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__(4, 4)
        self.register_buffer("kept", buffer)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(8.0).view(1, 8)[:, 3],
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    ],
    ids=["one strided element", "transposed", "conjugate"],
)
def test_buffers_come_back_however_they_lie(
    make: Callable[[], Tensor], world: int, tmp_path: Path
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        buffer: Tensor = model.kept  # type: ignore[assignment]
        sharded.save(tmp_path / "out", None, sw.Training())
        buffer.zero_()
        sharded.load(tmp_path / "out")
        assert torch.equal(buffer, make())

    on_ranks(world, lambda: Buffered(make()), rank)
    assert torch.equal(tensors(tmp_path / "out", "model")["kept"], make())


def test_extra_state_that_only_pickle_could_write_is_said_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm).save(tmp_path / "out")

    on_ranks(1, lambda: nn.Sequential(Extra(2, 2)), rank)
    assert "1 modules keep extra state (get_extra_state), the first is '0'" in caplog.text


# --- how it is written -----------------------------------------------------------------------


def test_nothing_is_gathered_but_the_edges_of_pages(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        sharded = sw.shard(model, comm=comm)
        comm.counters.reset()
        sharded.save(tmp_path / "out")
        return sum(comm.counters.bytes_sent.values())

    def wide() -> nn.Module:
        return nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))

    sent = on_ranks(4, wide, rank)
    model = sum(param.nbytes for param in wide().parameters())
    texts = 8_000  # of checksums, to every rank
    boundaries = 4 * 4 + 4
    assert max(sent) <= 3 * (boundaries * PAGE + texts) < model


def test_a_save_passes_its_points_in_order(tmp_path: Path, reached: list[tuple[str, int]]) -> None:
    every = [point for point in failpoints.POINTS if point != "snapshot taken"]
    for step in (1, 2):

        def rank(comm: Comm, model: nn.Module, step: int = step) -> None:
            sharded = sw.shard(model, comm=comm)
            sharded.save(tmp_path / f"step-{step}", save_total_limit=1)

        reached.clear()
        on_ranks(2, DECODER.build, rank)
    assert [point for point, rank in reached if rank == 0] == every
    assert [point for point, rank in reached if rank == 1] == every[1:4]
    synced = max(k for k, (point, _) in enumerate(reached) if point == "data synced")
    assert reached[synced + 1][0] == "all parts known"
    assert names(tmp_path) == ["latest", "step-2"]


def test_it_reaches_the_disk_before_it_has_a_name(tmp_path: Path) -> None:
    calls = _calls(tmp_path)
    order = [
        "fsync model.safetensors",  # data
        "fsync model.safetensors",  # header
        "fsync step-1.partial",
        "fsync .manifest.json.unfinished",
        "rename .manifest.json.unfinished -> manifest.json",
        "fsync step-1.partial",
        "rename step-1.partial -> step-1",
        "fsync run",
        "rename .latest -> latest",
        "fsync run",
    ]
    assert calls[-len(order) :] == order


def _calls(tmp_path: Path) -> list[str]:
    calls: list[str] = []

    def listen(real: Any, kind: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind == "fsync":
                calls.append(f"fsync {_plain(str(Path(f'/proc/self/fd/{args[0]}').readlink()))}")
            else:
                calls.append(f"rename {_plain(str(args[0]))} -> {_plain(str(args[1]))}")
            return real(*args, **kwargs)

        return call

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", listen(os.fsync, "fsync"))
    patch.setattr(os, "rename", listen(os.rename, "rename"))
    patch.setattr(os, "replace", listen(os.replace, "rename"))
    try:
        sw.shard(seeded(DECODER.build)).save(tmp_path / "run" / "step-1")
    finally:
        patch.undo()
    return calls


def _plain(name: str) -> str:
    """The last part, without what is drawn by lot."""
    last = Path(name).name
    if last.startswith(".latest"):
        return ".latest"
    return last.split(".partial-")[0] + ".partial" * (".partial-" in last)


# --- when it fails ---------------------------------------------------------------------------


def too_large(comm: Comm, path: str, everybody: bool) -> str:
    model = nn.Linear(512, 512)
    sharded = sw.shard(model, comm=comm)
    sharded.save(path)
    first = clones(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if everybody or comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limit[1]))
    try:
        sharded.save(path)
    except sw.CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        sharded.load(path)  # the old one is whole, and the group lives
        assert same(model.state_dict(), first)
        sharded.save(path)  # and the next save succeeds
        return str(error)
    raise AssertionError


@pytest.mark.prove
@pytest.mark.spawn
@pytest.mark.parametrize("everybody", [True, False])
def test_files_that_may_not_grow_fail_on_all_ranks_together(
    everybody: bool, tmp_path: Path
) -> None:
    errors = run_processes(2, too_large, str(tmp_path / "step-1"), everybody)
    assert errors[0] == errors[1]
    assert "ulimit -f" in errors[0]
    assert "as they were" in errors[0]
    assert ("rank 0" in errors[0]) == everybody
    assert ("rank 1" in errors[0]) != everybody
    assert names(tmp_path) == ["latest", "step-1"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(sw.CheckpointError, match=r"file.*failed"):
        saved(DECODER, 1, tmp_path / "file" / "step-1")
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(sw.CheckpointError, match="may not write"):
            saved(DECODER, 1, tmp_path / "step-1")


def elsewhere(rank: int, world: int, folder: str, path: str) -> str:
    from tests.ranks import in_group

    here = Path(path) / f"host-{rank}"
    here.mkdir(parents=True)
    os.chdir(here)
    return in_group(rank, world, folder, _refused)


def _refused(comm: Comm) -> str:
    sharded = sw.shard(nn.Linear(4, 4), comm=comm)
    # Another folder on each rank, by the same name.
    text = error_text(sw.CheckpointError, lambda: sharded.save("run/step-1"))
    saving = sharded.save_async("run/step-1")  # whose writers look for the folder
    assert saving is not None
    assert text in error_text(sw.CheckpointError, saving.wait)
    sharded.save("run/step-2", kind="full")
    loaded = sharded.resume("run")
    assert loaded is not None
    assert loaded.path.name == "step-2"
    return text


@pytest.mark.parametrize("save", [sw.Sharded.save, sw.Sharded.save_async])
def test_a_last_step_that_one_rank_skips_is_not_saved(save: Any, tmp_path: Path) -> None:
    """SGD has no count of its steps, and no backward pass follows at which ranks compare them."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            nets.loss(model, nets.decoder_batch(comm.rank, 2)).backward()
            if number == 0 or comm.rank == 0:
                optimizer.step()
        return error_text(sw.CheckpointError, lambda: save(sharded, tmp_path / "step-1"))

    first, second = on_ranks(2, nets.decoder, rank)
    assert first == second
    assert "backward(): rank 0: 1 × SGD.step() with lr 0.1; rank 1: none" in first


@pytest.mark.spawn
def test_a_folder_that_not_all_ranks_share_is_rank_0s_alone(tmp_path: Path) -> None:
    errors = [o.value or o.error for o in outcomes_of(2, elsewhere, str(tmp_path))]
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1: on ")
    assert "local to each host, not a shared file system" in errors[0]
    assert names(tmp_path / "host-0" / "run") == ["latest", "step-2"]  # nothing is left behind
    assert names(tmp_path / "host-1") == []


def test_gradients_that_would_be_lost_are_an_error(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        with sharded.accumulate(last=False):
            nets.loss(model, DECODER.batch(0, 2)).backward()
        with pytest.raises(sw.ScheduleError, match="a checkpoint does not store gradients"):
            sharded.save(tmp_path / "step-1", training=sw.Training(step=1))
        sharded.save(tmp_path / "weights")  # which have no part in it
        sharded.drop_gradients()
        sharded.save(tmp_path / "step-1", training=sw.Training(step=1))
        with sharded.accumulate(last=False):
            nets.loss(model, DECODER.batch(0, 2)).backward()
        model.zero_grad()  # what is thrown away is not lost
        sharded.save(tmp_path / "step-2", training=sw.Training(step=2))

    on_ranks(2, DECODER.build, rank)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_file_sise": 3}, "nearest is 'max_file_size'"),
        ({"max_file_size": 0}, "at least 1"),
        ({"save_total_limit": 0}, "at least 1"),
        ({"keep_best": "best"}, "one of 'lowest', 'highest'"),
        ({"kind": "local"}, "pass kind='sharded', or"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], fact: str, tmp_path: Path) -> None:
    with pytest.raises(sw.ConfigError) as caught:
        sw.shard(nn.Linear(2, 2)).save(tmp_path / "step-1", **options)
    assert fact in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "manifest.json", "training.json", "x.safetensors", ".x"])
def test_files_that_cannot_lie_beside_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match="cannot be put beside"):
        sw.shard(nn.Linear(2, 2)).save(tmp_path / "out", files={name: "x"})


# --- old ones --------------------------------------------------------------------------------


def test_the_number_of_steps_is_what_was_said_or_what_the_name_says(tmp_path: Path) -> None:
    model = seeded(DECODER.build)
    sharded, optimizer = sw.shard(model), adamw(model.parameters())
    sharded.save(tmp_path / "step-30", optimizer)
    sharded.save(tmp_path / "step-40", optimizer, sw.Training(step=41))
    sharded.save(tmp_path / "last", optimizer)
    steps = [check_complete(tmp_path / name).step for name in ("step-30", "step-40", "last")]
    assert steps == [30, 41, None]
    assert [sharded.load(tmp_path / name).step for name in ("step-30", "last")] == [30, None]


# --- what is wrong on one rank ---------------------------------------------------------------


class Broken:
    """A scheduler whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError(5, "no state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("values", "options", "kind", "fact"),
    [
        ({"metric": math.nan}, {}, sw.CheckpointError, "rank 1: training.metric is nan"),
        ({"metric": "low"}, {}, sw.CheckpointError, "rank 1: TypeError: must be real number"),
        ({"local": object()}, {}, sw.CheckpointError, "rank 1: training.local is a builtins"),
        ({"scheduler": Broken()}, {}, sw.CheckpointError, "rank 1: OSError: [Errno 5] no state"),
        ({"position": 1}, {}, sw.CheckpointError, "training.position: rank 0: null; rank 1: 1"),
        ({"step": 3}, {}, sw.CheckpointError, "training.step: rank 0: 1; rank 1: 3"),
        ({}, {"save_total_limit": 0}, sw.ConfigError, "rank 1: save_total_limit is 0"),
        ({}, {"files": {"../x": ""}}, sw.CheckpointError, "rank 1: a file called"),
    ],
    ids=["NaN", "no number", "local", "scheduler", "position", "step", "limit", "file"],
)
@pytest.mark.parametrize("way", ["save", "save_async"])
def test_one_rank_s_mistake_is_an_error_on_all_and_the_next_save_works(
    way: str,
    values: dict[str, Any],
    options: dict[str, Any],
    kind: type[Exception],
    fact: str,
    tmp_path: Path,
) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        mine, how = (values, options) if comm.rank else ({}, {})
        save = getattr(sharded, way)
        text = error_text(
            kind, lambda: save(tmp_path / "step-1", training=sw.Training(**mine), **how)
        )
        assert list(tmp_path.iterdir()) == []
        all_gather_object(comm, "", "looked")
        if (saving := save(tmp_path / "step-2", training=sw.Training())) and way == "save_async":
            saving.wait()
        return text

    [text] = set(on_ranks(2, lambda: nn.Linear(2, 2), rank))
    assert fact in text
    assert names(tmp_path) == ["latest", "step-2"]


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 20, hard))
    try:
        sharded = sw.shard(model)
        sharded.save(tmp_path / "step-1", max_file_size=1)
        assert sharded.resume(tmp_path) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(check_complete(tmp_path / "step-1").files) > 80


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], ids=oct)
def test_whoever_the_umask_lets_may_read_everything(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        sharded = sw.shard(nn.Linear(2, 2))
        sharded.save(tmp_path / "step-1", training=sw.Training(), files={"note.txt": "x"})
        sharded.save_file(tmp_path / "whole.safetensors")
        sharded.save_file(tmp_path / "whole.pt")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {oct(0o666 & ~umask)}


def test_parents_that_are_made_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record(monkeypatch)
    sw.shard(nn.Linear(2, 2)).save(tmp_path / "a" / "b" / "step-1")
    assert calls[:2] == [f"fsync {tmp_path}", f"fsync {tmp_path / 'a'}"]


# --- what file systems of others do ----------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_where_space_cannot_be_reserved_files_only_get_their_length(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS before 4.2 and CephFS, where glibc would write a byte into every block instead."""

    def refused(file: int, *_: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(writer, "_fallocate", refused)
    monkeypatch.setattr(os, "posix_fallocate", None)
    plan = FilePlan("x", b"", {"x": Stored("U8", (1 << 20,), 0, 1 << 20)}, (), ())
    writer.allocate(tmp_path, [plan], 0)
    status = (tmp_path / "x").stat()
    assert (status.st_size, status.st_blocks) == (1 << 20, 0)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_file_in_memory_only_gets_its_length() -> None:
    plan = FilePlan("x", b"", {"x": Stored("U8", (1 << 20,), 0, 1 << 20)}, (), ())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writer.allocate(Path(folder), [plan], 0)
        status = (Path(folder) / "x").stat()
    assert (status.st_size, status.st_blocks) == (1 << 20, 0)


@pytest.mark.parametrize("block", [LEAST, 1 << 20, BLOCK])
def test_each_block_of_a_chunk_has_a_checksum_wherever_its_memory_is_cut(
    block: int, tmp_path: Path
) -> None:
    """Also where a chunk goes on in a block in which the one before it ended."""
    data = torch.randint(0, 256, (2 * BLOCK,), dtype=torch.uint8)
    (tmp_path / "x").touch()
    with Writer(tmp_path, 0, len(data), block) as target:
        for start, stop in ((0, 3_000_100), (3_000_100, BLOCK), (BLOCK, 2 * BLOCK)):
            part = data[start:stop]
            target.write(Chunk("x", start, stop, (part[:7], part[7:700_000], part[700_000:])))
        pieces = target.finish().pieces["x"]
    written = (tmp_path / "x").read_bytes()
    assert written == data.numpy().tobytes()
    assert [checked for _, _, checked in pieces] == checksum.of_bytes(written, block)


def test_ranks_begin_with_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[int, list[str]] = {0: [], 1: []}
    write = Writer.write

    def recorded(self: Writer, chunk: Chunk) -> None:
        written[self.rank].append(chunk.file)
        write(self, chunk)

    monkeypatch.setattr(Writer, "write", recorded)
    saved(DECODER, 2, tmp_path / "step-2")
    assert written[0][0] == "model.safetensors"
    assert written[1][0] == "training/optimizer.safetensors"
    assert {*written[0]} == {*written[1]}


def test_optimizer_state_is_split_so_that_ranks_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_plan, "SMALL", 1 << 12)
    saved(DECODER, 2, tmp_path / "step-2")
    assert (tmp_path / "step-2" / "model.safetensors").is_file()
    files = [*(tmp_path / "step-2" / "training").glob("optimizer-*.safetensors")]
    assert save_plan.FILES <= len(files) <= 2 * save_plan.FILES
    assert {"exp_avg/embed.weight", "exp_avg_sq/embed.weight"} < set().union(*map(load_file, files))


def test_a_file_system_that_keeps_one_host_s_bytes_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mounted object stores do: each host's file replaces the other's when it is closed."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        hosts[threading.get_ident()] = f"host-{comm.rank}"
        sharded.save(tmp_path / "step-1")
        monkeypatch.setattr(writer, "_write_at", lost)
        return error_text(sw.CheckpointError, lambda: sharded.save(tmp_path / "step-2"))

    def lost(file: int, data: memoryview, at: int) -> None:
        if hosts.get(threading.get_ident()) != "host-1":
            real(file, data, at)

    hosts: dict[int, str] = {}
    real = writer._write_at
    monkeypatch.setattr(writer, "host", lambda: hosts[threading.get_ident()])
    [text] = set(on_ranks(2, lambda: nn.Linear(64, 64), rank))
    assert "step-2" in text
    assert "does not hold what host-1 wrote to it, so it is not published" in text
    assert names(tmp_path) == ["latest", "step-1"]
