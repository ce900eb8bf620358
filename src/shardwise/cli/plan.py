"""``shardwise plan``: does it fit, how fast will it be, and what to change, before it runs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml

from shardwise.cli.other_libraries import without_their_noise
from shardwise.cli.planned import Planned, of_recipe, planned
from shardwise.cli.progress import working
from shardwise.comm.machine.environment import read_launch
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.launch.launcher import exit_with_launcher, start
from shardwise.plan.forecast.ask import MOST_ROWS, ask, candidates_of, devices
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.fixes import Series, shorter
from shardwise.plan.forecast.machine import Machine, known
from shardwise.plan.forecast.question import Question
from shardwise.plan.forecast.verdict import Verdict
from shardwise.recipe.read import set_key
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import check_suffix
from shardwise.train.foresight import HERE

QUANTITY = re.compile(
    r"(\d[\d,_]*\.?\d*) *([kmgbt]?)(?:i?b(?:ytes?)?|tok(?:ens?)?)?", re.IGNORECASE
)
NEAR = 0.05  # a rank's rows may be changed by so much, so that they split into micro-batches
RANK = 16  # of adapters, where they are a fix
CLOSE = 0.1  # a global batch may be changed by so much, so that ranks have equal parts
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command, as typed; ``None``: as a recipe says, or usual."""

    gpus: str = "8xH100"
    nodes: int = 1
    link: str | None = None
    seq: int | None = None
    global_batch: str | None = None
    micro_batch: int | None = None
    strategy: str | None = None
    lora: str | None = None
    quantize: str | None = None
    tokens: str | None = None
    machines: Path | None = None

    def machine(self) -> Machine:
        """Raises ``ConfigError`` for an accelerator or a link that is not known."""
        table = known() if self.machines is None else known().with_file(self.machines)
        per_host, name = devices(self.gpus)
        machine = table.machine(name, per_host, between=self.link)
        if self.link is not None and self.nodes == 1:
            raise ConfigError(
                f"--link {self.link} is between nodes, and there is one. Add --nodes 2, or leave "
                "--link out."
            )
        return machine

    @property
    def ranks(self) -> int:
        return devices(self.gpus)[0] * self.nodes

    def rows(self, subject: Planned) -> int | None:
        """Rows of a step; of tokens that are no whole number for a rank, see ``whole_rows``."""
        if self.global_batch is None:
            return subject.question.rows
        chosen = subject.chosen.micro_batch if subject.chosen else None
        micro, tokens = self.micro_batch or chosen, quantity(self.global_batch)
        at_a_time = self.ranks * (micro or 1)
        of_one = at_a_time * subject.length
        times = max(1, round(tokens / of_one)) if micro else whole_rows(tokens / of_one)
        if abs(times * of_one / max(tokens, 1) - 1) > CLOSE:
            raise ConfigError(
                f"{tokens:,} tokens in a step cannot be shared by {self.ranks:,} ranks in rows of "
                f"{subject.length:,}. The nearest is --global-batch {times * of_one:,}, or choose "
                "fewer ranks or another --seq."
            )
        return times * at_a_time

    @property
    def rank_of_lora(self) -> int | None:
        if self.lora is None:
            return None
        rank = re.fullmatch(r"(?:r *= *)?0*([1-9]\d*)", self.lora)
        if rank is None:
            raise ConfigError(f"--lora {self.lora} names no rank. Write --lora r=16.")
        return int(rank[1])


def whole_rows(asked: float) -> int:
    """``30.5 → 32``: the number within ``NEAR`` of it that halves most often; a whole one stays.

    So it splits into many sizes of micro-batches; halves of more than ``MOST_ROWS`` do not count.
    """
    plain = max(1, round(asked))
    if asked.is_integer():
        return plain
    sizes = (2**n for n in reversed(range(MOST_ROWS.bit_length())))
    nearest = (size * math.ceil(asked / size - 0.5) for size in sizes)
    least, most = asked * (1 - NEAR), asked * (1 + NEAR)
    return next((rows for rows in nearest if least <= rows <= most), plain)


def quantity(text: str) -> int:
    """``"1Mtok" → 1,000,000``, ``"15B" → 15,000,000,000``. Raises ``ConfigError``."""
    match = QUANTITY.fullmatch(text.strip())
    number = float(match[1].replace(",", "").replace("_", "")) if match else 0.0
    if match is None or int(number * SIZES[match[2].lower()]) < 1:
        raise ConfigError(f"{text!r} is no quantity. Write a number such as 1Mtok, 15B or 4096.")
    return int(number * SIZES[match[2].lower()])


