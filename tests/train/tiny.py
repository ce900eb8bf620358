"""A corpus and a recipe so small that a whole run takes a second."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import NamedTemporaryFile

from shardwise.recipe.read import read_recipe
from shardwise.recipe.recipe import Recipe

WORDS = ("def", "return", "self", "value", "for", "name", "in", "items", "if", "not", "None", "x")

RECIPE = """\
model: {width: 16, layers: 2, heads: 4, kv_heads: 2, hidden: 24}
tokenizer: {vocabulary: 300}
data: {source: SOURCE, context: 16, validation: 0.2}
batch: {rows: 12, micro: 1}
optimizer: {lr: 1e-2, warmup: 2, eps: 1e-4}
sample: {prompt: "def", tokens: 4}
run: {folder: FOLDER, steps: 4, eval_every: 2, eval_rows: 7, device: cpu, plan: false}
"""


def documents(count: int = 60) -> list[str]:
    """Texts of a few lines, all different, the same every time."""
    draw = random.Random(7)
    lines = [" ".join(draw.choices(WORDS, k=8)) + "\n" for _ in range(count * 6)]
    return [f"# {i}\n" + "".join(lines[6 * i : 6 * i + 6]) for i in range(count)]


def text_folder(path: Path, count: int = 60) -> Path:
    """A folder with one file per document."""
    path.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents(count)):
        _write(path / f"{number:03}.txt", text)
    return path


def recipe_file(folder: Path) -> Path:
    """A recipe on disk, beside its text; it runs in ``folder / "run"``."""
    text_folder(folder / "text")
    path = folder / "tiny.yaml"
    text = RECIPE.replace("SOURCE", str(folder / "text")).replace("FOLDER", str(folder / "run"))
    _write(path, text)
    return path


def _write(path: Path, text: str) -> None:
    """Write it whole or not at all: ranks in threads write the same file while others read it."""
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def tiny_recipe(folder: Path, *overrides: str) -> Recipe:
    return read_recipe(recipe_file(folder), overrides)
