"""Which comm comes from which environment, and what is left behind: nothing."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.comm.machine import connect as connect_module
from shardwise.comm.machine.accelerators import Backend, row
from shardwise.comm.machine.connect import comm_for, connect, load_backend, over
from shardwise.comm.machine.environment import Launch
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.backend import BackendComm
from shardwise.comm.transports.gloo import GlooComm
from shardwise.comm.transports.local import LocalComm
from shardwise.comm.transports.shared_memory import SharedMemoryComm
from shardwise.comm.transports.transport import IMMEDIATE, end_group
from shardwise.errors import ConfigError, RanksDisagree
from tests.comm.laws import sum_of
from tests.copies import error_text
from tests.ranks import free_port, gloo_group, outcomes_of


def sum_of_ranks(comm: Comm) -> float:
    return sum_of(comm, torch.full((comm.size,), float(comm.rank))).item()


# --- the launcher's environment --------------------------------------------------------------


def test_without_a_launcher_there_is_one_rank_and_no_process_group() -> None:
    with connect() as comm:
        assert type(comm) is LocalComm
        assert not dist.is_initialized()


def test_one_launched_rank_may_call_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that make a ``DistributedSampler`` run at any number of ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with connect("cpu") as comm:
        assert type(comm) is LocalComm
        assert dist.get_world_size() == 1
        dist.barrier()
    assert not dist.is_initialized()


def test_a_partial_environment_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        connect()


@pytest.mark.parametrize("transport", ["memory", "messages"])
def test_a_transport_of_the_cpu_is_refused_on_a_device(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """It would train on the CPU, and say nothing."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ConfigError, match=f"transport is '{transport}', which moves the CPU's mem"):
        connect_module._comm(MagicMock(), torch.device("cuda", 0), 60.0, IMMEDIATE, transport)


def test_an_unknown_device_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"'cudda'\. Known, nearest first: cuda"):
        connect("cudda")


def test_a_meeting_place_that_nobody_serves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RanksDisagree, match=f"did not all connect to 127.0.0.1:{port} within 1 s"):
        connect(timeout=1.0)
    assert not dist.is_initialized()


