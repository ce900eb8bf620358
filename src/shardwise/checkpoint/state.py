"""What a run needs to go on where it stopped, beside parameters and optimizer state.

Tensors of it are in safetensors files; the rest is one JSON document, ``training.json``. A rank
that is not there any more has no generator to restore: with another number of ranks the numbers
that dropout draws cannot be the same, and loading says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.checkpoint import plain
from shardwise.errors import CheckpointError

__all__ = ["NAME", "Document", "Stateful", "Training"]

NAME = "training.json"
VERSION = 1


class Stateful(Protocol):
    """A scheduler, a loss scaler, or anything else that tells its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Training:
    """Where a run stands.

    Attributes:
        step: optimizer steps taken so far; ``None``: the number in the folder's name.
        scheduler: of the learning rate; its state must be plain values.
        scaler: of the loss.
        position: where in the data the run is: plain values, alike on every rank.
        config: what the run was started with: plain values.
        local: plain values of this rank's own.
        metric: how good this checkpoint is, for ``keep_best``.
        accumulating: the step is not over: what was accumulated is stored, too.
    """

    step: int | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    position: Any = None
    config: Any = None
    local: Any = None
    metric: float | None = None
    accumulating: bool = False


@dataclass(frozen=True)
class Document:
    """``training.json``, decoded.

    Attributes:
        step: optimizer steps taken, where that was said.
        world: ranks that saved it.
        optimizers: one record for each; see ``optimizers.contents``.
        scheduler, scaler: their states, or ``None``.
        position, config: as they were given.
        local: each rank's own values, by rank.
    """

    step: int | None
    world: int
    optimizers: list[dict[str, Any]]
    scheduler: Any
    scaler: Any
    position: Any
    config: Any
    local: list[Any]

    @classmethod
    def decode(cls, data: bytes, where: str) -> Document:
        """Read it.

        Raises:
            CheckpointError: it is not what ``encode`` wrote.
        """
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise CheckpointError(
                    f"{where} is of version {found['version']!r:.20}, and this shardwise reads "
                    f"version {VERSION}. Install a later shardwise."
                )
            step, world = found["step"], int(found["world"])
            parts = {key: plain.decode(found[key]) for key in _VALUES}
            return cls(None if step is None else int(step), world, found["optimizers"], **parts)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{where} is damaged ({type(error).__name__}: {error}). Load another checkpoint, "
                "or only the weights of this one."
            ) from None


_VALUES = ("scheduler", "scaler", "position", "config", "local")


def encode(
    training: Training, optimizers: Sequence[Mapping[str, Any]], local: Sequence[str]
) -> bytes:
    """The document.

    Args:
        training: of this rank; only ``local`` may differ by rank.
        optimizers: see ``optimizers.contents``.
        local: each rank's ``local_text``, by rank.

    Raises:
        CheckpointError: a value that cannot be written, naming it.
    """
    states = {"scheduler": training.scheduler, "scaler": training.scaler}
    values = {"position": training.position, "config": training.config}
    values |= {key: None if owner is None else owner.state_dict() for key, owner in states.items()}
    found = {key: plain.encode(value, f"training.{key}") for key, value in values.items()}
    found |= {"version": VERSION, "step": training.step, "world": len(local)}
    found |= {"optimizers": list(optimizers), "local": [json.loads(text) for text in local]}
    return json.dumps(found, indent=1).encode() + b"\n"


def local_text(training: Training) -> str:
    """This rank's own values, as they travel to rank 0."""
    return json.dumps(plain.encode(training.local, "training.local"))
