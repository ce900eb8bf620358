"""The main job: prepare, train, validate, sample, save. Emits records and prints nothing.

    1. the folder and the data        rank 0 reads, everybody receives
    2. the model, sharded
    3. the steps                      validation every now and then, and at the end
    4. what remains                   a sample, the table of bytes, the model, the picture

Every rank walks through the same calls in the same order, since most are collectives; that
only rank 0 speaks and writes is decided in one place, `_Desk`.
"""

from __future__ import annotations

import math
import time

from shardwise.comm.protocol import Comm
from shardwise.errors import ShardwiseError
from shardwise.train.batches import accumulation
from shardwise.train.config import Recipe
from shardwise.train.data import Data, prepare
from shardwise.train.exchange import gathered
from shardwise.train.export import export
from shardwise.train.folder import RECIPE, Folder
from shardwise.train.footprint import footprint
from shardwise.train.job import Job, build
from shardwise.train.meter import Meter, memory_in_use
from shardwise.train.metrics import (
    Built,
    Emit,
    Evaluated,
    Finished,
    Journal,
    Placed,
    Record,
    Sampled,
    Stepped,
    Warned,
)
from shardwise.train.plot import draw
from shardwise.train.recipe import keys, resolved
from shardwise.train.sample import sample
from shardwise.train.tokenizer import end_id
from shardwise.train.validation import Validation

__all__ = ["train"]


class _Desk:
    """What rank 0 writes to and speaks through; on the other ranks, nothing."""

    def __init__(self, recipe: Recipe, comm: Comm, emit: Emit) -> None:
        self.folder: Folder | None = None
        if comm.rank == 0:
            self.folder = Folder.open(recipe.run.folder, recipe.run.overwrite)
            self.folder.write_text(RECIPE, resolved(recipe))
            self.journal = Journal(self.folder.path / "metrics.jsonl")
        self._emit = emit

    def say(self, record: Record | None) -> None:
        if self.folder is not None and record is not None:
            self.journal(record)
            self._emit(record)


def train(recipe: Recipe, comm: Comm, emit: Emit) -> Evaluated:
    """Train as ``recipe`` says, on the ranks of ``comm``. A collective.

    Args:
        recipe: alike on every rank, which is checked.
        comm: the ranks.
        emit: called on rank 0 with each record as it happens.

    Returns:
        The last validation; the same on every rank.

    Raises:
        ConfigError: the recipe cannot work here (batch, folder, data).
        RanksDisagree: the ranks were given different recipes.
        ShardwiseError: the loss is no longer a number.
    """
    start = time.perf_counter()
    accumulation(recipe.batch, comm.size)  # before anything is read or written
    comm.agree(_facts(recipe))
    desk = _Desk(recipe, comm, emit)
    data = prepare(recipe, comm, desk.folder)
    desk.say(data.report)
    job = build(recipe, comm, data.training, data.tokenizer.get_vocab_size())
    desk.say(_built(job, data))
    evaluated, placed = _steps(job, data, desk)
    _finish(job, data, desk)
    desk.say(placed)
    desk.say(Finished(recipe.run.folder, _files(desk), time.perf_counter() - start))
    return evaluated


def _facts(recipe: Recipe) -> dict[str, str]:
    """Every key of the recipe, so that a difference between ranks is named."""
    tree = recipe.model_dump()
    facts = {}
    for key in keys():
        value: object = tree
        for part in key.name.split("."):
            assert isinstance(value, dict)
            value = value[part]
        facts[key.name] = str(value)
    return facts


def _built(job: Job, data: Data) -> Built:
    recipe, ranks = job.recipe, job.sharded.comm.size
    return Built(
        parameters=sum(bucket.layout.used for bucket in job.sharded.buckets),
        strategy=job.sharded.placement.name,
        ranks=ranks,
        rows=recipe.batch.rows,
        micro=recipe.batch.micro,
        accumulation=accumulation(recipe.batch, ranks),
        context=recipe.data.context,
        steps=recipe.run.steps,
        epochs=recipe.run.steps * recipe.batch.rows / len(data.training),
    )


# --- the steps -------------------------------------------------------------------------------


def _steps(job: Job, data: Data, desk: _Desk) -> tuple[Evaluated, Placed]:
    """All of them, and what the last one leaves: the last validation, and the bytes."""
    run, comm = job.recipe.run, job.sharded.comm
    validation = Validation(data.validation, run.eval_rows, job.recipe.batch.micro)
    meter = Meter()
    for step in range(1, run.steps + 1):
        with meter.step(job.tokens_per_step):
            share, norm, lr = job.gradients(step - 1)
            job.optimizer.step()
        if step == run.steps:  # the only moment after the last update when gradients exist
            placed = footprint(job.sharded, job.optimizer, comm)
        job.optimizer.zero_grad()
        record = _stepped(step, share, (norm, lr), meter, job)
        desk.say(record)
        _check_finite(record)
        if step == run.steps or (run.eval_every and step % run.eval_every == 0):
            evaluated = validation.measure(job.model, comm, step)
            desk.say(evaluated)
    return evaluated, placed


def _stepped(
    step: int, share: float, norm_and_lr: tuple[float, float], meter: Meter, job: Job
) -> Stepped:
    """What every rank knows of the step, put together. A collective."""
    steps = job.recipe.run.steps
    comm = job.sharded.comm
    heard = gathered(comm, (share, memory_in_use(comm.device)), "loss")
    return Stepped(
        step=step,
        steps=steps,
        loss=heard[:, 0].sum().item(),
        lr=norm_and_lr[1],
        grad_norm=norm_and_lr[0],
        tokens_per_second=meter.tokens_per_second,
        memory=int(heard[:, 1].max().item()),
        seconds_left=meter.seconds_per_step * (steps - step),
    )


def _check_finite(record: Stepped) -> None:
    if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
        raise ShardwiseError(
            f"step {record.step}: the loss is {record.loss:g} and the gradient norm "
            f"{record.grad_norm:g}, so the parameters are ruined and the run ends here. The "
            f"learning rate was {record.lr:g}; lower optimizer.lr, or raise optimizer.warmup."
        )


# --- what remains ----------------------------------------------------------------------------


def _finish(job: Job, data: Data, desk: _Desk) -> None:
    """A sample and the whole model: collectives. Rank 0 writes."""
    recipe, comm = job.recipe, job.sharded.comm
    if recipe.sample.tokens:
        text = sample(job.model, data.tokenizer, recipe.sample, recipe.run.seed, comm.device)
        desk.say(Sampled(recipe.sample.prompt, text))
    states = job.model.state_dict()
    if desk.folder is not None:
        end = end_id(data.tokenizer)
        export(desk.folder, states, recipe.model, recipe.data.context, end)
        _draw(desk, desk.folder, recipe.sharding.strategy, comm.size)


def _files(desk: _Desk) -> tuple[str, ...]:
    if desk.folder is None:
        return ()
    return tuple(sorted(path.name for path in desk.folder.path.iterdir() if path.is_file()))


def _draw(desk: _Desk, folder: Folder, strategy: str, ranks: int) -> None:
    title = f"{folder.path.name}: {strategy} over {ranks} rank{'s' * (ranks != 1)}"
    try:
        with folder.replacing("loss.png") as path:
            draw(desk.journal.records, title, path)
    except ImportError:
        desk.say(Warned("loss.png is not drawn: pip install 'shardwise[train]' for matplotlib."))
