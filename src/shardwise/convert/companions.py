"""What a folder of weights has beside them: configuration, tokenizer, training state.

``transformers`` needs the first two. They lie with the weights or, of a run's checkpoint, in the
folder of the run. Code (``.py``) is never among them: to copy it would be to vouch for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.disk import explained
from shardwise.checkpoint.folder import CHECKPOINTS, step_of
from shardwise.checkpoint.lock import LOCK
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.plan import INDEX
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.safetensors_format import inside
from shardwise.checkpoint.save_plan import MODEL
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.convert.catalogue import SUFFIX
from shardwise.errors import CheckpointError

CONFIG = "config.json"
SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of what a folder of weights has beside them: configuration and tokenizer."""
FROM_A_RUN = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "merges.txt", "tokenizer.model"),
    "chat_template.jinja",
)
LARGEST = 100_000_000  # bytes of all small files together: they are in memory at once


def companions(source: CheckpointReader, whole: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Configuration and tokenizer, from beside the weights or from the run.

    Args:
        whole: training state, too.

    Returns:
        Bytes by name; and the names of what lies there, too, and is no such file, or too much.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names, left_out = _small_names(source, whole)
    small: dict[str, bytes] = {}
    for name in names:
        if name == TRAINING or _nbytes(source.folder, name) <= _room(small):
            small[name] = source.bytes(name)
        else:
            left_out.append(name)
    for folder in _run_folders(source):
        for name in FROM_A_RUN:
            nbytes = -1 if name in small else _nbytes(folder, name)
            if 0 <= nbytes <= _room(small):
                with explained(f"reading {folder / name}", reads=True):
                    small[name] = inside(folder, name).read_bytes()
    return small, tuple(sorted(left_out))


def _room(small: dict[str, bytes]) -> int:
    return LARGEST - sum(map(len, small.values()))


def _nbytes(folder: Path, name: str) -> int:
    """-1 where there is no such file."""
    path = inside(folder, name)
    with explained(f"reading {path}", reads=True):
        return path.stat().st_size if path.is_file() else -1


def _small_names(source: CheckpointReader, whole: bool) -> tuple[list[str], list[str]]:
    """Files to copy, training state first; and those that are neither that nor weights."""
    names = [n for n in source.listed() if not n.endswith((SUFFIX, INDEX)) and source.has(n)]
    small = [n for n in names if n.endswith(SMALL) and not n.endswith(".index.json")]
    copied = sorted(set(small) - {MANIFEST, TRAINING}, key=names.index)
    copied = [TRAINING, *copied] if whole and TRAINING in small else copied
    return copied, [name for name in names if name not in small and name != LOCK]


def _run_folders(source: CheckpointReader) -> list[Path]:
    """Where a run keeps what all its checkpoints share; where one file's folder keeps the rest."""
    if not source.listed() and source.names(MODEL) == [f"{MODEL}{SUFFIX}"]:
        return [source.folder]  # one file alone, by the name that only such a folder's file has
    if source.manifest is None or step_of(source.folder.name) is None:
        return []
    parent = source.folder.parent
    return [parent, parent.parent] if parent.name == CHECKPOINTS else [parent]


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """``config.json`` that says the new dtype, since ``transformers`` loads as it says."""

    def changed(key: str, value: Any) -> Any:
        if key in ("dtype", "torch_dtype") and isinstance(value, str):
            return str(dtype).removeprefix("torch.")
        is_config = key.endswith("_config") and key != "quantization_config"
        if not is_config or not isinstance(value, dict):
            return value
        return {inner: changed(inner, one) for inner, one in value.items()}

    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        raise CheckpointError(
            "config.json is not JSON, so it cannot be told the new dtype. Mend it, or export "
            "without --dtype."
        ) from None
    return json.dumps(changed("_config", fields), indent=2, ensure_ascii=False).encode() + b"\n"