def launch_two(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The environment of one of two ranks, in which no process group is made."""
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connect_module, "_init_process_group", lambda *_: None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=MagicMock()))


@pytest.mark.parametrize(
    ("rank", "agent_has_it", "seconds"),
    [(0, "", 5.0), (0, "False", 5.0), (1, "", 0.0), (0, "True", 0.0), (1, "True", 0.0)],
)
def test_who_serves_the_store_waits_until_the_others_have_read_why_it_closed(
    monkeypatch: pytest.MonkeyPatch, rank: int, agent_has_it: str, seconds: float
) -> None:
    launch_two(monkeypatch, rank)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_has_it)
    monkeypatch.setattr(connect_module, "_comm", lambda *given: given[3])
    shutdown: Any = connect("cpu")
    assert (shutdown.linger, shutdown.callback.func) == (seconds, end_group)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_group_over_which_no_comm_can_be_made_is_destroyed(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """On a device, its end would wait for what is unfinished."""

    def fail(*_: object) -> NoReturn:
        raise KeyError("no such host")

    ended: list[str] = []
    launch_two(monkeypatch, 0)
    monkeypatch.setattr(connect_module, "_comm", fail)
    called = iter([False, True])  # there is no group at first
    monkeypatch.setattr(dist, "is_initialized", lambda: next(called))
    monkeypatch.setattr(connect_module, "device_of", lambda *_: torch.device(device))
    monkeypatch.setattr(connect_module, "load_backend", lambda row: row.backends[0])
    monkeypatch.setattr(dist.group.WORLD, "abort", lambda: ended.append("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("destroyed"))
    with pytest.raises(KeyError):
        connect(device)
    assert ended == ["aborted"] * (device == "cuda") + ["destroyed"]


def test_torch_waits_longer_than_we_do_where_its_own_watchdog_kills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options_passed: dict[str, Any] = {}
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda name, **options: options_passed.update(options, name=name),
    )
    cpu, device = torch.device("cpu"), torch.device("cuda", 1)
    init, meeting = connect_module._init_process_group, MagicMock()
    meeting.store.return_value = "the store"
    meeting.run = meeting.watch = lambda call: call()
    init(Backend("nccl"), device, 30.0, Launch(1, 2, 1, "::1", 29500), meeting)
    assert options_passed == {
        "name": "nccl",
        "store": "the store",
        "rank": 1,
        "world_size": 2,
        "timeout": timedelta(seconds=90),
        "device_id": device,
    }
    init(Backend("gloo"), cpu, 30.0, Launch(0, 2, 0, "10.0.0.7", 29500), meeting)
    assert (options_passed["timeout"], options_passed["device_id"]) == (timedelta(seconds=30), None)


# --- a launched group: made here, ended here -------------------------------------------------


def launch(rank: int, world: int, folder: str, port: int, next_port: int) -> list[object]:
    """Connect as ranks of torchrun, then of srun; the one that serves the store raises."""
    torchrun = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in torchrun.items()})
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    with connect() as comm:
        facts: list[object] = [type(comm).__name__, comm.rank, comm.size, sum_of_ranks(comm)]
    facts.append(dist.is_initialized())
    for name in torchrun:
        del os.environ[name]
    os.environ["MASTER_PORT"] = str(next_port)  # or a rank may meet the store that is closing
    os.environ.update(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=str(world), SLURM_PROCID=str(rank))
    os.environ.update(SLURM_JOB_ID="1", SLURM_LOCALID=str(rank), SLURM_STEP_NUM_NODES="1")
    return facts + raise_on_rank_0(rank)


def raise_on_rank_0(rank: int) -> list[object]:
    start = time.monotonic()
    try:
        with connect() as comm:
            if rank == 0:
                raise KeyError("no such file")
            sum_of_ranks(comm)
    except (KeyError, RanksDisagree) as error:
        return [str(error), dist.is_initialized(), time.monotonic() - start]
    return []


@pytest.mark.spawn
def test_a_launched_group_ends_with_its_comm_also_after_an_error() -> None:
    first, second = outcomes_of(2, launch, free_port(), free_port())
    assert (first.error, second.error) == ("", "")
    assert first.value[:5] == ["SharedMemoryComm", 0, 2, 1.0, False]
    assert second.value[:5] == ["SharedMemoryComm", 1, 2, 1.0, False]
    raised, initialised, _ = first.value[5:]
    reason, still_initialised, seconds = second.value[5:]
    assert (raised, initialised, still_initialised) == ("'no such file'", False, False)
    # Rank 0 serves the store: it stayed until rank 1 had read why it left.
    assert reason.startswith("rank 0 has left (it raised KeyError('no such file') after 0 coll")
    assert seconds < 60  # and not the time limit of half an hour


def fail_on_rank_1(rank: int, world: int, folder: str, port: int, place: str) -> tuple[str, float]:
    """Connect, where no descriptor is left on rank 1 at one of the places that need one."""
    torchrun = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in torchrun.items()})

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    if rank == 1:
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, fail)
    start = time.monotonic()
    try:
        connect("cpu", transport="messages")
    except (OSError, RanksDisagree) as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.spawn
@pytest.mark.parametrize(
    "place",
    [
        "torch.distributed.init_process_group",
        "shardwise.comm.machine.connect.new_client",
        "shardwise.comm.transports.gloo.ProcessGroupGloo",
    ],
)
def test_an_error_of_one_rank_while_all_connect_reaches_every_rank(place: str) -> None:
    outcomes = outcomes_of(3, fail_on_rank_1, free_port(), place)
    assert [(outcome.error, outcome.exitcode) for outcome in outcomes] == [("", 0)] * 3
    texts, seconds = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert all("Too many open files" in text for text in texts), texts
    assert all("rank 1" in text for text in texts[::2]), texts
    assert max(seconds) < 60  # and not the time limit of half an hour


# --- a group that exists: used, and left alone -----------------------------------------------


def use_what_exists(rank: int, world: int, folder: str) -> list[object]:
    facts: list[object] = []
    with gloo_group(rank, world, folder):
        with connect() as comm:
            facts += [type(comm) is SharedMemoryComm, sum_of_ranks(comm)]
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("replicate", "shard"))
        with over(mesh["shard"]) as comm, over(mesh["shard"]) as beside:
            facts += [comm.size, sum_of_ranks(comm), sum_of_ranks(beside)]
        with over(mesh["replicate"]) as comm:
            facts += [type(comm) is LocalComm]
        with over(mesh) as comm:
            facts.append([axis.size for axis in comm.axes(1, 3)])
        cube = init_device_mesh("cpu", (1, 1, 3))
        with pytest.raises(ConfigError) as error:
            over(cube)
        facts.append(str(error.value))
        pair = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(ConfigError, match="not a member"):
                over(None)
        else:
            kinds: dict[str, type] = {
                "messages": GlooComm,
                "memory": SharedMemoryComm,
                "native": BackendComm,
            }
            for transport, kind in kinds.items():
                with over(pair, transport=transport) as comm:
                    assert type(comm) is kind
                    facts += [comm.size, comm.rank, sum_of_ranks(comm)]
            dist.barrier(pair)  # it still works, after each of them has closed
        dist.barrier()  # the world's group still works
    return facts


def test_a_mesh_says_where_its_ranks_compute_unless_a_device_is_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh._device_type = "cpu"
    monkeypatch.setattr(DeviceMesh, "ndim", 1)
    devices = list[str | None]()

    def place(_: object, device: str | None) -> torch.device:
        devices.append(device)
        return torch.device("cpu")

    monkeypatch.setattr(connect_module, "_axis", lambda mesh: None)
    monkeypatch.setattr(connect_module, "_current_device", place)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    over(mesh)
    over(mesh, device="meta")
    assert devices == ["cpu", "meta"]


@pytest.mark.spawn
def test_an_existing_group_a_mesh_axis_and_a_part_of_the_world_will_do() -> None:
    outcomes = outcomes_of(3, use_what_exists)
    assert [o.error for o in outcomes] == [""] * 3
    for outcome in outcomes:
        assert outcome.value[:6] == [True, 3.0, 3, 3.0, 3.0, True]
        assert outcome.value[6] == [1, 3]
        assert "this mesh has 3 axes (axis 0=1, axis 1=1, axis 2=3)" in outcome.value[7]
        assert "mesh['axis 2']" in outcome.value[7]
    assert [o.value[8:] for o in outcomes] == [[2, 0, 1.0] * 3, [], [2, 1, 1.0] * 3]


def connect_again(rank: int, world: int, folder: str, count: int) -> list[float]:
    """Comms over one group: some are closed at once, some are left open, and each is used."""
    opened, sums = list[Comm](), list[float]()
    with gloo_group(rank, world, folder):
        for number in range(count):
            comm = connect(transport=("memory", "messages")[number % 2])
            sums.append(sum_of_ranks(comm))
            if number % 3:
                comm.close()  # by the faster rank while the slower one may still read
            else:
                opened.append(comm)
            sums.append(sum_of_ranks(opened[0]))  # the first goes on
        for comm in opened:
            comm.close()
    return sums


@pytest.mark.spawn
@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.prove)])
def test_ranks_connect_over_one_group_again_and_again(count: int) -> None:
    for outcome in outcomes_of(2, connect_again, count, timeout=60):
        assert (outcome.error, outcome.value) == ("", [1.0] * 2 * count)


def opened() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of shared memory that this process has."""
    gc.collect()
    gc.collect()  # memory that the end of a comm let go
    mappings = Path("/proc/self/maps").read_text().count("memfd:shardwise")
    return len([*Path("/proc/self/fd").iterdir()]), threading.active_count(), mappings


def shard_again(rank: int, world: int, folder: str, count: int, at_once: int) -> list[Any]:
    """What is open after each of ``count`` models, some of which live on; and at the end."""
    counts, handles = [], list[sw.Sharded]()
    gc.freeze()  # what torch has imported
    with gloo_group(rank, world, folder):
        for number in range(count):
            model, hybrid = nn.Linear(8 + 8 * number, 8), world > 2 and number % 2
            how: dict[str, Any] = {"mesh": (world // 2, 2)} if hybrid else {}
            sharded = sw.shard(model, "hybrid_shard" if hybrid else "full_shard", **how)
            model(torch.ones(2, 8 + 8 * number)).sum().backward()
            if number < at_once:
                handles.append(sharded)
            elif number % 3 == 0:
                sharded.unshard()
            if number % 10 == 1:  # two that are let go without a word
                sums = [sum_of_ranks(over(dist.group.WORLD, transport="messages"))]
                assert [*sums, sum_of_ranks(over(dist.group.WORLD))] == [sums[0]] * 2
            del model, sharded
            counts.append(opened())
        handles.clear()
    return [*counts, opened()]


@pytest.mark.prove
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("world", "count"),
    [
        (2, 50),
        pytest.param(2, 200, marks=pytest.mark.prove),
        pytest.param(8, 50, marks=pytest.mark.prove),
    ],
)
def test_what_models_and_comms_opened_is_given_back(world: int, count: int) -> None:
    for outcome in outcomes_of(world, shard_again, count, 20, timeout=200):
        assert outcome.error == ""
        (files, threads, mappings), *others, last = outcome.value[3:]
        for count_of in others:
            assert count_of[0] <= files + 2  # gloo closes a little later
            assert count_of[1:] == (threads, mappings)
        assert last[0] < files
        assert last[1:] == (2, 0)  # main, and what ends it with the tests


def test_models_over_one_group_share_a_comm_until_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with gloo_group(0, 1, str(tmp_path)):
        monkeypatch.setattr(connect_module, "_comm", lambda *_: LocalComm())
        first = comm_for(None)
        assert comm_for(None, (1, 1)) is comm_for(None, None) is first
        mesh = init_device_mesh("cpu", (1, 1))
        assert comm_for(None, mesh) is comm_for(None, init_device_mesh("cpu", (1, 1)))
        assert comm_for(None, mesh) is not first
        assert connect() is not first
        monkeypatch.setattr(LocalComm, "is_usable", False)
        assert comm_for(None) is not first


def connect_alone(rank: int, world: int, folder: str) -> str:
    """Rank 0 connects once more than rank 1 does, which comes when rank 0 has given up."""
    with gloo_group(rank, world, folder):
        connect().close()
        text = error_text(RanksDisagree, lambda: connect(timeout=1.0)) if rank == 0 else ""
        dist.barrier()
        return text or error_text(RanksDisagree, connect)


@pytest.mark.spawn
@pytest.mark.prove
def test_a_rank_that_connects_alone_is_an_error_on_both_and_no_hang() -> None:
    first, second = outcomes_of(2, connect_alone, timeout=60)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    assert "rank 1" in first.value


# --- who carries the collectives -------------------------------------------------------------


def stub(folder: Path, module: str, code: str = "") -> None:
    """A package that imports, and runs ``code``."""
    place = folder.joinpath(*module.split("."))
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(code)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, and a torch with nothing but gloo built in."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    monkeypatch.setattr(torch, "hpu", None, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: torch.hpu is not None)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available: None if torch.hpu is None else torch.device("hpu"),  # type: ignore[attr-defined]
    )
    torch.get_device_module.cache_clear()
    yield tmp_path
    torch.get_device_module.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("device", "module", "backend"),
    [
        ("hpu", "habana_frameworks.torch.distributed.hccl", "hccl"),
        ("xpu", "oneccl_bindings_for_pytorch", "ccl"),
    ],
)
def test_a_plug_in_is_imported_where_the_row_names_one(
    plugins: Path, device: str, module: str, backend: str
) -> None:
    stub(plugins, module)
    assert load_backend(row(device)) == Backend(backend, module)
    assert module in sys.modules


