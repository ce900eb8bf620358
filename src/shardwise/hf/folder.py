"""The folder of a model: a local one, or that of the hub's name in the cache.

Weights, configuration and tokenizer are fetched at most once for each host, by the hub's own
library, whose environment variables hold: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

CONFIG = "config.json"
SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of configuration and tokenizer."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
COMPARE_CONFIG = f"Compare {CONFIG} with that of the original model."
BOTH_DIRECTIONS = {"bert-generation", "xlnet"}
"""Types of models that read later tokens, too, beside those that can be trained with masks."""


def locate(
    source: str | Path,
    revision: str | None = None,
    cache: str | Path | None = None,
    patterns: Sequence[str] = ("*.safetensors", *SMALL),
) -> Path:
    """The folder that holds a ``config.json`` and, of the hub's name, what ``patterns`` name.

    Args:
        source: a folder, or a name on the hub, such as ``meta-llama/Llama-2-70b-hf``.
        revision: of the hub's name: a branch, a tag or a commit.
        cache: the hub's cache, instead of the usual one.
        patterns: what is fetched.

    Raises:
        ConfigError: there is no such folder or name, or it cannot be fetched; or a folder is to
            have a revision.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ConfigError(
                f"{path} holds no {CONFIG}, so it is no model's folder. Name one that "
                "save_pretrained of transformers or `shardwise train` wrote."
            )
        if revision is not None:
            raise ConfigError(
                f"{path} is a folder here, which is read as it is, and revision {revision!r} is of "
                "a name on the hub; leave the revision out."
            )
        return path.absolute()
    if path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") > 1:
        raise ConfigError(f"there is no folder {path}; a name on the hub is like owner/name.")
    with _errors_of_the_hub(str(source), revision):
        return _fetched(str(source), revision, cache, tuple(patterns))


@functools.cache
def _fetched(
    name: str, revision: str | None, cache: str | Path | None, patterns: Sequence[str]
) -> Path:
    """Fetch once: a run's saves ask no network, and get no later commit of its branch."""
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "cache_dir": cache, "allow_patterns": list(patterns)}
    return Path(snapshot_download(name, **options))


def dtype_on_hub(name: str, revision: str | None) -> str:
    """Return the dtype of a hub folder's first tensor, as safetensors calls it: ``BF16``.

    Only the headers of the files are fetched.

    Raises:
        ConfigError: they cannot be fetched.
    """
    from huggingface_hub import get_safetensors_metadata

    with _errors_of_the_hub(name, revision):
        metadata = get_safetensors_metadata(name, revision=revision)
    first = metadata.files_metadata[next(iter(metadata.weight_map.values()))]
    return next(iter(first.tensors.values())).dtype


@contextmanager
def _errors_of_the_hub(name: str, revision: str | None) -> Iterator[None]:
    """Raises them as ``ConfigError``, which says what to do."""
    from huggingface_hub import errors

    of = f"{name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        yield
    except errors.GatedRepoError as error:
        reason = "its owner admits only accounts that accepted its terms"
        advice = f"Accept them at https://huggingface.co/{name}, then `hf auth login`, or HF_TOKEN."
        raise ConfigError(f"{of} was not fetched: {reason}. {advice}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"{of} is no folder here and not in the hub's cache, and the hub is not reached: "
            "HF_HUB_OFFLINE is set, or there is no network. Name a local folder; or run `hf "
            f"download {name}` where there is a network, and take the cache (HF_HOME) with you."
        ) from error
    except Exception as error:
        text = getattr(error, "server_message", None) or str(error).strip() or repr(error)
        why = f"{type(error).__name__}: {text.splitlines()[-1].rstrip('.')}"
        raise ConfigError(
            f"{of} is no folder here, and was not fetched from the hub: {why}. Check the name and "
            "the revision; a private one needs `hf auth login`, or HF_TOKEN. Where the network "
            "failed, start again: what came is kept."
        ) from error


@contextmanager
def errors_of_transformers(fact: str, advice: str) -> Iterator[None]:
    """Raises them as ``ConfigError``: of a file that says what it should not they may be any."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except Exception as error:
        why = (isinstance(error, StrictDataclassError) and error.__cause__) or error
        reason = (str(why).strip() or "no reason given").splitlines()[0].rstrip(" :.")
        raise ConfigError(f"{fact}: {type(why).__name__}: {reason}. {advice}") from error


def config_of(folder: Path) -> Any:
    """The configuration of the model in ``folder``.

    Raises:
        ConfigError: transformers has no such model, or its weights are quantised.
    """
    from transformers import AutoConfig

    fact = "describes no model of this version of transformers, which runs no code of a folder"
    with errors_of_transformers(f"{folder / CONFIG} {fact}", COMPARE_CONFIG):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for key in SIZES:
        size = getattr(config.get_text_config(), key, None)
        if isinstance(size, int) and size < 1:
            raise ConfigError(f"{folder / CONFIG}: {key} is {size}; set it to 1 or more.")
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method", "unknown")
        raise ConfigError(
            f"the weights in {folder} are quantised by {method!r}, which cannot be sharded or "
            "trained as they are. Name the folder of the unquantised model."
        )
    return config


def new_model(config: Any, **options: Any) -> Any:
    """A new model of a configuration, by ``AutoModelForCausalLM.from_config``.

    Raises:
        ConfigError: it is no causal language model's, or one that reads in both directions, or its
            values make none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"a {config.model_type} is no causal language model (transformers has no "
            "AutoModelForCausalLM of it), and only these are made of a configuration. Train it in "
            "a loop of your own, by sw.shard(model); where a command takes a model, write a "
            "function that returns it with an input, and name that: file.py:function."
        )
    if _reads_ahead(config):
        raise ConfigError(
            f"a {config.model_type} reads in both directions, so it would see the very tokens that "
            "it is trained to predict, and learn nothing. Write is_decoder: true into its "
            "config.json, if it has that; or train it with masked tokens, in a loop of your own, "
            "by sw.shard(model)."
        )
    fact = f"transformers makes no model of {Path(config.name_or_path) / CONFIG}"
    with errors_of_transformers(fact, COMPARE_CONFIG):
        return AutoModelForCausalLM.from_config(config, **options)


def _reads_ahead(config: Any) -> bool:
    """Is there an encoder, whose model "for causal LM" masks no later token unless it is told?"""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    encodes = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type in BOTH_DIRECTIONS
    masks = any(getattr(config, name, False) for name in ("is_decoder", "causal"))
    return encodes and not masks and not getattr(config, "is_encoder_decoder", False)


def tokenizer_of(folder: Path, **options: Any) -> Any:
    """Its tokenizer, of ``transformers``; ``None`` if the folder has none.

    Raises:
        ConfigError: its files are damaged, or one is missing.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER):
        return None
    fact = f"transformers reads no tokenizer in {folder}"
    with errors_of_transformers(fact, "If files of it are damaged or missing, copy them again."):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
