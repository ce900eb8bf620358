"""The front door of forecasts: a model, a machine and what is already decided give a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwise.config.precision import Precision
from shardwise.errors import ConfigError
from shardwise.plan.forecast.advice import Advice, Situation, advise
from shardwise.plan.forecast.candidate import Candidate, candidates, savings
from shardwise.plan.forecast.machine import Link, known
from shardwise.plan.forecast.observe import Loss, loss_of
from shardwise.plan.forecast.search import Estimate, Forecast, Inputs, Planner, Question
from shardwise.plan.forecast.verdict import Errors, Fix, Verdict
from shardwise.plan.units.wrap import Wrap

MOST_ROWS = 64  # of a micro-batch that is looked for
EXACT = 4  # candidates of each strategy that are forecast whole


def devices(text: str) -> tuple[int, str]:
    """``"8xH100" → 8, "H100"``: devices of a host. Raises ``ConfigError``."""
    count, x, name = text.partition("x")
    if not (x and count.strip().isdecimal() and int(count) > 0):
        raise ConfigError(
            f"{text!r} does not say how many devices of which kind. Write a number, x and a name, "
            "such as 8xH100: those of one host."
        )
    return int(count), name.strip()


def plan(
    model: nn.Module,
    machine: str,
    inputs: Callable[[int], Inputs],
    *,
    hosts: int = 1,
    link: str | None = None,
    rows: int | None = None,
    optimizer: str = "adamw",
    wrap: Wrap | None = None,
    precision: Precision = Precision(),
    loss: Loss = loss_of,
    tokens: int | None = None,
) -> Verdict:
    """Say how ``model`` can be trained fastest on a machine that need not be there; ``sw.plan``.

    Args:
        model: best on the meta device; it stays as it is.
        machine: devices of a host, such as ``"8xH100"``.
        inputs: rows of a micro-batch → positional and keyword arguments of the model's forward;
            of tensors only shapes and dtypes matter.
        hosts, link: how many there are, and what connects them: a name, or ``"400Gb/s"``.
        rows: of a step, over all ranks; ``None``: one micro-batch of each rank.
        optimizer: ``"adamw"``, ``"adamw_8bit"``, ``"sgd"`` or ``"momentum"``.
        wrap, precision: as of ``shard()``.
        loss: of what the model returns.
        tokens: of the whole run.

    Raises:
        ConfigError: no such accelerator or link, or rows that the ranks cannot share.
        ScheduleError: the model looks at values, which the meta device does not have.
    """
    per_host, name = devices(machine)
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
) -> Verdict:
    """Answer ``question``.

    Args:
        chosen: the verdict is about it; ``None``: about the fastest that fits, or else the one that
            takes least memory.
        tokens: of the whole run.
        among: candidates to search; ``None``: all that are worth it.

    Raises:
        ConfigError: the rows of a step cannot be split among the ranks, or a strategy has no mesh.
    """
    if chosen is not None:
        question.check(chosen)
    planner, search = Planner(question), _Search(question)
    if among is None:
        among = search.candidates()
    estimates = sorted(planner.estimates(among, search.fits), key=search.seconds_per_row)
    others = search.fastest(planner, estimates)
    best = planner.forecast(chosen) if chosen else search.best(planner, others, estimates)
    verdict = Verdict(
        best,
        question.machine,
        question.ranks,
        search.reserved,
        search.errors,
        others,
        advice=search.advice(),
        searched=len(estimates),
        tokens=tokens,
    )
    return verdict if verdict.says == "fits" else replace(verdict, fixes=_fixes(planner, best))


class _Search:
    """Facts of one question that its search goes by."""

    def __init__(self, question: Question) -> None:
        self.question = question
        errors = known().errors  # nothing was measured on this machine, as on a source left out
        self.errors = Errors(errors["memory"].middle, errors["unseen"].middle)
        self.reserved = question.machine.accelerator.reserved
        self.capacity = question.machine.accelerator.memory
        params = list(question.model.parameters())
        self.numel = sum(map(_elements, params))
        trained = sum(param.numel() for param in params if param.requires_grad)
        self.is_frozen = trained < self.numel / 2

    def candidates(self) -> Iterable[Candidate]:
        """Return those whose micro-batches divide the rows of a step."""
        question, rows = self.question, [2**n for n in range(MOST_ROWS.bit_length())]
        if question.rows is not None:
            of_a_rank = question.rows / question.ranks
            rows = [n for n in rows if of_a_rank % n == 0] or [1]
            question.check(Candidate("full_shard", rows[0]))
        return candidates(question.ranks, question.machine.per_host, rows, self.is_frozen)

    def fits(self, peak: float, in_host: float) -> bool:
        """Does it fit, the error included?"""
        machine, more = self.question.machine, 1 + self.errors.memory
        of_a_host = in_host * min(machine.per_host, self.question.ranks)
        in_host_memory = of_a_host * more <= machine.accelerator.host_memory
        return in_host_memory and (peak + self.reserved) * more <= self.capacity

    def seconds_per_row(self, estimate: Estimate) -> tuple[float, float]:
        """Time to order by, and of equal ones memory."""
        rows = 1 if self.question.rows else estimate.candidate.micro_batch
        return estimate.seconds / rows, estimate.peak

    def fastest(self, planner: Planner, estimates: Sequence[Estimate]) -> list[Forecast]:
        """The fastest of each strategy that fits, forecast whole."""
        first: dict[str, list[Candidate]] = {}
        for estimate in estimates:
            if estimate.seconds < float("inf"):
                first.setdefault(estimate.candidate.strategy, []).append(estimate.candidate)
        best = []
        for few in first.values():
            forecasts = [planner.forecast(candidate) for candidate in few[:EXACT]]
            forecasts = [f for f in forecasts if self.fits(f.memory.peak, f.memory.in_host)]
            best += sorted(forecasts, key=_rate, reverse=True)[:1]
        return sorted(best, key=_rate, reverse=True)

    def best(
        self, planner: Planner, others: Sequence[Forecast], estimates: Sequence[Estimate]
    ) -> Forecast:
        """The fastest, with what memory it leaves used for unsharded units if that is faster."""
        if not others:
            return planner.forecast(min(estimates, key=lambda e: e.peak).candidate)
        best = others[0]
        free = self.capacity / (1 + self.errors.memory) - self.reserved - best.memory.peak
        whole = sum(p.numel() * p.itemsize for p in self.question.model.parameters())
        share = round(min(1.0, free / whole), 2)
        if not best.candidate.unsharded and share > 0 and "shard" in best.candidate.strategy:
            more = planner.forecast(replace(best.candidate, unsharded=share))
            fits = self.fits(more.memory.peak, more.memory.in_host)
            if fits and more.time.seconds < best.time.seconds:
                return more
        return best

    def advice(self) -> list[Advice]:
        """The rules of thumb for this model on this machine."""
        machine, hosts = self.question.machine, self.question.ranks / self.question.machine.per_host
        between = _plain(machine.between) if hosts > 1 else None
        bits = machine.between.bandwidth * 8
        return list(advise(Situation(self.numel, _inside(machine.inside), between, bits)))


def _elements(param: nn.Parameter) -> int:
    """Elements of a weight; a byte of codes is two of 4 bits."""
    return param.numel() * (2 if param.dtype is torch.uint8 else 1)


def _rate(forecast: Forecast) -> float:
    return forecast.time.tokens_per_second


def _inside(link: Link) -> str:
    """The rules' word for it: hosts with NVLink have switches since A100."""
    name = _plain(link)
    return "nvswitch" if name.startswith("nvlink") else name


def _plain(link: Link) -> str:
    return "infiniband" if "infiniband" in link.name.lower() else link.name.lower().replace(" ", "")


def _fixes(planner: Planner, best: Forecast) -> list[Fix]:
    """Single changes, those that save most first."""
    changed = {change: planner.forecast(other) for change, other in savings(best.candidate)}
    fixes = [
        Fix(name, f.memory.peak, _rate(best) / _rate(f))
        for name, f in changed.items()
        if f.memory.peak < best.memory.peak
    ]
    return sorted(fixes, key=lambda fix: fix.peak)
