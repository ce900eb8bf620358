"""``python -m tests.programs --seeds 2000``: random programs and checkpoints, counted.

Ranks are threads, or with ``--transport`` processes. A failure is printed as a program that can be
run alone, on threads.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from shardwise.comm.machine import connect
from shardwise.errors import ShardwiseError
from tests.programs.processes import Process, Verdict, verdict
from tests.programs.random_checkpoints import case, run
from tests.programs.random_programs import program_text
from tests.ranks import gloo_group, outcomes_of

Transport = Literal["memory", "messages"]


def judged(
    seed: int, transport: Transport | None = None, world: int | None = None
) -> tuple[Verdict, str]:
    """The verdict on program ``seed``, and its text.

    Args:
        transport: of ranks that are processes; ``None``: they are threads.
        world: number of ranks; ``None``: 1, 2 or 3. Of four most programs are on a grid of 2 × 2.
    """
    world = world or (1, 2, 3)[seed % 3]
    text = program_text(seed, world)
    names = namespace(text)
    on_ranks = None if transport is None else partial(on_processes, text, transport)
    return verdict(names["program"], world, names["TOLERANCE"], on_ranks), text


def namespace(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "<program>", "exec"), names)
    return names


def on_processes(text: str, transport: Transport, world: int) -> list[list[Any]]:
    """What each of ``world`` processes sees. Raises what the first rank raised."""
    outcomes = outcomes_of(world, _seen, text, transport)
    for outcome in outcomes:
        if outcome.error or isinstance(outcome.value, ShardwiseError):
            raise outcome.value or RuntimeError(outcome.error)
    return [outcome.value for outcome in outcomes]


def _seen(
    rank: int, world: int, folder: str, text: str, transport: Transport
) -> list[Any] | ShardwiseError:
    logging.disable(logging.WARNING)
    with (
        gloo_group(rank, world, folder),
        connect.over(dist.group.WORLD, transport=transport) as comm,
    ):
        process = Process((rank,), world, comm, folder=Path(folder) / "run")
        try:
            namespace(text)["program"](process)
        except ShardwiseError as error:
            return type(error)(str(error))
        return process.seen


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--transport", choices=("memory", "messages"))
    parser.add_argument("--world", type=int, choices=range(1, 5))
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds = range(given.first, given.first + given.seeds)
    programs, checkpoints = Counter[str](), Counter[str]()
    for seed in seeds:
        judgement, text = judged(seed, given.transport, given.world)
        programs[judgement.word] += 1
        if judgement.word in ("wrong", "crashed"):
            write(f"# seed {seed}: {judgement}\n{text}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            judgement = run(case(seed), Path(folder) / "run")
            checkpoints[judgement.word] += 1
            if judgement.word in ("wrong", "crashed"):
                write(f"{judgement}\n{case(seed)}")
    write(f"programs: {dict(programs)}")
    write(f"checkpoints: {dict(checkpoints)}")


if __name__ == "__main__":
    # By its name, by which other processes find its functions.
    import_module("tests.programs.__main__").main()
