"""Heartbeats: each rank says in the store that it runs and what it does, whether it waits or not.

A late rank that sends them is slow; one that sends none is frozen, or out of reach.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from time import monotonic

from torch.distributed.distributed_c10d import Store

from shardwise.comm.watchdog.call_site import activity, stack_of, user_call
from shardwise.comm.watchdog.desync import by_ranks
from shardwise.errors import ConfigError


def limit(environ: Mapping[str, str]) -> float:
    """Seconds in which a rank that does not answer is named."""
    text = environ.get("SHARDWISE_HEARTBEAT_SECONDS", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"SHARDWISE_HEARTBEAT_SECONDS is {text!r}, and must be a number of seconds above 0, in "
            "which a rank that does not answer is named: export SHARDWISE_HEARTBEAT_SECONDS=10"
        )
    return seconds


LIMIT = limit(os.environ)
INTERVAL = LIMIT / 10  # seconds between two heartbeats
FIRST_WARNING = LIMIT / 2  # seconds of waiting before the first log line; the interval doubles
MOST = 8  # ranks that a report describes


class Heartbeats:
    """One rank's heartbeats, and what it has seen of the others'. Final."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank, self._sent = store, rank, 0
        self._caller = threading.get_ident()  # whose stack has the user's program
        # Of each rank its last heartbeat, as ``send`` writes it, and when it was new.
        self._seen: dict[int, tuple[list[str], float]] = {}

    def send(self, last: str = "", joint: str = "") -> None:
        """Send the next one, with the ``last`` collective; ``joint`` as that method says."""
        self._sent += 1
        details = activity(), last and f"last issued {last}", user_call(self._caller)
        text = ", ".join([f"process {os.getpid()} on {platform.node()}", *filter(None, details)])
        beat = [str(self._sent), text, stack_of(self._caller), joint]
        self._store.set(f"alive/{self._rank}", json.dumps(beat))
        self.look(1)  # of rank 0, which may serve the store, so that it is known if that is silent

    def end(self) -> None:
        """Send none any more: the silence of this rank is no sign."""
        self._store.set(f"alive/{self._rank}", json.dumps(["", "connected", "", ""]))

    def last(self, rank: int) -> str:
        """The text of the last heartbeat that was seen of a rank."""
        return self._seen[rank][0][1] if rank in self._seen else "no heartbeat yet"

    def joint(self) -> dict[int, int]:
        """Each rank that is in a joint call of torch → how many collectives came before it."""
        return {rank: int(beat[3]) for rank, (beat, _) in self._seen.items() if beat[3]}

    def look(self, size: int) -> dict[int, float]:
        """The ranks that have sent nothing new for three intervals, and for how many seconds."""
        for rank in range(size):
            if self._store.check([key := f"alive/{rank}"]):
                beat = json.loads(self._store.get(key))
                if rank not in self._seen or self._seen[rank][0][0] != beat[0]:
                    self._seen[rank] = beat, monotonic()
        ages = {rank: monotonic() - since for rank, (beat, since) in self._seen.items() if beat[0]}
        return {rank: age for rank, age in ages.items() if age > 3 * INTERVAL}

    def describe(self, ranks: Iterable[int], silent: Mapping[int, float]) -> str:
        """A line for each of ``ranks``, the silent ones first, and one for each stack."""
        lines = list[str]()
        for rank in sorted(ranks, key=lambda rank: rank not in silent)[:MOST]:
            if rank not in self._seen:
                lines.append(f"rank {rank} has sent no heartbeat yet")
                continue
            how = "runs"
            if rank in silent:
                how = f"has sent no heartbeat for {silent[rank]:.0f} s: it is frozen, or its host "
                how += "cannot be reached. The last one"
            lines.append(f"rank {rank} {how}: {self.last(rank)}")
        for stack in by_ranks({rank: beat[2] for rank, (beat, _) in self._seen.items()}):
            lines.append(f"stack of {stack}")
        return "".join(f"\n  {line}" for line in lines)
