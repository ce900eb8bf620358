"""The plan of a save: the files before they are written, and this rank's bytes of them.

model.safetensors        parameters and persistent buffers, as Hugging Face names them
training.json            step, scheduler, data position, groups of the optimizer …
config.json, …           what else a reader of the folder needs
training/                where a reader that takes every *.safetensors of the folder does not look:
  optimizer.safetensors    exp_avg/NAME, exp_avg_sq/NAME, step/NAME …
  ranks.safetensors        what every rank has of its own: generators, buffers where they differ
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.checkpoint import checksum, manifest, training_state
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.local_shards import LocalShard, own_rows, param_shards, weights
from shardwise.checkpoint.optimizer_state import Named, facts_of, optimizer_shards
from shardwise.checkpoint.options import Part, SaveRequest
from shardwise.checkpoint.plan import FilePlan, block_size, index_files, plan_files
from shardwise.checkpoint.safetensors_format import bytes_of, is_plain
from shardwise.checkpoint.segments import Segments, gathered
from shardwise.checkpoint.wrappers import bare_names
from shardwise.checkpoint.writer import Chunk, Writer, write_part
from shardwise.checkpoint.writer import Part as Written
from shardwise.comm.protocol import Comm
from shardwise.config.precision import dtype_name
from shardwise.errors import CheckpointError
from shardwise.optim.sharded_model import ShardedModel

MODEL, OPTIMIZER, RANKS, REST = "model", "optimizer", "ranks", "rest"
FILES, SMALL = 8, 64 << 20
"""Optimizer state is in so many files, that ranks write at once, but of so many bytes at least."""
RNG, BUFFER = "rng/", "buffer/"  # what the tensors of RANKS begin with


@dataclass(frozen=True)
class SavePlan:
    """One checkpoint, as one rank sees it before anything is written."""

    files: tuple[FilePlan, ...]  # the safetensors files, the same on every rank
    segments: tuple[Segments, ...] = field(repr=False)
    # All other files but the manifest, whole. Rank 0 writes its own, and others may lack some
    small: Mapping[str, bytes] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)  # further names of tied tensors → the stored one
    block: int
    # What optimizers keep as rank 0 has it, as short texts
    alike: Mapping[str, str] = field(repr=False)

    def chunks(self, comm: Comm) -> Iterator[Chunk]:
        """Yield what this rank writes, file by file, with the memory that holds it now.

        Ranks begin with different files: the kernel lets one of them at a time write to a file.
        """
        files = list(zip(self.files, self.segments, strict=True))
        starts, ours = [0], comm.rank * self.nbytes // comm.size
        starts += accumulate(file.size for file in self.files[:-1])
        first = min(range(len(starts)), key=lambda k: abs(starts[k] - ours))
        for file, segments in files[first:] + files[:first]:
            for start, stop in file.chunks(comm.rank):
                yield Chunk(file.name, start, stop, tuple(segments.between(start, stop)))

    def write(self, comm: Comm, folder: Path, one_writer: bool) -> list[Written]:
        """Write all files there, and return what each rank wrote. A collective."""
        chunks = gathered(comm, self.segments) if one_writer else self.chunks(comm)
        part = write_part(Writer(folder, comm.rank, self.total(comm.rank), self.block), chunks)
        parts = all_gather_object(comm, part, "parts of a save")
        return [Written.decode(some) for some in parts]

    def total(self, rank: int) -> int:
        """Bytes that ``rank`` writes."""
        spans = (span for file in self.files for span in file.spans)
        return sum(span.stop - span.start for span in spans if span.rank == rank)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all files with tensors."""
        return sum(file.size for file in self.files)

    def facts(self) -> dict[str, str]:
        """Return what every rank must have alike, as short texts to compare."""
        files = {
            f"file {file.name}": f"{len(file.tensors)} tensors, {file.size:,} bytes, {file.digest}"
            for file in self.files
        }
        return {**files, **self.alike}


class SavedState(NamedTuple):
    """State that this rank stores, before the first collective."""

    values: Mapping[str, Any]  # of the training, as JSON has them
    groups: Mapping[str, Sequence[LocalShard]]
    aliases: Mapping[str, str]
    small: Mapping[str, bytes]
    records: Sequence[Mapping[str, Any]]  # of optimizers
    own: Mapping[str, Tensor]  # generators
    whole: Mapping[str, Tensor]  # what every rank has, alike or not


