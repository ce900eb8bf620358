"""The plan of a load: each stored part and its place on this rank, and what does not fit.

All of it is compared first, with nothing changed; then it is a list of ranges to read, and a few
values to hand over when they have been read.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint import training_state
from shardwise.checkpoint.local_shards import held_whole, param_shards
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.optimizer_restore import Restored, StoredStates
from shardwise.checkpoint.optimizer_state import Named
from shardwise.checkpoint.options import Loaded, LoadOptions
from shardwise.checkpoint.read_requests import ReadRequest, request_for
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation, find_stored
from shardwise.checkpoint.safetensors_format import DTYPES, PACKED, Stored, code_of, lies_plain
from shardwise.checkpoint.save_plan import BUFFER, OPTIMIZER, RANKS, RNG
from shardwise.checkpoint.training_state import Document, Stateful, Training
from shardwise.checkpoint.wrappers import further_names
from shardwise.errors import CheckpointError, nearest
from shardwise.optim.sharded_model import ShardedModel

log = logging.getLogger("shardwise")

NEAREST = 20
"""Missing names for which the nearest stored one is looked up: each costs a comparison with all."""


class ModelTensor(NamedTuple):
    """A tensor of the model: all its names, the first first."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


MISFITS = ("missing", "unexpected", "misshapen", "foreign", "cast")
"""Not stored; not in the model; of another shape; of a dtype that cannot be converted; of another
that can."""


@dataclass(frozen=True)
class Matched:
    """Tensors of the model that are stored, and those that do not fit."""

    pairs: Mapping[str, str]  # the model's (first) name → the stored one, which is to be read
    misfits: Mapping[str, Mapping[str, str]]  # for each of ``MISFITS``: name → a line about it

    def problems(self, cast: bool) -> list[str]:
        """One line for each thing that does not fit; conversions count unless ``cast``."""
        kinds = MISFITS[:-1] if cast else MISFITS
        return [line for kind in kinds for line in self.misfits[kind].values()]


def match(
    tensors: Sequence[ModelTensor],
    stored: Mapping[str, Stored],
    aliases: Mapping[str, str],
    wanted: Callable[[str], bool] | None = None,
) -> Matched:
    """Find each tensor of the model.

    Args:
        aliases: further names that the files' writer knew → the stored name.
        wanted: are tensors of this name to be loaded? ``None``: all are.
    """
    pairs: dict[str, str] = {}
    misfits: dict[str, dict[str, str]] = {kind: {} for kind in MISFITS}
    known: set[str | None] = set()
    for names, dtype, shape in tensors:
        name, stored_name = names[0], find_stored(names, stored, aliases)
        known.update(names, (aliases.get(n) for n in names))
        if wanted and not wanted(name):
            continue
        if stored_name is None:
            misfits["missing"][name] = f"{name}: not stored"
            continue
        tensor = stored[stored_name]
        if (kind := _misfit(tensor, dtype, shape)) in (None, "cast"):
            pairs[name] = stored_name
        if kind is not None:
            pair = (tensor.shape, shape) if kind == "misshapen" else (tensor.dtype, dtype)
            misfits[kind][name] = "{}: stored as {}, the model has {}".format(name, *pair)
    misfits["unexpected"] = {
        n: f"{n}: stored, and the model has no such name" for n in stored if n not in known
    }
    for name in list(misfits["missing"])[:NEAREST]:
        if like := nearest(name, list(misfits["unexpected"] or stored), 1):
            misfits["missing"][name] += f"; nearest stored is {like[0]}"
    return Matched(pairs, misfits)


def _misfit(stored: Stored, dtype: str, shape: tuple[int, ...]) -> str | None:
    if stored.shape != shape:
        return "misshapen"
    if stored.dtype == dtype:
        return None
    # torch has no arithmetic on packed elements
    known = stored.dtype in DTYPES and not {stored.dtype, dtype} & set(PACKED)
    floats = known and all(DTYPES[d].is_floating_point for d in (stored.dtype, dtype))
    return "cast" if floats else "foreign"


