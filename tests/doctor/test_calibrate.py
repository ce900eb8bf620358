"""A calibration measures this machine and writes an entry that a forecast can ask for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from shardwise.doctor import calibrate as calibration
from shardwise.doctor.calibrate import calibrate
from shardwise.launch.machine_memory import machine_memory
from shardwise.plan.forecast.machine import known
from tests.ranks import run_threads


def test_what_is_measured_is_an_entry_of_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    monkeypatch.setattr(calibration, "SENT", (2**10, 2**20))
    monkeypatch.setattr(calibration, "SIZES", calibration.SIZES[:3])
    monkeypatch.setattr(calibration, "WEIGHTS", 2**20)
    monkeypatch.setattr(calibration, "ELEMENTWISE", (64, 64, 2))
    file = tmp_path / "here.toml"
    file.write_text(run_threads(2, partial(calibrate, name='A "desk"'))[0], "utf-8")
    machine = known().with_file(file).machine('A "desk"')
    accelerator = machine.accelerator
    assert accelerator.waits
    assert machine.per_host == 2
    assert 1e8 < accelerator.peak("fp32") < 1e14
    assert 1e7 < accelerator.bandwidth < 1e13
    assert 1e-7 < accelerator.kernel < 1e-2
    assert 0 < accelerator.attention < 100
    assert accelerator.short is not None
    assert accelerator.narrow is not None
    engine = accelerator.step, accelerator.unit, accelerator.parameter
    assert all(0 <= seconds < 1 for seconds in engine)
    assert 5e7 < accelerator.reserved < 5e9  # Python and torch; this process has run other tests
    assert accelerator.kept == calibration.KEPT
    assert accelerator.host_memory == 0  # a CPU's own memory is the host's
    assert 0 <= accelerator.recomputing < 5e8  # of torch's compiler, unless it was there
    assert 1e6 < machine.inside.bandwidth < 1e12


def test_beside_an_accelerator_is_this_host_s_memory() -> None:
    """Without it a row has the 1 TB of a usual host, and what is offloaded seems to fit."""
    assert calibration._beside(torch.device("cuda")) == machine_memory(pinned=True)
    assert calibration._beside(torch.device("cpu")) == 0


def test_an_edge_is_what_makes_small_sizes_take_longer() -> None:
    seconds = {size: 3e-12 * (1 + 20 / size) for size in (64, 16)}
    assert calibration._edge((seconds[64], 64), (seconds[16], 16)) == pytest.approx(20)
    assert calibration._edge((seconds[16], 64), (seconds[64], 16)) == 0  # noise: it took no longer


def test_what_a_gradient_and_a_unit_take_in_the_engine_is_what_it_adds() -> None:
    step, unit, parameter, latency = 5e-4, 4e-4, 2e-5, 1e-4
    few, _ = calibration.LAYERS
    seconds = {f"plain {layers}": 1e-4 * layers for layers in calibration.LAYERS}
    for layers in calibration.LAYERS:
        gradients = layers * calibration.PARAMETERS
        added = step + unit + latency + gradients * parameter
        seconds[f"engine {layers}"] = seconds[f"plain {layers}"] + added
    seconds["units"] = seconds[f"engine {few}"] + (few - 1) * (unit + latency)
    expected = {"step": step, "unit": unit, "parameter": parameter}
    assert calibration._engine(seconds, latency, 1e-5) == pytest.approx(expected)
    measured = unit + latency
    assert calibration._engine(seconds, 2 * measured, 1e-5)["unit"] == pytest.approx(measured / 5)
    seconds["units"] = seconds[f"engine {few}"] / 2  # noise: it took less
    assert calibration._engine(seconds, latency, 1e-5)["unit"] == 2e-5
