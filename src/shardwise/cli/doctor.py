"""``shardwise doctor``: what is here; with ``--conformance``, whether the engine is right on it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from shardwise.checkpoint.collectives import all_gather_object
from shardwise.cli.tables import table
from shardwise.comm.machine.accelerators import ROWS, Accelerator, peak, row
from shardwise.comm.machine.connect import connect, load_backend
from shardwise.comm.machine.devices import detect, device_module
from shardwise.comm.machine.endpoint import probe
from shardwise.comm.machine.environment import read_launch
from shardwise.comm.protocol import Comm
from shardwise.config.precision import dtype_name
from shardwise.config.version import __version__
from shardwise.doctor.conformance import CHECKS, Result, conform
from shardwise.doctor.machine import Devices, Package, device_name, devices, packages, variables
from shardwise.doctor.steps import StepCost, step_costs
from shardwise.errors import ShardwiseError
from shardwise.launch.error_files import told_by_launcher
from shardwise.launch.launcher import exit_with_launcher, start
from shardwise.plan.printed import size

CPU_RANKS = 2  # of the conformance suite, where there is no accelerator
RESULT = Path("shardwise-conformance.json")  # and a page of text beside it


def run_doctor(
    *, conformance: bool, device: str | None, nproc: int | None, output: Path | None
) -> None:
    """``shardwise doctor``; raises where something is missing, or not right."""
    if not conformance:
        _look(device, output)
        return
    if read_launch(os.environ) is None and (ranks := nproc or _ranks(device)) > 1:
        given = {"device": device, "output": output}
        options = [f"--{name}={value}" for name, value in given.items() if value is not None]
        start([sys.executable, "-m", "shardwise.cli", "doctor", "--conformance", *options], ranks)
        return
    exit_with_launcher(os.environ)
    with told_by_launcher(), connect(device) as comm:
        _examine(comm, output or RESULT)


def _ranks(device: str | None) -> int:
    """Devices are counted and not used here: on some, only one process can."""
    ours = _accelerator(device)
    return CPU_RANKS if ours.device == "cpu" else max(1, device_module(ours).device_count())


def _accelerator(device: str | None) -> Accelerator:
    return row(device) if device else detect()


# --- what is here ----------------------------------------------------------------------------


def _look(device: str | None, output: Path | None) -> None:
    installed, kinds = packages(), [devices(known.device) for known in ROWS]
    for lines in (_package_lines(installed), _device_lines(kinds), _variable_lines()):
        click.echo("\n".join([*lines, ""]))
    ours = _accelerator(device)
    here = next(one for one in kinds if one.accelerator is ours)
    click.echo(f"here      ranks use {here.accelerator.device} over {here.backend or 'nothing'}")
    if output:
        facts = {
            **_facts(installed),
            "devices": {one.accelerator.device: one.names for one in kinds},
        }
        _write(output, facts)
    if launch := read_launch(os.environ):  # or why a launcher's variables start no run
        where = f", which meet at {launch.address}:{launch.port}" if launch.address else ""
        click.echo(f"launch    rank {launch.rank} of {launch.size}{where}")
        click.echo(f"meeting   {probe(launch)}" if where else "meeting   no address is set")
    if unfit := [one.name for one in installed if not one.fits]:
        raise ShardwiseError(f"missing, or too old: {', '.join(unfit)}. Install what is needed.")


def _package_lines(installed: Sequence[Package]) -> list[str]:
    rows = [
        (
            one.name,
            one.installed or "none",
            one.needed,
            one.tested,
            "" if one.fits else _install(one),
        )
        for one in installed
    ]
    return table(rows, ["package", "found", "needed", "newest tested", ""], left=5)


def _install(package: Package) -> str:
    extra = f"[{package.extra}]" if package.extra else ""
    return f"NO: pip install 'shardwise{extra}'"


def _device_lines(kinds: Sequence[Devices]) -> list[str]:
    head = ["device", "here", "collectives", "compile", "dtypes", "bf16 peak"]
    why = [f"{one.accelerator.device}: {one.problem}" for one in kinds if one.problem]
    return [*table(map(_device_row, kinds), head, left=6), "", *why]


def _device_row(kind: Devices) -> tuple[str, ...]:
    known, names = kind.accelerator, kind.names
    best = peak(known, names[0]) if names else None
    return (
        known.device,
        f"{len(names)} × {names[0]}" if names else "none",
        kind.backend or "-",
        known.compile_backend,
        ", ".join(map(dtype_name, known.dtypes)),
        f"{best.flops / 1e12:,.0f} TFLOP/s ({best.source})" if best else "-",
    )


def _variable_lines() -> list[str]:
    rows = [(one.device, one.name, one.value or "not set", one.meaning) for one in variables()]
    return table(rows, ["device", "variable", "value", "meaning"], left=4)


# --- whether it is right ---------------------------------------------------------------------


def _examine(comm: Comm, path: Path) -> None:
    """Print a page, on rank 0 alone, and write it beside the results."""
    name, backend = device_name(comm.device), load_backend(row(comm.device)).name
    rank_devices = all_gather_object(comm, str(comm.device), "devices")
    page = _Page(comm.rank == 0)
    page.print(f"shardwise {__version__}, torch {torch.__version__}, {platform.platform()}")
    page.print(f"{comm.size} ranks on {name} over {backend}, by {type(comm).__name__}")
    page.print(", ".join(f"rank {rank} → {device}" for rank, device in enumerate(rank_devices)))
    results: dict[str, Result] = {}
    for result in conform(comm):
        results[result.name] = result
        page.print(_result_line(result))
    wrong = [name for name in CHECKS if name not in results or not results[name].passed]
    page.print(f"{len(CHECKS) - len(wrong)} of {len(CHECKS)} checks passed")
    costs = list[StepCost]()
    for cost in step_costs(comm) if not wrong else ():
        costs.append(cost)
        page.print(_cost_line(cost))
    if comm.rank == 0:
        facts = {
            **_facts(packages()),
            "device": comm.device.type,
            "device_name": name,
            "backend": backend,
            "transport": type(comm).__name__,
            "ranks": rank_devices,
            "passed": not wrong,
            "checks": [asdict(result) for result in results.values()],
            "steps": [asdict(cost) for cost in costs],
        }
        _write(path, facts)
        text = path.with_suffix(".txt")
        page.print(f"written   {path} and {text}")
        text.write_text("\n".join([*page.lines, ""]), "utf-8")
    if wrong:
        raise ShardwiseError(
            f"{len(wrong)} of {len(CHECKS)} checks did not pass: {', '.join(wrong)}. Do not train "
            "on this device with this version."
        )


@dataclass
class _Page:
    """Lines that one rank prints and keeps. Final."""

    prints: bool
    lines: list[str] = field(default_factory=list)

    def print(self, line: str) -> None:
        if self.prints:
            self.lines.append(line)
            click.echo(line)


def _result_line(result: Result) -> str:
    verdict = "pass" if result.passed else "FAIL"
    text = f"expected {result.expected}; found {result.found}"
    return f"{verdict}  {result.name:<20}  {text} ({result.seconds:.1f} s)"


def _cost_line(cost: StepCost) -> str:
    """Planned bytes leave activations out, so more of them is no failure."""
    peak = "no count on a CPU" if cost.peak is None else size(cost.peak)
    expected = f"expected {size(cost.planned)} and activations at most"
    return f"step  {cost.strategy:<20}  {expected}; found {peak}, {cost.milliseconds:.2f} ms"


def _facts(installed: Sequence[Package]) -> dict[str, Any]:
    return {
        "format": "shardwise conformance 2",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "shardwise": __version__,
        "torch": torch.__version__,
        "packages": {one.name: one.installed for one in installed},
        "environment": {one.name: one.value for one in variables() if one.value is not None},
    }


def _write(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
