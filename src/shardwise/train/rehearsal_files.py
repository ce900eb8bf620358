"""Files of a rehearsal: a tiny base model, and samples of documented functions of Python."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_MODULES = ("bisect", "colorsys", "fnmatch", "heapq", "keyword", "shlex", "shutil", "statistics")
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,  # with blocks of 64, whatever the quantisation packs
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_COUNT = 40
MODEL = f"random, {_SHAPE['num_hidden_layers']} layers of width {_SHAPE['hidden_size']}"
SAMPLES = f"{_COUNT} samples"
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
)


def base(source: str, folder: Path) -> Path:
    """A folder with random weights of the kind of ``source``; a Llama, if that is not here.

    It is made once.
    """
    if folder.joinpath("tokenizer_config.json").exists():  # written last
        return folder
    import torch
    import transformers as hf
    from tokenizers import Tokenizer
    from transformers.utils import logging

    from shardwise.hf.folder import new_model
    from shardwise.train import tokenizer as bpe

    logging.disable_progress_bar()
    try:
        kind = hf.AutoConfig.from_pretrained(source, local_files_only=True).model_type
    except (OSError, ValueError):
        kind = "llama"
    text = bpe.train([f"{task}\n{answer}" for task, answer in _functions()], 512)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        eos_token=bpe.END,
        pad_token="<pad>",  # noqa: S106 - no password
    )
    tokenizer.chat_template = _CHAT
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = hf.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **_SHAPE, **ends)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        new_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def samples(kind: str, folder: Path, tokens: Sequence[str] = (), name: str = "samples") -> Path:
    """A JSONL file in one of the formats of ``data.format``; questions begin with ``tokens``."""
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    before = "".join(tokens)
    lines = (json.dumps(_sample(kind, before + task, answer)) for task, answer in _functions())
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def _sample(kind: str, task: str, answer: str) -> dict[str, Any]:
    turns = [("user", task), ("assistant", answer)]
    if kind == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}
    if kind == "messages":
        return {"messages": [{"role": role, "content": text} for role, text in turns]}
    if kind == "completion":
        return {"prompt": task, "completion": answer}
    return {"instruction": task, "input": "", "output": answer}


def _functions() -> list[tuple[str, str]]:
    """Return the docstrings of short functions of the standard library, and their first lines."""
    return [pair for name in _MODULES for pair in _documented(name)][:_COUNT]


def _documented(name: str) -> Iterator[tuple[str, str]]:
    text = inspect.getsource(__import__(name))
    for node in ast.parse(text).body:
        docstring = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if docstring:
            yield docstring.splitlines()[0], ast.get_source_segment(text, node)[:200]  # type: ignore[index]
