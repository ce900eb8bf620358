"""Options of saving and loading, and reports of both: frozen, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer

from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.training_state import Document, Training
from shardwise.errors import ConfigError, nearest
from shardwise.errors.arguments import checked
from shardwise.plan.printed import size

KINDS = ("full", "sharded", "local")


def kind_of(word: object) -> str:
    """``"full"``, ``"FULL"`` or ``"FULL_STATE_DICT"`` → ``"full"``; also a ``StateDictType``."""
    text = word if isinstance(word, str) else getattr(word, "name", "")
    kind = str(text).lower().removesuffix("_state_dict")
    if kind not in KINDS:
        like = nearest(kind, KINDS, 1)[0]
        raise ConfigError(
            f"there is no state dict of kind {word!r}; nearest is {like!r}. Kinds are "
            f"{', '.join(KINDS)} (FULL_STATE_DICT, SHARDED_STATE_DICT, LOCAL_STATE_DICT)."
        )
    return kind


@dataclass(frozen=True)
class Part:
    """A part of a model in the form that another library reads, for ``SaveOptions.names``."""

    wants: Callable[[str], bool]  # does a tensor of this name belong to it?
    stem: str  # what the name of its file begins with, such as ``"adapter_model"``
    # Name in the model → name in that file; what has none is stored in ``training/``
    stored: Mapping[str, str]
    files: Mapping[str, bytes]  # small files that belong beside it

    def __call__(self, name: str) -> bool:
        return self.wants(name)


@checked
@dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    Attributes:
        kind: ``"sharded"``: every rank writes what it holds, into files that any number of ranks
            loads. ``"full"``: the same files, which rank 0 alone writes, and reads for the others
            where they do not see them: for hosts that share no disk (not in the background).
        max_file_size: bytes of tensors in one file at most, unless one tensor has more.
        save_total_limit: of the checkpoints beside this one, and this one, how many stay.
        keep_best: ``"lowest"`` or ``"highest"``: the checkpoint with that ``Training.metric``
            stays, however old.
        files: further small files for the folder: name → text or bytes.
        names: which of the model's tensors are stored, by name, such as those of an adapter;
            ``None`` = all. They are loaded by the same ``names``.
        snapshot_bytes: host memory that a rank may use to save in the background; what does not
            fit is copied as the writing goes on, and the next step waits. ``None``: see
            ``budget_of``.
        when_busy: to save in the background while the save before is still being written:
            ``"wait"`` for that one, or ``"skip"`` this one.
    """

    kind: str | Enum = "sharded"
    max_file_size: int = 5_000_000_000
    save_total_limit: int | None = None
    keep_best: Literal["lowest", "highest"] | None = None
    files: Mapping[str, str | bytes] | None = None
    names: Callable[[str], bool] | None = None
    snapshot_bytes: int | None = None
    when_busy: Literal["wait", "skip"] = "wait"

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind_of(self.kind))
        if self.kind == "local":
            raise ConfigError(
                "no folder of kind 'local' is written any more: pass kind='sharded', or, on hosts "
                "that share no disk, kind='full'."
            )
        for name in ("max_file_size", "save_total_limit"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.snapshot_bytes is not None and self.snapshot_bytes < BLOCK:
            raise ConfigError(
                f"snapshot_bytes is {self.snapshot_bytes:,}; at least {BLOCK:,} are needed "
                f"({size(BLOCK)}, one block of a file)."
            )


@dataclass(frozen=True)
class SaveRequest:
    """A request to save: where, whose state, and how. Without training state: weights alone."""

    path: str | Path
    optimizers: Sequence[Optimizer]
    training: Training | None
    options: SaveOptions
    background: bool = False  # forward passes change buffers before all is copied


MakeRequest = Callable[[], SaveRequest]  # it raises where options are wrong


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        nbytes: of all its files, over all ranks.
        seconds: from the call to the end.
        removed: names of older checkpoints that went.
    """

    path: Path
    nbytes: int
    seconds: float
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A report of what was loaded, and what was not.

    Attributes:
        checked: were bytes compared with checksums? A plain Hugging Face folder has none.
        missing, unexpected, misshapen: names that were left out, because the files or the model
            do not have them, or in another shape or an unlike dtype. Empty after a strict load.
        cast: names that were converted to another dtype.
        inexact: why the run cannot go on exactly as it would have; empty if it can.
        document: the training state, if there is one.
        local: the plain values of this rank's own, if as many ranks saved them.
    """

    path: Path
    checked: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    cast: tuple[str, ...]
    inexact: tuple[str, ...]
    document: Document | None
    local: Any = None

    def __repr__(self) -> str:
        kinds = ("missing", "unexpected", "misshapen", "cast")
        changed = ((kind, names) for kind in kinds if (names := getattr(self, kind)))
        words = ["checksums compared" if self.checked else "no checksums to compare"]
        words += [f"{len(names)} {kind} ({names[0]}, …)" for kind, names in changed]
        words += self.inexact
        return f"Loaded({str(self.path)!r}, step {self.step}: {'; '.join(words)})"

    @property
    def step(self) -> int | None:
        """Optimizer steps that had been taken."""
        return None if self.document is None else self.document.step

    @property
    def position(self) -> Any:
        """Return the run's position in its data."""
        return None if self.document is None else self.document.position


@checked
@dataclass(frozen=True)
class LoadOptions:
    """Options of a load: what, and how strictly."""

    optimizers: Sequence[Optimizer] = ()  # whose state is restored
    # Whose scheduler and scaler are restored; with it, random generators are, too
    training: Training | None = None
    strict: bool = True  # whatever does not fit is an error, and not left out
    cast: bool = False  # stored floating-point tensors may have another dtype than the model's
    # Which of the model's tensors are loaded, with their optimizer state; ``None``: all
    names: Callable[[str], bool] | None = None
