"""Creates a Comm from the launcher's environment variables, or from an existing process group.

Without a launcher's variables there is one rank and no process group. A process group that is
created here is destroyed with its Comm, also after an error; an existing one is not.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.comm.machine.accelerators import Accelerator, Backend, row
from shardwise.comm.machine.devices import detect, device_module, device_of, imported, index_of
from shardwise.comm.machine.endpoint import on_one_host, own_endpoint
from shardwise.comm.machine.environment import Launch, read_launch
from shardwise.comm.machine.interfaces import choose_interface
from shardwise.comm.machine.meeting import Meeting, new_client
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.backend import BackendComm
from shardwise.comm.transports.gloo import GlooComm
from shardwise.comm.transports.local import LocalComm
from shardwise.comm.transports.shared_memory import shared_memory
from shardwise.comm.transports.transport import IMMEDIATE, Shutdown, axis_name, end_group
from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked

TIMEOUT = 1800.0  # seconds for which a rank waits for a slow one
TRANSPORTS = ("auto", "memory", "messages", "native")
LINGER = 5.0  # seconds for which the rank that serves the store waits for the others to close


@checked
def connect(
    device: str | None = None,
    timeout: float = TIMEOUT,
    transport: Literal["auto", "memory", "messages", "native"] = "auto",
) -> Comm:
    """A communicator over all ranks: ``with sw.connect() as comm: …``.

    Args:
        device: a device type such as ``"cuda"``; by default this machine's accelerator, or the CPU.
            Its index is the process's local rank; without a launcher, that of the current device.
            ``"cuda:1"`` says it.
        timeout, transport: see ``over``.

    Returns:
        With an existing process group: a comm over it, which does not destroy it. With the
        environment of a launcher (torchrun, srun or mpirun): a comm over a new group, which is
        destroyed with it. Otherwise: a comm of one rank.

    Raises:
        ConfigError: the environment is incomplete, or the device or its backend does not exist.
        RanksDisagree: not every rank connected in time.
    """
    if dist.is_initialized():
        return over(dist.group.WORLD, device, timeout, transport)
    accelerator = row(device) if device else detect()
    launch = read_launch(os.environ)
    this_device = device_of(accelerator, index_of(device), launch.local_rank if launch else None)
    if launch is None:
        return LocalComm(this_device)
    if launch.size == 1:  # programs call torch.distributed at any number of ranks
        name = load_backend(accelerator).name
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1)
        return LocalComm(this_device, Shutdown(callback=partial(end_group, dist.group.WORLD)))
    launch, is_first = on_one_host(launch, os.environ), launch.rank == 0
    choose_interface(accelerator, own_endpoint(launch, os.environ) if is_first else launch.address)
    backend, open_axes = load_backend(accelerator), partial(_new_axes, this_device.type, timeout)
    serves = is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = Meeting(launch, serves, timeout, attempt)
    try:
        _init_process_group(backend, this_device, timeout, launch, meeting)
        assert dist.group.WORLD is not None  # it was created above
        shutdown = Shutdown(
            LINGER if serves else 0.0,
            partial(end_group, dist.group.WORLD),
            open_axes=partial(open_axes, transport),
            failure=meeting.failure,
        )
        comm = _comm(dist.group.WORLD, this_device, timeout, shutdown, transport)
    except BaseException as error:
        meeting.fail(error)
        if dist.is_initialized():
            if dist.group.WORLD is not None and this_device.type != "cpu":
                dist.group.WORLD.abort()  # its end would wait for what is unfinished
            dist.destroy_process_group()
        raise
    _shared[dist.group.WORLD] = {0: comm}
    return comm


_shared: WeakKeyDictionary[ProcessGroup, dict[int, Comm]] = WeakKeyDictionary()
"""What models that are given no comm share: one for a group and a number of mesh axes, until the
group is destroyed. Models are garbage at other times on other ranks, so they are no measure."""


def comm_for(comm: Comm | None, mesh: Any = None) -> Comm:
    """``comm``; without one, that of a ``DeviceMesh`` or group, or of the launcher.

    All models over one group share one.
    """
    if comm is not None:
        return comm
    ranks = None if isinstance(mesh, (tuple, list)) else mesh
    if ranks is None and not dist.is_initialized():
        return connect()
    axes = ranks.ndim if isinstance(ranks, DeviceMesh) else 0
    group = dist.group.WORLD if ranks is None else ranks.get_group(0) if axes else ranks
    if not isinstance(group, ProcessGroup):
        return over(group)  # which says what is wrong with it
    shared = _shared.setdefault(group, {})
    if axes not in shared or not shared[axes].is_usable:
        shared[axes] = connect() if ranks is None else over(ranks)
    return shared[axes]


def over(
    ranks: ProcessGroup | DeviceMesh | None,
    device: str | None = None,
    timeout: float = TIMEOUT,
    transport: str = "auto",
) -> Comm:
    """A communicator over an existing process group, which is not destroyed with it.

    Args:
        ranks: a process group, or a device mesh: of one axis, such as ``mesh["shard"]``, or of all
            ranks and two axes, over the second of which parameters are sharded.
        device: a device type; by default that of the mesh or of the group's backend.
        timeout: seconds that a rank waits for a slow one before it raises.
        transport: ``"memory"`` (CPU ranks of one host), ``"messages"`` (tagged, over gloo) or
            ``"native"`` (the backend's own collectives); ``"auto"``: native off the CPU, memory
            where all ranks can map it, else messages.

    Raises:
        ConfigError: the mesh has several axes, or there is no process group or no such transport.
        RanksDisagree: not every rank connected in time.
    """
    if ranks is None:
        raise ConfigError(
            "there is no process group: this process is not a member of the one that was passed, "
            "or none was initialised. Pass a group that this rank belongs to."
        )
    if isinstance(ranks, DeviceMesh):
        device = device or ranks.device_type
        if ranks.ndim == 2:
            return _grid(ranks, device, timeout, transport)
        ranks = _axis(ranks)
    this_device = _current_device(ranks, device)
    shutdown = Shutdown(open_axes=partial(_new_axes, this_device.type, timeout, transport))
    return _comm(ranks, this_device, timeout, shutdown, transport)


def _grid(mesh: DeviceMesh, device: str, timeout: float, transport: str) -> Comm:
    """The comm of all ranks, whose axes are those of ``mesh``."""
    ranks = list(range(dist.get_world_size()))
    if mesh.mesh.flatten().tolist() != ranks:
        raise ConfigError(
            f"this mesh of two axes is {mesh.mesh.tolist()}. It must hold all ranks, 0 to "
            f"{ranks[-1]}, row by row: make it by init_device_mesh, or pass one of its axes."
        )
    world = dist.group.WORLD
    assert world is not None  # the mesh has initialised it
    shutdown = Shutdown(open_axes=lambda *_: _axes_of(mesh, timeout, transport))
    return _comm(world, _current_device(world, device), timeout, shutdown, transport)


def _new_axes(
    device: str, timeout: float, transport: str, replicate: int, shard: int
) -> tuple[Comm, Comm]:
    """The axes of a grid of all ranks. A collective."""
    if replicate * shard != dist.get_world_size():  # all processes have to make a group
        return IMMEDIATE.open_axes(replicate, shard)
    grid = torch.arange(replicate * shard).view(replicate, shard)
    return _axes_of(DeviceMesh(device, grid), timeout, transport)


def _axes_of(mesh: DeviceMesh, timeout: float, transport: str) -> tuple[Comm, Comm]:
    """This rank's axes of a mesh."""

    def axis(at: int, name: str) -> Comm:
        group = mesh.get_group(at)
        shutdown = Shutdown(where=axis_name(name, dist.get_process_group_ranks(group)))
        device = _current_device(group, mesh.device_type)
        return _comm(group, device, timeout, shutdown, transport)

    return axis(0, "replicate"), axis(1, "shard")


def _comm(
    group: ProcessGroup, device: torch.device, timeout: float, shutdown: Shutdown, transport: str
) -> Comm:
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport is {transport!r}; choose one of {', '.join(TRANSPORTS)}.")
    if transport in ("memory", "messages") and device.type != "cpu":
        raise ConfigError(
            f"transport is {transport!r}, which moves the CPU's memory only, and the device is "
            f'{device}, so this would train on the CPU. Leave transport out, or pass device="cpu".'
        )
    if (size := dist.get_world_size(group)) == 1:
        return LocalComm(device)
    rank = dist.get_rank(group)
    store = _own_store(group, rank)
    if transport == "native" or (transport == "auto" and device.type != "cpu"):
        return BackendComm(group, device, store, row(device).averages, timeout, shutdown)
    if transport in ("auto", "memory"):
        if comm := shared_memory(store, rank, size, timeout, shutdown):
            return comm
        if transport == "memory":
            raise ConfigError(
                f"the {size} ranks cannot map each other's memory (they run on several hosts, in "
                "separate containers, or not on Linux on x86-64). Leave transport out: messages "
                "over gloo work everywhere."
            )
    return GlooComm(rank, size, store, timeout, shutdown)


def _own_store(group: ProcessGroup, rank: int) -> Store:
    """A separate client with a key prefix of its own, so that blocking calls of others do not wait.

    The n-th comm of each rank over one group gets the same prefix.
    """
    store = new_client(group.get_group_store())
    count = store.add(f"shardwise/{rank}", 1)
    return PrefixStore(f"shardwise/{count}/", store)


def _axis(mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
        axes = ", ".join(f"{name}={n}" for name, n in zip(names, mesh.mesh.shape, strict=True))
        raise ConfigError(
            f"this mesh has {mesh.ndim} axes ({axes}), and parameters are sharded over one. "
            f"Pass that one, for example mesh[{names[-1]!r}]."
        )
    return mesh.get_group()


def _current_device(group: ProcessGroup, device: str | None) -> torch.device:
    """This rank's device: the current one, which the creator of the group has set."""
    if device is None:
        device = "cpu" if dist.get_backend(group) == "gloo" else detect().device
    accelerator, index = row(device), index_of(device)
    if accelerator.device == "cpu":
        return torch.device("cpu")
    current = device_module(accelerator).current_device()
    if index not in (None, current):
        raise ConfigError(
            f"the device is {device}, and the current one is {accelerator.device}:{current}, for "
            f"which the process group was made. Call torch.{accelerator.device}.set_device({index})"
            " before the group is made, or leave the index out."
        )
    return torch.device(accelerator.device, current)


def _init_process_group(
    backend: Backend, device: torch.device, timeout: float, launch: Launch, meeting: Meeting
) -> None:
    # A vendor's own watchdog would kill the process before ours could report.
    torch_timeout = timeout if device.type == "cpu" else timeout + 60
    connect_ranks = partial(
        dist.init_process_group,
        backend.name,
        store=meeting.store(),
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(seconds=torch_timeout),
        device_id=None if device.type == "cpu" else device,
    )
    # A thread has a current device of its own, so only what needs none is done on another.
    meeting.run(connect_ranks) if device.type == "cpu" else meeting.watch(connect_ranks)


def load_backend(accelerator: Accelerator) -> Backend:
    """The accelerator's first backend that is available, with its plug-in imported."""
    for backend in accelerator.backends:
        is_builtin = not backend.plugin and dist.is_backend_available(backend.name)
        if is_builtin or imported(backend.plugin):
            return backend
    backends = " or ".join(
        f"{b.name} (import {b.plugin})" if b.plugin else f"{b.name} (built into torch)"
        for b in accelerator.backends
    )
    raise ConfigError(
        f"no collective backend for {accelerator.device} is available: it needs {backends}. "
        'Install it, or pass device="cpu".'
    )
