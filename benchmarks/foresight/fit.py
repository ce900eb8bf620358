"""The fit of a few constants, and the judgement of each row by a fit that has not seen it.

Two constants for each accelerator and five for all, each with a prior: a number that was measured
by others, or is usual. What rows cannot tell stays there. The fit is damped least squares on the
logarithm of throughput, in which far rows (Huber 1964) and large sources count less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations

import torch
from torch import Tensor

from benchmarks.foresight.plans import Plan
from shardwise.plan.forecast.machine import Accelerator, Constants

USUAL = Constants(bandwidth=0.8, small=55, contention=0.3, short=260, narrow=15)
PRODUCTS, ATTENTION = 0.85, 0.55  # of what one large product reaches, and of the peak
WIDTHS = {  # of the priors, as logarithms
    "bandwidth": 0.15,
    "small": 0.5,
    "contention": 0.5,
    "short": 0.5,
    "narrow": 0.7,
    "products": 0.12,
    "attention": 0.2,
}
NOISE = 0.08  # of a row, as a logarithm
SOURCE = 10  # rows from which on those of one source count less
STEP, ROUNDS, CLOSE = 0.01, 8, 0.003
PARTS, STRIDE = 5, 7  # of the rows, for those that are seen
TRUST = 0.65  # of one measurement, which has noise of its own, where a forecast is corrected by it


@dataclass(frozen=True)
class Fitted:
    """Constants by name: ``("", name)`` of all machines, ``(accelerator, name)`` of one."""

    names: tuple[tuple[str, str], ...]
    logarithms: Tensor  # [names], of the constant over its prior

    def constants(self) -> Constants:
        """The constants of all machines."""
        return Constants(**{f.name: self._of("", f.name) for f in fields(Constants)})

    def accelerator(self, known: Accelerator) -> Accelerator:
        """An accelerator with its own; its table's where no row was on it."""
        if (known.name, "products") not in self.names:
            return known
        products, attention = (self._of(known.name, name) for name in ("products", "attention"))
        return replace(known, products=known.best * products, attention=attention)

    def _of(self, accelerator: str, name: str) -> float:
        key = accelerator, name
        is_fitted = key in self.names
        return _prior(name) * math.exp(self.logarithms[self.names.index(key)] if is_fitted else 0.0)

    def error(self, plan: Plan) -> float:
        """The logarithm of forecast over measured throughput."""
        accelerator = self.accelerator(plan.case.machine.accelerator)
        forecast = plan.forecast(accelerator, self.constants())
        return math.log(forecast.tokens_per_second / plan.measured)


def _prior(name: str) -> float:
    own = {"products": PRODUCTS, "attention": ATTENTION}
    return own[name] if name in own else getattr(USUAL, name)


def start(plans: Sequence[Plan]) -> Fitted:
    """All constants at their priors."""
    accelerators = sorted({plan.case.machine.accelerator.name for plan in plans})
    names = [("", field.name) for field in fields(Constants)]
    names += [(one, name) for one in accelerators for name in ("products", "attention")]
    return Fitted(tuple(names), torch.zeros(len(names), dtype=torch.float64))


@dataclass(frozen=True)
class Fit:
    """All rows, with the slopes of their errors where all of them were fitted."""

    plans: Sequence[Plan]
    fitted: Fitted
    slopes: Tensor  # [rows, names]

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Fit:
        """Fit all rows."""
        fitted = start(plans)
        for _ in range(ROUNDS):
            errors, slopes = _errors(plans, fitted), _slopes(plans, fitted)
            change = _change(plans, fitted, errors, slopes)
            fitted = replace(fitted, logarithms=fitted.logarithms + change)
            if change.abs().max() < CLOSE:
                break
        return cls(plans, fitted, _slopes(plans, fitted))

    def without(self, left_out: Container[str], rounds: int = 3) -> Fitted:
        """Fit the other rows, from the priors on; slopes are those of the fit of all rows.

        Args:
            left_out: numbers of rows.
        """
        kept = [n for n, plan in enumerate(self.plans) if plan.case.number not in left_out]
        plans, slopes, fitted = [self.plans[n] for n in kept], self.slopes[kept], start(self.plans)
        for _ in range(rounds):
            change = _change(plans, fitted, _errors(plans, fitted), slopes)
            fitted = replace(fitted, logarithms=fitted.logarithms + change)
        return fitted


def _errors(plans: Sequence[Plan], fitted: Fitted) -> Tensor:
    """``[rows]``."""
    return torch.tensor([fitted.error(plan) for plan in plans], dtype=torch.float64)


