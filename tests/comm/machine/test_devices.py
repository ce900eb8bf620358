"""Only generic device calls, and plug-ins that find their variables: stand-ins show both."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.machine import devices
from shardwise.comm.machine.accelerators import Accelerator, row
from shardwise.comm.machine.connect import _current_device, connect
from shardwise.comm.machine.devices import (
    detect,
    device_count,
    device_module,
    device_of,
    index_of,
    variables_to_set,
)
from shardwise.comm.transports.backend import BackendComm
from shardwise.errors import ConfigError
from tests.plugins import write_plugins
from tests.ranks import free_port, outcomes_of

NEW, OLD = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "LOWER_LIST"


def see(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    present = torch.device(device) if device else None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: present is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: present)


@pytest.mark.parametrize(
    ("device", "expected"), [(None, "cpu"), ("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu")]
)
def test_what_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, device: str | None, expected: str
) -> None:
    see(monkeypatch, device)
    assert detect().device == expected


def test_each_process_gets_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[int] = []
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 4,
        set_device=made_current.append,
        current_device=lambda: made_current[-1],
    )
    looked_up: list[str] = []

    def get_device_module(device: str) -> SimpleNamespace:
        looked_up.append(device)
        return module

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1,2,3")
    assert device_of(row("xpu"), None, 3) == torch.device("xpu", 3)
    assert (looked_up, made_current) == (["xpu"] * 2, [3])
    with pytest.raises(ConfigError) as error:
        device_of(row("xpu"), None, 4)
    text = "local rank 4 wants xpu:4, but torch sees 4 here (ZE_AFFINITY_MASK=0,1,2,3). Each"
    assert str(error.value).startswith(text)
    assert made_current == [3]


@pytest.mark.parametrize(
    ("passed", "local_rank", "expected"),
    [
        ("xpu", None, "xpu:3"),  # the current one, which the user has set
        ("xpu", 0, "xpu:0"),
        ("xpu:1", None, "xpu:1"),
        ("xpu:1", 0, "xpu:1"),
    ],
)
def test_an_index_is_honoured_and_without_a_launcher_the_current_device_stays(
    monkeypatch: pytest.MonkeyPatch, passed: str, local_rank: int | None, expected: str
) -> None:
    made_current: list[int] = [3]
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 4,
        current_device=lambda: made_current[-1],
        set_device=made_current.append,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert device_of(row("xpu"), index_of(passed), local_rank) == torch.device(expected)
    assert made_current[-1] == torch.device(expected).index
    with pytest.raises(ConfigError, match="this process wants xpu:4, but torch sees 4 here"):
        device_of(row("xpu"), 4, local_rank)


def test_an_index_is_a_number() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda:one'; write 'cuda', or 'cuda:0' with"):
        connect("cuda:one")


def test_cpu_ranks_share_one_device() -> None:
    assert device_of(row("cpu"), None, 7) == torch.device("cpu")


def test_devices_are_counted_and_the_cpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    see(monkeypatch, "xpu")
    assert device_count() == 3
    see(monkeypatch, None)
    assert device_count() == 0


def test_a_device_of_which_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with pytest.raises(ConfigError, match="torch sees no xpu device on this machine"):
        device_of(row("xpu"), None, 0)


def test_a_group_that_exists_computes_on_the_current_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(is_available=lambda: True, current_device=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    see(monkeypatch, "xpu")
    group: Any = "xccl"
    assert _current_device(group, None) == torch.device("xpu", 2)
    group = "gloo"
    assert _current_device(group, None) == torch.device("cpu")
    assert _current_device(group, "xpu") == torch.device("xpu", 2)
    assert _current_device(group, "xpu:2") == torch.device("xpu", 2)
    with pytest.raises(ConfigError) as error:
        _current_device(group, "xpu:1")
    assert str(error.value) == (
        "the device is xpu:1, and the current one is xpu:2, for which the process group was made. "
        "Call torch.xpu.set_device(1) before the group is made, or leave the index out."
    )


def test_a_plug_in_is_imported_only_for_a_device_that_torch_does_not_see_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_available = True
    module = SimpleNamespace(is_available=lambda: is_available)
    imported: list[Accelerator] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(devices, "_import_plugin", imported.append)
    assert device_module(row("xpu")) is module
    assert imported == []
    is_available = False
    assert device_module(row("xpu")) is module
    assert imported == [row("xpu")]


def test_without_its_plug_in_no_variable_is_set_for_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    see(monkeypatch, None)
    assert detect().device == "cpu"
    assert "PT_HPU_LAZY_MODE" not in os.environ


# --- what a plug-in finds in the environment -------------------------------------------------


@pytest.mark.parametrize(
    ("device", "environ", "expected"),
    [
        ("cpu", {}, {}),
        ("cuda", {"LOWER_LIST": "nobody's"}, {}),
        ("xpu", {}, {}),
        ("hpu", {}, {"PT_HPU_LAZY_MODE": "0"}),
        ("hpu", {"PT_HPU_LAZY_MODE": "1"}, {}),  # the user's word; what it leads to is refused
        ("hpu", {OLD: "ops.txt"}, {"PT_HPU_LAZY_MODE": "0", NEW: "ops.txt"}),
        ("hpu", {NEW: "ops.txt"}, {"PT_HPU_LAZY_MODE": "0", OLD: "ops.txt"}),
        ("hpu", {NEW: "ops.txt", OLD: "old.txt"}, {"PT_HPU_LAZY_MODE": "0"}),
    ],
)
def test_the_variables_that_each_row_sets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    environ: dict[str, str],
    expected: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ops.txt").write_text("addmm\n")
    assert variables_to_set(row(device), environ) == expected


def test_a_list_of_operations_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"LOWER_LIST names ops_bf16.txt, which is not a file"):
        variables_to_set(row("hpu"), {OLD: "ops_bf16.txt"})


def test_a_flag_that_was_set_too_late_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that imports the plug-in first and sets the variable afterwards."""
    internal = ModuleType("internal")
    internal.is_lazy = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.internal", internal)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    with pytest.raises(ConfigError) as error:
        device_module(row("hpu"))
    assert str(error.value) == (
        "habana_frameworks.torch runs in lazy mode, because PT_HPU_LAZY_MODE was not 0 when it was "
        "imported (now it is 0). Lazy mode collects operations and runs them later, so parameters "
        "would not be gathered and freed when the schedule says. Set the variable where the "
        "process starts (PT_HPU_LAZY_MODE=0 python …), or import habana_frameworks.torch after "
        "sw.connect(), which sets it."
    )