def test_what_torch_has_built_in_comes_before_a_plug_in(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(plugins, "oneccl_bindings_for_pytorch")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in {"gloo", "xccl"})
    assert load_backend(row("xpu")).name == "xccl"
    assert load_backend(row("cpu")).name == "gloo"


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda", "collective backend for cuda is available: it needs nccl (built into torch)."),
        ("xpu", "it needs xccl (built into torch) or ccl (import oneccl_bindings_for_pytorch)."),
        ("hpu", "it needs hccl (import habana_frameworks.torch.distributed.hccl)."),
    ],
)
@pytest.mark.usefixtures("plugins")
def test_a_missing_backend_is_named_with_where_it_comes_from(device: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_backend(row(device))
    assert text in str(error.value)


HPU = """
import torch
from types import SimpleNamespace
torch.hpu = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    set_device=lambda index: None,
    current_device=lambda: 0,
)
"""


@pytest.mark.parametrize("device", ["hpu", None])
def test_a_devices_plug_in_is_imported_before_the_device_is_looked_for(
    plugins: Path, device: str | None
) -> None:
    stub(plugins, "habana_frameworks.torch", HPU)
    with connect(device) as comm:
        assert comm.device == torch.device("hpu", 0)


@pytest.mark.usefixtures("plugins")
def test_without_the_plug_in_its_device_is_refused_and_the_cpu_is_what_there_is() -> None:
    with pytest.raises(ConfigError) as error:
        connect("hpu")
    assert str(error.value) == (
        "this torch does not know the device hpu: it needs habana_frameworks.torch, which is not "
        'installed here. Install it, or pass device="cpu".'
    )
    with connect() as comm:
        assert comm.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["hpu", None])