def _slopes(plans: Sequence[Plan], fitted: Fitted) -> Tensor:
    """``[rows, names]``; constants of another accelerator change nothing."""
    errors = _errors(plans, fitted)
    slopes = torch.zeros(len(plans), len(fitted.names), dtype=torch.float64)
    for column, (accelerator, _) in enumerate(fitted.names):
        moved = fitted.logarithms.clone()
        moved[column] += STEP
        other = replace(fitted, logarithms=moved)
        for row, plan in enumerate(plans):
            if accelerator in ("", plan.case.machine.accelerator.name):
                slopes[row, column] = (other.error(plan) - errors[row]) / STEP
    return slopes


def _change(plans: Sequence[Plan], fitted: Fitted, errors: Tensor, slopes: Tensor) -> Tensor:
    """One step of Gauss and Newton, towards smaller errors and towards the priors."""
    rows = Counter(plan.case.source for plan in plans)
    shares = [max(1, rows[plan.case.source] / SOURCE) for plan in plans]
    weights = 1 / (NOISE * torch.tensor(shares, dtype=torch.float64).sqrt())
    weights = weights / (errors * weights).abs().clamp(min=1).sqrt()
    widths = torch.tensor([WIDTHS[name] for _, name in fitted.names], dtype=torch.float64)
    weighed = slopes * weights[:, None]
    matrix = weighed.T @ weighed + torch.diag(widths**-2)
    pull = weighed.T @ (errors * weights) + fitted.logarithms * widths**-2
    change: Tensor = torch.linalg.solve(matrix, -pull)
    return change.clamp(-0.3, 0.3)


# ---- judgement ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """Errors of rows by class, each relative, by the row's number."""

    seen: Mapping[str, float]
    calibrated: Mapping[str, float]
    unseen: Mapping[str, float]
    pairs: int  # of rows of one source and accelerator that differ by more than 5 %
    right: int  # of them, in the right order


def judge(plans: Sequence[Plan], fit: Fit) -> Judgement:
    """Judge each row by fits that have not seen it."""
    unseen = _unseen(plans, fit)
    far = {plan.case.number: _relative(error) for plan, error in unseen.items()}
    return Judgement(_seen(plans, fit), _calibrated(unseen), far, *ordered(unseen))


def _relative(logarithm: float) -> float:
    return math.expm1(logarithm)


def _seen(plans: Sequence[Plan], fit: Fit) -> dict[str, float]:
    """By a fit that has other rows of the source, and not these: every fifth row is left out."""
    sources = {plan.case.source for plan in fit.plans}
    fitted_rows = {plan.case.number: n for n, plan in enumerate(fit.plans)}
    known = [plan for plan in plans if plan.case.source in sources]
    errors: dict[str, float] = {}
    for part in range(PARTS):
        left_out = {number for number, n in fitted_rows.items() if n * STRIDE % PARTS == part}
        fitted = fit.without(left_out)
        kept = Counter(p.case.source for p in fit.plans if p.case.number not in left_out)
        rows = [p for p in known if p.case.number in left_out and kept[p.case.source]]
        errors |= {plan.case.number: _relative(fitted.error(plan)) for plan in rows}
    others = [plan for plan in known if plan.case.number not in fitted_rows]
    return errors | {plan.case.number: _relative(fit.fitted.error(plan)) for plan in others}


def _unseen(plans: Sequence[Plan], fit: Fit) -> dict[Plan, float]:
    """The logarithm of each row's error, by a fit without its source."""
    errors: dict[Plan, float] = {}
    for source in {plan.case.source: None for plan in plans}:
        numbers = {plan.case.number for plan in fit.plans if plan.case.source == source}
        fitted = fit.without(numbers)
        errors |= {plan: fitted.error(plan) for plan in plans if plan.case.source == source}
    return errors


def _calibrated(unseen: Mapping[Plan, float]) -> dict[str, float]:
    """The same where one row of the source and accelerator was measured: the mean over which.

    The forecast is multiplied by ``(measured / forecast) ** TRUST`` of that row.
    """
    groups: dict[tuple[str, str], list[Plan]] = {}
    for plan in unseen:
        groups.setdefault(plan.case.group, []).append(plan)
    errors: dict[str, float] = {}
    for group in groups.values():
        for plan in group:
            others = [other for other in group if other is not plan]
            if others:
                apart = [abs(_relative(unseen[plan] - TRUST * unseen[other])) for other in others]
                errors[plan.case.number] = sum(apart) / len(apart)
    return errors


def ordered(unseen: Mapping[Plan, float]) -> tuple[int, int]:
    """Pairs of one source and accelerator that differ by more than 5 %, and those ordered right."""
    pairs = right = 0
    for one, other in combinations(unseen, 2):
        measured = math.log(one.measured / other.measured)
        if one.case.group == other.case.group and abs(measured) > math.log(1.05):
            pairs += 1
            right += (measured + unseen[one] - unseen[other]) * measured > 0
    return pairs, right
