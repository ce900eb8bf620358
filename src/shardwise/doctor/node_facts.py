"""Facts that one node states of itself, before ranks train together."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from time import perf_counter

import torch

from shardwise.comm.machine.accelerators import Accelerator, row
from shardwise.comm.machine.devices import detect
from shardwise.comm.machine.endpoint import addresses_of, own_endpoint
from shardwise.comm.machine.environment import Launch, local_size
from shardwise.comm.machine.interfaces import interface_to, interfaces
from shardwise.comm.machine.run_token import run_token
from shardwise.config.version import __version__
from shardwise.doctor.listeners import Listener, listeners
from shardwise.doctor.machine import device_name, packages

WRITTEN, CHUNK, SECONDS = 2**25, 2**22, 1.0  # bytes to the disk, at once, and at most as long
# Variables that change what all ranks do together; those that name an interface may differ.
SAME = ("NCCL_", "TORCH_", "PYTORCH_", "CCL_", "HCCL_", "PT_HPU_", "OMP_", "SHARDWISE_")
MAY_DIFFER = ("SHARDWISE_RUN_TOKEN", "SHARDWISE_LIFELINE", "SHARDWISE_WORKER")


@dataclass(frozen=True)
class Meets:
    """A node's way to the others.

    Attributes:
        rank, host: of this process.
        name, port: the address that was given.
        resolved: the addresses of that name here.
        here: interface → address, of this host.
        chosen: variable → the interface that it names.
        route: the interface that leads there; ``""`` if none does.
        several: there are other nodes, as the launcher says.
        is_first: rank 0 is here, and serves the store itself.
        holder: the program that listens at that port here already.
        has_token: the run has a token.
    """

    rank: int
    host: str
    name: str
    port: int
    resolved: tuple[str, ...]
    here: Mapping[str, str]
    chosen: Mapping[str, str]
    route: str
    several: bool = True
    is_first: bool = False
    holder: str = ""
    has_token: bool = True

    @property
    def interface(self) -> str:
        """The interface of the collectives."""
        return next(reversed([self.route, *self.chosen.values()]))


@dataclass(frozen=True)
class NodeFacts:
    """Facts that are compared between nodes, or limit a run.

    Attributes:
        address, port: where its probe answers.
        versions, variables: by name.
        folder: looked at; ``free``: bytes there; ``write``: bytes per second, with fsync; 0: this
            user may not write there.
        open: programs of this run that listen on all interfaces: ``program:port``.
        recipe: what it says here, key by key; empty if none was given.
    """

    rank: int
    host: str
    interface: str
    address: str
    port: int
    chosen: dict[str, str] = field(default_factory=dict)
    route: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    free: int = 0
    write: float = 0.0
    open: list[str] = field(default_factory=list)
    recipe: dict[str, str] = field(default_factory=dict)


def meets(launch: Launch, serves: bool, environ: Mapping[str, str]) -> Meets:
    """Look at this host's networks, and at the address that was given."""
    leads = interface_to(launch.address)
    here = {one.name: one.address for one in reversed(interfaces())}
    route = leads.name if leads else ""
    if launch.rank == 0 and (own := own_endpoint(launch, environ)) in here.values():
        route = next(name for name, address in here.items() if address == own)
    return Meets(
        launch.rank,
        platform.node(),
        launch.address,
        launch.port,
        tuple(addresses_of(launch.address)),
        here,
        _chosen(environ, detect(), here),
        route,
        (local_size(environ) or launch.size) < launch.size,
        is_first=serves,
        holder=_holder(launch.port) if serves else "",
        has_token=bool(run_token()),
    )


def _chosen(
    environ: Mapping[str, str], accelerator: Accelerator, here: Mapping[str, str]
) -> dict[str, str]:
    """The variables that name an interface; the last one carries the collectives.

    NCCL takes a beginning of a name (``eth``), several (``eth0,eth1``), and which not (``^lo``).
    """
    names = dict.fromkeys((row("cpu").socket_interface, accelerator.socket_interface))
    given = {name: environ[name] for name in names if environ.get(name, "^")[0] != "^"}
    first = {name: value.split(",")[0].strip("=") for name, value in given.items()}
    return {
        name: value if value in here else next((i for i in here if i.startswith(value)), value)
        for name, value in first.items()
    }


def _holder(port: int) -> str:
    """The program that listens at this port, of those that this user may look at."""
    held = next((one for one in listeners() if one.port == port), None)
    return f"{held.program} (process {held.pid}, at {held.address})" if held else ""


def node_facts(seen: Meets, folder: Path, address: str, port: int) -> NodeFacts:
    """Look at versions, variables, the folder and this run's own listeners."""
    write = write_rate(folder)
    return NodeFacts(
        seen.rank,
        seen.host,
        seen.interface,
        address,
        port,
        dict(seen.chosen),
        seen.route,
        _versions(),
        _variables(os.environ),
        str(folder.resolve()),
        disk_usage(folder).free,
        write,
        [_text(one) for one in listeners(_of_this_run(os.environ)) if one.is_open],
    )


def _versions() -> dict[str, str]:
    accelerator = detect()
    device = device_name(torch.device(accelerator.device)) if accelerator.device == "cpu" else ""
    return {
        "shardwise": __version__,
        **{one.name: one.installed for one in packages() if one.installed},
        "device": device or device_name(torch.device(accelerator.device, 0)),
    }


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(SAME)
        and name not in MAY_DIFFER
        and not name.endswith(("IFNAME", "_IFACE"))
    }


def _of_this_run(environ: Mapping[str, str]) -> list[int]:
    """This process, and torchrun's if that has started it."""
    return [os.getpid(), *[os.getppid()] * ("TORCHELASTIC_RUN_ID" in environ)]


def _text(listener: Listener) -> str:
    return f"{listener.program}:{listener.port}"


def write_rate(folder: Path) -> float:
    """Bytes per second that this folder's disk takes; 0 if nothing can be written there."""
    path = folder / f".shardwise-doctor-{secrets.token_hex(8)}"
    start, written = perf_counter(), 0
    try:
        with path.open("wb") as file:
            while written < WRITTEN and perf_counter() - start < SECONDS:
                written += file.write(bytes(CHUNK))
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        return 0.0
    finally:
        with suppress(OSError):
            path.unlink()
    return written / (perf_counter() - start)
