"""Which processes run, one after the other, and the tables that come of what they measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median

from benchmarks.finetune.engines import ENGINES
from benchmarks.finetune.measure import Run, Tuned, measure, tune
from benchmarks.finetune.pairs import held_out, prompt, write_pairs
from benchmarks.finetune.setup import LongPrompts, Setup, write_base
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import MIB, Column, Report, Row, Table
from benchmarks.harness.rounds import rotated, slowest
from benchmarks.harness.workers import on_ranks
from benchmarks.step.measure import CHECKED, check_losses
from shardwise.recipe.read import read_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "stdlib-base.yaml"
PROMPT = prompt("Return the name of the file.")
RIVALS = ("transformers", "peft", "accelerate", "bitsandbytes")
WARM_UP = 4  # steps of a run that are not timed
LAST = 4  # steps whose mean loss is the last one

TUNED = (
    Column("base"), Column("loss before", ".3f"), Column("after", ".3f"),
    Column("right before", ".3f"), Column("right after", ".3f"), Column("trained", ",.0f"),
    Column("of peft", ".1e"),
)  # fmt: skip
SIDE = (
    Column("engine"), Column("tokens/s", ",.0f", drawn=True), Column("least", ",.0f"),
    Column("most", ",.0f"), Column("CPU ms", ",.0f"), Column("first loss", ".4f"),
    Column("last loss", ".4f"), Column("MiB peak", ".1f"), Column("− start", ".1f"),
)  # fmt: skip
NOTES = """
loss        of validation, the mean over the tokens of answers, in nats; right: the share of them
            that is the likeliest by the model
of peft     the largest difference of logits when transformers loads the base and peft the adapter
tokens/s    places of all rows ÷ the median step of a run, without its first 4; a step lasts until
            its slowest rank is done; the median over rounds, and the least and the largest of them
CPU ms      processor time of a step, both ranks together: what others do on the machine counts less
last loss   mean of the last 4 steps, which are the same rows for every engine
MiB peak    resident set of the rank with most, from before the model is loaded until the end;
            memory that both share counts half in each;
            − start: without what was resident then: Python, torch, transformers, peft
trainer_…   transformers' Trainer, peft, accelerate. Asked for FSDP2 on CPUs, accelerate drops it
            without a word and trains with DDP; here it is told that it has a device that it takes