class ModelPlan:
    """Stored tensors and their places in the model's parameters and persistent buffers."""

    def __init__(
        self,
        sharded: ShardedModel,
        stored: Mapping[str, TensorLocation],
        aliases: Mapping[str, str],
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self.shards = param_shards(sharded)
        self._buffers = held_whole(sharded.model)
        self._comm, self._stored = sharded.comm, stored
        self._late: list[tuple[Tensor, Tensor]] = []
        self.inexact: list[str] = []  # what is not as it was, once ``requests`` were made
        of_model = [(s.member.aliases, s.value.dtype, s.member.shape) for s in self.shards]
        of_model += [(names, buffer.dtype, buffer.shape) for names, buffer in self._buffers]
        tensors = [ModelTensor(n, code_of(d, n[0]), tuple(shape)) for n, d, shape in of_model]
        places = {name: place.stored for name, place in stored.items()}
        self.matched = match(tensors, places, aliases, wanted)

    def requests(self, own: Mapping[str, TensorLocation]) -> Iterator[ReadRequest]:
        """Every rank's part of parameters, and whole buffers.

        Args:
            own: ``buffer/NAME``: buffers that differed between ranks. Every rank reads its own
                values again, where as many ranks load them.
        """
        for shard in self.shards:
            if place := self._place(shard.member.name):
                yield request_for(place, shard.start, shard.value)
        for names, buffer in self._buffers:
            place, start = self._place(names[0]), 0
            stored_name = self.matched.pairs.get(names[0], names[0])
            differing = own.get(BUFFER + names[0]) or own.get(BUFFER + stored_name)
            if place is None:
                continue
            if differing and differing.stored.shape == (self._comm.size, *buffer.shape):
                place, start = differing, self._comm.rank * buffer.numel()
            elif differing:
                self.inexact.append(
                    f"buffer {names[0]} differed between {differing.stored.shape[0]} ranks; all "
                    "have rank 0's now"
                )
            memory = buffer
            if not lies_plain(buffer):
                memory = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
                self._late.append((buffer, memory))
            yield request_for(place, start, memory)

    def apply(self) -> None:
        """Copy what could not be read in place to where it belongs."""
        for buffer, value in self._late:
            buffer.copy_(value)

    def _place(self, name: str) -> TensorLocation | None:
        return self._stored.get(self.matched.pairs.get(name, ""))


@dataclass(frozen=True)
class OpenCheckpoint:
    """Contents of an open folder: tensors of each kind by name, and the training state."""

    source: CheckpointReader
    weights: Mapping[str, TensorLocation]
    document: Document | None
    states: Mapping[str, TensorLocation]
    own: Mapping[str, TensorLocation]

    def encode(self) -> list[Any]:
        """Return JSON for ranks that do not see the folder; it has a manifest."""
        assert self.source.manifest is not None
        manifest = self.source.manifest.encode().decode()
        document = self.source.bytes(training_state.NAME).decode() if self.document else ""
        return [str(self.source.folder), manifest, document, self.weights, self.states, self.own]

    @classmethod
    def decode(cls, encoded: Sequence[Any], stack: ExitStack) -> OpenCheckpoint:
        """Return what ``encode`` gave; no file is opened before, and ``stack`` closes all."""
        folder, manifest, document, *tensors = encoded
        weights, states, own = (
            {
                name: TensorLocation(file, Stored(dtype, tuple(shape), *ends))
                for name, (file, (dtype, shape, *ends)) in some.items()
            }
            for some in tensors
        )
        reader = CheckpointReader(Path(folder), Manifest.decode(manifest.encode(), folder))
        source = stack.enter_context(reader)
        decoded = Document.decode(document.encode(), folder) if document else None
        return cls(source, weights, decoded, states, own)

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tensors → the stored one."""
        return further_names(self.weights, self.source.aliases)

    @property
    def identity(self) -> str:
        """The same text on ranks that see the same checkpoint."""
        text = hashlib.sha256(repr(sorted(self.weights.items())).encode()).hexdigest()[:16]
        manifest = self.source.manifest
        return f"{self.source.folder.name} {text if manifest is None else manifest.token}"


def open_checkpoint(path: str | Path, options: LoadOptions, stack: ExitStack) -> OpenCheckpoint:
    """Open the checkpoint that ``path`` means; ``stack`` closes it."""
    source = stack.enter_context(CheckpointReader.open(path))
    weights = source.weights()
    document, states, own = None, {}, {}
    if source.manifest is not None and source.has(training_state.NAME):
        document = Document.decode(
            source.bytes(training_state.NAME), str(source.folder / training_state.NAME)
        )
        states = source.tensors(OPTIMIZER) if options.optimizers else {}
        own = source.tensors(RANKS)
    return OpenCheckpoint(source, weights, document, states, own)


class LoadPlan:
    """The parts of a checkpoint that this rank reads, and their places."""

    def __init__(
        self, sharded: ShardedModel, checkpoint: OpenCheckpoint, options: LoadOptions
    ) -> None:
        self._checkpoint, self._comm, self._buckets = checkpoint, sharded.comm, sharded.buckets
        self._model = ModelPlan(sharded, checkpoint.weights, checkpoint.aliases, options.names)
        self._inexact = self._model.inexact
        self._optimizers: Restored | None = None
        problems = self._model.matched.problems(options.cast)
        others: list[str] = []  # what does not fit beside the model's tensors
        if options.optimizers:
            self._optimizers = self._restored(options)
            others += self._optimizers.problems
        reordered = self._optimizers.reordered if self._optimizers else ()
        self._stateful, unlike = _stateful(checkpoint.document, options.training, reordered)
        if options.strict and (problems or others or unlike):
            raise misfit_error(
                f"{checkpoint.source.folder} does not fit what is to be loaded",
                [*problems, *others, *unlike],
                "Load it into the model that was saved; or pass strict=False to load what fits "
                "(the result lists the rest), cast=True to convert dtypes.",
            )
        self._inexact += [*others, *unlike, *(self._optimizers.dropped if self._optimizers else ())]
        self._changed = [*self._model.matched.problems(cast=False), *self._inexact]
        self._local = self._local_values()
        self.requests = list(self._model.requests(checkpoint.own))
        if self._optimizers is not None:
            self.requests += self._optimizers.requests()
        self._rng = self._generators() if options.training is not None else {}

    def restore(self, training: Training | None) -> Loaded:
        """All that is left to do when all bytes have been read."""
        self._model.apply()
        if self._optimizers is not None:
            self._optimizers.apply()
        if training is not None:
            self._restore_training()
        return self._report()

    def _restore_training(self) -> None:
        for bucket in self._buckets:  # a checkpoint is of the moment between two steps
            bucket.gradients.drop()
            for param in bucket.params:
                param.grad = None
        for owner, values in self._stateful:
            owner.load_state_dict(values)
        if self._rng:
            training_state.restore_rng(self._rng, self._comm.device)

    def _report(self) -> Loaded:
        misfits, checkpoint = self._model.matched.misfits, self._checkpoint
        if self._changed and not self._comm.rank:
            log.warning(
                "%s: %d things were left out or converted, such as: %s. The report lists them",
                checkpoint.source.folder,
                len(self._changed),
                "; ".join(self._changed[:3]),
            )
        return Loaded(
            path=checkpoint.source.folder,
            checked=checkpoint.source.manifest is not None,
            missing=tuple(misfits["missing"]),
            unexpected=tuple(misfits["unexpected"]),
            misshapen=(*misfits["misshapen"], *misfits["foreign"]),
            cast=tuple(misfits["cast"]),
            inexact=tuple(self._inexact),
            document=checkpoint.document,
            local=self._local,
        )

    def _restored(self, options: LoadOptions) -> Restored:
        checkpoint, matched = self._checkpoint, self._model.matched
        if checkpoint.document is None or not checkpoint.document.optimizers:
            raise CheckpointError(
                f"{checkpoint.source.folder} holds no optimizer state, and an optimizer was passed "
                "to load. Leave it out to load the weights alone, and begin with a fresh optimizer."
            )
        weights = checkpoint.weights
        converted = {n: weights[matched.pairs[n]].stored.dtype for n in matched.misfits["cast"]}
        records, aliases = checkpoint.document.optimizers, checkpoint.aliases
        stored = StoredStates(records, checkpoint.states, aliases, converted, options.names)
        return Restored(options.optimizers, Named(self._model.shards), stored)

    def _local_values(self) -> Any:
        document, comm = self._checkpoint.document, self._comm
        if document is None or document.world == comm.size:
            return document and document.local[comm.rank]
        if any(values is not None for values in document.local):
            self._inexact.append(
                f"local values of {document.world} ranks are not those of {comm.size}: they are in "
                "document.local, by rank"
            )
        return None

    def _generators(self) -> dict[str, Tensor]:
        document, comm = self._checkpoint.document, self._comm
        if document is None or document.world != comm.size:
            before = "not known" if document is None else f"{document.world} → {comm.size}"
            self._inexact.append(
                f"world size {before}: RNG states not restored, so dropout draws other numbers"
            )
            return {}
        states = {}
        for name, place in self._checkpoint.own.items():
            if name.startswith(RNG):
                size = place.stored.shape[1]
                state = states[name.removeprefix(RNG)] = torch.empty(size, dtype=torch.uint8)
                self.requests.append(request_for(place, comm.rank * size, state))
        return states


def _stateful(
    document: Document | None, training: Training | None, reordered: Sequence[str]
) -> tuple[list[tuple[Stateful, Any]], list[str]]:
    """Scheduler and scaler that get their stored state; and a line for each that does not."""
    if training is None:
        return [], []
    if document is None:
        return [], ["training state: none is stored"]
    fitting: list[tuple[Stateful, Any]] = []
    problems: list[str] = []
    owners = (("scheduler", training.scheduler, reordered), ("scaler", training.scaler, ()))
    for name, owner, unlike in owners:
        state, kind = getattr(document, name), document.classes.get(name)
        if owner is None:
            continue
        if state is None:
            problems.append(f"{name}: its state is not stored")
        elif kind not in (None, type(owner).__name__):
            problems.append(f"{name}: its state is of {kind}, not of {type(owner).__name__}")
        elif unlike:
            problems += unlike
        elif refusal := _refusal(owner, state):
            problems.append(f"{name}: {type(owner).__name__} does not take its state ({refusal})")
        else:
            fitting.append((owner, state))
    return fitting, problems


def _refusal(owner: Stateful, state: Any) -> str:
    """Say why ``owner`` does not take ``state``; ``""`` if it does: it is tried, and put back."""
    before = copy.deepcopy(owner.state_dict())
    try:
        owner.load_state_dict(copy.deepcopy(state))
    except Exception as error:  # noqa: BLE001 - a class of the user's, which raises what it likes
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        owner.load_state_dict(before)
    return ""


def misfit_error(fact: str, problems: Sequence[str], advice: str) -> CheckpointError:
    """One error for all ``problems``, a line each."""
    lines = "".join(f"\n  {line}" for line in problems)
    points = f"{len(problems)} point{'s' * (len(problems) != 1)}"
    return CheckpointError(f"{fact}, in {points}; nothing was changed:{lines}\n{advice}")