def test_a_plug_in_that_cannot_be_imported_never_means_the_cpu_in_silence(
    plugins: Path, device: str | None
) -> None:
    stub(plugins, "habana_frameworks.torch", "raise ImportError('libSynapse.so: not found')")
    with pytest.raises(ConfigError) as error:
        connect(device)
    assert str(error.value) == (
        "habana_frameworks.torch is installed, but its import failed (libSynapse.so: not found), "
        "so its devices cannot be used. Repair or remove that package, or pass "
        'device="cpu".'
    )


@pytest.mark.parametrize(
    ("device", "transport", "can_share", "carrier"),
    [
        ("cpu", "auto", True, "memory"),
        ("cpu", "auto", False, "messages"),
        ("cpu", "memory", True, "memory"),
        ("cpu", "messages", True, "messages"),
        ("cpu", "native", True, "native"),
        ("cuda", "auto", True, "native"),
        ("cuda", "native", True, "native"),
    ],
)
def test_the_device_and_the_host_choose_the_transport_unless_it_is_passed(
    monkeypatch: pytest.MonkeyPatch, device: str, transport: str, can_share: bool, carrier: str
) -> None:
    stand_ins = {"GlooComm": "messages", "BackendComm": "native", "_own_store": "a store"}
    for name, made in (stand_ins | {"shared_memory": "memory" if can_share else ""}).items():
        monkeypatch.setattr(connect_module, name, lambda *_, made=made: made)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    group: Any = None
    comm: object = connect_module._comm(group, torch.device(device), 1.0, IMMEDIATE, transport)
    assert comm == carrier


def test_a_comm_comes_before_a_mesh_and_a_device_mesh_before_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect_module, "connect", lambda: "of the launcher")
    monkeypatch.setattr(connect_module, "over", lambda mesh: f"over {mesh}")
    comm: Any = LocalComm()
    assert comm_for(comm, "a mesh") is comm
    meshes = (None, (2, 2), [2, 2], "a mesh")
    made: list[object] = [comm_for(None, mesh) for mesh in meshes]
    assert made == ["of the launcher"] * 3 + ["over a mesh"]


def test_a_grid_is_made_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    with pytest.raises(ConfigError, match="cannot be made a grid of 2 × 2 ranks"):
        connect_module._new_axes("cpu", 1.0, "auto", 2, 2)


def test_a_transport_that_does_not_exist_is_refused_with_those_that_do() -> None:
    group: Any = None
    with pytest.raises(ConfigError) as error:
        connect_module._comm(group, torch.device("cpu"), 1.0, IMMEDIATE, "pigeons")
    text = "transport is 'pigeons'; choose one of auto, memory, messages, native."
    assert str(error.value) == text
