"""Pairs (docstring → function) of modules that the base has not been trained on.

The recipe of the base holds out files by a hash of their text. Their functions are the samples
here, and every ``EVERY``-th of these files is for validation: no module is in both splits.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from shardwise.recipe.recipe import Recipe
from shardwise.train.corpus import is_held_out, source_files

EVERY = 5
LONGEST = 600  # characters of a sample, about 200 tokens

Pair = dict[str, str]
"""``prompt`` and ``completion``, as ``data.format: completion`` reads them."""


def held_out(recipe: Recipe) -> list[str]:
    """The texts that the base's recipe holds out, in the order in which files are read."""
    texts = (p.read_text("utf-8", "replace") for p in source_files(recipe.data.source)[1])
    return [text for text in texts if is_held_out(text, recipe.data.validation)]


def pairs(text: str) -> Iterator[Pair]:
    """The documented functions of a module, without their docstrings; none if it has no syntax."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        if docstring := ast.get_docstring(node):
            node.body = node.body[1:]
            pair = {"prompt": prompt(docstring), "completion": ast.unparse(node)}
            if sum(map(len, pair.values())) <= LONGEST:
                yield pair


def prompt(docstring: str) -> str:
    """The prompt that asks the model for a function."""
    return f'"""{docstring}"""\n'


def write_pairs(texts: list[str], folder: Path) -> tuple[int, int]:
    """Write ``training.jsonl`` and ``validation.jsonl``; the numbers of their pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = []
    for name, validation in (("training", False), ("validation", True)):
        modules = (text for n, text in enumerate(texts) if (n % EVERY == 0) is validation)
        lines = [json.dumps(pair) for text in modules for pair in pairs(text)]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        counts.append(len(lines))
    return counts[0], counts[1]
