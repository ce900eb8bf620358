"""The progress of each rank, and error messages for ranks that issue different collectives.

Every rank issues the same collectives in the same order. So the n-th collective of one rank must
equal the n-th of every other, whatever the timing. A backend that gets mismatched messages reports
"connection closed by peer" or nothing at all. Pure functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
UNUSABLE = "This group cannot be used any more."
NOWHERE: Mapping[int, str] = {}
# No collective has these tags, so a message with one of them never matches another.
NO_TAG, PROBE_TAG = 2**31 - 1, 2**31 - 2


class Collective(NamedTuple):
    """One collective as a rank issued it."""

    seq: int  # its number on this rank, from 0; negative during startup of the group
    kind: str  # for example "all_gather" or "broadcast from rank 0"
    op: str  # of the label
    unit: str  # of the label
    nbytes: int  # of the whole buffer (of the tensor, for a broadcast)

    @property
    def tag(self) -> int:
        """A hash of all fields, in ``range(PROBE_TAG)``, so mismatched messages never match."""
        fields = f"{self.seq} {self.kind} {self.op} {self.unit} {self.nbytes}"
        return zlib.crc32(fields.encode()) % PROBE_TAG

    @property
    def details(self) -> str:
        """The label, and after startup also number and size."""
        if self.seq < 0:
            return str(self)
        return f"{self} (collective {self.seq}, {self.nbytes:,} bytes)"

    def __str__(self) -> str:
        return f"{self.op} {self.unit}".strip()


class RankProgress(NamedTuple):
    """The progress of one rank, as it published it."""

    issued: int = 0  # number of collectives
    recent: tuple[Collective, ...] = ()  # the last of them, oldest first
    waits: int | None = None  # the number of the collective that it waits for
    ended: str = ""  # why it ended, for example "its process ended normally"
    call: str = ""  # from where in the user's program it waits; see ``user_call``

    @property
    def waits_for(self) -> Collective | None:
        return next((c for c in self.recent if c.seq == self.waits), None)


def diagnose(progress: Mapping[int, RankProgress]) -> str:
    """Say why the ranks cannot continue; ``""`` if they may. ``progress``: rank → its progress.

    The progress may be old, so only permanent facts count: two ranks issued different collectives
    under one number, or a rank ended before a collective that another waits for.
    """
    issued: dict[int, dict[int, Collective]] = {}  # by number and rank
    for rank, one in progress.items():
        for collective in one.recent:
            issued.setdefault(collective.seq, {})[rank] = collective
    for seq, issued_by in sorted(issued.items()):
        if len(set(issued_by.values())) > 1:
            last_common = [*issued.get(seq - 1, {}).values()]
            calls = {rank: progress[rank].call for rank in issued_by}
            return mismatch(issued_by, str(last_common[0]) if last_common else "", calls)
    waits_for = {rank: c for rank, one in progress.items() if (c := one.waits_for)}
    for rank, one in progress.items():
        waiting = {peer: c for peer, c in waits_for.items() if c.seq >= one.issued}
        if one.ended and waiting:
            calls = {peer: progress[peer].call for peer in waiting}
            return rank_left(rank, one.ended, one.issued, waiting) + look_at(calls)
    return ""


def missing_ranks(
    progress: Mapping[int, RankProgress], size: int, collective: Collective
) -> list[int]:
    """The ranks that have not issued ``collective`` by their published progress."""
    return [r for r in range(size) if r not in progress or progress[r].issued <= collective.seq]


def look_at(calls: Mapping[int, str]) -> str:
    """A sentence on where the ranks are in the user's program; ``calls[rank]`` as ``user_call``."""
    known = {rank: call for rank, call in calls.items() if call}
    return f" Look at {'; '.join(by_ranks(known))}." if known else ""


def mismatch(
    issued_by: Mapping[int, Collective], last_common: str = "", calls: Mapping[int, str] = NOWHERE
) -> str:
    """Ranks issued different collectives under one number, after ``last_common``."""
    ranks_at = _ranks_by_value(issued_by)
    # The minority first, where the error is.
    fewest_first = sorted(ranks_at.items(), key=lambda place: (len(place[1]), -place[1][0]))
    with_kind = len({(str(c), c.nbytes) for c in ranks_at}) < len(ranks_at)
    (first, first_ranks), *others = fewest_first
    verb = "is" if len(first_ranks) == 1 else "are"
    where = [f"{format_ranks(first_ranks)} {verb} at {_describe(first, with_kind)}"]
    where += [f"{format_ranks(ranks)} at {_describe(c, with_kind)}" for c, ranks in others]
    last = f" The last one in common was {last_common}." if last_common else ""
    return (
        f"collective {first.seq} differs: {', '.join(where)}.{last} Nothing was delivered. "
        f"{UNUSABLE} Every rank must run the same model with the same modules in the same order on "
        "equally many batches: look for a branch, a loop or a size that depends on the rank."
        f"{look_at(calls)}"
    )


