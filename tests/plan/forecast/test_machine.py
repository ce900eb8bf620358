"""The table of machines: every number has a source, and a name that is not there a near one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.forecast.machine import known

WANTED = (
    *("H100 SXM", "H100 PCIe", "H200", "A100 40GB", "A100 80GB", "B200", "GB200", "L40S", "L4"),
    *("RTX 3090", "RTX 4090", "MI250X", "MI300X", "Gaudi 2", "Gaudi 3", "Max 1550", "TPU v5e"),
)
LINKS = (
    *("NVLink 3", "NVLink 4", "NVLink 5", "PCIe 3", "PCIe 4", "PCIe 5", "8 x NDR InfiniBand"),
    *("EFA", "10 Gb Ethernet", "100 Gb Ethernet", "1 Gb Ethernet"),
)


def test_each_entry_has_a_source_and_numbers_that_can_be() -> None:
    table = known()
    assert {*WANTED} <= {*table.accelerators}
    assert {*LINKS} <= {*table.links}
    for accelerator in table.accelerators.values():
        assert accelerator.source
        assert 0 < accelerator.products <= accelerator.best <= 1
        assert 0 < accelerator.attention < 1
        assert accelerator.memory > 1e9
        table.machine(accelerator.name)  # its links are there, too
    assert all(link.source and link.bandwidth > 0 for link in table.links.values())


@pytest.mark.parametrize("name", ["H100", "h100-80gb", "H100 SXM"])
def test_names_are_told_apart_by_letters_and_digits_alone(name: str) -> None:
    assert known().accelerator(name).name == "H100 SXM"


def test_an_unknown_name_is_one_sentence_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"called 'H1000', .* The nearest is 'H100'\.$"):
        known().accelerator("H1000")
    nearest = r"The nearest is 'NVLink 4'; a rate such as 400Gb/s serves, too\.$"
    with pytest.raises(ConfigError, match=rf"called 'NVLink 44', .* {nearest}"):
        known().link("NVLink 44")


def test_forecasts_have_errors_by_what_is_known() -> None:
    errors = known().errors
    assert {*errors} == {"seen", "calibrated", "unseen", "memory", "process"}
    assert all(0 < error.middle < error.most < 1 for error in errors.values())


def test_a_link_may_be_a_rate() -> None:
    link = known().link("400 Gb/s")
    assert link.bandwidth == pytest.approx(45e9)
    assert known().link("1,600Gbps").bandwidth == pytest.approx(4 * link.bandwidth)
    assert known().link("400gbit/s") == link
    assert link.name == "400 Gb/s"


def test_a_rate_in_bytes_is_eight_times_one_in_bits() -> None:
    assert known().link("50GB/s") == known().link("50 GBps") == known().link("400 Gb/s")
    with pytest.raises(ConfigError, match="no link is called '50GBPS'"):  # either may be meant
        known().link("50GBPS")


def test_a_precision_that_an_accelerator_lacks_is_an_error_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"A100 80GB has no products in fp8, .* fp32, bf16"):
        known().accelerator("A100").peak("fp8")


def test_a_file_adds_entries_and_replaces_those_of_the_same_name(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text('[links."PCIe 4"]\nbandwidth = 1e9\nlatency = 1e-3\nsource = "here"\n')
    table = known().with_file(file)
    assert table.link("PCIe 4").bandwidth == 1e9
    assert table.link("PCIe 5") is known().link("PCIe 5")
    assert table.machine("L4").inside.source == "here"
