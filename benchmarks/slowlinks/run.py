"""Which runs are made over which links, and the table of what they took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from secrets import token_hex
from typing import Any, NamedTuple

from benchmarks.harness.command import Log, setting
from benchmarks.harness.hosts import hosts
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Row, Table
from benchmarks.slowlinks.program import CONTEXT, ROWS, Run


class Method(NamedTuple):
    """How two hosts train one model."""

    strategy: str
    every: int = 1
    wire: str = "float16"


METHODS = {
    "full_shard": Method("full_shard"),
    "hybrid_shard": Method("hybrid_shard"),
    "DiLoCo 20 fp16": Method("diloco", 20),
    "DiLoCo 20 int8": Method("diloco", 20, "int8"),
    "DiLoCo 50 fp16": Method("diloco", 50),
    "DiLoCo 50 int8": Method("diloco", 50, "int8"),
}
COLUMNS = (
    Column("method"), Column("step s", ".2f"), Column("tokens/s", ",.0f", drawn=True),
    Column("KB a step", ",.0f"), Column("least KB", ",.0f"), Column("÷", ".2f"),
    Column("steps to loss", ".0f"), Column("s to loss", ".0f"), Column("loss", ".2f"),
)  # fmt: skip
NOTES = """
two hosts of one rank each: namespaces of this machine, which a bridge joins; each cable lets so
many megabits a second through, each way (tc tbf), without delay
step s         mean over a run, with the wait for the last exchange
KB a step      sent by host 0, by the kernel's counters: with headers, control messages and gloo's
least KB       what has to be sent: full_shard gathers twice (its last unit once) and reduces once,
               hybrid_shard (copies on both hosts) reduces and gathers gradients, each half of 4
               bytes a parameter;
               DiLoCo 2 bytes (fp16) or 1 (int8) a parameter and round
steps, s to loss   the first validation at which the loss is at most TARGET; validation, every 10
               steps, is not timed. DiLoCo: of worker 0, with its own parameters
loss           the last one
""".strip()


@dataclass(frozen=True)
class Config:
    """What to measure."""

    links: tuple[int, ...] = setting((50, 200, 1_000), "megabits a second", least=1)
    methods: tuple[str, ...] = setting(tuple(METHODS), "which", known=METHODS)
    target: float = setting(2.78, "loss of validation; over the first link alone")
    most: int = setting(200, "steps of a run over the first link; half as many where sharded")
    steps: int = setting(12, "steps of a run over other links; DiLoCo: a round, and 40 at least")


def run(config: Config, log: Log) -> Iterator[Report]:
    """Sharding, copies and DiLoCo over slow links between two hosts."""
    settings = (f"{ROWS} rows of {CONTEXT} bytes a host and step, AdamW, fp32", "1 round")
    notes = tuple(NOTES.replace("TARGET", f"{config.target:g}").splitlines())
    report, rows = Report(this_machine(), settings, notes=notes), dict[int, dict[str, Row]]()
    for link in config.links:
        for name in config.methods:
            log(f"{link} Mbit/s: {name}")
            rows.setdefault(link, {})[name] = row_of(config, link, METHODS[name])
            tables = [
                Table.of(f"{link} Mbit/s", COLUMNS, of_link) for link, of_link in rows.items()
            ]
            yield replace(report, tables=tuple(tables))


def row_of(config: Config, link: int, method: Method) -> Row:
    """One run of two hosts."""
    is_first, apart = link == config.links[0], method.strategy == "diloco"
    steps = config.most // (1 if apart else 2)
    if not is_first:
        steps = max(method.every, 40) if apart else config.steps
    words = {"steps": steps, "every": method.every, "wire": method.wire}
    result = measured(link, method.strategy, {**words, "target": config.target * is_first})
    least = least_nbytes(method, result["numel"], result["last"])
    row: Row = {
        "step s": result["step"],
        "tokens/s": 2 * ROWS * CONTEXT / result["step"],
        "KB a step": result["sent"] / 1e3,
        "least KB": least / 1e3,
        "÷": result["sent"] / least,
    }
    losses: Sequence[tuple[int, float, float]] = result["losses"]
    if losses:
        reached = next((one for one in losses if one[2] <= config.target), None)
        row |= {"loss": losses[-1][2]}
        row |= {"steps to loss": reached[0], "s to loss": reached[1]} if reached else {}
    return row


def least_nbytes(method: Method, numel: int, last: int) -> float:
    """Bytes that one of two hosts has to send in a step.

    Args:
        numel, last: parameters of the model, and of its last unit, which is gathered once.
    """
    if method.strategy == "diloco":
        return numel * (1 if method.wire == "int8" else 2) / method.every
    if method.strategy == "hybrid_shard":
        return 2 * 4 * numel / 2
    return (3 * numel - last) * 4 / 2


def measured(link: int, strategy: str, words: dict[str, Any]) -> dict[str, Any]:
    """What host 0 prints."""
    environment = {**os.environ, "SHARDWISE_RUN_TOKEN": token_hex(8), "OMP_NUM_THREADS": "1"}
    with hosts(2, link) as pair:
        addresses = [host.address for host in pair]
        programs = [
            host.start(
                *(sys.executable, "-m", "benchmarks.slowlinks.program"),
                json.dumps(asdict(Run(strategy, rank, addresses, **words))),
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(pair)
        ]
        outputs = [program.communicate()[0] for program in programs]
        if any(program.returncode for program in programs):
            raise RuntimeError(f"{strategy} over {link} Mbit/s ended with an error")
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result
