"""Rules of thumb of the guide to FSDP over several machines."""

from __future__ import annotations

import pytest

from shardwise.plan.forecast.advice import Situation, advise

BILLION = 1_000_000_000


def verdicts(*situation: object) -> dict[str, bool]:
    return {advice.strategy: advice.takes for advice in advise(Situation(*situation))}  # type: ignore[arg-type]


@pytest.mark.parametrize(("billions", "takes"), [(0.9, True), (1.1, False)])
def test_no_shard_is_for_models_below_a_billion(billions: float, takes: bool) -> None:
    assert verdicts(int(billions * BILLION), "nvswitch", None, 0)["no_shard"] is takes


@pytest.mark.parametrize(
    ("inside", "avoided"),
    [
        ("NVSwitch", set()),
        ("NVLink", {"full_shard"}),
        ("PCIe 5", {"full_shard"}),
        ("PCIe 4", {"full_shard", "shard_grad_op"}),
    ],
)
def test_sharding_asks_for_fast_links_in_a_host(inside: str, avoided: set[str]) -> None:
    rules = verdicts(8 * BILLION, inside, None, 0)
    assert {strategy for strategy, takes in rules.items() if not takes} == {"no_shard", *avoided}


@pytest.mark.parametrize(
    ("parameters", "written"),
    [(8_030_000_000, "8 B"), (2_614_000_000, "2.6 B"), (124_439_808, "124 M"), (999, "999")],
)
def test_parameters_are_counted_without_exponents(parameters: int, written: str) -> None:
    first = next(advise(Situation(parameters, "nvswitch", None, 0)))
    assert first.why.startswith(f"{written} parameters")


@pytest.mark.parametrize(
    ("billions", "between", "takes"),
    [(8, "HDR InfiniBand", False), (6, "HDR InfiniBand", True), (8, "100 Gb Ethernet", True)],
)
def test_hybrids_are_for_small_models_or_without_infiniband(
    billions: int, between: str, takes: bool
) -> None:
    assert verdicts(billions * BILLION, "nvswitch", between, 400e9)["hybrid_shard"] is takes


def test_below_100_gigabits_hosts_should_meet_rarely() -> None:
    assert verdicts(8 * BILLION, "nvswitch", "ethernet", 99e9)["diloco"]
    assert "diloco" not in verdicts(8 * BILLION, "nvswitch", "ethernet", 100e9)


def test_a_link_is_called_by_the_name_that_the_table_has() -> None:
    rules = advise(Situation(8 * BILLION, "PCIe 4", "100 Gb Ethernet", 90e9))
    why = {advice.strategy: advice.why for advice in rules}
    assert why["shard_grad_op"] == "PCIe 4 is no NVLink, NVSwitch or PCIe 5"
    assert why["hybrid_shard"] == "100 Gb Ethernet is no InfiniBand"
