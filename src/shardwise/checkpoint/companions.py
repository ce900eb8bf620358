"""What a folder of weights has beside them: configuration, tokenizer, training state.

``transformers`` needs the first two. They lie with the weights or, of a run's checkpoint, in the
folder of the run. Code (``.py``) is never among them: to copy it would be to vouch for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.catalogue import SUFFIX
from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import step_of
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.names import inside
from shardwise.checkpoint.run import CHECKPOINTS
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import NAME as TRAINING
from shardwise.errors import CheckpointError

__all__ = ["INDEX", "companions", "with_dtype"]

SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of what a folder of weights has beside them: configuration and tokenizer."""
FROM_A_RUN = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
LARGEST = 100_000_000  # bytes of a small file
INDEX = ".safetensors.index.json"


def companions(source: Source, all_of_it: bool) -> dict[str, bytes]:
    """Configuration and tokenizer, from beside the weights or from the run; training state."""
    found = {name: source.bytes(name) for name in _small_names(source, all_of_it)}
    for folder in _run_folders(source):
        for name in FROM_A_RUN:
            if name in found:
                continue
            path = inside(folder, name)
            with explained(f"reading {path}"):
                if path.is_file() and path.stat().st_size <= LARGEST:
                    found[name] = path.read_bytes()
    return found


def _small_names(source: Source, all_of_it: bool) -> list[str]:
    if source.manifest is not None:
        names = list(source.manifest.files)
    else:
        there = sorted(source.folder.iterdir())
        small = [path for path in there if path.is_file() and path.stat().st_size <= LARGEST]
        names = [path.name for path in small if path.suffix in SMALL]
    no_copy = {MANIFEST} if all_of_it else {MANIFEST, TRAINING}
    return [
        name
        for name in names
        if not name.endswith((SUFFIX, INDEX)) and name not in no_copy and source.has(name)
    ]


def _run_folders(source: Source) -> list[Path]:
    """Where the run that saved a checkpoint may keep what all its checkpoints share."""
    if source.manifest is None or step_of(source.folder.name) is None:
        return []
    parent = source.folder.parent
    return [parent, parent.parent] if parent.name == CHECKPOINTS else [parent]


def with_dtype(config: bytes, dtype: torch.dtype | None) -> bytes:
    """``config.json`` that says the new dtype, since ``transformers`` loads as it says."""
    name = str(dtype).removeprefix("torch.")

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: name
            if key in ("dtype", "torch_dtype") and isinstance(inner, str)
            else changed(inner)
            if key.endswith("_config") and key != "quantization_config"
            else inner
            for key, inner in value.items()
        }

    try:
        found = json.loads(config)
    except (ValueError, RecursionError):
        raise CheckpointError(
            "config.json is not JSON, so it cannot be told the new dtype. Mend it, or export "
            "without --dtype."
        ) from None
    return json.dumps(changed(found), indent=2, ensure_ascii=False).encode() + b"\n"
