"""This process's device, from its accelerator's row: plug-in, environment, index.

A plug-in reads its variables when it is imported, so they are set before. The ordinary way leaves
import, variables and index to each script: the one that is forgotten is found by an error from
elsewhere, or by a slow run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.machine.accelerators import ROWS, Accelerator, row
from shardwise.errors import ConfigError


def detect() -> Accelerator:
    """The row of the accelerator that torch sees here; the CPU's if none has a row.

    Raises:
        ConfigError: a device's plug-in is installed, and cannot be imported.
    """
    if not torch.accelerator.is_available():
        for known in ROWS:
            _import_plugin(known)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type not in {known.device for known in ROWS}:
        return row("cpu")
    return row(device)


def device_count() -> int:
    """Devices of this machine's accelerator; 0 where there is none."""
    accelerator = detect()
    return 0 if accelerator.device == "cpu" else int(device_module(accelerator).device_count())


def index_of(device: str | None) -> int | None:
    """The index in ``"cuda:1"``, if there is one; ``ConfigError`` if it is no number."""
    name, colon, index = (device or "").partition(":")
    if colon and not index.isdecimal():
        raise ConfigError(f"device is {device!r}; write {name!r}, or {name + ':0'!r} with index.")
    return int(index) if colon else None


def device_of(
    accelerator: Accelerator, index: int | None, local_rank: int | None = None
) -> torch.device:
    """This process's device, made the current one.

    Always with its index: a bare ``xpu`` has sent libraries down the CUDA path.

    Args:
        index: the one that the user wants; by default that of the local rank.
        local_rank: of this process; ``None``, without a launcher: the current device stays.

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
    wanted = local_rank if index is None else index
    if wanted is not None and wanted >= count:
        name, who = accelerator.visible_devices, f"local rank {local_rank}"
        visible = f" ({name}={os.environ[name]})" if name in os.environ else ""
        raise ConfigError(
            f"{who if index is None else 'this process'} wants {accelerator.device}:{wanted}, but "
            f"torch sees {count} here{visible}. Each process needs a device of its own: start "
            f'at most {count} processes on this machine, or pass device="cpu". If the launcher '
            "shows each process only a device of its own, let it show all of them "
            "(srun --gpu-bind=none)."
        )
    if wanted is not None:
        module.set_device(wanted)
    # Not of the wanted index: whichever card a process has, HPU calls it 0.
    return torch.device(accelerator.device, module.current_device())


def device_module(accelerator: Accelerator) -> Any:
    """Return ``torch.get_device_module``'s module, after the import of the device's plug-in.

    Raises:
        ConfigError: torch does not know the device, or its plug-in runs in lazy mode.
    """
    if not _is_available(accelerator.device):
        _import_plugin(accelerator)
    _check_eager(accelerator)
    try:
        return torch.get_device_module(accelerator.device)
    except RuntimeError as error:
        raise ConfigError(
            f"this torch does not know the device {accelerator.device}: it needs "
            f'{accelerator.plugin}, which is not installed here. Install it, or pass device="cpu".'
        ) from error


def imported(plugin: str) -> bool:
    """Import ``plugin``, if it is installed; ``ConfigError`` where that fails. Is it?"""
    if not _is_installed(plugin):
        return False
    try:
        import_module(plugin)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{plugin} is installed, but its import failed ({error}), so its devices cannot be "
            'used. Repair or remove that package, or pass device="cpu".'
        ) from error
    return True


def variables_to_set(accelerator: Accelerator, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment before the plug-in is imported.

    A variable that the user has set keeps its value. One that was renamed gets both names, so
    that plug-ins of any version find it.

    Raises:
        ConfigError: a variable names a file that does not exist, which the plug-in would ignore.
    """
    wanted = {name: value for name, value in accelerator.environment if name not in environ}
    for names in accelerator.renamed:
        given = [name for name in reversed(names) if name in environ]  # the new name counts
        if not given:
            continue
        path = environ[given[0]]
        if not Path(path).is_file():
            raise ConfigError(
                f"{given[0]} names {path}, which is not a file (looked for in {Path.cwd()}). "
                f"{accelerator.plugin} would use its own list instead, without an error. "
                f"Correct the path, or unset {given[0]}."
            )
        wanted |= {name: path for name in names if name not in environ}
    return wanted


def _import_plugin(accelerator: Accelerator) -> None:
    if _is_installed(accelerator.plugin):
        os.environ.update(variables_to_set(accelerator, os.environ))
        imported(accelerator.plugin)


def _check_eager(accelerator: Accelerator) -> None:
    """Refuse lazy mode, which a variable that was set too late leads to, too."""
    module, _, function = accelerator.is_lazy.rpartition(".")
    is_lazy = getattr(sys.modules.get(module), function, None)
    if is_lazy is None or not is_lazy():
        return
    ((name, value),) = accelerator.environment
    raise ConfigError(
        f"{accelerator.plugin} runs in lazy mode, because {name} was not {value} when it was "
        f"imported (now it is {os.environ.get(name, 'not set')}). Lazy mode collects operations "
        "and runs them later, so parameters would not be gathered and freed when the schedule "
        f"says. Set the variable where the process starts ({name}={value} python …), or import "
        f"{accelerator.plugin} after sw.connect(), which sets it."
    )


def _is_installed(plugin: str) -> bool:
    return bool(plugin) and find_spec(plugin.partition(".")[0]) is not None


def _is_available(device: str) -> bool:
    try:
        return bool(torch.get_device_module(device).is_available())
    except RuntimeError:  # torch does not know this kind of device
        return False
