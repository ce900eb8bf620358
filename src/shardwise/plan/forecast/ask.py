"""The entry point of forecasts: a model, a machine and what is already decided give a verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn

from shardwise.config.precision import Precision
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked
from shardwise.plan.forecast.advice import Advice, Situation, advise
from shardwise.plan.forecast.candidate import WIRES, Candidate, candidates
from shardwise.plan.forecast.fixes import Fixes, Series
from shardwise.plan.forecast.machine import Link, known
from shardwise.plan.forecast.observe import Loss, loss_of
from shardwise.plan.forecast.planner import Forecast, Peak, Planner
from shardwise.plan.forecast.question import Inputs, Question
from shardwise.plan.forecast.search import fastest, smallest
from shardwise.plan.forecast.verdict import Errors, Verdict
from shardwise.plan.units.wrap import Wrap

MOST_ROWS = 64  # of a micro-batch that is looked for
EXACT = 4  # candidates of each strategy that are forecast whole


def devices(text: str) -> tuple[int, str]:
    """``"8xH100" → 8, "H100"``: devices of a host. Raises ``ConfigError``."""
    match = re.fullmatch(r"\s*0*([1-9]\d*)\s*[xX×]\s*(\S.*)", text)
    if match is None:
        raise ConfigError(
            f"{text!r} does not say how many devices of which kind. Write a number, x and a name, "
            "such as 8xH100: those of one host."
        )
    return int(match[1]), match[2].strip()


@checked
def plan(
    model: nn.Module,
    machine: str = "",
    inputs: Callable[[int], Inputs] | None = None,
    *,
    hosts: int = 1,
    link: str | None = None,
    rows: int | None = None,
    optimizer: Literal["adamw", "adamw_8bit", "sgd", "momentum"] = "adamw",
    wrap: Wrap | None = None,
    precision: Precision = Precision(),
    loss: Loss = loss_of,
    tokens: int | None = None,
) -> Verdict:
    """Say how ``model`` can be trained fastest on a machine that need not be there; ``sw.plan``.

    Args:
        model: best on the meta device; it stays as it is.
        machine: devices of a host, such as ``"8xH100"``. Needed.
        inputs: rows of a micro-batch → positional and keyword arguments of the model's forward;
            of tensors only shapes and dtypes matter. Needed; of a language model in rows of 2,048:
            ``lambda rows: ((torch.zeros(rows, 2048, dtype=torch.int64),), {})``.
        hosts, link: how many there are, and what connects them: a name, or ``"400Gb/s"``.
        rows: of a step, over all ranks; ``None``: one micro-batch of each rank.
        optimizer: torch's, or bitsandbytes' with 8 bits; ``"momentum"``: SGD with it.
        wrap, precision: as of ``shard()``.
        loss: of what the model returns.
        tokens: of the whole run.

    Raises:
        ConfigError: no inputs, no such accelerator, link or optimizer, or rows that ranks cannot
            share.
        ScheduleError: the model looks at values, which the meta device does not have.
    """
    per_host, name = devices(machine)
    if inputs is None:
        raise ConfigError(
            "what the model is called with is not known. Pass a function of a micro-batch's rows; "
            f'of a language model in rows of 2,048: sw.plan(model, "{machine}", lambda rows: '
            "((torch.zeros(rows, 2048, dtype=torch.int64),), {}))."
        )
    for option, number in {"hosts": hosts, "rows": rows, "tokens": tokens}.items():
        if number is not None and number < 1:
            raise ConfigError(f"{option} is {number}; it is a number from 1 on.")
    question = Question(
        model,
        inputs,
        known().machine(name, per_host, between=link),
        per_host * hosts,
        rows,
        optimizer,
        {"wrap": wrap, "precision": precision},
        loss=loss,
    )
    return ask(question, tokens=tokens)


def ask(
    question: Question,
    chosen: Candidate | None = None,
    tokens: int | None = None,
    among: Iterable[Candidate] | None = None,
    further: Iterable[Series] = (),
) -> Verdict:
    """Answer ``question``.

    Args:
        chosen: the verdict is about it; ``None``: about the fastest that fits, or else the one that
            takes least memory.
        tokens: of the whole run.
        among: candidates to search; ``None``: all that are worth it.
        further: changes to try where it does not fit, besides more ranks and other candidates.

    Raises:
        ConfigError: the rows of a step cannot be split among the ranks, or a strategy has no mesh.
    """
    if chosen is not None:
        question.check(chosen)
    planner, search = Planner(question), _Search(question)
    every = list(candidates_of(question) if among is None else among)
    others = search.fastest_of_each(planner, [c for c in every if c.wire is None], "strategy")
    best = planner.forecast(chosen) if chosen else search.best(planner, others, every)
    verdict = Verdict(
        best,
        question.machine,
        question.ranks,
        search.reserved,
        search.errors,
        others,
        search.rounded_otherwise(planner, best, every),
        advice=search.advice({each.strategy for each in every}),
        searched=len(every),
        tokens=tokens,
        recipe=planner.recipe(best.candidate),
    )
    if verdict.says == "fits":
        return verdict
    fixes = Fixes(planner, best, search.errors, searched=chosen is None)
    return replace(verdict, fixes=fixes.ranked(further))


def candidates_of(
    question: Question, strategy: str | None = None, micro_batch: int | None = None
) -> list[Candidate]:
    """All that are worth asking about, whose micro-batches divide the rows of a step.

    Args:
        strategy, micro_batch: ``None``: any.

    Raises:
        ConfigError: the rows of a step cannot be split so, or the strategy needs more ranks.
    """
    rows = [2**n for n in range(MOST_ROWS.bit_length())] if micro_batch is None else [micro_batch]
    if question.rows is not None and micro_batch is None:
        of_a_rank = question.rows / question.ranks
        rows = [n for n in range(1, MOST_ROWS + 1) if of_a_rank % n == 0] or [1]
    question.check(Candidate("full_shard", rows[0]))
    others = [wire for wire in WIRES if getattr(torch, wire) is not question.dtypes.reduce]
    wires = None, *(others if question.ranks > 1 else ())
    given = question.ranks, question.machine.per_host, rows, _is_frozen(question.model), wires
    few = [each for each in candidates(*given) if strategy in (None, each.strategy)]
    if not few:
        raise ConfigError(
            f"{strategy} keeps a copy on each host, and {question.ranks:,} ranks are one host of "
            f"{question.machine.per_host:,}. Plan for more nodes, or another strategy."
        )
    return few


class _Search:
    """Facts of one question that its search goes by."""

    def __init__(self, question: Question) -> None:
        self.question = question
        errors = known().errors  # nothing was measured on this machine, as on a source left out
        kind = "process" if question.machine.accelerator.waits else "memory"
        self.errors = Errors(errors[kind].middle, errors["unseen"].middle)
        self.reserved = question.machine.accelerator.reserved
        self.capacity = question.machine.accelerator.memory
        self.numel = _numel(question.model)

    def fits(self, peak: Peak) -> bool:
        """Does it fit, the error included?"""
        return self.errors.fits(self.filled(peak))

    def filled(self, peak: Peak) -> float:
        """The part of memory that it fills: see ``Machine.filled``."""
        return self.question.machine.filled(*peak, self.question.ranks)

    def _fits(self, forecast: Forecast) -> bool:
        return self.errors.fits(forecast.memory.filled(self.question.machine, self.question.ranks))

    def _held(self, forecast: Forecast) -> int:
        return forecast.memory.held(self.question.machine.accelerator)

    def fastest_of_each(
        self, planner: Planner, every: Sequence[Candidate], kind: Literal["strategy", "wire"]
    ) -> list[Forecast]:
        """The fastest of each strategy or wire that fits, forecast whole; the fastest first."""
        kinds: dict[str | None, list[Candidate]] = {}
        for candidate in every:
            kinds.setdefault(getattr(candidate, kind), []).append(candidate)
        best = (self._fastest(planner, alike) for alike in kinds.values())
        return sorted((f for f in best if f is not None), key=_rate, reverse=True)

    def _fastest(self, planner: Planner, alike: Sequence[Candidate]) -> Forecast | None:
        """Forecast the first whole until no estimate is faster than the fastest of them."""
        best: Forecast | None = None
        for candidate, seconds in islice(fastest(planner, alike, self.fits), EXACT):
            if best and seconds > best.time.seconds / self.question.rows_of(best.candidate):
                break
            whole = planner.forecast(candidate)
            if self._fits(whole) and (best is None or _rate(whole) > _rate(best)):
                best = whole
        return best

    def rounded_otherwise(
        self, planner: Planner, best: Forecast, every: Sequence[Candidate]
    ) -> list[Forecast]:
        """The fastest that fits of each dtype in which gradients could travel, and in bfloat16."""
        wires = self.fastest_of_each(planner, [c for c in every if c.wire], "wire")
        if self.question.dtypes.param is not torch.float32:
            return wires
        narrow = planner.forecast(replace(best.candidate, computes="bfloat16"))
        return sorted([*wires, narrow] if self._fits(narrow) else wires, key=_rate, reverse=True)

    def best(
        self, planner: Planner, others: Sequence[Forecast], every: Sequence[Candidate]
    ) -> Forecast:
        """The fastest, with what memory it leaves used for unsharded units if that is faster."""
        if not others:
            plain = [c for c in every if c.wire is None]
            return planner.forecast(smallest(planner, plain, self.filled))
        best = others[0]
        free = self.capacity / (1 + self.errors.memory) - self.reserved - self._held(best)
        whole = sum(p.numel() * p.itemsize for p in self.question.model.parameters())
        share = round(min(1.0, free / whole), 2)
        frees = not placement_of(best.candidate.strategy).resident
        if frees and share > 0 and not best.candidate.unsharded:
            more = planner.forecast(replace(best.candidate, unsharded=share))
            if self._fits(more) and more.time.seconds < best.time.seconds:
                return more
        return best

    def advice(self, strategies: set[str]) -> list[Advice]:
        """The rules of thumb for this model on this machine, of what was searched."""
        machine, hosts = self.question.machine, self.question.ranks / self.question.machine.per_host
        between = machine.between.name if hosts > 1 else None
        bits = machine.between.bandwidth * 8
        rules = advise(Situation(self.numel, _inside(machine.inside), between, bits))
        return [rule for rule in rules if rule.strategy in {"diloco", *strategies}]


def _numel(model: nn.Module) -> int:
    """Elements of all weights; bytes of quantised ones are none, nor are their scales."""
    plain = sum(param.numel() for param in model.parameters() if param.dtype is not torch.uint8)
    quantised: list[Any] = [module for module in model.modules() if _is_quantised(module)]
    return plain + sum(int(module.values) for module in quantised)


def _is_quantised(module: nn.Module) -> bool:
    return any(param.dtype is torch.uint8 for param in module.parameters(recurse=False))


def _is_frozen(model: nn.Module) -> bool:
    """Is most of it?"""
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return trained < _numel(model) / 2


def _rate(forecast: Forecast) -> float:
    return forecast.time.tokens_per_second


def _inside(link: Link) -> str:
    """The rules' word for it: hosts with NVLink have switches since A100."""
    return "NVSwitch" if link.name.startswith("NVLink") else link.name
