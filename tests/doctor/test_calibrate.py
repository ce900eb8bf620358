"""A calibration measures this machine and writes an entry that a forecast can ask for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from shardwise.doctor import calibrate as calibration
from shardwise.doctor.calibrate import calibrate
from shardwise.plan.forecast.machine import known
from tests.ranks import run_threads


def test_what_is_measured_is_an_entry_of_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibration, "LAPS", 2)
    monkeypatch.setattr(calibration, "SENT", (2**10, 2**20))
    monkeypatch.setattr(calibration, "SIZES", calibration.SIZES[:3])
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
    assert 5e7 < accelerator.reserved < 5e9  # Python and torch; this process has run other tests
    assert accelerator.kept == calibration.KEPT
    assert 0 <= accelerator.recomputing < 5e8  # of torch's compiler, unless it was there
    assert 1e6 < machine.inside.bandwidth < 1e12