def run_plan(
    model: str, options: PlanOptions, why: str | None, as_json: bool, write: Path | None
) -> int:
    """Print the verdict; return the status to exit with."""
    if write is not None and write.exists():
        raise ConfigError(f"{write} exists, and nothing was written. Name another file.")
    if write is not None:
        check_suffix(write)
    # What a model or a library prints as it is imported is not part of the answer.
    saying = working(f"planning {model}, which can take half a minute")
    with saying, without_their_noise(), redirect_stdout(sys.stderr):
        subject, verdict = answer(model, options)
    if write is not None and subject.recipe is None:
        raise ConfigError(
            f"a recipe cannot name {model}, so nothing was written. Leave --write out."
        )
    if write is not None:
        _write(write, subject, verdict)
    if as_json:
        click.echo(json.dumps(verdict.as_json()))
    else:
        click.echo(str(verdict))
        if why is not None:
            beside = "the same peak in units of 1,024, without context and communicators:"
            click.echo("\n".join(["", beside, *verdict.best.memory.why()]))
    return verdict.exit_code


def run_calibrate(path: Path, nproc: int) -> int:
    """Measure this machine on ``nproc`` ranks, and write its entry to ``path``."""
    from shardwise.comm.machine.connect import connect
    from shardwise.doctor.calibrate import calibrate

    if read_launch(os.environ) is None and nproc > 1:
        start([sys.executable, "-m", "shardwise.cli", "plan", f"--calibrate={path}"], nproc)
        return 0
    exit_with_launcher(os.environ)
    with connect() as comm:
        entry = calibrate(comm, HERE)
    if comm.rank == 0:
        path.write_text(entry, "utf-8")
        machines = shlex.quote(str(path))
        click.echo(f"wrote {path}: plan with --machines {machines} --gpus {comm.size}x{HERE}")
    return 0


def answer(model: str, options: PlanOptions) -> tuple[Planned, Verdict]:
    """The subject that was asked about, and the verdict.

    Raises:
        ConfigError: a name is not known, or numbers do not go together.
    """
    subject = planned(
        model,
        options.machine(),
        options.ranks,
        length=options.seq,
        lora=options.rank_of_lora,
        quantize=options.quantize,
    )
    subject = subject._replace(question=replace(subject.question, rows=options.rows(subject)))
    tokens = None if options.tokens is None else quantity(options.tokens)
    chosen, among = None, None
    if subject.chosen is not None:
        chosen = _changed(subject.chosen, options)
    else:
        strategy = options.strategy and placement_of(options.strategy).name
        among = candidates_of(subject.question, strategy, options.micro_batch)
    asked = None if options.global_batch is None else quantity(options.global_batch)
    verdict = ask(subject.question, chosen, tokens, among, _further(model, subject, options))
    return subject, replace(verdict, asked=asked)


def _further(model: str, subject: Planned, options: PlanOptions) -> Iterator[Series]:
    """Shorter rows, and adapters, where a model of transformers is trained whole or in 16 bits."""
    if subject.recipe is None:
        return
    yield shorter(subject.question, subject.length, options.global_batch is not None)
    recipe = Recipe.model_validate(subject.recipe)
    if recipe.model.source is None or recipe.model.quantization.bits:
        return
    rank = recipe.adapter.rank
    lora, between, nf4 = f"--lora r={RANK}", " ", "--quantize nf4"
    if subject.chosen is not None:
        lora, between, nf4 = f"adapter.rank: {RANK}", ", ", "model.quantization.bits: 4"
    adapted = partial(_adapted, model, subject, options, rank or RANK)
    if rank is None:
        yield [(lora, adapted)]
    yield [(nf4 if rank else f"{lora}{between}{nf4}", partial(adapted, "nf4"))]


def _adapted(
    model: str, subject: Planned, options: PlanOptions, rank: int, quantize: str | None = None
) -> Question:
    """Ask about it with adapters. Raises ``ConfigError``: a recipe's other keys do not go along."""
    given = model, options.machine(), options.ranks
    if subject.chosen is None:
        of = planned(*given, length=subject.length, lora=rank, quantize=quantize)
    else:
        bits = {"model.quantization.bits": 4} if quantize else {}
        of = of_recipe(*given, {"data.context": subject.length, "adapter.rank": rank, **bits})
    return replace(of.question, rows=subject.question.rows)


def _changed(chosen: Candidate, options: PlanOptions) -> Candidate:
    """Return what a recipe has chosen, with what options say."""
    strategy = placement_of(options.strategy or chosen.strategy).name
    return replace(chosen, strategy=strategy, micro_batch=options.micro_batch or chosen.micro_batch)


def _write(path: Path, subject: Planned, verdict: Verdict) -> None:
    """Write a recipe of what was chosen."""
    recipe: dict[str, Any] = dict(subject.recipe or {})
    rows = subject.question.rows or verdict.best.candidate.micro_batch * verdict.ranks
    keys = {"data.context": subject.length, "batch.rows": rows, **verdict.recipe}
    for key, value in keys.items():
        set_key(recipe, key, value)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    click.echo(f"wrote {path}", err=True)
