"""One row per kind of device, and only generic device calls: a stand-in device shows both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwise.accelerators import ROWS, detect, device_of, row
from shardwise.errors import ConfigError


def test_the_table() -> None:
    table = [(r.device, [b.name for b in r.backends], r.alignment, r.averages) for r in ROWS]
    assert table == [
        ("cpu", ["gloo"], 64, False),
        ("cuda", ["nccl"], 128, True),
        ("xpu", ["xccl", "ccl"], 128, False),
        ("hpu", ["hccl"], 128, False),
    ]


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


def see(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    found = torch.device(device) if device else None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)


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
        is_available=lambda: True, device_count=lambda: 4, set_device=made_current.append
    )
    asked: list[str] = []

    def get_device_module(device: str) -> SimpleNamespace:
        asked.append(device)
        return module

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    assert device_of(row("xpu"), 3) == torch.device("xpu", 3)
    assert (asked, made_current) == (["xpu"] * 2, [3])
    with pytest.raises(ConfigError, match="local rank 4 wants xpu:4, but torch sees 4 here"):
        device_of(row("xpu"), 4)
    assert made_current == [3]


def test_cpu_ranks_share_one_device() -> None:
    assert device_of(row("cpu"), 7) == torch.device("cpu")
