"""What a folder of weights has beside them: configuration, tokenizer, training state.

``transformers`` needs the first two. They lie with the weights or, of a run's checkpoint, in the
folder of the run. Code (``.py``) is never among them: to copy it would be to vouch for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import step_of
from shardwise.checkpoint.lock import LOCK
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.names import inside
from shardwise.checkpoint.run import CHECKPOINTS
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import NAME as TRAINING
from shardwise.convert.catalogue import SUFFIX
from shardwise.convert.writer import INDEX
from shardwise.errors import CheckpointError

__all__ = ["CONFIG", "companions", "with_dtype"]

CONFIG = "config.json"
SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of what a folder of weights has beside them: configuration and tokenizer."""
FROM_A_RUN = (
    CONFIG,
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
LARGEST = 100_000_000  # bytes of all small files together: they are in memory at once
OTHER_INDEX = ".index.json"  # of weights in pickles


def companions(source: Source, all_of_it: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Configuration and tokenizer, from beside the weights or from the run; training state.

    Returns:
        Bytes by name; and the names of what lies there, too, and is no such file, or too much.

    Raises:
        CheckpointError: the training state is more than can be held.
    """
    names, left_out = _small_names(source, all_of_it)
    found: dict[str, bytes] = {}
    room = LARGEST
    for name in names:
        path = inside(source.folder, name)
        with explained(f"reading {path}", reads=True):
            nbytes = path.stat().st_size
        if name != TRAINING and nbytes > room:
            left_out.append(name)
            continue
        found[name] = source.bytes(name)
        room -= nbytes
    return found | _of_the_run(source, found, room), tuple(sorted(left_out))


def _of_the_run(source: Source, there: Mapping[str, bytes], room: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for folder in _run_folders(source):
        for name in FROM_A_RUN:
            if name in there or name in found:
                continue
            path = inside(folder, name)
            with explained(f"reading {path}", reads=True):
                if path.is_file() and path.stat().st_size <= room:
                    found[name] = path.read_bytes()
                    room -= len(found[name])
    return found


def _small_names(source: Source, all_of_it: bool) -> tuple[list[str], list[str]]:
    """Files to copy, what a run goes on from first; and those that are neither that nor weights."""
    names = [n for n in source.listed() if not n.endswith((SUFFIX, INDEX)) and source.has(n)]
    small = [name for name in names if name.endswith(SMALL) and not name.endswith(OTHER_INDEX)]
    no_copy = {MANIFEST} if all_of_it else {MANIFEST, TRAINING}
    kept = sorted(set(small) - no_copy, key=lambda name: (name != TRAINING, names.index(name)))
    return kept, [name for name in names if name not in small and name != LOCK]


def _run_folders(source: Source) -> list[Path]:
    """Where a run keeps what all its checkpoints share; where one file's folder keeps the rest."""
    if not source.listed() and source.names(MODEL) == [f"{MODEL}{SUFFIX}"]:
        return [source.folder]  # one file alone, by the name that only such a folder's file has
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
