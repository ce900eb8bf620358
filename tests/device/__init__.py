"""A device that torch takes for a real one, on this machine: its own type, allocator and streams.

    device.cpp  the device, as torch's interface for devices outside torch asks for it
    ``see()``   makes torch know the device ``mock``, and shardwise its row

A tensor of the host among the device's, or a collective of host memory, is an error here as on a
GPU. What a stream writes is there when that stream is waited for, and no sooner, so what does not
wait computes with what was there before. A collective reads when it is issued, which is early:
``tests/recorder`` sees a write that should wait for it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.utils.backend_registration import rename_privateuse1_backend

from shardwise.comm.machine import accelerators, devices
from shardwise.comm.machine.accelerators import BF16, FP16, FP32, FP64, Accelerator, Backend

__all__ = ["DEVICE", "build", "see"]

DEVICE = "mock"
COUNT, MEMORY = 8, 8 << 30  # as in device.cpp
_TORCH = Path(torch.__file__).parent
ROW = Accelerator(
    DEVICE,
    (Backend("mockccl"),),
    alignment=128,
    averages=False,
    dtypes=(FP32, BF16, FP16, FP64),
    visible_devices="MOCK_VISIBLE_DEVICES",
    socket_interface="GLOO_SOCKET_IFNAME",
)


def build(folder: Path) -> Path:
    """Compile the device, and return its library. Takes half a minute."""
    library = folder / "mock_device.so"
    places = (_TORCH / "include", _TORCH / "include/torch/csrc/api/include")
    headers = [f"-isystem{place}" for place in (*places, sysconfig.get_paths()["include"])]
    libraries = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    source = Path(__file__).with_name("device.cpp")
    subprocess.run(
        [
            *("c++", "-std=c++20", "-O0", "-shared", "-fPIC", *headers, str(source)),
            *("-o", str(library), f"-L{_TORCH / 'lib'}", *libraries),
        ],
        check=True,
    )
    return library


def see(library: Path) -> None:
    """Let torch and shardwise know the device, in this process and for good."""
    spec = spec_from_file_location("mock_device", library)
    assert spec is not None
    assert spec.loader is not None
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _module(native))

    def collectives(store: Store, rank: int, size: int, timeout: Any) -> Any:
        return native.over_gloo(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("mockccl", collectives, devices=[DEVICE])
    for module in (accelerators, devices):
        setattr(module, "ROWS", (*accelerators.ROWS, ROW))  # noqa: B010 - of another length


def _module(native: Any) -> Any:
    """``torch.mock``: what there is in ``torch.cuda`` as well."""
    module: Any = ModuleType("torch.mock")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: COUNT
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.get_device_name = lambda _=None: "Mock"
    module.get_device_properties = lambda _=None: SimpleNamespace(total_memory=MEMORY, name="Mock")
    module.memory_allocated = lambda _=None: native.in_use()
    module.memory_reserved = module.max_memory_allocated = lambda _=None: native.peak()
    module.reset_peak_memory_stats = lambda _=None: native.reset_peak()
    module.synchronize, module.empty_cache = lambda _=None: native.synchronize(), lambda: None
    module._is_in_bad_fork = lambda: False
    generators = [native.generator(index) for index in range(COUNT)]
    module.manual_seed_all = lambda seed: [one.manual_seed(seed) for one in generators]
    module.get_rng_state = lambda device=DEVICE: native.generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=DEVICE: native.generator(_index(device)).set_state(
        state
    )
    module.Stream, module.Event, module.stream = torch.Stream, torch.Event, _OnStream
    module.current_stream = torch.accelerator.current_stream
    module.get_amp_supported_dtype = lambda: [FP16, BF16]
    sys.modules["torch.mock"] = module
    return module


def _index(device: Any) -> int:
    index: int | None = device if isinstance(device, int) else torch.device(device).index
    return -1 if index is None else index


class _OnStream:
    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self.stream or self.before)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self.before)
