"""What a run saves, and what it goes on from.

The order of the data is a function of the seed and the step, and the learning rate one of the
step, so beside parameters and optimizer state a run *is* the number of its steps. The rest of
what is stored is there to refuse: the recipe, and a fingerprint of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Loaded, Saving, Training
from shardwise.checkpoint import Saved as Written
from shardwise.checkpoint.disk import retried
from shardwise.checkpoint.folder import steps
from shardwise.checkpoint.training_state import NAME as DOCUMENT
from shardwise.checkpoint.training_state import Document
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint
from shardwise.train.config import CheckpointConfig
from shardwise.train.data import Data
from shardwise.train.exchange import text_from_rank_0
from shardwise.train.export import companions
from shardwise.train.folder import CHECKPOINTS
from shardwise.train.job import Job
from shardwise.train.metrics import Record, Resumed, Saved, Warned, count
from shardwise.train.recipe import flat
from shardwise.train.start import OVERWRITE, Start, check_same
from shardwise.train.tokenizer import FILE

__all__ = ["Checkpoints", "Point", "is_due"]


@dataclass(frozen=True)
class Point:
    """Where a run stands between two steps; the same on every rank.

    Attributes:
        step: steps taken.
        validated: was the validation of this step, where one is due, made before it was saved?
        best: the lowest validation loss so far.
    """

    step: int = 0
    validated: bool = True
    best: float | None = None


POSITION = {"data", "sample", *(field.name for field in fields(Point))}


def is_due(config: CheckpointConfig, step: int, steps: int, best: bool) -> bool:
    """Is there something to be saved after step ``step`` of ``steps``, unasked? Pure.

    Args:
        best: it was validated, and is better than all before it.
    """
    if config.keep_best and best:
        return True
    return config.save_every > 0 and (step % config.save_every == 0 or step == steps)


class Checkpoints:
    """Saves and resumes one run. All methods are collectives.

    Attributes:
        trouble: why the last save failed; ``""`` if it did not.
    """

    def __init__(self, job: Job, data: Data, say: Callable[[Record | None], None]) -> None:
        self._job, self._data, self._say = job, data, say
        self._folder = Path(job.recipe.run.folder).expanduser() / CHECKPOINTS
        self._saving: tuple[int, Saving] | None = None
        self.trouble = ""

    # ---- to go on ----------------------------------------------------------------------------

    def resume(self, start: Start) -> tuple[Start, Point]:
        """Load what the recipe says to go on from, and say so; step 0 if there is nothing.

        Nothing on the disk changes, but that damaged checkpoints are renamed once an older one is
        loaded. What is refused is refused before it is loaded.

        Args:
            start: as decided from the folder.

        Returns:
            Afresh where ``run.overwrite`` is true and the run cannot go on: its text is another
            now, or all its checkpoints are damaged. And where the run stands.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; or they do not fit, or the
                disk does not let them be read.
            ConfigError: they are another run's; only on rank 0, where that is found first.
        """
        source = self._job.recipe.checkpoint.resume
        start = self._judged(start)
        report = self._newest(self._folder) if start is Start.GO_ON else None
        if start is Start.GO_ON and report is None and _has_steps(self._folder):
            start = Start.AFRESH
        if report is None and source not in ("auto", "never"):
            report = self._given(Path(source).expanduser())
        return start, Point() if report is None else self._point(report)

    def _judged(self, start: Start) -> Start:
        """Rank 0 looks whether the run in the folder may go on, before tensors are loaded."""
        if self._job.sharded.comm.rank == 0 and start is Start.GO_ON:
            try:
                self._check_newest(self._folder)
            except ConfigError:
                if not self._job.recipe.run.overwrite:
                    raise
                start = Start.AFRESH
        text = start.value if self._job.sharded.comm.rank == 0 else None
        return Start(text_from_rank_0(self._job.sharded.comm, text, "whether the run goes on"))

    def _newest(self, folder: Path) -> Loaded | None:
        try:
            return self._job.sharded.resume(folder, self._job.optimizer, Training())
        except DamagedCheckpoint as error:  # all of them
            if self._job.recipe.run.overwrite and folder == self._folder:
                return None
            raise DamagedCheckpoint(f"{error} Or {OVERWRITE}") from None

    def _given(self, path: Path) -> Loaded:
        """A run, a folder of checkpoints, or a checkpoint."""
        for run in (path / CHECKPOINTS, path):
            if _has_steps(run):
                self._check_newest(run)
                report = self._newest(run)
                assert report is not None  # or it would have been refused
                return report
        document = _document(path)
        if document is None:
            raise _of_no_run(path)
        self._check(path, document)
        return self._job.sharded.load(path, self._job.optimizer, Training())

    def _check_newest(self, folder: Path) -> None:
        """Of a run, the newest checkpoint that is not damaged. Loading finds the same."""
        for path in steps(folder) if folder.is_dir() else []:
            with suppress(DamagedCheckpoint):
                if (document := _document(path)) is not None:
                    self._check(path, document)
                    return

    def _check(self, path: Path, document: Document) -> None:
        """Raises ``ConfigError`` if this run cannot go on from there."""
        recipe, position = self._job.recipe, document.position
        ours = isinstance(position, dict) and set(position) >= POSITION
        if not ours or not isinstance(document.config, dict):
            raise _of_no_run(path)
        check_same(document.config, recipe, f"{_shown(path)} is of a run")
        if position["data"] != self._data.fingerprint:
            raise self._other_text(path, document)
        if position["step"] > recipe.run.steps:
            raise ConfigError(
                f"{_shown(path)} has taken {count(position['step'], 'step')}, and run.steps is "
                f"{recipe.run.steps}; raise it, or name another folder with --run.folder."
            )

    def _other_text(self, path: Path, document: Document) -> ConfigError:
        before, now = flat(document.config).get("data.source"), self._job.recipe.data.source
        what = f"data.source was {before!r} and is {now!r}"
        if before == now:
            what = f"what data.source {now!r} holds has changed since"
        then, here = document.position.get("tokens"), self._data.tokens
        if then and tuple(then) != here:
            what += f", {sum(then):,} tokens then and {sum(here):,} now"
        return ConfigError(
            f"{_shown(path)} was trained on other text: {what}. One run has one text: give it that "
            f"text again; or {OVERWRITE}"
        )

    def _point(self, report: Loaded) -> Point:
        document = report.document
        assert document is not None  # or it would have been refused
        self._check(report.path, document)  # an older one, where the newest was damaged
        point = Point(**{field.name: document.position[field.name] for field in fields(Point)})
        for note in report.inexact:
            self._say(Warned(note))
        sample = point.step * self._job.recipe.batch.rows
        self._say(Resumed(point.step, sample, _shown(report.path), document.world))
        return point

    # ---- to save -----------------------------------------------------------------------------

    def save(self, point: Point, metric: float | None = None) -> bool:
        """Save, or begin to; a failure is told, and training can go on.

        Args:
            point: where the run stands.
            metric: the validation loss, if this step was validated.

        Returns:
            Whether it is saved, or on its way.
        """
        config = self._job.recipe.checkpoint
        path = self._folder / f"step-{point.step}"
        try:
            if config.asynchronous:
                self._begin(path, point, metric)
            else:
                written = self._job.sharded.save(path, *self._what(point, metric), **self._how())
                self._done(point.step, written)
        except CheckpointError as error:
            self.lost(error)
            return False
        return True

    def look(self) -> None:
        """How is what is on its way? Said when it is there."""
        if self._saving is None:
            return
        step, saving = self._saving
        try:
            if (written := saving.check()) is not None:
                self._done(step, written)
        except CheckpointError as error:
            self.lost(error)

    def settle(self) -> None:
        """Wait for what is on its way."""
        if self._saving is None:
            return
        step, saving = self._saving
        try:
            self._done(step, saving.wait())
        except CheckpointError as error:
            self.lost(error)

    def lost(self, error: CheckpointError) -> None:
        """A save failed. The engine may say so twice, once for each who asks."""
        self._saving = None
        if str(error) != self.trouble:
            self.trouble = str(error)
            self._say(Warned(f"NOT SAVED, and the run goes on: {error}"))

    def _begin(self, path: Path, point: Point, metric: float | None) -> None:
        # Between two steps this trainer changes nothing that is saved.
        what, how = self._what(point, metric), self._how() | {"copied_by": "next_step"}
        before = self._saving
        try:
            saving = self._job.sharded.save_async(path, *what, **how)
        except CheckpointError as error:
            if before is None:
                raise
            self.lost(error)  # the one before failed, and this one was not begun
            before, saving = None, self._job.sharded.save_async(path, *what, **how)
        assert saving is not None  # it waits for the one before
        if before is not None:
            self.look()
        self._saving = (point.step, saving)

    def _done(self, step: int, written: Written) -> None:
        self._saving, self.trouble = None, ""
        path, removed = _shown(written.path), written.removed
        self._say(Saved(step, path, written.nbytes, written.seconds, removed))

    def _what(self, point: Point, metric: float | None) -> tuple[Any, Training]:
        recipe = self._job.recipe
        position = asdict(point) | {
            "sample": point.step * recipe.batch.rows,
            "data": self._data.fingerprint,
            "tokens": list(self._data.tokens),
        }
        # Where it lies is not what it is: equal runs have equal checkpoints.
        config = recipe.model_dump(mode="json", exclude={"run": {"folder"}})
        known = metric if metric is not None and math.isfinite(metric) else None
        training = Training(step=point.step, position=position, config=config, metric=known)
        return self._job.optimizer, training

    def _how(self) -> dict[str, Any]:
        config = self._job.recipe.checkpoint
        return {
            "save_total_limit": config.save_total_limit,
            "keep_best": "lowest" if config.keep_best else None,
            "files": {FILE: self._data.tokenizer.to_str(), **companions(self._job, self._data)},
        }


def _has_steps(folder: Path) -> bool:
    return folder.is_dir() and bool(steps(folder))


def _document(path: Path) -> Document | None:
    """What a checkpoint says of the run; ``None`` where it says nothing.

    Raises:
        DamagedCheckpoint: what it says is damaged.
        CheckpointError: a later version wrote it, or the disk does not let it be read.
    """
    file = path / DOCUMENT
    data = retried(f"reading {file}", lambda: _bytes_of(file))
    return None if data is None else Document.decode(data, str(file))


def _bytes_of(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _of_no_run(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is no checkpoint of `shardwise train`: it does not say where a run was. Name "
        "another in checkpoint.resume."
    )


def _shown(path: Path) -> str:
    """As the user would write it from here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
