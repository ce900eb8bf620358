"""Adapters of ``peft``: the folder that ``PeftModel.from_pretrained`` loads, from a sharded model.

``model.save_pretrained`` asks modules for their state dicts, which on a sharded model gathers, on
one rank alone. Here the adapter is gathered first, without the frozen base, and peft then writes
with nothing of ours attached to the model. To load needs nothing of us: on every rank,
``peft.set_peft_model_state_dict(model, load_file(…))``.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.checkpoint.collectives import raise_on_all
from shardwise.checkpoint.disk import explained, make_folder, sync_folder
from shardwise.checkpoint.folder import new_token
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.sharded import Sharded

__all__ = ["is_adapters", "save_adapter"]


def save_adapter(sharded: Sharded, folder: str | Path, adapter: str = "default") -> None:
    """Write an adapter's weights and configuration, as peft itself does. A collective.

    Files that are there already are replaced, each at once, the weights last. The base model's own
    embeddings are not among them; train them by peft's ``modules_to_save``.

    Args:
        sharded: of a ``PeftModel``.
        folder: on rank 0's disk.
        adapter: its name.

    Raises:
        CheckpointError: on every rank alike: it is no such model, has no such adapter, or the
            folder cannot be written.
    """
    model: Any = sharded.model
    wanted = is_adapters(sharded, adapter)
    states = sharded.state_dict(rank0_only=True, names=wanted)

    def write() -> None:
        if sharded.comm.rank == 0:
            final = Path(folder).expanduser().absolute()
            with sharded._undressed(), explained(f"writing {final}"), _told_to_all():
                _write(model, final, states, adapter)

    raise_on_all(sharded.comm, "writing an adapter", write)


def is_adapters(sharded: Sharded, adapter: str = "default") -> Callable[[str], bool]:
    """Is a tensor of this name the adapter's, and not the frozen base's?

    peft keeps what an adapter adds under the adapter's name (``q_proj.lora_A.default.weight``), and
    what it trains in place, such as biases, is trainable.

    Raises:
        CheckpointError: the model has no adapter of this name.
    """
    model: Any = sharded.model
    known = getattr(model, "peft_config", None)
    if not isinstance(known, Mapping) or adapter not in known:
        there = ", ".join(map(repr, known)) if isinstance(known, Mapping) else "none"
        raise CheckpointError(
            f"{type(model).__qualname__} has no peft adapter {adapter!r}; it has {there}. Shard "
            "the model that peft.get_peft_model() returned, and name one of its adapters."
        )
    names = model.named_parameters(remove_duplicate=False)
    trained = {name for name, param in names if param.requires_grad}
    others = set(known) - {adapter}

    def wanted(name: str) -> bool:
        parts = set(name.split("."))
        return adapter in parts or (name in trained and not parts & others)

    return wanted


_PEFTS = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def _told_to_all() -> Iterator[None]:
    """What peft itself raises, as one that every rank hears of."""
    try:
        yield
    except _PEFTS as error:
        raise CheckpointError(
            f"peft could not save the adapter: {type(error).__name__}: {error}. Look whether peft "
            "can save it from an unsharded model."
        ) from error


def _write(model: Any, final: Path, states: Mapping[str, Tensor], adapter: str) -> None:
    unfinished = final.with_name(f".{final.name}.unfinished-{new_token()}")
    try:
        model.save_pretrained(
            unfinished,
            state_dict=dict(states),
            selected_adapters=[adapter],
            save_embedding_layers=False,
        )
        # peft puts any adapter but the default one into a folder of its name
        made = unfinished if adapter == "default" else unfinished / adapter
        make_folder(final)
        mode = stat.S_IMODE((made / "adapter_config.json").stat().st_mode)
        for path in sorted(made.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.chmod(mode)  # the safetensors library lets nobody but the owner read its files
            _sync(path)
            path.replace(final / path.name)
        sync_folder(final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