# --- the whole way, with gloo behind the vendors' names --------------------------------------


def connect_to(
    rank: int, world: int, folder: str, port: int, device: str, passed: str | None
) -> list[object]:
    """What a rank sees inside ``connect(passed)``, and what is left after an error in it."""
    plugins = Path(folder) / str(rank)
    write_plugins(plugins, device)
    sys.path.insert(0, str(plugins))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    facts: list[object] = []
    initialise = dist.init_process_group

    def spy(name: str, **options: object) -> None:
        facts.append(options["device_id"])
        initialise(name, **options)  # type: ignore[arg-type]

    dist.init_process_group = spy  # type: ignore[assignment]
    try:
        with connect(passed) as comm:
            comm.agree({"layout": "a1b2"})
            assert type(comm) is BackendComm
            facts += [comm.device, dist.get_backend(), os.environ.get("PT_HPU_LAZY_MODE")]
            raise KeyError
    except KeyError:
        return [*map(str, facts), dist.is_initialized()]


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("device", "passed", "backend", "lazy_mode"),
    [("hpu", None, "hccl", "0"), ("xpu", "xpu", "ccl", "None")],
)
def test_plug_ins_are_imported_and_every_call_has_the_device_of_the_local_rank(
    device: str, passed: str | None, backend: str, lazy_mode: str
) -> None:
    outcomes = outcomes_of(2, connect_to, free_port(), device, passed)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for rank, outcome in enumerate(outcomes):
        here = f"{device}:{rank if device == 'xpu' else 0}"  # Gaudi's card is 0 to each process
        assert outcome.value == [here, here, backend, lazy_mode, False]
