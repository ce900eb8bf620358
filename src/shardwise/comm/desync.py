"""What a rank says that it does, and the sentences for ranks that do not do the same.

Every rank issues the same collectives in the same order. So the n-th collective of one rank
and the n-th of another are either equal or an error, whatever the timing: no rank has to be
ahead or behind for the difference to be certain. The ordinary way is to let the backend meet
unlike messages, and to read "connection closed by peer" or nothing at all. Pure functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Collective",
    "Cursor",
    "absent",
    "by_ranks",
    "decide",
    "differing_facts",
    "facts_differ",
    "gone",
    "late",
    "left",
    "mismatch",
    "named",
    "slow",
]

DEAD = "This group cannot be used any more."
NO_TAG = 2**31 - 1  # no collective has this tag, so a message with it never meets another


class Collective(NamedTuple):
    """One collective as a rank issued it.

    Attributes:
        seq: how many collectives this rank had issued before it; negative while a group is made.
        kind: what moves, for example ``"all_gather"`` or ``"broadcast from rank 0"``.
        op, unit: the label.
        nbytes: bytes of the whole buffer (of the tensor, for a broadcast).
    """

    seq: int
    kind: str
    op: str
    unit: str
    nbytes: int

    @property
    def tag(self) -> int:
        """A hash of all fields, in ``range(NO_TAG)``: messages of unlike collectives never meet."""
        return (
            zlib.crc32(f"{self.seq} {self.kind} {self.op} {self.unit} {self.nbytes}".encode())
            % NO_TAG
        )

    @property
    def in_full(self) -> str:
        return (
            f"{self} (collective {self.seq}, {self.nbytes:,} bytes)" if self.seq >= 0 else f"{self}"
        )

    def __str__(self) -> str:
        return f"{self.op} {self.unit}".strip()


@dataclass(frozen=True)
class Cursor:
    """Where one rank is, as it wrote it for the others.

    Attributes:
        issued: collectives issued so far.
        recent: the last of them, oldest first.
        waits: the number of the collective that it waits for, or -1.
        ended: ``""``, or how it left, for example ``"its process ended normally"``.
    """

    issued: int = 0
    recent: tuple[Collective, ...] = ()
    waits: int = -1
    ended: str = ""

    @property
    def waits_for(self) -> Collective | None:
        return next((c for c in self.recent if c.seq == self.waits), None)


def decide(cursors: Mapping[int, Cursor]) -> str:
    """Why the ranks (rank → cursor) can never go on, or ``""`` while they may.

    Only facts that time cannot change count, because a cursor may be old: a number under which
    two ranks issued unlike collectives; a rank that has left before one that another waits for.
    """
    seqs = sorted({c.seq for cursor in cursors.values() for c in cursor.recent})
    for seq in seqs:
        at = {rank: c for rank, cursor in cursors.items() for c in cursor.recent if c.seq == seq}
        if len(set(at.values())) > 1:
            return mismatch(at, _in_common(cursors, seq))
    for rank, cursor in cursors.items():
        at = {peer: c for peer, other in cursors.items() if (c := other.waits_for)}
        waiting = {peer: c for peer, c in at.items() if c.seq >= cursor.issued}
        if cursor.ended and waiting:
            return left(rank, cursor.ended, cursor.issued, waiting)
    return ""


def absent(cursors: Mapping[int, Cursor], size: int, collective: Collective) -> list[int]:
    """The ranks whose cursors do not show that they issued ``collective``."""
    return [r for r in range(size) if r not in cursors or cursors[r].issued <= collective.seq]


def mismatch(at: Mapping[int, Collective], before: str = "") -> str:
    """``at``: rank → what it issued under one number. ``before``: what all issued just before."""
    places: dict[Collective, list[int]] = {}
    for rank, collective in sorted(at.items()):
        places.setdefault(collective, []).append(rank)
    # The odd ones out first: that is where to look.
    odd_first = sorted(places.items(), key=lambda place: (len(place[1]), -place[1][0]))
    with_kind = len({(str(c), c.nbytes) for c in places}) < len(places)
    (odd, odd_ranks), *others = odd_first
    where = [f"{named(odd_ranks)} {_be(odd_ranks)} at {_place(odd, with_kind)}"]
    where += [f"{named(ranks)} at {_place(c, with_kind)}" for c, ranks in others]
    last = f" The last one in common was {before}." if before else ""
    return (
        f"collective {odd.seq} differs: {', '.join(where)}.{last} Nothing was delivered. {DEAD} "
        "Let every rank run the same modules in the same order on equally many batches, and give "
        "every rank the same model: look for a branch, a loop or a size that depends on the rank."
    )


def left(rank: int, how: str, count: int, waiting: Mapping[int, Collective]) -> str:
    """``rank`` ended after ``count`` collectives; ``waiting``: rank → what it still waits for."""
    return (
        f"rank {rank} has left ({how} after {max(0, count)} collectives) while "
        f"{_waiting(waiting)}. Its part will never come. {DEAD} Give every rank equally many "
        f"steps, and read rank {rank}'s own output for an error."
    )


def gone(rank: int, waiting: Mapping[int, Collective]) -> str:
    """``rank``'s connection closed and it wrote no reason: it did not end in an orderly way."""
    return (
        f"rank {rank} is gone without a word (killed, crashed, or cut off) while "
        f"{_waiting(waiting)}. Its part will never come. {DEAD} Read rank {rank}'s own output, "
        "and its machine's kernel log for a kill by lack of memory; then start again."
    )


