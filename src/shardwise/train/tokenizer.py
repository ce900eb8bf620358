"""A byte-level BPE tokenizer, trained on the training split; or one of the user's own.

It is stored with the model. A ready-made tokenizer's vocabulary of 32,000 or more would be most of
a small model's parameters. Training one takes seconds. The same text always gives the
same tokenizer, so a stored one is reused if text and vocabulary size are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.recipe.model_config import TokenizerConfig
from shardwise.train.folder import Folder
from shardwise.train.libraries import library

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.int32]

END = "<|endoftext|>"  # between documents; its id is 0
FILE = "tokenizer.json"
CACHE = "tokenizer.cache.json"  # hash of the text and size that FILE was trained with
_library = partial(library, "tokenizers", "training", "train")
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
        origin: where it comes from, in a few words.
    """

    text: str
    files: dict[str, str]
    origin: str


def load_or_train(
    folder: Folder, documents: Sequence[str], config: TokenizerConfig, added: Sequence[str] = ()
) -> TrainedTokenizer:
    """The recipe's; or that in ``folder`` if it was trained on the same documents; or a new one.

    ``added`` are tokens that the recipe's gets besides.

    Nothing is written: the existing files may belong to a finished model.

    Raises:
        ConfigError: ``config.source`` cannot be read, or has no token ``config.end``.
    """
    if config.source is not None:
        text = _with(_read(Path(config.source).expanduser(), config.end), added)
        return TrainedTokenizer(text, {FILE: text}, f"read from {config.source}")
    key, text = _cache_key(documents, config.vocabulary), folder.read_text(FILE) or ""
    origin = "from the last run"
    if folder.read_text(CACHE) != _cache_record(key, text):
        text, origin = train(documents, config.vocabulary), "trained on the training split"
    return TrainedTokenizer(text, {FILE: text, CACHE: _cache_record(key, text)}, origin)


def _read(path: Path, end: str) -> str:
    """The text of the ``tokenizer.json`` at ``path`` or in it, which has the token ``end``."""
    file = path / FILE if path.is_dir() else path
    try:
        text = file.read_text("utf-8")
        tokenizer = load(text)
    except Exception as error:  # noqa: BLE001 - tokenizers raises bare exceptions
        raise ConfigError(
            f"tokenizer.source: {file} cannot be read as a tokenizer ({error}). Name a "
            "tokenizer.json or its folder, as save_pretrained of transformers writes it."
        ) from None
    end_id(tokenizer, end)
    return text


def _with(text: str, tokens: Sequence[str]) -> str:
    if not tokens:
        return text
    tokenizer = _library().Tokenizer.from_str(text)
    tokenizer.add_tokens(list(tokens))
    return str(tokenizer.to_str())


def load(text: str) -> Tokenizer:
    """The tokenizer in the text of a ``tokenizer.json``."""
    tokenizer: Tokenizer = _library().Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is plain text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def of_transformers(
    text: str, config: TokenizerConfig, added: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """The tokenizer in ``text`` as that of `transformers`, with the chat template of its folder.

    ``added`` are tokens in ``text`` that the folder's lacks.

    Raises:
        ConfigError: `transformers` is not installed.
    """
    hf = library("transformers", "a data.format of samples", "hf")
    folder = Path(config.source or "").expanduser()
    if config.source and (folder / "tokenizer_config.json").exists():
        from shardwise.hf.folder import tokenizer_of

        tokenizer: PreTrainedTokenizerBase = tokenizer_of(folder, eos_token=config.end)
        tokenizer.add_tokens(list(added))
        return tokenizer
    fast: PreTrainedTokenizerBase = hf.PreTrainedTokenizerFast(
        tokenizer_object=load(text), eos_token=config.end
    )
    return fast


def encode(tokenizer: Tokenizer, documents: Sequence[str], end: str = END) -> Tokens:
    """All documents as one stream, each followed by the token ``end``; no other special tokens."""
    last = end_id(tokenizer, end)
    ids: list[Tokens] = [np.empty(0, dtype=np.int32)]
    for start in range(0, len(documents), ENCODE_BATCH):
        batch = list(documents[start : start + ENCODE_BATCH])
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids += [np.asarray([*encoding.ids, last], dtype=np.int32) for encoding in encodings]
    return np.concatenate(ids)


def end_id(tokenizer: Tokenizer, end: str = END) -> int:
    """The id of the end token.

    Raises:
        ConfigError: there is none; with the special tokens that there are.
    """
    number = tokenizer.token_to_id(end)
    if number is None:
        added = tokenizer.get_added_tokens_decoder().values()
        special = ", ".join(token.content for token in added if token.special)
        raise ConfigError(
            f"the tokenizer has no {end} token; its special tokens are: {special or 'none'}. Set "
            "tokenizer.end to the one that ends a text."
        )
    return number


def transformers_config(context: int, end: str = END) -> dict[str, object]:
    """The ``tokenizer_config.json`` with which `transformers` loads the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,  # or a batch could not be tokenized
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
