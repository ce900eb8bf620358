"""A recipe in small: the same path, with a tiny model of its kind, a few samples and steps.

1. shrink      the recipe; with a base model and samples that are made beside it
2. (run it)    on two ranks, and again on one
3. prove       both have the same losses, and plain transformers and peft load what was written
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ShardwiseError
from shardwise.recipe.read import flatten, set_key
from shardwise.recipe.recipe import Recipe
from shardwise.train import rehearsal_files
from shardwise.train.data import prepare
from shardwise.train.folder import METRICS, Folder
from shardwise.train.model_folder import with_tokenizer
from shardwise.train.validation import Validation

Tree = dict[str, Any]
RANKS = 2
_TEXT = {"data.source": "stdlib", "data.field": "text", "data.max_bytes": 300_000}
_STREAMS = {"data.streaming.streams": 4, "data.streaming.shuffle": 4}
_DECODER = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 176}
_BATCH = {"batch.rows": 8, "batch.micro": 2, "data.context": 64}
_RUN = {"run.device": "cpu", "run.log_every": 1, "run.eval_rows": 8, "run.plan": False}
_STEPS, _EPOCHS = 6, 3


@dataclass(frozen=True)
class Rehearsal:
    """A recipe, and what is small in its rehearsal.

    Attributes:
        recipe: as it was written.
        folder: of everything that the rehearsal reads and writes.
    """

    recipe: Recipe
    folder: Path

    @classmethod
    def beside(cls, recipe: Recipe) -> Rehearsal:
        """Make a folder beside that of the run."""
        folder = Path(f"{recipe.run.folder}-rehearsal").expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return cls(recipe, folder)

    def small(self, ranks: int = RANKS) -> Recipe:
        """The recipe of the run on so many ranks; what it reads is there."""
        flat = flatten(self.recipe.model_dump())
        runs = {"run.folder": str(self.folder / f"ranks-{ranks}"), **_RUN}
        if flat["run.epochs"] is None or flat["data.format"] == "text":
            runs |= {"run.steps": _STEPS, "run.epochs": None}
        else:
            runs["run.epochs"] = min(flat["run.epochs"], _EPOCHS)
        new = {"run.overwrite": True, "checkpoint.resume": "never", "run.throughput_warmup": 1}
        new |= {"checkpoint.mirror": None, "outer": {}}  # nothing leaves this machine
        less: Tree = {"sharding.mesh": None, "sharding.compile": False}
        less["sample.tokens"] = min(flat["sample.tokens"], 8)
        if flat.get("adapter.rank") is not None:
            less["adapter.dropout"] = 0.0  # each number of ranks would draw other numbers
            less["optimizer.lr"] = max(flat["optimizer.lr"], 1e-2)  # few steps are to show
        small = {**_BATCH, **runs, **new, **less, **self._model(flat), **self._data(flat)}
        for key in ("checkpoint.save_every", "run.eval_every", "optimizer.warmup"):
            small[key] = min(flat[key], 2) if isinstance(flat[key], int) else flat[key]
        tree = self.recipe.model_dump()
        for key, value in small.items():
            set_key(tree, key, value)
        return Recipe.model_validate(tree)

    def _model(self, flat: Tree) -> Tree:
        if source := flat.get("model.from"):
            base = rehearsal_files.base(source, self.folder / "base")
            return {"model.from": str(base), "model.revision": None}
        return {"tokenizer.vocabulary": 512, **{f"model.{k}": v for k, v in _DECODER.items()}}

    def _data(self, flat: Tree) -> Tree:
        if flat["data.format"] == "text":
            return _TEXT | (_STREAMS if flat["data.streaming.streams"] else {})
        added = self.recipe.adapter.new_tokens
        form: str = flat["data.format"]
        held_out: str | None = None
        path = rehearsal_files.samples(form, self.folder, added)
        streamed: Tree = {}
        if flat["data.streaming.streams"]:
            held_out = str(rehearsal_files.samples(form, self.folder, added, "validation"))
            streamed = _STREAMS | {"data.streaming.epochs": None}  # few samples, read again
        data = {"data.source": str(path), "data.columns": {}, "data.context": 256, **streamed}
        return data | {"data.validation": 0.25, "data.validation_source": held_out}

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """Each key that is smaller or elsewhere: its name, and both values.

        A model or data that are made, and epochs of them, say how large they are.
        """
        before, after = flatten(self.recipe.model_dump()), flatten(self.small().model_dump())
        notes = {"model.from": rehearsal_files.MODEL, "run.epochs": rehearsal_files.SAMPLES}
        if self.recipe.data.format != "text":
            notes["data.source"] = rehearsal_files.SAMPLES
        for key, value in after.items():
            if value != before.get(key) or (key == "run.epochs" and value is not None):
                small = f"{value}, {notes[key]}" if value and key in notes else str(value)
                yield key, str(before.get(key)), small

    def proof(self) -> Iterator[str]:
        """Say what both runs show, a sentence each.

        Raises:
            ShardwiseError: one of them does not hold.
        """
        compute = self.recipe.sharding.precision.param_dtype
        tolerance = 1e-4 if compute in (None, "float32", "float64") else 1e-3
        sharded, whole = (_losses(self.folder / f"ranks-{ranks}") for ranks in (RANKS, 1))
        apart = max(abs(a - b) / b for a, b in zip(sharded, whole, strict=True))
        _check(apart, tolerance, f"the losses of {RANKS} ranks and of one process")
        yield (
            f"{len(whole)} losses of {RANKS} ranks equal those of one process: at most {apart:.1e} "
            f"apart, relative (limit {tolerance:g})"
        )
        recipe = self.small()
        model, written = self._loaded(recipe)
        loss = _validation_loss(recipe, model)
        _check(
            abs(loss - sharded[-1]) / sharded[-1], tolerance, f"the last validation and {written}"
        )
        yield f"{written} has the validation loss {loss:.4f}; the run's last was {sharded[-1]:.4f}"
        if recipe.adapter.rank is not None:
            yield _adapter_counts(recipe, model, loss, 10 * tolerance)

    def _loaded(self, recipe: Recipe) -> tuple[torch.nn.Module, str]:
        """The model that the run wrote, without any code of ours, and what it is."""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        flat, folder = flatten(recipe.model_dump()), Path(recipe.run.folder)
        if flat.get("adapter.rank") is None:
            return AutoModelForCausalLM.from_pretrained(folder), "the model in plain transformers"
        from peft import PeftModel

        options = {"quantization_config": recipe.model.quantization.config()}
        base: Any = AutoModelForCausalLM.from_pretrained(flat["model.from"], **options)
        if recipe.adapter.new_tokens:
            tokens = len(AutoTokenizer.from_pretrained(folder / "adapter"))
            rows = max(tokens, base.get_input_embeddings().num_embeddings)
            base.resize_token_embeddings(rows, mean_resizing=False)
        return PeftModel.from_pretrained(base, folder / "adapter"), "the adapter in plain peft"


def _losses(folder: Path) -> list[float]:
    """List the loss of each step and validation, in order."""
    lines = folder.joinpath(METRICS).read_text("utf-8").splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


def _validation_loss(recipe: Recipe, model: torch.nn.Module) -> float:
    comm = LocalComm()
    data = prepare(with_tokenizer(recipe), comm, Folder(Path(recipe.run.folder)))
    rows, micro = recipe.run.eval_rows, recipe.batch.micro
    return Validation(data.validation, rows, micro).evaluate(model, comm, 0).loss


def _adapter_counts(recipe: Recipe, model: Any, loss: float, least: float) -> str:
    """The base alone has another loss, so an adapter of zeros would have been noticed."""
    with model.disable_adapter():
        base = _validation_loss(recipe, model)
    if abs(base - loss) < least * base:
        raise ShardwiseError(
            f"the rehearsal failed: the validation loss is {loss:.4f} with the adapter and "
            f"{base:.4f} without it, and less than {least:g} apart, relative, shows nothing."
        )
    return f"the base without the adapter has {base:.4f}"


def _check(apart: float, tolerance: float, what: str) -> None:
    if not apart <= tolerance:
        raise ShardwiseError(
            f"the rehearsal failed: {what} are {apart:.1e} apart, relative, and the limit is "
            f"{tolerance:g}. Both runs are kept; compare their metrics.jsonl."
        )
