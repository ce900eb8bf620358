"""What of a checkpoint goes where on this rank, and everything that does not fit.

First all of it is compared, with nothing changed; then it is a list of ranges to read, and a few
values to hand over when they have been read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import rng, state
from shardwise.checkpoint.contents import BUFFER, MODEL, OPTIMIZER, RANKS, RNG
from shardwise.checkpoint.dtypes import code_of
from shardwise.checkpoint.header import Stored
from shardwise.checkpoint.holdings import Home, homes, persistent_buffers
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.match import Matched, Wanted, match
from shardwise.checkpoint.optimizers import Named, Optimizers
from shardwise.checkpoint.reader import Want, wanted
from shardwise.checkpoint.restore import Restored, restored
from shardwise.checkpoint.source import Place, Source
from shardwise.checkpoint.state import Document, Training
from shardwise.checkpoint.target import ShardedModel
from shardwise.errors import CheckpointError, ConfigError, nearest

__all__ = ["Fitted", "Found", "Loaded", "Wish", "open_found"]


GRADIENTS = "gradients"
IN_A_STEP = (
    "gradients: an earlier shardwise saved this in the middle of an accumulation, and gradients "
    "are not loaded any more; the step begins anew"
)


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and what was not.

    Attributes:
        path: the checkpoint's folder.
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

    @property
    def step(self) -> int | None:
        """Optimizer steps that had been taken."""
        return None if self.document is None else self.document.step

    @property
    def position(self) -> Any:
        """Where in the data the run was."""
        return None if self.document is None else self.document.position


@dataclass(frozen=True)
class Wish:
    """What is to be loaded, and how strictly.

    Attributes:
        optimizers: whose state is restored.
        training: whose scheduler and scaler are restored; with it, random generators are, too.
        strict: whatever does not fit is an error, and not left out.
        cast: stored floating-point tensors may have another dtype than the model's.
    """

    optimizers: Optimizers = ()
    training: Training | None = None
    strict: bool = True
    cast: bool = False

    @classmethod
    def of(cls, optimizers: Optimizers, training: Training | None, how: Mapping[str, Any]) -> Wish:
        """With ``how`` as keyword arguments; an unknown one is an error that names the nearest."""
        for name in how:
            if name not in ("strict", "cast"):
                like = nearest(name, ("strict", "cast"))[0]
                raise ConfigError(f"load() has no option {name!r}; nearest is {like!r}.")
        return cls(optimizers, training, **how)


@dataclass(frozen=True)
class Found:
    """What a folder holds."""

    source: Source
    weights: Mapping[str, Place]
    document: Document | None
    states: Mapping[str, Place]
    own: Mapping[str, Place]
    has_gradients: bool

    def encode(self) -> str:
        """As a text for ranks that do not see the folder, of which ``manifest`` is there."""
        assert self.source.manifest is not None
        tensors = [self.weights, self.states, self.own]
        named = [{n: [p.file, *p.stored] for n, p in some.items()} for some in tensors]
        manifest = self.source.manifest.encode().decode()
        document = self.source.bytes(state.NAME).decode() if self.document else ""
        return json.dumps([str(self.source.folder), manifest, document, *named])

    @classmethod
    def decode(cls, text: str) -> Found:
        """What ``encode`` gave; nothing of it is opened."""
        folder, manifest, document, *named = json.loads(text)
        weights, states, own = (
            {
                name: Place(file, Stored(dtype, tuple(shape), *ends))
                for name, (file, dtype, shape, *ends) in some.items()
            }
            for some in named
        )
        source = Source(Path(folder), Manifest.decode(manifest.encode(), folder))
        decoded = Document.decode(document.encode(), folder) if document else None
        return cls(source, weights, decoded, states, own, False)

    @property
    def aliases(self) -> Mapping[str, str]:
        manifest = self.source.manifest
        return {} if manifest is None else manifest.aliases

    @property
    def identity(self) -> str:
        """The same text on ranks that see the same checkpoint."""
        manifest = self.source.manifest
        if manifest is not None:
            return f"{self.source.folder.name} {manifest.token}"
        text = hashlib.sha256(repr(sorted(self.weights.items())).encode()).hexdigest()
        return f"{self.source.folder.name} {text[:16]}"


def open_found(path: str | Path, wish: Wish, stack: ExitStack) -> Found:
    """Open the checkpoint that ``path`` means; ``stack`` closes it.

    Raises:
        CheckpointError: there is none, it is not complete, or it is malformed.
    """
    source = stack.enter_context(Source.open(path))
    weights = source.tensors(MODEL)
    if not weights:
        raise CheckpointError(
            f"{source.folder} holds no model.safetensors and no index of several. Name a folder "
            "that shardwise or a Hugging Face library wrote; pickled files (.bin, .pt) are not "
            "read, since a pickle can run anybody's code."
        )
    document, states, own, has_gradients = None, {}, {}, False
    if source.manifest is not None and source.has(state.NAME):
        document = Document.decode(source.bytes(state.NAME), str(source.folder / state.NAME))
        states = source.tensors(OPTIMIZER) if wish.optimizers else {}
        own = source.tensors(RANKS)
        has_gradients = bool(source.names(GRADIENTS))
    return Found(source, weights, document, states, own, has_gradients)


class Fitted:
    """What of a checkpoint goes where on this rank.

    Raises:
        CheckpointError: something does not fit; all of it, in one error.
    """

    def __init__(self, sharded: ShardedModel, found: Found, wish: Wish) -> None:
        self._found, self._comm, self._buckets = found, sharded.comm, sharded.buckets
        places = homes(sharded.buckets)
        buffers = persistent_buffers(sharded.model)
        self._matched = _match(places, buffers, found)
        self._inexact: list[str] = []
        self._optimizers: Restored | None = None
        problems = self._matched.problems(wish.cast)
        if wish.optimizers:
            self._optimizers = _optimizers(found, wish, Named(places))
            problems += self._optimizers.problems
        problems += _absent(found, wish)
        if wish.training is not None and found.has_gradients:
            self._inexact.append(IN_A_STEP)
            problems.append(IN_A_STEP)
        if wish.strict and problems:
            raise _unfit(found, problems)
        self.wants = [*self._parameters(places), *self._buffers(buffers)]
        if self._optimizers is not None:
            self.wants += self._optimizers.wants()
        self._rng = self._generators() if wish.training is not None else {}

    def apply(self, training: Training | None) -> None:
        """What is restored when all bytes have been read."""
        for buffer, value in self._late:
            buffer.copy_(value)
        if self._optimizers is not None:
            self._optimizers.apply()
        if training is None:
            return
        for bucket in self._buckets:  # a checkpoint is of the moment between two steps
            bucket.gradients.drop()
            for param in bucket.params:
                param.grad = None
        document = self._found.document
        if document is None:
            return
        for owner, values in (
            (training.scheduler, document.scheduler),
            (training.scaler, document.scaler),
        ):
            if owner is not None and values is not None:
                owner.load_state_dict(values)
        if self._rng:
            rng.restore(self._rng, self._comm.device)

    def report(self) -> Loaded:
        matched, found = self._matched, self._found
        left_out = self._optimizers.left_out if self._optimizers else ()
        same = found.document is not None and found.document.world == self._comm.size
        return Loaded(
            path=found.source.folder,
            checked=found.source.manifest is not None,
            missing=matched.missing,
            unexpected=matched.unexpected,
            misshapen=matched.misshapen + matched.foreign,
            cast=matched.cast,
            inexact=(*self._inexact, *(f"no optimizer state of {name}" for name in left_out)),
            document=found.document,
            local=found.document.local[self._comm.rank] if found.document and same else None,
        )

    def _place(self, name: str) -> Place | None:
        stored = self._matched.pairs.get(name)
        return None if stored is None else self._found.weights[stored]

    def _parameters(self, places: Sequence[Home]) -> Iterator[Want]:
        for home in places:
            if place := self._place(home.member.name):
                yield wanted(place, home.start, home.value)

    def _buffers(self, buffers: Sequence[tuple[tuple[str, ...], Tensor]]) -> Iterator[Want]:
        """Every rank reads them whole: its own, where ranks differed and are as many."""
        self._late: list[tuple[Tensor, Tensor]] = []
        rank, world = self._comm.rank, self._comm.size
        for names, buffer in buffers:
            place = self._place(names[0])
            if place is None:
                continue
            start, own = 0, self._found.own.get(BUFFER + names[0])
            if own is not None and own.stored.shape == (world, *buffer.shape):
                place, start = own, rank * buffer.numel()
            elif own is not None:
                self._inexact.append(
                    f"buffer {names[0]} differed between {own.stored.shape[0]} ranks; all have "
                    "rank 0's now"
                )
            memory = buffer if buffer.is_contiguous() else torch.empty_like(buffer).contiguous()
            if memory is not buffer:
                self._late.append((buffer, memory))
            yield wanted(place, start, memory)

    def _generators(self) -> dict[str, Tensor]:
        document, comm = self._found.document, self._comm
        if document is None or document.world != comm.size:
            before = "not known" if document is None else f"{document.world} → {comm.size}"
            self._inexact.append(
                f"world size {before}: RNG states not restored, so dropout draws other numbers"
            )
            return {}
        states = {}
        for name, place in self._found.own.items():
            if name.startswith(RNG):
                size = place.stored.shape[1]
                states[name.removeprefix(RNG)] = torch.empty(size, dtype=torch.uint8)
                self.wants.append(wanted(place, comm.rank * size, states[name.removeprefix(RNG)]))
        return states


def _match(
    places: Sequence[Home], buffers: Sequence[tuple[tuple[str, ...], Tensor]], found: Found
) -> Matched:
    asked = [
        Wanted(
            home.member.aliases,
            code_of(home.value.dtype, home.member.name),
            tuple(home.member.shape),
        )
        for home in places
    ]
    asked += [Wanted(n, code_of(b.dtype, n[0]), tuple(b.shape)) for n, b in buffers]
    stored = {name: place.stored for name, place in found.weights.items()}
    return match(asked, stored, found.aliases)


def _optimizers(found: Found, wish: Wish, named: Named) -> Restored:
    if found.document is None or not found.document.optimizers:
        raise CheckpointError(
            f"{found.source.folder} holds no optimizer state, and an optimizer was passed to "
            "load. Leave it out to load the weights alone, and begin with a fresh optimizer."
        )
    records = found.document.optimizers
    return restored(wish.optimizers, named, records, found.states, found.aliases)


def _absent(found: Found, wish: Wish) -> list[str]:
    """What the caller wants restored and nobody saved."""
    document, training = found.document, wish.training
    if training is None:
        return []
    if document is None:
        return ["training state: none is stored"]
    asked = {"scheduler": training.scheduler, "scaler": training.scaler}
    stored = {"scheduler": document.scheduler, "scaler": document.scaler}
    return [
        f"{name}: its state is not stored"
        for name, owner in asked.items()
        if owner is not None and stored[name] is None
    ]


def _unfit(found: Found, problems: Sequence[str]) -> CheckpointError:
    lines = "".join(f"\n  {line}" for line in problems)
    return CheckpointError(
        f"{found.source.folder} does not fit what is to be loaded, in {len(problems)} points; "
        f"nothing was changed:{lines}\nLoad it into the model that was saved; or pass "
        "strict=False to load what fits (the result lists the rest), cast=True to convert dtypes."
    )