def late(ranks: Sequence[int], seconds: float, waiting: Mapping[int, Collective]) -> str:
    """``ranks`` have not come within the time limit of ``seconds``."""
    verb = "has" if len(ranks) == 1 else "have"
    who = f"{named(ranks)} {verb} not come" if ranks else "every rank came, but nothing arrived"
    return (
        f"{who} within {seconds:,.0f} s while {_waiting(waiting)}. {DEAD} Look at what the "
        "processes are doing (py-spy dump --pid …), or give the slow part more time: "
        "connect(timeout=…)."
    )


def slow(
    rank: int,
    cursors: Mapping[int, Cursor],
    missing: Sequence[int],
    seconds: float,
    collective: Collective,
) -> str:
    """That ``rank`` waits for ``missing`` ranks, or for the backend if every rank has come.

    Of the ranks that wait for the same, the lowest says it for all; the others say ``""``.
    """
    waiting = [r for r, c in sorted(cursors.items()) if c.waits == collective.seq and not c.ended]
    if waiting[:1] != [rank]:
        return ""
    verb = "has" if len(waiting) == 1 else "have"
    who = named(missing) if missing else "the backend, though every rank has come,"
    return f"{named(waiting)} {verb} waited {seconds:,.0f} s for {who} at {collective.in_full}"


def facts_differ(facts: Sequence[Mapping[str, str]]) -> str:
    """``facts[rank]``: name → text, of which at least two differ."""
    lines = differing_facts(facts)
    more = [f"  … and {len(lines) - 10} more"] if len(lines) > 10 else []
    return (
        f"the ranks do not agree on {len(lines)} of their facts:\n"
        + "\n".join(lines[:10] + more)
        + f"\nThey would not train one model. {DEAD} Start every rank with the same code, "
        "configuration and versions."
    )


def differing_facts(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name whose text is not the same for every rank, in ``facts[rank]``."""
    lines: list[str] = []
    for name in sorted({name for mine in facts for name in mine}):
        texts = by_ranks(dict(enumerate(mine.get(name, "(absent)") for mine in facts)))
        lines += [f"  {name}: {'; '.join(texts)}"] if len(texts) > 1 else []
    return lines


def by_ranks(texts: Mapping[int, str]) -> list[str]:
    """Each text once, after the ranks that have it: ``ranks 0 and 2: a``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [f"{named(those)}: {text}" for text, those in ranks.items()]


def named(ranks: Sequence[int]) -> str:
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
    *most, last = parts
    return (
        f"rank{'s' if len(ranks) > 1 else ''} " + (f"{', '.join(most)} and " if most else "") + last
    )


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _place(collective: Collective, with_kind: bool) -> str:
    kind = f"{collective.kind}, " if with_kind else ""
    return f"{collective} ({kind}{collective.nbytes:,} bytes)"


def _waiting(waiting: Mapping[int, Collective]) -> str:
    return " and ".join(f"rank {rank} waits at {c.in_full}" for rank, c in sorted(waiting.items()))


def _in_common(cursors: Mapping[int, Cursor], seq: int) -> str:
    before = [c for cursor in cursors.values() for c in cursor.recent if c.seq == seq - 1 >= 0]
    return str(before[0]) if before else ""