def plan_save(
    sharded: ShardedModel, request: SaveRequest, state: SavedState, shared: list[Any]
) -> SavePlan:
    """Plan a save from this rank's state, and what each shared: ``local`` values, ``sums_of``."""
    training, options, comm = request.training, request.options, sharded.comm
    groups, small = dict(state.groups), dict(state.small)
    if comm.rank == 0 and options.names is None:  # it alone writes them, so it alone encodes them
        small = _model_config(sharded.model) | small
    if training is not None:
        own, (first, *others) = dict(state.own), [sums for _, sums in shared]
        for name, value in state.whole.items():
            if any(sums.get(name) != first.get(name) for sums in others):
                own[BUFFER + name] = value  # not alike on all ranks: statistics of batch norm
        rows = own_rows(own, comm.rank, comm.size)
        groups[RANKS] = [row.clone() for row in rows] if request.background else rows
        if comm.rank == 0:
            small[training_state.NAME] = training_state.document(
                training.step, state.values, state.records, [values for values, _ in shared]
            )
    plans: dict[str, Sequence[FilePlan]] = {}
    segments: list[Segments] = []
    block = block_size([shard.entry for group in groups.values() for shard in group])
    for stem, group in groups.items():
        by_name = {shard.entry.name: shard for shard in group}
        entries, is_gathered = [shard.entry for shard in group], options.kind == "full"
        limit = options.max_file_size
        if stem == OPTIMIZER:
            limit = min(limit, max(SMALL, sum(entry.nbytes for entry in entries) // FILES))
        plans[stem] = plan_files(stem, entries, limit, is_gathered, block)
        segments += [Segments(plan, by_name) for plan in plans[stem]]
    small |= index_files(plans)
    alike = facts_of(state.groups.get(OPTIMIZER, ()), state.records)
    every = tuple(plan for some in plans.values() for plan in some)
    return SavePlan(every, tuple(segments), small, state.aliases, block, alike)


def state_to_save(sharded: ShardedModel, request: SaveRequest) -> SavedState:
    """Find what this rank stores, where it is."""
    options, training = request.options, request.training
    values = training_state.values_of(training) if training else {}
    params = param_shards(sharded)
    shards, aliases = weights(params, sharded.model)
    whole = {s.entry.name: s.value for s in shards if s.entry.everywhere and s.value.numel()}
    if (wanted := options.names) is not None:
        shards = [shard for shard in shards if wanted(shard.entry.name)]
        aliases = {alias: name for alias, name in aliases.items() if wanted(name)}
    shards = [s.clone() if request.background and s.entry.everywhere else s for s in shards]
    groups, small = {MODEL: shards}, _checked(options.files or {})
    if isinstance(wanted, Part):
        groups, aliases = _as_part(wanted, shards, aliases)
        small = {**wanted.files, **small}
    if training is None:
        return SavedState(values, groups, aliases, small, (), {}, whole)
    sharded.runtime.check_reduced(
        "and a checkpoint does not store gradients, so they would be lost. Save after the last "
        "micro-batch of the step"
    )
    groups[OPTIMIZER], records = optimizer_shards(request.optimizers, Named(params))
    rng = training_state.capture_rng(sharded.comm.device)
    own = {RNG + name: value for name, value in rng.items()}
    return SavedState(values, groups, aliases, small, records, own, whole)


def _as_part(
    part: Part, shards: Sequence[LocalShard], aliases: Mapping[str, str]
) -> tuple[dict[str, list[LocalShard]], dict[str, str]]:
    """The tensors by the names and in the file of another library, the rest apart; and aliases."""
    names = part.stored
    every = {shard.entry.name: shard for shard in shards}  # and further names, where it has them
    every |= {alias: every[name] for alias, name in aliases.items() if alias in names}
    by_stored_name = [
        s._replace(entry=s.entry._replace(name=names[n])) for n, s in every.items() if n in names
    ]
    rest = [s for s in shards if s.entry.name not in names]
    further = {alias: names.get(name, name) for alias, name in aliases.items()}
    further |= {name: names[name] for name in every if names.get(name, name) != name}
    return {part.stem: by_stored_name} | ({REST: rest} if rest else {}), further


def sums_of(whole: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums, by which ranks see whether they have the same."""
    return {name: checksum.crc32(bytes_of(t.cpu()).numpy()) for name, t in whole.items()}


def _model_config(model: nn.Module) -> dict[str, bytes]:
    """The ``config.json`` of a ``transformers`` model, so that its folder loads there."""
    config = getattr(model, "config", None)
    to_text = getattr(config, "to_json_string", None)
    if not callable(to_text):
        return {}
    fields = json.loads(to_text())
    if not fields.get("architectures"):
        bare = bare_names(model)
        wrapped = [module for path, module in model.named_modules() if not bare(path)]
        fields["architectures"] = [type(wrapped[-1]).__name__]
    if not fields.get("dtype") and (param := next(model.parameters(), None)) is not None:
        fields["dtype"] = dtype_name(param.dtype)
    return {"config.json": json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"}


def _checked(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    for name in files:
        ours = name in (training_state.NAME, manifest.NAME) or ".safetensors" in name
        if not is_plain(name) or ours or name.startswith("."):
            raise CheckpointError(
                f"a file called {name!r:.80} cannot be put beside the checkpoint: the name is "
                "hidden, no plain file name, or one of the checkpoint's own. Choose another."
            )
    return {n: data.encode() if isinstance(data, str) else data for n, data in files.items()}
