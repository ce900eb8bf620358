"""Results of a finished run: the whole model, its metrics, the loss curve, a sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.hf.adapters import save_adapter
from shardwise.plan.printed import size
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import evenly_spaced
from shardwise.train.data import Data
from shardwise.train.folder import ADAPTER, RECIPE, RESULTS, Folder
from shardwise.train.hf_config import WEIGHTS, config_texts
from shardwise.train.job import Job
from shardwise.train.length import passes
from shardwise.train.plot import plot_loss
from shardwise.train.records import Evaluated, Record, Stepped, Warned
from shardwise.train.run_logger import RunLogger
from shardwise.train.sample import sample
from shardwise.train.streams import StreamedRows
from shardwise.train.tokenizer import of_transformers


def export(
    job: Job, data: Data, logger: RunLogger, tokens_per_second: float, save_error: str
) -> None:
    """Write all of it. A collective; rank 0 writes."""
    recipe, comm = job.recipe, job.sharded.comm
    try:
        _save_model(job, data, logger)
    except (OSError, CheckpointError) as error:
        raise _export_error(error, recipe.run.steps, save_error) from error
    if logger.folder is not None:
        records = logger.metrics_log.records
        for name, text in result_files(recipe, data, records, tokens_per_second).items():
            logger.folder.write_text(name, text)
        _plot(logger, logger.folder, recipe.sharding.strategy, comm.size)
    if recipe.sample.tokens:  # last, so that a prompt that cannot be continued costs nothing else
        logger.log(sample(job.model, data.tokenizer, recipe))


def _save_model(job: Job, data: Data, logger: RunLogger) -> None:
    """The whole model with its configuration; or an adapter alone, whose base is `model.from`.

    The tokenizer is beside an adapter that has trained new tokens.
    """
    folder = Path(job.recipe.run.folder).expanduser()
    if logger.folder is not None:
        logger.folder.remove_unfinished(WEIGHTS)
    if job.recipe.adapter.rank is not None:
        save_adapter(job.sharded, folder / ADAPTER)
        if logger.folder is not None and (added := job.recipe.adapter.new_tokens):
            text, config = data.tokenizer.to_str(), job.recipe.tokenizer
            of_transformers(text, config, added).save_pretrained(folder / ADAPTER)
        return
    job.sharded.save_file(folder / WEIGHTS)
    if logger.folder is not None:
        for name, content in config_texts(job, data).items():
            logger.folder.write_bytes(name, content)


def _export_error(error: Exception, steps: int, last_error: str) -> CheckpointError:
    reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    checkpoint = (
        f" Its last checkpoint could not be saved either: {last_error}" if last_error else ""
    )
    return CheckpointError(
        f"the run has taken all its {steps:,} steps, and the model could not be written: {reason}"
        f"{checkpoint} Rerun the same command when there is space: it resumes from the last "
        "checkpoint that was saved."
    )


def files_of(logger: RunLogger) -> tuple[str, ...]:
    """Return the names of the run's files, and of nothing else in its folder, on rank 0."""
    if logger.folder is None:
        return ()
    own = {*RESULTS, RECIPE}
    files = (path.name for path in logger.folder.path.iterdir() if path.name in own)
    adapter = [path for path in (logger.folder.path / ADAPTER).glob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in adapter)
    shown = [f"{ADAPTER}/ ({size(nbytes)})"] if adapter else []
    return tuple(sorted(name for name in (*files, *shown) if not name.startswith(".")))


def _plot(logger: RunLogger, folder: Folder, strategy: str, ranks: int) -> None:
    title = f"{folder.path.name}: {strategy} over {ranks} rank{'s' * (ranks != 1)}"
    try:
        with folder.atomic_write("loss.png") as path:
            plot_loss(logger.metrics_log.records, title, path)
    except ImportError:
        logger.log(Warned("loss.png is not drawn: pip install 'shardwise[train]' for matplotlib."))


def result_files(
    recipe: Recipe, data: Data, records: Sequence[Record], tokens_per_second: float
) -> dict[str, str]:
    """`train_results.json` and `eval_results.json`, with the names of transformers' Trainer. Pure.

    The losses are those of the whole run.

    Args:
        records: of the metrics log.
        tokens_per_second: over all ranks.
    """
    steps = [record for record in records if isinstance(record, Stepped)]
    evaluated = [record for record in records if isinstance(record, Evaluated)]
    if not (steps and evaluated):  # it was resumed where it ends
        return {}
    rows = steps[-1].step * recipe.batch.rows
    samples_per_second = tokens_per_second * rows / max(1, steps[-1].tokens)
    train: dict[str, Any] = {
        "train_loss": fmean(record.loss for record in steps),
        "train_samples_per_second": samples_per_second,
        "train_steps_per_second": samples_per_second / recipe.batch.rows,
        "train_tokens_per_second": tokens_per_second,
    }
    last = evaluated[-1]
    samples = len(evenly_spaced(len(data.validation), recipe.run.eval_rows))
    evaluation: dict[str, Any] = {
        "eval_loss": last.loss,
        "eval_accuracy": last.accuracy,
        "eval_runtime": last.seconds,
        "eval_samples": samples,
        "eval_samples_per_second": samples / last.seconds,
        "perplexity": last.perplexity,
    }
    if not isinstance(data.training, StreamedRows):  # their number is not known
        train["train_samples"] = len(data.training)
        for values in (train, evaluation):
            values["epoch"] = passes(recipe, steps[-1].step, len(data.training))
    return {
        f"{name}_results.json": json.dumps(values, indent=4, sort_keys=True)
        for name, values in (("train", train), ("eval", evaluation))
    }
