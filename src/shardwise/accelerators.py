"""One row per kind of device: what must be imported, who carries its collectives, its alignment.

A vendor's quirk is a cell of this table and not an ``if`` in the engine, which makes generic
device calls only (``torch.accelerator``, ``torch.get_device_module``). A new device is a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.errors import ConfigError, nearest

__all__ = [
    "ROWS",
    "Accelerator",
    "Backend",
    "detect",
    "device_module",
    "device_of",
    "imported",
    "row",
]


@dataclass(frozen=True)
class Backend:
    """A library of collectives as ``torch.distributed`` names it.

    Attributes:
        name: for ``init_process_group``.
        plugin: the module whose import registers it; ``""`` if torch may have it built in.
    """

    name: str
    plugin: str = ""


@dataclass(frozen=True)
class Accelerator:
    """A row.

    Attributes:
        device: torch's name of the device type.
        backends: who can carry its collectives, the preferred one first.
        alignment: bytes at whose multiples a slot starts.
        averages: whether to use the backend's AVG, once it has passed a self-test. XCCL has
            divided twice for some sizes (intel/torch-xpu-ops#3020): there we sum and divide.
        plugin: the module whose import lets torch know the device; ``""`` if torch always does.
    """

    device: str
    backends: tuple[Backend, ...]
    alignment: int
    averages: bool
    plugin: str = ""


ROWS = (
    Accelerator("cpu", (Backend("gloo"),), alignment=64, averages=False),
    Accelerator("cuda", (Backend("nccl"),), alignment=128, averages=True),
    Accelerator(
        "xpu",
        (Backend("xccl"), Backend("ccl", plugin="oneccl_bindings_for_pytorch")),
        alignment=128,
        averages=False,
        plugin="intel_extension_for_pytorch",
    ),
    Accelerator(
        "hpu",
        (Backend("hccl", plugin="habana_frameworks.torch.distributed.hccl"),),
        alignment=128,
        averages=False,
        plugin="habana_frameworks.torch",
    ),
)


def row(device: torch.device | str) -> Accelerator:
    """The row of a device such as ``"cuda"``, ``"cuda:1"`` or ``torch.device("cpu")``.

    Raises:
        ConfigError: no row has this name; the rows are listed, nearest first.
    """
    name = device.type if isinstance(device, torch.device) else device.split(":")[0]
    rows = {known.device: known for known in ROWS}
    if name in rows:
        return rows[name]
    table = ", ".join(f"{known} ({_backends(rows[known])})" for known in nearest(name, rows, 99))
    raise ConfigError(
        f"no accelerator is called {name!r}. Known, nearest first: {table}. "
        "Pass one of these as device=, or none to use what this machine has."
    )


def detect() -> Accelerator:
    """The row of the accelerator that torch sees here; the CPU's if none has a row.

    Raises:
        ConfigError: a device's plug-in is installed, and cannot be imported.
    """
    if not torch.accelerator.is_available():
        for known in ROWS:
            imported(known.plugin)
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None and found.type in {known.device for known in ROWS}:
            return row(found)
    return row("cpu")


def device_of(accelerator: Accelerator, local_rank: int) -> torch.device:
    """The device of the ``local_rank``-th process of a machine, made the current one.

    Always with its index: a bare ``xpu`` has sent libraries down the CUDA path.

    Raises:
        ConfigError: torch does not know the device, or sees fewer of it than there are processes.
    """
    if accelerator.device == "cpu":
        return torch.device("cpu")
    module = device_module(accelerator)
    count = module.device_count()
    if not count:
        raise ConfigError(
            f"torch sees no {accelerator.device} device on this machine. Pass "
            'device="cpu" (--run.device cpu), or none to use what is there.'
        )
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} wants {accelerator.device}:{local_rank}, but torch sees "
            f"{count} here. Each process needs a device of its own: start at most {count} "
            'processes on this machine, or pass device="cpu". If the launcher shows each process '
            "only a device of its own, let it show all of them (srun --gpu-bind=none)."
        )
    module.set_device(local_rank)
    return torch.device(accelerator.device, local_rank)


def device_module(accelerator: Accelerator) -> Any:
    """What ``torch.get_device_module`` gives, after the import of the device's plug-in.

    Raises:
        ConfigError: torch does not know the device, and no plug-in is installed that teaches it.
    """
    if not _is_available(accelerator.device):
        imported(accelerator.plugin)
    try:
        return torch.get_device_module(accelerator.device)
    except RuntimeError as error:
        raise ConfigError(
            f"this torch does not know the device {accelerator.device}: it needs "
            f"{accelerator.plugin}, which is not installed here. Install it, or pass "
            'device="cpu".'
        ) from error


def imported(plugin: str) -> bool:
    """Import ``plugin`` if its package is installed. Returns whether it is.

    Raises:
        ConfigError: it is installed, and its import fails.
    """
    if not plugin or find_spec(plugin.split(".", maxsplit=1)[0]) is None:
        return False
    try:
        import_module(plugin)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{plugin} is installed, but its import failed ({error}), so its devices cannot be "
            'used. Repair or remove that package, or pass device="cpu".'
        ) from error
    return True


def _is_available(device: str) -> bool:
    try:
        return bool(torch.get_device_module(device).is_available())
    except RuntimeError:  # torch does not know this kind of device
        return False


def _backends(accelerator: Accelerator) -> str:
    return " or ".join(backend.name for backend in accelerator.backends)
