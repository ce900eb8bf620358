"""A verdict: does it fit, how fast is it, what limits it, and what to change; as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardwise.plan.forecast.advice import Advice
from shardwise.plan.forecast.machine import Machine
from shardwise.plan.forecast.memory import MemoryForecast
from shardwise.plan.forecast.planner import Forecast
from shardwise.plan.forecast.time import TimeForecast

EXIT = {"fits": 0, "does not fit": 2, "within the error": 3}
WORDS = {"fits": "FITS", "does not fit": "DOES NOT FIT", "within the error": "MAY FIT"}
DAY = 86_400


class Errors(NamedTuple):
    """Relative errors of forecasts of this class, as they were measured: docs/planning.md."""

    memory: float
    time: float

    def fits(self, filled: float) -> bool:
        """Does it fit, the error included? ``filled``: see ``Machine.filled``."""
        return filled * (1 + self.memory) <= 1


class Fix(NamedTuple):
    """One change that takes less memory, and what it costs."""

    change: str
    peak: int  # bytes
    in_host: int  # bytes in host memory, beside
    time: float  # for each token, beside what it takes now
    fits: bool  # the error included


@dataclass(frozen=True)
class Verdict:
    """The answer to one question.

    Attributes:
        best: the forecast that it is about.
        machine, ranks: on which.
        reserved: bytes of the device that neither model nor engine has.
        errors: of the forecast.
        others: the fastest of each strategy that fits, the fastest first.
        rounded: the fastest that fit and round otherwise: gradients travel in another dtype, or
            the model computes in bfloat16.
        fixes: single changes, first those after which it fits; empty where it fits.
        advice: of the rules of thumb.
        searched: how many candidates were estimated.
        tokens: of the whole run, where they are known; rows of a model that has no tokens.
        recipe: the keys of a recipe that set ``best``.
        asked: tokens of a step over all ranks that were asked for; ``None``: no number was.
    """

    best: Forecast
    machine: Machine
    ranks: int
    reserved: int
    errors: Errors
    others: Sequence[Forecast] = ()
    rounded: Sequence[Forecast] = ()
    fixes: Sequence[Fix] = ()
    advice: Sequence[Advice] = ()
    searched: int = 0
    tokens: int | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    asked: int | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        time = self.best.time
        return time.work.tokens * sum(times for _, times in time.micro_batches) * self.ranks

    @property
    def peak(self) -> int:
        """Bytes at most on the device."""
        return self.best.memory.held(self.machine.accelerator) + self.reserved

    @property
    def capacity(self) -> float:
        """Bytes of the device."""
        return self.machine.accelerator.memory

    @property
    def filled(self) -> float:
        """The part of memory that it fills: see ``Machine.filled``."""
        return self.best.memory.filled(self.machine, self.ranks)

    @property
    def says(self) -> str:
        """A key of ``EXIT``."""
        if self.errors.fits(self.filled):
            return "fits"
        return "does not fit" if self.filled > 1 else "within the error"

    @property
    def in_host(self) -> int:
        """Bytes at most of a rank in host memory, beside the device."""
        return self.machine.accelerator.beside(self.best.memory.in_host)

    @property
    def host_memory(self) -> float:
        """Bytes that a rank has of its host's memory."""
        return self.machine.accelerator.host_memory / min(self.machine.per_host, self.ranks)

    @property
    def exit_code(self) -> int:
        """0: it fits; 2: it does not; 3: the error decides."""
        return EXIT[self.says]

    @property
    def days(self) -> float | None:
        """Days that ``tokens`` take."""
        rate = self.best.time.tokens_per_second * self.ranks
        return None if self.tokens is None else self.tokens / rate / DAY

    @property
    def first_line(self) -> str:
        """The whole verdict in one line."""
        time, errors = self.best.time, self.errors
        rate = f"{time.tokens_per_second:,.0f} {time.work.counted}/s"
        parts = [
            f"peak {_gb(self.peak)} ({self.peak / self.capacity:.0%}) ± {errors.memory:.0%}",
            f"{rate} per {self._device} ± {errors.time:.0%}",
            f"MFU {time.mfu():.0%}",
        ]
        if self.filled > self.peak / self.capacity:  # the device is not what is full
            parts[1:1] = [f"{_gb(self.in_host)} in host memory {self._of_host}"]
        if self.days is not None and self.tokens is not None:
            parts.append(f"{_duration(self.days)} for {_count(self.tokens)} {time.work.counted}")
        name = self.machine.accelerator.name
        memory = "" if "GB" in name else f" {self.capacity / 1e9:.0f} GB"
        return f"{WORDS[self.says]} on {self.ranks:,} × {name}{memory}: {', '.join(parts)}"

    @property
    def _of_host(self) -> str:
        return f"of {_gb(self.host_memory)} for each"

    @property
    def _device(self) -> str:
        return "GPU" if self.machine.accelerator.device in ("cuda", "xpu") else "rank"

    def lines(self) -> Iterator[str]:
        """The verdict, and what it rests on."""
        yield self.first_line
        yield f"with {self.best.candidate}"
        if self.asked is not None and self.asked != self.step_tokens:
            counted = self.best.time.work.counted
            yield f"a step has {self.step_tokens:,} {counted}, and not the {self.asked:,} asked for"
        yield ""
        yield from self._memory()
        yield ""
        yield from self._time()
        yield from self._others()
        yield from self._fixes()
        yield from self._advice()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_json(self) -> dict[str, Any]:
        """Return all of it, in bytes and seconds."""
        return {
            "verdict": self.says,
            "ranks": self.ranks,
            "accelerator": self.machine.accelerator.name,
            "capacity": self.capacity,
            "host_memory": self.host_memory,
            "reserved": self.reserved,
            "errors": self.errors._asdict(),
            "days": self.days,
            "step_tokens": self.step_tokens,
            "asked": self.asked,
            **self._record(self.best),
            "others": [*map(self._record, self.others)],
            "rounded": [*map(self._record, self.rounded)],
            "recipe": dict(self.recipe),
            "fixes": [fix._asdict() for fix in self.fixes],
            "advice": [advice._asdict() for advice in self.advice],
            "searched": self.searched,
        }

    def _record(self, forecast: Forecast) -> dict[str, Any]:
        candidate, memory, time = forecast
        return {
            "candidate": asdict(candidate),
            "peak": memory.peak,
            "held": memory.held(self.machine.accelerator),
            "in_host": self.machine.accelerator.beside(memory.in_host),
            "peak_at": str(memory.at_peak),
            "by_kind": memory.by_kind,
            "by_unit": memory.by_unit,
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "counted": time.work.counted,
            "mfu": time.mfu(),
            "parts": time.parts,
        }

    def _memory(self) -> Iterator[str]:
        yield f"peak of a rank, while {self.best.memory.at_peak}:"
        memory: MemoryForecast = self.best.memory
        own = self.machine.accelerator.within(memory.in_host)
        more = {
            "offloaded": own,
            "freed and kept": self.peak - self.reserved - memory.peak - own,
            "context and communicators": self.reserved,
        }
        for kind, nbytes in {**memory.by_kind, **more}.items():
            if nbytes >= self.peak / 1000:
                yield f"  {kind:<26} {_gb(nbytes):>10}  {nbytes / self.peak:4.0%}"
        if self.in_host:
            yield f"  {'in host memory, beside':<26} {_gb(self.in_host):>10}  {self._of_host}"

    def _time(self) -> Iterator[str]:
        time = self.best.time
        yield f"step of a rank: {_seconds(time.seconds)}, most of it {_largest(time.parts)}"
        for part, seconds in sorted(time.parts.items(), key=lambda item: -item[1]):
            if seconds >= time.seconds / 1000:
                yield f"  {part:<26} {_seconds(seconds):>10}  {seconds / time.seconds:4.0%}"

    def _others(self) -> Iterator[str]:
        if not self.others:
            return
        yield ""
        fastest = "the fastest of each strategy that fits, and its limit"
        yield f"of {self.searched:,} candidates, {fastest}:"
        yield from map(self._other, self.others)
        if self.rounded:
            yield "and in other dtypes, which round otherwise:"
            yield from map(self._other, self.rounded)

    def _other(self, forecast: Forecast) -> str:
        candidate, memory, time = forecast
        peak = _gb(memory.held(self.machine.accelerator) + self.reserved)
        rate = f"{time.tokens_per_second:,.0f}"
        return f"  {rate:>8} {time.work.counted}/s {peak:>9}  {candidate}; {_largest(time.parts)}"

    def _fixes(self) -> Iterator[str]:
        if not self.fixes:
            return
        yield ""
        yield "what would change that, one thing at a time:"
        counted = self.best.time.work.counted.removesuffix("s")
        for change, peak, in_host, time, fits in self.fixes:
            total, says = _gb(peak + self.reserved), "fits" if fits else "does not fit"
            says += f", {_gb(in_host)} in host memory" if in_host else ""
            yield f"  {change:<32} {total:>10}, {says}; a {counted} takes {_times(time)}"

    def _advice(self) -> Iterator[str]:
        if not self.advice:
            return
        yield ""
        yield "rules of thumb, and what the numbers say instead:"
        for strategy, takes, why in self.advice:
            advice = f"{'take' if takes else 'avoid'} {strategy}: {why}"
            yield f"  {advice:<64} {self._instead(strategy, takes)}".rstrip()

    def _instead(self, strategy: str, takes: bool) -> str:
        """Say what the numbers say of a strategy, and why, beside a rule's word."""
        if strategy == "diloco":
            return "not computed: workers train apart"
        times = {other.candidate.strategy: other.time for other in self.others}
        if strategy not in times:
            return "computed: does not fit"
        fastest, own = next(iter(times.items())), times[strategy]
        if strategy == fastest[0]:
            waits = own.parts["exposed communication"] / own.seconds
            return f"computed: {'' if takes else 'and yet '}the fastest; {waits:.0%} of it waits"
        times_as_long = fastest[1].tokens_per_second / own.tokens_per_second
        if times_as_long < 1.005:
            return f"computed: as fast as {fastest[0]}"
        more = _more(own, fastest[1])
        return f"computed: takes {_times(times_as_long)} as {fastest[0]}: more {more}"


def _more(slow: TimeForecast, fast: TimeForecast) -> str:
    """The part of a step on which one spends most more for a token."""
    tokens = slow.tokens_per_second * slow.seconds, fast.tokens_per_second * fast.seconds
    added = {
        part: slow.parts[part] / tokens[0] - fast.parts[part] / tokens[1] for part in slow.parts
    }
    return _largest(added)


def _largest(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda part: parts[part])


def _times(factor: float) -> str:
    return f"{factor:,.2f} × as long"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.1f} us"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def _duration(days: float) -> str:
    if days >= 2:
        return f"{days:,.1f} days"
    if days * 24 >= 2:
        return f"{days * 24:,.1f} hours"
    return f"{days * 1440:,.0f} minutes" if days * 1440 >= 2 else _seconds(days * DAY)


def _count(number: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:g} {letter}"
    return f"{number:,}"
