"""Runs of the trainer on threads, and what each of them did: to compare one with another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import Batches, MicroBatch
from shardwise.train.foresight import USUAL, Foresight
from shardwise.train.job import Job
from shardwise.train.loop import Outcome, train
from shardwise.train.records import Busy, Record, Stepped
from shardwise.train.requests import SignalRequests
from shardwise.train.streams import StreamBatches


class Killed(Exception):
    """What stands for SIGKILL among threads: nothing of the trainer catches it."""


@dataclass
class Watched:
    """Everything that runs did since this was made.

    Attributes:
        trained: (step, rank) → the tokens that this rank was given, ``[rows, context]``; the last
            time counts.
        records: all of them, in order.
        drawn: the steps in the last picture.
    """

    monkeypatch: pytest.MonkeyPatch
    trained: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._record_rows_of(Batches)
        self._record_rows_of(StreamBatches)

        def draw(records: list[Record], _title: str, path: Path) -> None:
            self.drawn = steps(records)  # what the picture would show; to draw it takes a second
            path.touch()

        self.monkeypatch.setattr("shardwise.train.results.plot_loss", draw)

    def _record_rows_of(self, kind: type[Batches | StreamBatches]) -> None:
        original: Callable[[Any, int], list[MicroBatch]] = kind.step

        def step(batches: Batches | StreamBatches, number: int) -> list[MicroBatch]:
            micro_batches = original(batches, number)
            rows = [row for micro in micro_batches for row in micro.ids.tolist()]
            self.trained[number + 1, batches.rank] = rows
            return micro_batches

        self.monkeypatch.setattr(kind, "step", step)

    def run(
        self,
        recipe: Recipe,
        world: int,
        on_record: Callable[[Record], None] = lambda _: None,
        ask: Callable[[Comm], SignalRequests] = lambda _: SignalRequests(),
        foresight: Foresight = USUAL,
    ) -> Outcome:
        """One run on ``world`` threads.

        Args:
            on_record: called with each record of rank 0.
            ask: makes the requests of a rank.
        """

        def emit(record: Record) -> None:
            if not isinstance(record, Busy):  # of a slow machine
                self.records.append(record)
                on_record(record)

        outcomes = threads.run(
            world, lambda comm: train(recipe, comm, emit, ask(comm), foresight=foresight)
        )
        assert len({(o.step, o.stopped, o.save_error) for o in outcomes}) == 1
        for ahead in [key for key in self.trained if key[0] > outcomes[0].step]:
            del self.trained[ahead]  # the rows of a step were got, and it was not taken
        return outcomes[0]

    def killed(self, recipe: Recipe, world: int, at: tuple[int, int, int]) -> None:
        """A run that dies in micro-batch ``at = (step, rank, number)``, all from 1 but the rank."""
        loss, done = Job._loss, dict.fromkeys(range(world), 0)
        original = Batches.step

        def step(batches: Batches, number: int) -> list[MicroBatch]:
            done[batches.rank] = 0
            now[batches.rank] = number + 1
            return original(batches, number)

        def dying(job: Job, batch: MicroBatch, in_host: MicroBatch) -> Tensor:
            rank = job.sharded.comm.rank
            done[rank] += 1
            if (now[rank], rank, done[rank]) == at:
                raise Killed
            return loss(job, batch, in_host)

        now: dict[int, int] = {}
        with self.monkeypatch.context() as patch:
            patch.setattr(Batches, "step", step)
            patch.setattr(Job, "_loss", dying)
            with pytest.raises(Killed):
                self.run(recipe, world)

    def rows(self, steps: int) -> list[list[int]]:
        """All rows of steps 1 … ``steps``, in the order of the global batch."""
        return [
            row
            for step in range(1, steps + 1)
            for rank in sorted(rank for number, rank in self.trained if number == step)
            for row in self.trained[step, rank]
        ]

    def kind(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def lines(recipe: Recipe) -> list[dict[str, Any]]:
    """The run's `metrics.jsonl`."""
    text = (Path(recipe.run.folder) / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def losses(recipe: Recipe) -> list[float]:
    """The loss of every step, and every validation, as they are recorded."""
    return [line["loss"] for line in lines(recipe) if "loss" in line]


def steps(records: list[Record]) -> list[int]:
    return [record.step for record in records if isinstance(record, Stepped)]


def saved(recipe: Recipe) -> list[str]:
    """The run's checkpoints."""
    folder = Path(recipe.run.folder) / "checkpoints"
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Parameters and optimizer state of a checkpoint."""
    return {
        f"{path.stem}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        if not path.stem.startswith("ranks")
        for name, tensor in load_file(path).items()
    }


def digest(recipe: Recipe, step: int) -> str:
    """SHA-256 of all parameters and all optimizer state in the checkpoint of ``step``."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors(checkpoint(recipe, step)).items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def checkpoint(recipe: Recipe, step: int) -> Path:
    return Path(recipe.run.folder) / "checkpoints" / f"step-{step}"
