"""Saves adapters of ``peft`` from a sharded model, for ``PeftModel.from_pretrained``.

``model.save_pretrained`` on one rank would call state dict hooks, which are collectives. Here all
ranks gather the adapter without the frozen base, and then peft writes with our hooks removed.
Loading needs nothing special: ``peft.set_peft_model_state_dict(model, load_file(…))`` on every
rank.
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
    """Write an adapter's weights and configuration, as peft does. A collective.

    Existing files are replaced atomically, the weights last. Embeddings of the base model are not
    saved; train them with peft's ``modules_to_save``.

    Args:
        sharded: of a ``PeftModel``.
        folder: on rank 0's disk.
        adapter: its name.

    Raises:
        CheckpointError: on every rank: the model has no such adapter, or the folder cannot be
            written.
    """
    model: Any = sharded.model
    is_wanted = is_adapters(sharded, adapter)
    states = sharded.state_dict(rank0_only=True, names=is_wanted)

    def write() -> None:
        if sharded.comm.rank == 0:
            final = Path(folder).expanduser().absolute()
            with sharded._detached(), explained(f"writing {final}"), _peft_errors():
                _write(model, final, states, adapter)

    raise_on_all(sharded.comm, "writing an adapter", write)


def is_adapters(sharded: Sharded, adapter: str = "default") -> Callable[[str], bool]:
    """A predicate: does a tensor name belong to the adapter, not to the frozen base?

    peft puts the adapter's name into the names of added tensors (``q_proj.lora_A.default.weight``);
    tensors that it trains in place, such as biases, are trainable.

    Raises:
        CheckpointError: the model has no adapter of this name.
    """
    model: Any = sharded.model
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or adapter not in configs:
        available = ", ".join(map(repr, configs)) if isinstance(configs, Mapping) else "none"
        raise CheckpointError(
            f"{type(model).__qualname__} has no peft adapter {adapter!r}; it has {available}. "
            "Shard the model that peft.get_peft_model() returned, and name one of its adapters."
        )
    names = model.named_parameters(remove_duplicate=False)
    trained = {name for name, param in names if param.requires_grad}
    other_adapters = set(configs) - {adapter}

    def is_wanted(name: str) -> bool:
        parts = set(name.split("."))
        return adapter in parts or (name in trained and not parts & other_adapters)

    return is_wanted


_PEFT_ERRORS = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def _peft_errors() -> Iterator[None]:
    """Errors of peft as a ``CheckpointError``, which is raised on every rank."""
    try:
        yield
    except _PEFT_ERRORS as error:
        raise CheckpointError(
            f"peft could not save the adapter: {type(error).__name__}: {error}. Check whether peft "
            "can save it from an unsharded model."
        ) from error


def _write(model: Any, final: Path, states: Mapping[str, Tensor], adapter: str) -> None:
    partial = final.with_name(f".{final.name}.unfinished-{new_token()}")
    try:
        model.save_pretrained(
            partial,
            state_dict=dict(states),
            selected_adapters=[adapter],
            save_embedding_layers=False,
        )
        # peft puts any adapter but the default one into a folder of its name
        written = partial if adapter == "default" else partial / adapter
        make_folder(final)
        mode = stat.S_IMODE((written / "adapter_config.json").stat().st_mode)
        for path in sorted(written.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.chmod(mode)  # safetensors creates files that only their owner can read
            _sync(path)
            path.replace(final / path.name)
        sync_folder(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
