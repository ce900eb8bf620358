"""From the launcher's environment, or from a group that exists, to a Comm.

A launcher is recognised by its variables and nothing else; without one there is one rank, and no
process group. What is opened here is closed here, also after an error; what was there before
stays. The ordinary way leaves both to each script, and a raised error to a leaked group.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.accelerators import (
    Accelerator,
    Backend,
    detect,
    device_module,
    device_of,
    imported,
    row,
)
from shardwise.comm.backend import BackendComm
from shardwise.comm.environment import Launch, launched
from shardwise.comm.gloo import GlooComm
from shardwise.comm.group import Ending
from shardwise.comm.local import LocalComm
from shardwise.comm.malloc import keep_mapped
from shardwise.comm.protocol import Comm
from shardwise.comm.shared_memory import shared_memory
from shardwise.errors import ConfigError, RanksDisagree

__all__ = ["connect", "over"]

TIMEOUT = 1800.0  # seconds for which a rank waits for a slow one
TRANSPORTS = ("auto", "memory", "messages", "native")
LINGER = 5.0  # seconds for which the rank that serves the store waits for the others to leave


def connect(device: str | None = None, timeout: float = TIMEOUT, transport: str = "auto") -> Comm:
    """This process's end of all ranks: ``with sw.connect() as comm: …``.

    Args:
        device: a device type such as ``"cuda"``; by default what this machine has, else the CPU.
        timeout: seconds for which a rank waits for a slow one before that is an error.
        transport: how bytes travel; see ``over``.

    Returns:
        With a process group that exists: a comm over it, which does not destroy it. With the
        environment of a launcher (torchrun, srun or mpirun): a comm over a new group that ends
        with it. Else: one rank alone.

    Raises:
        ConfigError: the environment is incomplete, or there is no such device or backend.
        RanksDisagree: not every rank came in time.
    """
    if dist.is_initialized():
        return over(_world(), device, timeout, transport)
    accelerator = row(device) if device else detect()
    launch = launched(os.environ)
    here = device_of(accelerator, launch.local_rank if launch else 0)
    if launch is None:
        return LocalComm(here)
    if launch.size == 1:  # programs call torch.distributed at any number of ranks
        name = _load(accelerator).name
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1)
        return LocalComm(here, Ending(then=dist.destroy_process_group))
    _initialise(_load(accelerator), here, timeout, launch)
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    ending = Ending(LINGER if serves else 0.0, dist.destroy_process_group)
    try:
        return _comm(_world(), here, timeout, ending, transport)
    except BaseException:
        dist.destroy_process_group()
        raise


def over(
    ranks: ProcessGroup | DeviceMesh | None,
    device: str | None = None,
    timeout: float = TIMEOUT,
    transport: str = "auto",
) -> Comm:
    """A comm over ranks that torch already knows; they are not destroyed with it.

    Args:
        ranks: a process group, or a device mesh of one axis, such as ``mesh["shard"]``.
        device: a device type; by default the mesh's, or the one that the group's backend serves.
        timeout: seconds for which a rank waits for a slow one before that is an error.
        transport: ``"memory"`` (CPU ranks of one host), ``"messages"`` (tagged, over gloo) or
            ``"native"`` (the backend's own collectives); ``"auto"``: native off the CPU, memory
            where all ranks can map it, else messages.

    Raises:
        ConfigError: the mesh has several axes, there is no process group, or no such transport.
        RanksDisagree: not every rank came in time.
    """
    if isinstance(ranks, DeviceMesh):
        group, device = _axis(ranks), device or ranks.device_type
    elif ranks is None:
        raise ConfigError(
            "there is no process group here: this process is not a member of the one that was "
            "passed, or none was initialised. Pass a group that this rank belongs to."
        )
    else:
        group = ranks
    if dist.get_world_size(group) == 1:
        return LocalComm(_here(group, device))
    return _comm(group, _here(group, device), timeout, Ending(), transport)


def _comm(
    group: ProcessGroup,
    device: torch.device,
    timeout: float,
    ending: Ending,
    transport: str,
) -> Comm:
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport is {transport!r}; choose one of {', '.join(TRANSPORTS)}.")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if device.type == "cpu":
        keep_mapped()
    store = _own_store(group, rank)
    if transport == "native" or (transport == "auto" and device.type != "cpu"):
        return BackendComm(group, device, store, row(device).averages, timeout, ending)
    if transport in ("auto", "memory"):
        if comm := shared_memory(store, rank, size, timeout, ending):
            return comm
        if transport == "memory":
            raise ConfigError(
                f"the {size} ranks cannot map each other's memory (they run on several hosts, in "
                "containers of their own, or not on Linux on x86-64). Leave transport out: "
                "messages over gloo work everywhere."
            )
    return GlooComm(rank, size, store, timeout, ending)


def _own_store(group: ProcessGroup, rank: int) -> Store:
    """A client of our own, under keys of our own: nobody's blocking call is ever in our way.

    The n-th comm of each rank over one group meets the n-th of the others.
    """
    store: Store = group.get_group_store().clone()  # type: ignore[attr-defined]
    nth = store.add(f"shardwise/{rank}", 1)
    return PrefixStore(f"shardwise/{nth}/", store)


def _axis(mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
        axes = ", ".join(f"{name}={n}" for name, n in zip(names, mesh.mesh.shape, strict=True))
        raise ConfigError(
            f"this mesh has {mesh.ndim} axes ({axes}), and parameters are split over one. "
            f"Pass that one, for example mesh[{names[-1]!r}]."
        )
    return mesh.get_group()


def _here(group: ProcessGroup, device: str | None) -> torch.device:
    """This rank's device. Whoever made the group has chosen the current one already."""
    if device is None:
        device = "cpu" if dist.get_backend(group) == "gloo" else detect().device
    accelerator = row(device)
    if accelerator.device == "cpu":
        return torch.device("cpu")
    return torch.device(accelerator.device, device_module(accelerator).current_device())


def _initialise(backend: Backend, device: torch.device, timeout: float, launch: Launch) -> None:
    # A vendor's own watchdog would end the process before ours has said why.
    patience = timeout if device.type == "cpu" else timeout + 60
    host = f"[{launch.address}]" if ":" in launch.address else launch.address  # of IPv6
    try:
        dist.init_process_group(
            backend.name,
            init_method=f"tcp://{host}:{launch.port}",
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=patience),
            device_id=None if device.type == "cpu" else device,
        )
    except dist.DistError as error:
        raise RanksDisagree(
            f"the ranks did not all meet at {host}:{launch.port} within {patience:,.0f} s "
            f"({error}). Nobody has begun. Look whether every rank was started, with equal "
            "MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and whether a firewall or a wrong network "
            "interface lies between them."
        ) from error


def _load(accelerator: Accelerator) -> Backend:
    """The first backend of the row that this machine has, its plug-in imported."""
    for backend in accelerator.backends:
        if not backend.plugin and dist.is_backend_available(backend.name):
            return backend
        if imported(backend.plugin):
            return backend
    wanted = " or ".join(
        f"{b.name} (import {b.plugin})" if b.plugin else f"{b.name} (built into torch)"
        for b in accelerator.backends
    )
    raise ConfigError(
        f"nothing here carries collectives for {accelerator.device}: it needs {wanted}. "
        'Install it, or pass device="cpu".'
    )


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # called only once it is initialised
    return world
