"""Laps: seconds of what is measured, in turns, on all ranks at once.

Each round times everything once, so all of it sees the machine in the same states; of each the
median over rounds counts. A lap lasts until the slowest rank is done, as a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from shardwise.comm.protocol import Comm, Label


@dataclass(frozen=True)
class Measured:
    """A subject of timing: ``run``, so many times in a lap, each of which counts as ``per``."""

    run: Callable[[], object]
    times: int = 1
    per: int = 1


def medians(comm: Comm, measured: Mapping[str, Measured], rounds: int) -> dict[str, float]:
    """Seconds of each, the same on every rank. A collective; a first round is left out.

    Args:
        rounds: how many laps each has.
    """
    laps = torch.zeros(len(measured), rounds + 1, dtype=torch.float64)
    for number in range(rounds + 1):
        for place, each in enumerate(measured.values()):
            laps[place, number] = _lap(comm, each)
    label = Label("calibrate", "seconds of laps")
    slowest = comm.gather_rows(laps.flatten().to(comm.device), label).amax(dim=0).cpu()
    middle = slowest.view_as(laps)[:, 1:].quantile(0.5, dim=1)
    return dict(zip(measured, middle.tolist(), strict=True))


def _lap(comm: Comm, measured: Measured) -> float:
    start_together = torch.zeros(1, dtype=torch.uint8, device=comm.device)
    comm.gather_rows(start_together, Label("calibrate", "start of a lap"))
    _synchronize(comm.device)
    start = perf_counter()
    for _ in range(measured.times):
        measured.run()
    _synchronize(comm.device)
    return (perf_counter() - start) / measured.times / measured.per


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
