"""What a folder of weights has beside them: configuration, tokenizer, training state.

``transformers`` needs the first two. They lie with the weights or, of a run's checkpoint, in the
folder of the run. Code (``.py``) is never among them: to copy it would be to vouch for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.disk import explained, size_of
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
LARGEST = 100_000_000  # bytes of a small file, which is in memory as a whole


def companions(source: CheckpointReader, whole: bool) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Bytes of configuration and tokenizer by name, and the names of what is left out.

    Args:
        whole: training state, too.
    """
    names = [n for n in source.listed() if not n.endswith((SUFFIX, INDEX)) and source.has(n)]
    of_ours = {MANIFEST, LOCK} if whole else {MANIFEST, LOCK, TRAINING}
    wanted = [n for n in names if _is_small(source.folder, n) or n == TRAINING]
    small = {name: source.bytes(name) for name in wanted if name not in of_ours}
    for folder in _run_folders(source):
        for name in FROM_A_RUN:
            if name not in small and _is_small(folder, name):
                with explained(f"reading {folder / name}", reads=True):
                    small[name] = (folder / name).read_bytes()
    return small, tuple(sorted({*names} - {*wanted} - of_ours))


def _is_small(folder: Path, name: str) -> bool:
    """Is there such a file that is configuration or a tokenizer?"""
    if not name.endswith(SMALL) or name.endswith(".index.json"):
        return False
    path = inside(folder, name)
    with explained(f"reading {path}", reads=True):
        nbytes = size_of(path)
    return nbytes is not None and nbytes <= LARGEST


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
