"""Rules of thumb by which strategies are chosen without computing: what each says of a machine.

They are those of PrimeIntellect's guide to FSDP over several machines ("Adapting the FSDP
ShardingStrategy"). A plan shows them beside what it computed, so that who follows a rule sees where
the rule and the numbers part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

FAST_INSIDE = ("nvlink", "nvswitch", "pcie 5")
SMALL, MEDIUM = 1e9, 7e9  # parameters
SLOW = 100e9  # bits per second between hosts


class Situation(NamedTuple):
    """The facts that the rules ask for."""

    parameters: int
    inside: str  # the link between devices of a host, such as "NVSwitch"
    between: str | None  # the link between hosts, such as "HDR InfiniBand"; None = one host
    bits_per_second: float  # of that link, for one host


class Advice(NamedTuple):
    """One rule: the strategy, whether it says to take it, and the reason."""

    strategy: str
    takes: bool
    why: str


def advise(situation: Situation) -> Iterator[Advice]:
    """Yield what each rule says that applies to the situation."""
    billions = f"{_count(situation.parameters)} parameters"
    if situation.parameters < SMALL:
        yield Advice("no_shard", True, f"{billions} are below 1 B")
    else:
        yield Advice("no_shard", False, f"{billions} are not below 1 B")
    if not situation.inside.lower().startswith(FAST_INSIDE):
        yield Advice("shard_grad_op", False, f"{situation.inside} is no NVLink, NVSwitch or PCIe 5")
    if not situation.inside.lower().startswith("nvswitch"):
        yield Advice("full_shard", False, f"{situation.inside} is no NVSwitch")
    if situation.between is not None:
        yield from _between_hosts(situation, situation.between, billions)


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            digits = ".2g" if number < 10 * size else ".0f"
            return f"{number / size:{digits}} {letter}"
    return f"{number:,}"


def _between_hosts(situation: Situation, between: str, billions: str) -> Iterator[Advice]:
    if situation.bits_per_second < SLOW:
        speed = f"{situation.bits_per_second / 1e9:g} Gb/s that hosts reach are below 100"
        yield Advice("diloco", True, speed)
    if "infiniband" not in between.lower():
        yield Advice("hybrid_shard", True, f"{between} is no InfiniBand")
    elif situation.parameters < MEDIUM:
        yield Advice("hybrid_shard", True, f"{billions} are below 7 B")
    else:
        yield Advice("hybrid_shard", False, f"InfiniBand, and {billions} are not below 7 B")
