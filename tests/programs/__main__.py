"""``python -m tests.programs --seeds 2000``: random programs and checkpoints, counted.

A failure is printed as a program that can be run alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.programs.processes import Verdict, verdict
from tests.programs.random_checkpoints import case, run
from tests.programs.random_programs import program_text


def judged(seed: int) -> tuple[Verdict, str]:
    """The verdict on program ``seed``, on 1, 2 or 3 ranks, and its text."""
    world = (1, 2, 3)[seed % 3]
    text = program_text(seed, world)
    names: dict[str, Any] = {"__name__": f"program{seed}"}
    exec(compile(text, f"<program {seed}>", "exec"), names)
    return verdict(names["program"], world, names["TOLERANCE"]), text


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    seeds = range(given.first, given.first + given.seeds)
    programs, checkpoints = Counter[str](), Counter[str]()
    for seed in seeds:
        judgement, text = judged(seed)
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
    main()