""".strip().splitlines()


@dataclass(frozen=True)
class Config:
    """What to measure."""

    base: str = setting("runs/stdlib-base", "a folder of transformers; trained if it is absent")
    folder: str = setting("runs/finetune", "for pairs and adapters")
    bits: tuple[int, ...] = setting((32, 4), "of the base that is fine-tuned")
    steps: int = setting(200, "of fine-tuning; 0 = none", least=0)
    engines: tuple[str, ...] = setting(tuple(ENGINES), "side by side", ENGINES)
    rounds: int = setting(3, "interleaved rounds; 0 = none", least=0)
    round_steps: int = setting(32, "of one run in a round", least=WARM_UP + 2)
    rows: int = setting(8, "in a step, over both ranks", least=2)
    context: int = setting(256, "tokens in a row", least=2)
    vocabulary: int = setting(32_768, "of one more base, with long prompts; 0 = none", least=0)


def run(config: Config, log: Log) -> Iterator[Report]:
    """Fine-tune a small base by LoRA; beside Trainer and peft under DDP and FSDP2."""
    recipe = read_recipe(RECIPE)
    counts = write_pairs(held_out(recipe), Path(config.folder))
    if not (Path(config.base) / "config.json").is_file():
        log(f"training {config.base}")
        command = ["-m", "shardwise", "train", str(RECIPE), "--nproc", "2"]
        subprocess.run([sys.executable, *command, "--run.folder", config.base], check=True)  # noqa: S603 - ours
    setup = Setup(config.base, config.folder, config.steps, config.rows, config.context)
    settings = (
        f"{counts[0]:,} + {counts[1]} pairs (docstring → function) of held-out modules, packed",
        f"2 ranks, {config.rows} × {config.context} tokens a step; LoRA of rank 8 on all layers",
    )
    rivals = ", ".join(f"{name} {version(name)}" for name in RIVALS)
    report = Report(this_machine(), (*settings, rivals), notes=tuple(NOTES))
    yield report
    if config.steps:
        tuned = dict[int, Tuned]()
        for bits in config.bits:
            log(f"{setup.steps} steps of LoRA on a base in {bits} bits")
            folder = f"{setup.pairs}/adapter-{bits}-bits"
            tuned[bits] = on_ranks(setup.ranks, tune, setup, bits, folder, PROMPT)[0]
        report = replace(report, tables=(tune_table(tuned, setup),))
        yield report
    if config.rounds:
        setup = replace(setup, steps=config.round_steps)
        report = replace(report, tables=(*report.tables, side_by_side(config, setup, log)))
        yield report
    if config.rounds and config.vocabulary:
        table = side_by_side(config, long_prompts(config), log)
        title = f"{table.title}, vocabulary {config.vocabulary:,}, 3/4 of the tokens are prompts"
        yield replace(report, tables=(*report.tables, replace(table, title=title)))


def long_prompts(config: Config) -> Setup:
    """Random samples for a base with random weights, which is written."""
    base = f"{config.folder}/vocabulary-{config.vocabulary}"
    write_base(config.base, base, config.vocabulary)
    lengths = config.round_steps, config.rows, config.context
    return LongPrompts(base, config.folder, *lengths, vocabulary=config.vocabulary)


def side_by_side(config: Config, setup: Setup, log: Log) -> Table:
    """Every engine in turns, in processes of its own: its peak is its own."""
    runs: dict[str, list[list[Run]]] = {name: [] for name in config.engines}
    for number in range(config.rounds):
        for name in rotated(config.engines, number):
            log(f"round {number + 1} of {config.rounds}: {name}")
            runs[name].append(on_ranks(setup.ranks, measure, name, setup))
    check(runs)
    return side_table(runs, setup)


# ---- from runs to tables -------------------------------------------------------------------


def tune_table(tuned: Mapping[int, Tuned], setup: Setup) -> Table:
    """Validation before and after, and the sample of each."""
    rows: dict[str, Row] = {}
    samples = []
    for bits, each in tuned.items():
        before, after = each.evaluated
        rows[f"{bits} bits"] = {
            "loss before": before.loss, "after": after.loss, "right before": before.accuracy,
            "right after": after.accuracy, "trained": each.trained, "of peft": each.difference,
        }  # fmt: skip
        samples += ["", f"{bits} bits, {PROMPT.rstrip()}", *each.text.rstrip().splitlines()]
    return Table.of(f"full_shard, {setup.steps} steps", TUNED, rows, samples)


def side_table(runs: Mapping[str, Sequence[Sequence[Run]]], setup: Setup) -> Table:
    """Every engine; below it ours beside each rival."""
    tokens = setup.rows * setup.context
    rows = {name: row_of(rounds, tokens) for name, rounds in runs.items()}
    pairs = product((n for n in rows if "trainer" not in n), (n for n in rows if "trainer" in n))
    quotients = (
        f"{mine} ÷ {rival}: {rows[mine]['tokens/s'] / rows[rival]['tokens/s']:.2f} in tokens/s, "
        f"{rows[mine]['− start'] / rows[rival]['− start']:.2f} in memory"
        for mine, rival in pairs
    )
    title = f"{len(next(iter(runs.values())))} rounds of {setup.steps} steps"
    return Table.of(title, SIDE, rows, quotients)


def row_of(rounds: Sequence[Sequence[Run]], tokens: int) -> dict[str, float]:
    """The row of an engine, from every round's ranks; ``tokens``: of a step."""
    seconds = [median(step_seconds(ranks)) for ranks in rounds]
    work = [sum(median(laps(run.work)) for run in ranks) for ranks in rounds]
    peaks = [max(run.peak - _elsewhere(run, len(ranks)) for run in ranks) for ranks in rounds]
    own = [max(r.peak - r.start - _elsewhere(r, len(ranks)) for r in ranks) for ranks in rounds]
    losses = rounds[0][0].losses
    return {
        "tokens/s": tokens / median(seconds), "least": tokens / max(seconds),
        "most": tokens / min(seconds), "CPU ms": 1e3 * median(work),
        "first loss": losses[0], "last loss": fmean(losses[-LAST:]),
        "MiB peak": median(peaks) / MIB, "− start": median(own) / MIB,
    }  # fmt: skip


def _elsewhere(run: Run, ranks: int) -> float:
    """Bytes of shared memory that count with the other ranks."""
    return run.shared * (1 - 1 / ranks)


def step_seconds(ranks: Sequence[Run]) -> list[float]:
    """Seconds of each timed step, by the rank that took longest."""
    return slowest([laps(run.ends) for run in ranks], float)


def laps(times: Sequence[float]) -> list[float]:
    """Between one step's end and the next one's, after the warm-up."""
    return [after - before for before, after in pairwise(times[WARM_UP:])]


def check(runs: Mapping[str, Sequence[Sequence[Run]]]) -> None:
    """Raises ``RuntimeError`` where an engine on the whole base trains something else than DDP."""
    losses = {name: rounds[0][0].losses[:CHECKED] for name, rounds in runs.items()}
    for name in losses if "trainer_ddp" in losses else ():
        if not name.endswith("4bit"):
            check_losses(name, losses[name], losses["trainer_ddp"], "the base")
