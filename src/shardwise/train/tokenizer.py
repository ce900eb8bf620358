"""A byte-level BPE tokenizer, trained on the training split and stored with the model.

A ready-made tokenizer would have to be downloaded, and its vocabulary of 32,000 or more would
be most of a small model's parameters. Training one takes seconds. The same text always gives the
same tokenizer, so a stored one is reused if text and vocabulary size are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.folder import Folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "END",
    "Tokens",
    "TrainedTokenizer",
    "encode",
    "end_id",
    "load",
    "load_or_train",
    "train",
    "transformers_config",
]

Tokens = NDArray[np.int32]

END = "<|endoftext|>"  # between documents; its id is 0
FILE = "tokenizer.json"
CACHE = "tokenizer.cache.json"  # hash of the text and size that FILE was trained with
ENCODE_BATCH = 64  # documents per call: an encoding is far larger than its ids


def train(documents: Sequence[str], vocabulary: int) -> str:
    """Train a tokenizer of at most ``vocabulary`` tokens; returns its ``tokenizer.json``.

    BPE (Sennrich et al. 2016, arXiv 1508.07909) over bytes, so that every text can be encoded and
    decodes to itself.
    """
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return str(tokenizer.to_str())


class TrainedTokenizer(NamedTuple):
    """A tokenizer.

    Attributes:
        text: of its ``tokenizer.json``.
        files: for the run's folder, by name.
        cached: it was reused.
    """

    text: str
    files: dict[str, str]
    cached: bool


def load_or_train(folder: Folder, documents: Sequence[str], vocabulary: int) -> TrainedTokenizer:
    """The tokenizer in ``folder`` if it was trained on the same documents; else a new one.

    Nothing is written: the existing files may belong to a finished model.
    """
    key = _cache_key(documents, vocabulary)
    text = folder.read_text(FILE)
    cached = text is not None and folder.read_text(CACHE) == _cache_record(key, text)
    if text is None or not cached:
        text = train(documents, vocabulary)
    return TrainedTokenizer(text, {FILE: text, CACHE: _cache_record(key, text)}, cached)


def load(text: str) -> Tokenizer:
    """The tokenizer in the text of a ``tokenizer.json``."""
    tokenizer: Tokenizer = _library().Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is plain text
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Tokens:
    """All documents as one stream, each followed by the end token."""
    end = end_id(tokenizer)
    ids: list[Tokens] = [np.empty(0, dtype=np.int32)]
    for start in range(0, len(documents), ENCODE_BATCH):
        encodings = tokenizer.encode_batch_fast(list(documents[start : start + ENCODE_BATCH]))
        ids += [np.asarray([*encoding.ids, end], dtype=np.int32) for encoding in encodings]
    return np.concatenate(ids)


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the end token."""
    end = tokenizer.token_to_id(END)
    if end is None:
        raise ConfigError(f"the tokenizer has no {END} token, so shardwise did not train it.")
    return end


def transformers_config(context: int) -> dict[str, object]:
    """The ``tokenizer_config.json`` with which `transformers` loads the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,  # or a batch could not be tokenized
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }


def _cache_key(documents: Sequence[str], vocabulary: int) -> str:
    digest = hashlib.sha256(f"{vocabulary} {_library().__version__}".encode())
    for document in documents:
        digest.update(hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def _cache_record(key: str, text: str) -> str:
    tokenizer = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"learnt_from": key, "tokenizer": tokenizer}, indent=2) + "\n"


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "training needs the tokenizers library: pip install 'shardwise[train]'."
        ) from None
    return tokenizers
