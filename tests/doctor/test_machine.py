"""What doctor reports: versions, devices of each kind, variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from shardwise.comm.machine.accelerators import ROWS
from shardwise.doctor.machine import Package, devices, packages, variables
from shardwise.torch_internals.self_tests import NEWEST_TESTED
from tests.plugins import write_plugins


@pytest.mark.parametrize(
    ("installed", "needed", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("2.11", ">=2.11", True),
        ("", ">=8.1", False),
        ("1.19.0", "", True),
    ],
)
def test_a_version_fits_or_does_not(installed: str, needed: str, fits: bool) -> None:
    assert Package("one", installed, needed).fits is fits


def test_a_package_of_an_extra_may_be_absent_but_not_too_old() -> None:
    assert Package("peft", "", ">=0.21", extra="peft").fits
    assert not Package("peft", "0.20", ">=0.21", extra="peft").fits


def test_what_is_installed_here_fits() -> None:
    known = {one.name: one for one in packages()}
    assert known["torch"].needed == ">=2.11"
    assert (known["peft"].needed, known["peft"].extra) == (">=0.21", "peft")
    assert {"transformers", "bitsandbytes", "datasets"} <= set(known)
    # The wheel's own record may leave out what it was built for, such as +cu132.
    assert torch.__version__.startswith(known["torch"].installed)
    assert known["torch"].tested == NEWEST_TESTED
    assert [one.name for one in known.values() if not one.fits] == []


def test_every_row_says_what_it_is_that_is_missing() -> None:
    by_name = {known.device: devices(known.device) for known in ROWS}
    assert by_name["cpu"].backend == "gloo"
    assert by_name["cpu"].problem == ""
    assert "it needs habana_frameworks.torch" in by_name["hpu"].problem
    assert by_name["xpu"].names == ()


def test_a_broken_plug_in_is_a_line_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugins(tmp_path, "hpu")
    (tmp_path / "habana_frameworks/torch/__init__.py").write_text("import libSynapse")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert "its import failed (No module named 'libSynapse')" in devices("hpu").problem
    for name in [name for name in sys.modules if name.startswith("habana_frameworks")]:
        del sys.modules[name]


def test_variables_are_shown_set_or_not() -> None:
    shown = {one.name: one for one in variables({"PT_HPU_LAZY_MODE": "1"})}
    assert shown["PT_HPU_LAZY_MODE"].value == "1"
    assert shown["PT_HPU_LAZY_MODE"].meaning.startswith("must be 0 when habana_frameworks.torch")
    assert shown["CUDA_VISIBLE_DEVICES"].value is None
