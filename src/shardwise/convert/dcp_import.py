"""A checkpoint of torch is read tensor by tensor and written as one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from shardwise.checkpoint import training_state
from shardwise.checkpoint.folder import check_replaceable
from shardwise.checkpoint.plan import BLOCK, FilePlan, plan_files
from shardwise.checkpoint.save_plan import MODEL, OPTIMIZER
from shardwise.checkpoint.writer import Chunk
from shardwise.convert.export import CONFIG
from shardwise.convert.normalize import NormalizedState, class_of, name_numbered, normalize, records
from shardwise.convert.torch_reader import TorchTensor, read_torch
from shardwise.convert.writer import Converted, entry_of, write_folder
from shardwise.plan.layout.layout import cut_at_multiples

LARGEST_FILE = 5_000_000_000  # bytes of tensors, as for saving


def import_checkpoint(
    source: str | Path | Sequence[str | Path],
    destination: str | Path,
    trust: bool = False,
    optimizer: str | None = None,
) -> Converted:
    """Make a checkpoint of ours of what torch's DCP, or ``torch.save``, wrote.

    Two tensors at most are in memory.

    Args:
        source: a DCP folder, or a ``.pt`` file with a whole state dict; or several of them, where
            model and optimizer lie apart.
        trust: unpickle what the restricted readers refuse, which can run any code.
        optimizer: its class, where the source does not name it: ``"AdamW"``; ``""``: leave it out.

    Raises:
        CheckpointError: trust is needed; or the source is broken, or in no known form. Nothing is
            left behind.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    paths = [Path(one).expanduser().absolute() for one in sources]
    final = Path(destination).expanduser().absolute()
    check_replaceable(final)
    normalized = normalize(read_torch(path, trust) for path in paths)
    tensors, small = {MODEL: normalized.weights}, _config(paths)
    if optimizer != "" and (normalized.groups or normalized.state):
        small[training_state.NAME] = _training(normalized, optimizer)
        tensors[OPTIMIZER] = _optimizer_tensors(normalized)
    plans = {}
    for stem, by_name in tensors.items():
        entries = [entry_of(name, tensor.dtype, tensor.shape) for name, tensor in by_name.items()]
        plans[stem] = plan_files(stem, entries, LARGEST_FILE)
    facts = {"step": normalized.step, "world": 1, "strategy": "imported", "kind": "full"}

    def chunks_of(stem: str, plan: FilePlan) -> Iterator[Chunk]:
        return _chunks(tensors[stem], plan)

    converted = write_folder(final, plans, chunks_of, small, {**facts, "aliases": {}})
    return replace(converted, left_out=tuple(normalized.left_out))


def _optimizer_tensors(normalized: NormalizedState) -> dict[str, TorchTensor]:
    """Group tensors by names such as ``exp_avg/layers.0.weight``, key by key."""
    states = [(k, name, v) for name, one in normalized.state.items() for k, v in one.items()]
    tensors = sorted((s for s in states if isinstance(s[2], TorchTensor)), key=itemgetter(0))
    return {f"{key}/{name}": value for key, name, value in tensors}


def _training(normalized: NormalizedState, optimizer: str | None) -> bytes:
    name_numbered(normalized)
    optimizers = records(normalized, optimizer or class_of(normalized))
    values = training_state.values_of(training_state.Training())
    return training_state.document(normalized.step, values, optimizers, [values["local"]])


def _config(paths: Sequence[Path]) -> dict[str, bytes]:
    """The folder's ``config.json``, unchecked. One beside a lone file may be of another model."""
    configs = [folder / CONFIG for folder in paths if folder.is_dir()]
    # A link could lead to any file that the user can read.
    own = [path for path in configs if path.is_file() and not path.is_symlink()]
    return {CONFIG: own[0].read_bytes()} if own else {}


def _chunks(tensors: Mapping[str, TorchTensor], plan: FilePlan) -> Iterator[Chunk]:
    for name, stored in plan.tensors.items():
        data = tensors[name].read()
        for start, stop in cut_at_multiples(stored.start, stored.stop, BLOCK):
            yield Chunk(plan.name, start, stop, (data[start - stored.start : stop - stored.start],))
