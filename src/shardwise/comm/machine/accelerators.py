"""One row per kind of device: plug-in, collectives, dtypes, variables, alignment, peak FLOP/s.

A vendor's quirk is a cell of this table and not an ``if`` in the engine, which makes generic
device calls only (``torch.accelerator``, ``torch.get_device_module``). A new device is a row.
``shardwise doctor`` prints the table, and what of it is on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.errors import ConfigError, nearest


@dataclass(frozen=True)
class Backend:
    """A library of collectives."""

    name: str  # for ``init_process_group``
    plugin: str = ""  # the module whose import registers it; "" if torch may have it built in


@dataclass(frozen=True)
class Peak:
    """Peak rates that the vendor promises of the devices whose name contains ``name``."""

    name: str
    flops: float  # FLOP/s of dense matrix products in bf16 (fp16 where there is no bf16)
    source: str  # the vendor's document


@dataclass(frozen=True)
class Accelerator:
    """A row."""

    device: str  # torch's name of the device type
    backends: tuple[Backend, ...]  # libraries of collectives, the preferred one first
    alignment: int  # bytes at whose multiples a slot starts
    # Whether to use the backend's AVG, once it has passed a self-test. XCCL has divided twice for
    # some sizes (intel/torch-xpu-ops#3020): there we sum and divide.
    averages: bool
    dtypes: tuple[torch.dtype, ...]  # ``Precision`` refuses others
    visible_devices: str  # the variable that hides devices from a process
    socket_interface: str  # the variable that names the network interface of the collectives
    compile_backend: str = "inductor"  # for ``torch.compile(backend=…)``
    peaks: tuple[Peak, ...] = ()  # by the device's name, the first match counts
    plugin: str = ""  # the module whose import lets torch know the device; "" if torch always does
    package: str = ""  # the distribution that has the plug-in
    # Variables that must have these values when the plug-in is imported.
    environment: tuple[tuple[str, str], ...] = ()
    # Variables that hold the path of a file, by their old and their new name.
    renamed: tuple[tuple[str, str], ...] = ()
    # What bitsandbytes 0.50 has no kernels for: "fp4", "adamw_8bit".
    lacks: tuple[str, ...] = ()
    is_lazy: str = ""  # the plug-in's function: are operations collected, to be run later?
    # Keys of the module's ``memory_stats``: bytes of the device, and in use. HPU's properties are a
    # text, and its ``memory_reserved`` is all of the device.
    memory_stats: tuple[str, ...] = ()


FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
H100 = "nvidia.com/en-us/data-center/h100"
H200 = "nvidia.com/en-us/data-center/h200"
B200 = "NVIDIA Blackwell architecture technical brief"
MAX = "Intel Data Center GPU Max series product brief"
GAUDI = "Intel Gaudi 3 AI Accelerator, Hot Chips 2024"

ROWS = (
    Accelerator(
        "cpu",
        (Backend("gloo"),),
        alignment=64,
        averages=False,
        dtypes=(FP32, BF16, FP16, FP64),
        visible_devices="",
        socket_interface="GLOO_SOCKET_IFNAME",
    ),
    Accelerator(
        "cuda",
        (Backend("nccl"),),
        alignment=128,
        averages=True,
        dtypes=(FP32, BF16, FP16, FP64),
        visible_devices="CUDA_VISIBLE_DEVICES",
        socket_interface="NCCL_SOCKET_IFNAME",
        peaks=(  # NVIDIA's tables show twice as much, with sparsity
            Peak("A100", 312e12, "nvidia.com/en-us/data-center/a100"),
            Peak("H100 NVL", 835.5e12, H100),
            Peak("H100 PCIe", 756e12, H100),
            Peak("H100", 989e12, H100),
            Peak("H200 NVL", 835.5e12, H200),
            Peak("H200", 989e12, H200),
            Peak("GB200", 2500e12, B200),
            Peak("B200", 2250e12, B200),
            Peak("L40S", 362e12, "nvidia.com/en-us/data-center/l40s"),
            Peak("L4", 121e12, "nvidia.com/en-us/data-center/l4"),
            Peak("V100", 125e12, "nvidia.com/en-us/data-center/v100"),
        ),
    ),
    Accelerator(
        "xpu",
        (Backend("xccl"), Backend("ccl", plugin="oneccl_bindings_for_pytorch")),
        alignment=128,
        averages=False,
        dtypes=(FP32, BF16, FP16),  # the Arc series has no fp64
        visible_devices="ZE_AFFINITY_MASK",
        socket_interface="CCL_KVS_IFACE",
        peaks=(Peak("Max 1550", 832e12, MAX), Peak("Max 1100", 352e12, MAX)),
        plugin="intel_extension_for_pytorch",
        package="intel-extension-for-pytorch",
    ),
    Accelerator(
        "hpu",
        (Backend("hccl", plugin="habana_frameworks.torch.distributed.hccl"),),
        alignment=128,
        averages=False,
        dtypes=(FP32, BF16),
        visible_devices="HABANA_VISIBLE_MODULES",
        socket_interface="HCCL_SOCKET_IFNAME",
        compile_backend="hpu_backend",
        peaks=(Peak("GAUDI3", 1835e12, GAUDI), Peak("GAUDI2", 432e12, GAUDI)),
        plugin="habana_frameworks.torch",
        package="habana-torch-plugin",
        environment=(("PT_HPU_LAZY_MODE", "0"),),
        renamed=(
            ("LOWER_LIST", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"),
            ("FP32_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"),
        ),
        lacks=("fp4", "adamw_8bit"),
        is_lazy="habana_frameworks.torch.utils.internal.is_lazy",
        memory_stats=("Limit", "InUse"),
    ),
)


def check_kernels(device: torch.device, wanted: str) -> None:
    """Raises ``ConfigError`` where bitsandbytes lacks ``"fp4"`` or ``"adamw_8bit"`` on a device."""
    if wanted in row(device).lacks:
        other = {"fp4": "nf4", "adamw_8bit": "adamw"}[wanted]
        raise ConfigError(
            f"bitsandbytes has no {wanted} on {device.type}, so no step could be taken: {other} "
            "works there."
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
    backends = {known: " or ".join(b.name for b in rows[known].backends) for known in rows}
    table = ", ".join(f"{known} ({backends[known]})" for known in nearest(name, rows, 99))
    raise ConfigError(
        f"no accelerator is called {name!r}. Known, nearest first: {table}. "
        "Pass one of these as device=, or none to use what this machine has."
    )


def peak(accelerator: Accelerator, name: str) -> Peak | None:
    """The peak of the device called ``name``, as ``get_device_name()`` gives it, if it is known."""
    return next((one for one in accelerator.peaks if one.name.lower() in name.lower()), None)
