"""One row per kind of device: what is in the table, and how a row is found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from shardwise.comm.machine.accelerators import ROWS, Accelerator, check_kernels, peak, row
from shardwise.errors import ConfigError


def test_the_table() -> None:
    table = [(r.device, [b.name for b in r.backends], r.alignment, r.averages) for r in ROWS]
    assert table == [
        ("cpu", ["gloo"], 64, False),
        ("cuda", ["nccl"], 128, True),
        ("xpu", ["xccl", "ccl"], 128, False),
        ("hpu", ["hccl"], 128, False),
    ]


def test_the_variables_and_the_compiler_of_each_row() -> None:
    table = [(r.visible_devices, r.socket_interface, r.compile_backend) for r in ROWS]
    assert table == [
        ("", "GLOO_SOCKET_IFNAME", "inductor"),
        ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "inductor"),
        ("ZE_AFFINITY_MASK", "CCL_KVS_IFACE", "inductor"),
        ("HABANA_VISIBLE_MODULES", "HCCL_SOCKET_IFNAME", "hpu_backend"),
    ]


@pytest.mark.parametrize(
    ("device", "name", "flops"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", 989e12),
        ("cuda", "NVIDIA H100 PCIe", 756e12),
        ("cuda", "NVIDIA H200 NVL", 835.5e12),
        ("cuda", "NVIDIA GB200", 2500e12),
        ("cuda", "NVIDIA L40S", 362e12),
        ("xpu", "Intel(R) Data Center GPU Max 1550", 832e12),
        ("hpu", "GAUDI2", 432e12),
        ("cuda", "a device of next year", None),
        ("cpu", "a processor", None),
    ],
)
def test_the_peak_is_found_by_the_devices_name(device: str, name: str, flops: float | None) -> None:
    known = peak(row(device), name)
    assert (known and known.flops) == flops
    assert all(one.source for one in row(device).peaks)


@pytest.mark.parametrize("known", ROWS, ids=lambda known: known.device)
def test_the_documents_table_is_this_one(known: Accelerator) -> None:
    page = Path(__file__).parents[3] / "docs" / "accelerators.md"
    start = f"| `{known.device}` |"
    line = next(line for line in page.read_text("utf-8").splitlines() if line.startswith(start))
    words = [*(backend.name for backend in known.backends), known.socket_interface]
    words += [backend.plugin for backend in known.backends]
    words += [known.plugin, known.visible_devices, known.compile_backend]
    words += [", ".join(str(dtype).removeprefix("torch.") for dtype in known.dtypes)]
    assert [word for word in words if word not in line] == []
    assert ("after a self-test" in line) is known.averages


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1)])
def test_a_row_is_found_by_name_or_device(device: str | torch.device) -> None:
    assert row(device).device == "cuda"


def test_an_unknown_device_lists_the_rows_nearest_first() -> None:
    with pytest.raises(ConfigError) as error:
        row("hpus")
    text = str(error.value)
    assert text.startswith("no accelerator is called 'hpus'. Known, nearest first: hpu (hccl), ")
    for known in ("cpu (gloo)", "cuda (nccl)", "xpu (xccl or ccl)"):
        assert known in text


def test_what_a_device_lacks_is_what_bitsandbytes_has_no_kernel_for() -> None:
    spec = find_spec("bitsandbytes")
    assert spec is not None
    assert spec.origin is not None
    for known in ROWS:
        files = Path(spec.origin).parent.joinpath("backends", known.device).glob("*.py")
        text = "".join(file.read_text("utf-8") for file in files)
        assert text
        steps = "optimizer_update_8bit_blockwise" in text
        assert ("adamw_8bit" in known.lacks) is not steps, known.device
        assert ("fp4" in known.lacks) is ("only supports quant_type 'nf4'" in text), known.device


def test_a_kernel_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"no adamw_8bit on hpu, .*: adamw works there"):
        check_kernels(torch.device("hpu"), "adamw_8bit")
    with pytest.raises(ConfigError, match="nf4 works there"):
        check_kernels(torch.device("hpu"), "fp4")
    check_kernels(torch.device("hpu"), "nf4")
    check_kernels(torch.device("cpu"), "adamw_8bit")
