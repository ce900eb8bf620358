"""Installed versions, devices, and what the environment says of them.

Looks only: nothing here is needed by a run, and a plug-in that is broken is a line of the answer.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

import torch

from shardwise.comm.machine.accelerators import ROWS, Accelerator, row
from shardwise.comm.machine.connect import load_backend
from shardwise.comm.machine.devices import device_module
from shardwise.errors import ConfigError
from shardwise.launch.launcher import available_cores
from shardwise.torch_internals.self_tests import NEWEST_TESTED

OF_EXTRAS = ("transformers", "peft", "bitsandbytes", "datasets")  # whose versions change a run


@dataclass(frozen=True)
class Package:
    """An installed distribution, or Python itself.

    Attributes:
        installed: its version; ``""`` if it is not installed.
        needed: what shardwise asks for, such as ``">=2.11"``; ``""`` if anything will do.
        tested: the newest release that the tests were run with; ``""`` if that matters little.
        extra: that of shardwise which installs it; ``""`` if every run needs it.
    """

    name: str
    installed: str
    needed: str = ""
    tested: str = ""
    extra: str = ""

    @property
    def fits(self) -> bool:
        """Test that the package is installed, unless it is an extra's, and new enough."""
        if not self.installed:
            return bool(self.extra)
        return _release(self.installed) >= _release(self.needed)


@dataclass(frozen=True)
class Devices:
    """The devices of one kind that torch sees here.

    Attributes:
        names: one for each device.
        backend: who carries their collectives; ``""`` if nobody does.
        problem: why they cannot be used; ``""`` if they can.
    """

    accelerator: Accelerator
    names: tuple[str, ...]
    backend: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Variable:
    """A variable of the environment that matters to one kind of device."""

    device: str
    name: str
    meaning: str
    value: str | None


# --- versions --------------------------------------------------------------------------------


def packages() -> list[Package]:
    """Python, what shardwise needs, and the plug-ins that are installed."""
    python = metadata.metadata("shardwise")["Requires-Python"] or ""
    lines = metadata.requires("shardwise") or []
    # torch>=2.11, or peft>=0.21; extra == "peft"
    needed = [re.match(r"([\w.-]+)([^;]*)(?:.*extra == .(\w+))?", line) for line in lines]
    tested = {"torch": NEWEST_TESTED}
    return [
        Package("python", platform.python_version(), python),
        *(
            Package(name, _version(name), each[2].strip(), tested.get(name, ""), each[3] or "")
            for each in needed
            if each and (not each[3] or each[1] in OF_EXTRAS)
            for name in [each[1]]
        ),
        *(Package(each.package, version) for each in ROWS if (version := _version(each.package))),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` and ``">=2.13"`` → ``(2, 13, 0)`` and ``(2, 13)``."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


# --- devices ---------------------------------------------------------------------------------


def devices(device: str) -> Devices:
    """List the devices of kind ``device``, as far as torch and its plug-ins see them."""
    accelerator = row(device)
    if device == "cpu":
        return Devices(accelerator, (device_name(torch.device("cpu")),), "gloo")
    try:
        count = device_module(accelerator).device_count()
        names = tuple(device_name(torch.device(device, index)) for index in range(count))
        backend = load_backend(accelerator).name if names else ""
    except ConfigError as error:
        return Devices(accelerator, (), problem=str(error))
    return Devices(accelerator, names, backend, "" if names else "torch sees none here")


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    if device.type == "cpu":
        return f"{platform.machine()}, {available_cores()} cores"
    return str(device_module(row(device)).get_device_name(device.index))


# --- environment -----------------------------------------------------------------------------


def variables(environ: Mapping[str, str] = os.environ) -> list[Variable]:
    """Every variable of every row, set or not."""
    return [
        Variable(known.device, name, meaning, environ.get(name))
        for known in ROWS
        for name, meaning in _named(known)
    ]


def _named(accelerator: Accelerator) -> Iterator[tuple[str, str]]:
    if accelerator.visible_devices:
        yield accelerator.visible_devices, "devices that a process sees"
    yield accelerator.socket_interface, "network interface of the collectives"
    for name, value in accelerator.environment:
        yield name, f"must be {value} when {accelerator.plugin} is imported; connect() sets it"
    for old, new in accelerator.renamed:
        yield new, f"a file; {old} in old versions, connect() sets both"
