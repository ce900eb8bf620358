"""Modules of two vendors' devices: what their documents have, of what programs here call.

``Xpu``: docs.pytorch.org/docs/stable/xpu.html. ``Hpu``: ``habana_frameworks.torch.hpu`` of
docs.habana.ai, "Python Packages", as HabanaAI/gaudi-pytorch-bridge 1.19 has it in
``python_packages/habana_frameworks/torch/hpu`` and ``backend/habana_device/HPUGuardImpl.h``. Any
other name raises, and an index that the vendor refuses is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor

from tests.recorder.device import Device

__all__ = ["Hpu", "Xpu", "see", "streams_of"]

GIB = 1 << 30
Index = torch.device | str | int | None


class Xpu:
    """``torch.xpu``. Final but for ``Hpu``."""

    name, model = "xpu", "Intel(R) Data Center GPU Max 1550"
    total = 128 * GIB

    def __init__(self, count: int = 2) -> None:
        self._count, self._current = count, 0
        self._generator = torch.Generator()
        self._memory: Callable[[], int] = int

    def __getattr__(self, name: str) -> NoReturn:
        raise NotImplementedError(f"torch.{self.name}.{name} is not documented, or not needed yet")

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Index) -> None:
        self._current = self._index(device)

    def synchronize(self, device: Index = None) -> None:
        self._index(device)

    def get_device_name(self, device: Index = None) -> str:
        self._index(device)
        return self.model

    def get_device_properties(self, device: Index = None) -> Any:
        self._index(device)
        return SimpleNamespace(name=self.model, total_memory=self.total)

    def get_rng_state(self, device: Index = "xpu") -> Tensor:
        self._index(device)
        return self._generator.get_state()

    def set_rng_state(self, new_state: Tensor, device: Index = "xpu") -> None:
        self._index(device)
        self._generator.set_state(new_state)

    def memory_allocated(self, device: Index = None) -> int:
        self._index(device)
        return self._memory()

    def memory_reserved(self, device: Index = None) -> int:
        return -(-self.memory_allocated(device) // (2 << 20)) * (2 << 20)

    def max_memory_allocated(self, device: Index = None) -> int:
        return self.memory_allocated(device)

    def reset_peak_memory_stats(self, device: Index = None) -> None:
        self._index(device)

    def _index(self, device: Index) -> int:
        named = f"{self.name}:{device}" if isinstance(device, int) else device
        place = torch.device(named or self.name)
        index: int | None = place.index
        index = self.current_device() if index is None else index
        if place.type != self.name or not 0 <= index < self._count:
            raise ValueError(f"{device} is no device of {self.name}")
        return index


class Hpu(Xpu):
    """``torch.hpu``: a process has one device, number 0, whichever card ``set_device`` chose."""

    name, model = "hpu", "GAUDI2"
    total = 96 * GIB

    def current_device(self) -> int:
        return 0

    def synchronize(self) -> None:  # type: ignore[override]
        """Of no device."""

    def get_device_properties(self, device: Index = None) -> str:
        self._index(device)
        return f"(sramBaseAddress=0, dramSize={self.total}, dramEnabled=1)"

    def get_rng_state(self, device: Index = "hpu") -> Tensor:
        self._first(device)
        return super().get_rng_state(device)

    def set_rng_state(self, new_state: Tensor, device: Index = "hpu") -> None:
        self._first(device)
        super().set_rng_state(new_state, device)

    def memory_stats(self, device: Index = None) -> dict[str, int]:
        used = self.memory_allocated(device)
        return {"Limit": self.total, "InUse": used, "MaxInUse": used}

    def memory_reserved(self, device: Index = None) -> int:
        """All of the device."""
        return self.memory_stats(device)["Limit"]

    def _first(self, device: Index) -> None:
        if self._index(device) != 0:
            raise RuntimeError(f"hpu supports only device 0, not {device}")


def see(module: Xpu) -> None:
    """Let torch see the device, for the rest of this process."""
    known: Any = torch.get_device_module

    def get_device_module(device: Index = None) -> Any:
        named = str(device or module.name).partition(":")[0]
        return module if named == module.name else known(device)

    def current_accelerator(check_available: bool = False) -> torch.device:
        return torch.device(module.name)

    torch.get_device_module = get_device_module  # type: ignore[assignment]
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = current_accelerator


@contextmanager
def streams_of(module: Xpu) -> Iterator[Device]:
    """Torch's streams and events are a recorder's, and memory is counted."""
    device = Device(place=torch.device(module.name, module.current_device()))

    def allocated() -> int:
        lives = list(device.accesses.lives.values())
        return sum(life.nbytes for life in lives if not life.is_host)

    class Timed:
        """``torch.Event``."""

        def __init__(self, place: torch.device, enable_timing: bool) -> None:
            assert (place, enable_timing) == (device.place, True)

        def record(self) -> None:
            self._event = device.current_stream().record_event()

        def synchronize(self) -> None:
            self._event.synchronize()

        def elapsed_time(self, end: Timed) -> float:
            assert device.host.clock.items() >= end._event.clock.items()  # it has been waited for
            return 1.0

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "_memory", allocated))
        stack.enter_context(mock.patch.object(torch, "Event", Timed))
        stack.enter_context(device.installed())
        yield device
