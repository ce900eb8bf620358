"""One of several workers that train apart: its number, and what they exchanged.

Workers read one text, and sample i of step s is another row on each of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.recipe.outer_config import OuterConfig

WORKER = "SHARDWISE_WORKER"


class Worker(NamedTuple):
    """One of several workers that train one model."""

    number: int
    workers: int


ALONE = Worker(0, 1)


def worker_of(config: OuterConfig) -> Worker:
    """The worker that this process belongs to.

    Raises:
        ConfigError: neither the recipe nor the environment says it.
    """
    if config.method == "none":
        return ALONE
    text = os.environ.get(WORKER, "") if config.worker is None else str(config.worker)
    if not text.isdecimal() or int(text) >= len(config.workers):
        raise ConfigError(
            f"outer.workers names {len(config.workers)} workers, and which of them this is, is "
            f"{text or 'not said'}. Start each with {WORKER}=0, 1, … in its environment, or with "
            "--outer.worker 0, 1, …"
        )
    return Worker(int(text), len(config.workers))


@dataclass(frozen=True)
class Exchanged:
    """Every unit was exchanged once more with other workers.

    Attributes:
        step: local steps.
        workers: the numbers of those that take part, as this one knows.
        sent, received: bytes since the start of this attempt.
    """

    step: int
    workers: tuple[int, ...]
    sent: int
    received: int
