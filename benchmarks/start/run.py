"""Which commands run, one after the other, and the table of what they say when."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.checkpoint.measure import forget
from benchmarks.finetune.pairs import held_out, write_pairs
from benchmarks.harness.command import Log, setting
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Row, Table
from benchmarks.harness.rounds import rotated
from shardwise.recipe.read import read_recipe
from shardwise.train import tokenizer as bpe

RECIPES = Path(__file__).parents[2] / "recipes"
CONTEXT, RANKS = 64, 2
OURS = {
    "imports": r"rank +local rank",
    "data": r"(text|data) ",
    "model": r"model ",
    "step": r"step +1/",
}
"""Phase → the line that ``shardwise train --verbose`` prints at its end."""
TRAINER = {phase: f"{phase} is over" for phase in OURS}
COLUMNS = (
    Column("program"), Column("files"), Column("seconds", ".1f", drawn=True),
    *(Column(phase, ".1f") for phase in OURS), Column("CPU s", ".1f"),
)  # fmt: skip
NOTES = """
seconds   from the command to the end of the first step, 2 ranks; medians over rounds, and of each
          phase; commands take turns
imports   the launcher, Python, imports, and the ranks' meeting
data      reading, the tokenizer, tokens
model     building it, its weights, shards or replicas, the optimizer
CPU s     processor time of all processes until then: what others do on the machine counts less
files     cold: a new run, whose tokenizer is to be trained, or whose model's weights are on the
          disk alone. warm: the same command again. Code is in memory for both
trainer   transformers' Trainer with peft under torchrun: benchmarks/start/trainer.py
""".strip().splitlines()


@dataclass(frozen=True)
class Config:
    """What to measure."""

    folder: str = setting("runs/start", "for the model, pairs and runs")
    width: int = setting(2_048, "of the model of transformers; 1.04 B parameters", least=64)
    rounds: int = setting(3, "in which each command runs twice", least=1)
    programs: tuple[str, ...] = setting(
        ("demo", "ours", "trainer ddp", "trainer fsdp2"), "which commands"
    )


@dataclass(frozen=True)
class Program:
    """A command, and the lines that end its phases."""

    command: Sequence[str]
    ends: Mapping[str, str]
    weights: Path | None = None  # what a cold start reads from the disk


def run(config: Config, log: Log) -> Iterator[Report]:
    """From the command to the first training step, beside transformers' Trainer."""
    folder = Path(config.folder)
    model, pairs = folder / f"model-{config.width}", folder / "training.jsonl"
    texts = held_out(read_recipe(RECIPES / "stdlib-base.yaml"))
    write_pairs(texts, folder)
    if not (model / "config.json").is_file():
        log(f"writing {model}")
        write_model(model, config.width, texts)
    laps: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(config.rounds):
        for name in rotated(config.programs, number):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                program = program_of(name, model, pairs, f"{place}/run")
                for files in ("cold", "warm"):
                    log(f"round {number + 1} of {config.rounds}: {name}, {files}")
                    if files == "cold" and program.weights is not None:
                        forget(program.weights)
                    laps.setdefault((name, files), []).append(seconds(program))
    rows: dict[str, Row] = {}
    for (name, files), of_program in laps.items():
        phases = {phase: median(lap[phase] for lap in of_program) for phase in OURS}
        total = median(sum(lap[phase] for phase in OURS) for lap in of_program)
        work = {"CPU s": median(lap["CPU s"] for lap in of_program)}
        rows[f"{name} {files}"] = {"files": files, "seconds": total, **phases, **work}
    report = Report(this_machine(), (f"{config.rounds} rounds",), notes=tuple(NOTES))
    yield replace(report, tables=(Table.of("2 ranks", COLUMNS, rows),))


def seconds(program: Program) -> dict[str, float]:
    """Seconds of each phase, and of processor time. The command is ended after the last one."""
    before = _work_of_ended()
    start, times, printed = perf_counter(), dict[str, float](), list[str]()
    waited, settings = [*program.ends], {**os.environ}
    settings.pop("PYTHONDONTWRITEBYTECODE", None)  # ours is compiled once, as what pip installs
    with _started(program.command, settings) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if waited and re.match(program.ends[waited[0]], line):
                now = perf_counter()
                times[waited.pop(0)], start = now - start, now
                if not waited:
                    process.send_signal(signal.SIGQUIT)
    if waited:
        raise RuntimeError(f"{program.command} ended before {waited[0]}: {''.join(printed[-20:])}")
    return {**times, "CPU s": _work_of_ended() - before}


def _work_of_ended() -> float:
    """Processor seconds of all processes below this one that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _started(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """SIGQUIT ends it, also where a shell lets what runs in the background ignore that."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        return subprocess.Popen(  # noqa: S603 - ours
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
    finally:
        signal.signal(signal.SIGQUIT, before)


def program_of(name: str, model: Path, pairs: Path, folder: str) -> Program:
    """The command of this name, whose run lies in ``folder``."""
    train = [sys.executable, "-m", "shardwise", "train"]
    ours = ["--nproc", str(RANKS), "--verbose", "--run.folder", folder, "--run.log_every", "1"]
    if name == "demo":
        return Program([*train, str(RECIPES / "demo.yaml"), *ours], OURS)
    if name == "ours":
        recipe = Path(folder).with_suffix(".yaml")
        recipe.write_text(recipe_of(model, pairs), "utf-8")
        return Program([*train, str(recipe), *ours], OURS, model)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    arguments = [str(model), str(pairs), str(CONTEXT), name.split()[1]]
    command = [sys.executable, *torchrun, "-m", "benchmarks.start.trainer", *arguments]
    return Program(command, TRAINER, model)


def recipe_of(model: Path, pairs: Path) -> str:
    """The recipe of the same fine-tuning."""
    return f"""
model: {{from: {model.resolve()}}}
adapter: {{rank: 8, alpha: 16}}
data: {{source: {pairs.resolve()}, format: completion, context: {CONTEXT}, packing: false}}
batch: {{rows: {RANKS}, micro: 1}}
checkpoint: {{save_every: 0}}
run: {{steps: 8, device: cpu, overwrite: true}}
"""


def write_model(folder: Path, width: int, texts: Sequence[str]) -> None:
    """Write a Llama of 16 layers with random weights in bfloat16, and a tokenizer of ``texts``."""
    import torch
    import transformers

    text = bpe.train(texts[:200], 4_096)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe.load(text), eos_token=bpe.END, pad_token=bpe.END
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=32_768, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=16,
        num_attention_heads=width // 64, num_key_value_heads=width // 256,
        tie_word_embeddings=True, dtype=torch.bfloat16,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