def rank_left(rank: int, reason: str, count: int, waiting: Mapping[int, Collective]) -> str:
    """``rank`` ended after ``count`` collectives; ``waiting``: rank → what it waits for."""
    return (
        f"rank {rank} has left ({reason} after {max(0, count)} collectives) while "
        f"{_waiting(waiting)}, which cannot complete. {UNUSABLE} Give every rank equally many "
        f"steps, and read rank {rank}'s own output for an error."
    )


def rank_died(rank: int, waiting: Mapping[int, Collective]) -> str:
    """``rank``'s connection closed and it published no reason: it was killed or has crashed."""
    return (
        f"rank {rank} ended without a reason (killed, crashed or disconnected) while "
        f"{_waiting(waiting)}, which cannot complete. {UNUSABLE} Read rank {rank}'s own output, "
        "and its machine's kernel log for an out-of-memory kill; then start again."
    )


def timed_out(ranks: Sequence[int], seconds: float, waiting: Mapping[int, Collective]) -> str:
    """``ranks`` have not issued the collective within ``seconds``."""
    subject = "every rank arrived, but no data did"
    if ranks:
        subject = f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not come"
    return (
        f"{subject} within {seconds:,.0f} s while {_waiting(waiting)}. {UNUSABLE} Look at the "
        "stacks of the processes (py-spy dump --pid …), or give the slow part more time: "
        "connect(timeout=…)."
    )


def still_waiting(
    rank: int,
    progress: Mapping[int, RankProgress],
    missing: Sequence[int],
    seconds: float,
    collective: Collective,
) -> str:
    """A warning that ``rank`` waits for ``missing`` ranks, or for the backend if none is missing.

    Of the ranks that wait for the same collective only the lowest warns; for others it is ``""``.
    """
    waiting = [r for r, c in sorted(progress.items()) if c.waits == collective.seq and not c.ended]
    if waiting[:1] != [rank]:
        return ""
    verb = "has" if len(waiting) == 1 else "have"
    subject = format_ranks(missing) if missing else "the backend, though every rank has come,"
    waited = f"{format_ranks(waiting)} {verb} waited {seconds:,.0f} s"
    return f"{waited} for {subject} at {collective.details}"


def facts_differ(facts: Sequence[Mapping[str, str]]) -> str:
    """The message for differing ``facts[rank]``: name → text."""
    lines = differing_facts(facts)
    rest = [f"  … and {len(lines) - 10} more"] if len(lines) > 10 else []
    return (
        f"{len(lines)} setting{'s are' if len(lines) > 1 else ' is'} not the same on all ranks:\n"
        + "\n".join(lines[:10] + rest)
        + f"\nThey would not train the same model. {UNUSABLE} Start every rank with the same code, "
        "configuration and versions."
    )


def differing_facts(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name whose text differs between ``facts[rank]``."""
    lines: list[str] = []
    for name in sorted({name for own in facts for name in own}):
        texts = by_ranks(dict(enumerate(own.get(name, "(absent)") for own in facts)))
        lines += [f"  {name}: {'; '.join(texts)}"] if len(texts) > 1 else []
    return lines


def by_ranks(texts: Mapping[int, str]) -> list[str]:
    """Each text once, with the ranks that have it: ``ranks 0 and 2: a``."""
    return [f"{format_ranks(ranks)}: {text}" for text, ranks in _ranks_by_value(texts).items()]


def _ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    ranks: dict[T, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return ranks


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0 and 2``, ``ranks 0–6 and 8``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    *all_but_last, last = parts
    listed = f"{', '.join(all_but_last)} and {last}" if all_but_last else last
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _describe(collective: Collective, with_kind: bool) -> str:
    kind = f"{collective.kind}, " if with_kind else ""
    return f"{collective} ({kind}{collective.nbytes:,} bytes)"


def _waiting(waiting: Mapping[int, Collective]) -> str:
    return " and ".join(f"rank {rank} waits at {c.details}" for rank, c in sorted(waiting.items()))
