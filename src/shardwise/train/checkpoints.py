"""Saving and resuming a run.

The order of the data is a function of the seed and the step, and so is the learning rate. Beside
parameters and optimizer state a run therefore needs only its step; and, of text that is read while
it trains, the positions of the streams. The recipe and a fingerprint
of the tokens are stored to refuse a checkpoint of a different run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Loaded, Saving, Training
from shardwise.checkpoint import Saved as SaveReport
from shardwise.checkpoint.collectives import broadcast_object, run_on_rank_0
from shardwise.checkpoint.disk import retried
from shardwise.checkpoint.folder import checkpoints
from shardwise.checkpoint.remote import download, remote_checkpoints
from shardwise.checkpoint.run_folder import saved_in
from shardwise.checkpoint.training_state import NAME as TRAINING_FILE
from shardwise.checkpoint.training_state import Document
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint
from shardwise.hf.adapters import is_adapters
from shardwise.recipe.read import flatten
from shardwise.recipe.recipe import CheckpointConfig
from shardwise.train.data import Data
from shardwise.train.folder import CHECKPOINTS, RECIPE
from shardwise.train.hf_config import config_texts
from shardwise.train.job import Job
from shardwise.train.length import is_multiple
from shardwise.train.mirror import Mirror, remove_unfinished
from shardwise.train.records import Record, Resumed, Saved, Warned, plural
from shardwise.train.start import OVERWRITE_HINT, Start, check_same_run
from shardwise.train.streams import Position
from shardwise.train.tokenizer import FILE


@dataclass(frozen=True)
class RunState:
    """The state of a run between two steps; the same on every rank.

    Attributes:
        step: steps taken.
        validated: False if a validation of this step is due and has not run yet.
        best: the lowest validation loss so far.
        stale: validations since then.
        seen: tokens trained on, over all ranks, with the padding of rows.
        streams: where each stream of streamed text is; of all ranks, since the last save.
    """

    step: int = 0
    validated: bool = True
    best: float | None = None
    stale: int = 0
    seen: int = 0
    streams: Sequence[Position] = ()


STATE_KEYS = {"data", "sample", "step", "validated", "best"}


def is_due(config: CheckpointConfig, step: int, steps: int, best: bool) -> bool:
    """Is a save due after step ``step`` of ``steps``, without a request? Pure.

    Args:
        best: the step was validated, with the lowest loss so far.
    """
    if config.keep_best and best:
        return True
    is_last = step == steps and config.save_every != 0
    return is_last or is_multiple(step, config.save_every)


class Checkpoints:
    """Saves and resumes one run. All methods are collectives.

    Attributes:
        save_error: why the last save failed; ``""`` if it did not.
    """

    def __init__(self, job: Job, data: Data, log: Callable[[Record | None], None]) -> None:
        self._job, self._data, self._log = job, data, log
        self._folder = Path(job.recipe.run.folder).expanduser() / CHECKPOINTS
        self._saving: tuple[int, Saving] | None = None
        has_adapter = job.recipe.adapter.rank is not None
        self._stored = is_adapters(job.sharded) if has_adapter else None  # which tensors
        self.save_error = ""
        config = job.recipe.checkpoint
        self._mirror = None
        if config.mirror is not None and job.sharded.comm.rank == 0:
            remove_unfinished(self._folder, "mirror")
            self._mirror = Mirror(config.mirror, config.save_total_limit)

    # ---- resume ------------------------------------------------------------------------------

    def resume(self, start: Start) -> tuple[Start, RunState]:
        """Load and log the checkpoint that the recipe resumes from; step 0 without one.

        Nothing on the disk changes, except that damaged checkpoints are renamed after an older one
        was loaded. A checkpoint is refused before it is loaded.

        Args:
            start: as decided from the folder.

        Returns:
            ``start``, or ``Start.NEW`` if ``run.overwrite`` is true and the run cannot be resumed:
            its text has changed, or all its checkpoints are damaged. And the state of the run.

        Raises:
            CheckpointError: all checkpoints are damaged, or they do not fit, or cannot be read.
            ConfigError: they are of a different run; raised on rank 0 only.
        """
        source = self._job.recipe.checkpoint.resume
        start = self._fetched(start)
        start = self._check_resumable(start)
        report = self._load_newest(self._folder) if start is Start.RESUME else None
        if start is Start.RESUME and report is None and checkpoints(self._folder):
            start = Start.NEW
        if report is None and source not in ("auto", "never"):
            report = self._load_given(Path(source).expanduser())
        return start, RunState() if report is None else self._restore_state(report)

    def _fetched(self, start: Start) -> Start:
        """Get the newest checkpoint from the mirror, where the run's folder has none."""
        config, comm = self._job.recipe.checkpoint, self._job.sharded.comm
        if config.mirror is None or config.resume != "auto":
            return start
        url = config.mirror

        def fetch() -> bool:
            is_replaced = start is Start.NEW and (self._folder.parent / RECIPE).exists()
            if not is_replaced and not checkpoints(self._folder) and remote_checkpoints(url):
                download(url, self._folder)
            remove_unfinished(self._folder, "download")
            return not is_replaced and bool(checkpoints(self._folder))

        return Start.RESUME if run_on_rank_0(comm, "the mirror of checkpoints", fetch) else start

    def _check_resumable(self, start: Start) -> Start:
        """Rank 0 checks that the run in the folder can be resumed, before tensors are loaded."""
        if self._job.sharded.comm.rank == 0 and start is Start.RESUME:
            try:
                self._check_newest(self._folder)
            except ConfigError:
                if not self._job.recipe.run.overwrite:
                    raise
                start = Start.NEW
        value = start.value  # rank 0's counts
        return Start(broadcast_object(self._job.sharded.comm, value, "whether the run goes on"))

    def _load_newest(self, folder: Path) -> Loaded | None:
        try:
            arguments = (folder, self._job.optimizer, self._restored())
            return self._job.sharded.resume(*arguments, names=self._stored)
        except DamagedCheckpoint as error:  # all of them
            if self._job.recipe.run.overwrite and folder == self._folder:
                return None
            raise DamagedCheckpoint(f"{error} Or {OVERWRITE_HINT}") from None

    def _load_given(self, path: Path) -> Loaded:
        """Load from a run, a folder of checkpoints, or a checkpoint."""
        for run in (path / CHECKPOINTS, path):
            if checkpoints(run):
                self._check_newest(run)
                report = self._load_newest(run)
                assert report is not None  # or it would have been refused
                return report
        document = _read_document(path)
        if document is None:
            raise _not_of_a_run(path)
        self._check_document(path, document)
        arguments = (path, self._job.optimizer, self._restored())
        return self._job.sharded.load(*arguments, names=self._stored)

    def _restored(self) -> Training:
        """Return which parts of the training state were restored."""
        return Training(scaler=self._job.scaler if self._job.scaler.is_enabled() else None)

    def _check_newest(self, folder: Path) -> None:
        """Check the newest checkpoint that is not damaged: the one that loading takes."""
        for path, _ in saved_in(folder).complete:
            with suppress(DamagedCheckpoint):
                if (document := _read_document(path)) is not None:
                    self._check_document(path, document)
                    return

    def _check_document(self, path: Path, document: Document) -> None:
        """Raises ``ConfigError`` if this run cannot resume from that checkpoint."""
        recipe, position = self._job.recipe, document.position
        is_ours = isinstance(position, dict) and set(position) >= STATE_KEYS
        if not is_ours or not isinstance(document.config, dict):
            raise _not_of_a_run(path)
        check_same_run(document.config, recipe, f"{_relative(path)} is of a run")
        if position["data"] != self._data.fingerprint:
            raise self._other_text(path, document)
        if position["step"] > recipe.run.steps:
            raise ConfigError(
                f"{_relative(path)} has taken {plural(position['step'], 'step')}, and run.steps is "
                f"{recipe.run.steps}; raise it, or name another folder with --run.folder."
            )
        self._check_rows(document)

    def _check_rows(self, document: Document) -> None:
        """Raise ``ConfigError`` where losses to choose by are of another number of rows."""
        run, rows = self._job.recipe.run, len(self._data.validation)
        then = flatten(document.config).get("run.eval_rows", run.eval_rows)
        chooses = run.patience is not None or self._job.recipe.checkpoint.keep_best
        if chooses and min(then, rows) != min(run.eval_rows, rows):
            raise ConfigError(
                f"run.eval_rows was {then} and is {run.eval_rows}, and losses of other rows do not "
                "compare, so the lowest of both would be chosen wrongly. Write run.eval_rows: "
                f"{then}, or leave run.patience and checkpoint.keep_best out."
            )

    def _other_text(self, path: Path, document: Document) -> ConfigError:
        before, now = flatten(document.config).get("data.source"), self._job.recipe.data.source
        reason = f"data.source was {before!r} and is {now!r}"
        if before == now:
            reason = f"what data.source {now!r} holds has changed since"
        then, tokens = document.position.get("tokens"), self._data.tokens
        if then and tuple(then) != tokens:
            reason += f", {sum(then):,} tokens then and {sum(tokens):,} now"
        return ConfigError(
            f"{_relative(path)} was trained on other text: {reason}. A run cannot change its text: "
            f"give it the earlier text again; or {OVERWRITE_HINT}"
        )

    def _restore_state(self, report: Loaded) -> RunState:
        document = report.document
        assert document is not None  # or it would have been refused
        self._check_document(report.path, document)  # an older one, where the newest was damaged
        # Not all versions save what was seen, and streams.
        saved = {"seen": document.position["step"] * self._job.tokens_per_step, **document.position}
        state = RunState(**{f.name: saved[f.name] for f in fields(RunState) if f.name in saved})
        for warning in report.inexact:
            self._log(Warned(warning))
        sample = state.step * self._job.recipe.batch.rows
        self._log(Resumed(state.step, sample, _relative(report.path), document.world))
        return state

    # ---- save --------------------------------------------------------------------------------

    def save(self, state: RunState, metric: float | None = None) -> bool:
        """Save, or start an asynchronous save; a failure is logged and training continues.

        Args:
            state: of the run.
            metric: the validation loss, if this step was validated.

        Returns:
            Whether the checkpoint is saved or being saved.
        """
        config = self._job.recipe.checkpoint
        path = self._folder / f"step-{state.step}"
        try:
            if config.asynchronous:
                self._start_saving(path, state, metric)
            else:
                saved = self._job.sharded.save(
                    path, *self._save_arguments(state, metric), **self._save_options()
                )
                self._report_saved(state.step, saved)
        except CheckpointError as error:
            self.report_failure(error)
            return False
        return True

    def poll(self) -> None:
        """Log an asynchronous save, or an upload, that has completed or failed."""
        self._log_mirrored(wait=False)
        if self._saving is None:
            return
        step, saving = self._saving
        try:
            if (saved := saving.check()) is not None:
                self._report_saved(step, saved)
        except CheckpointError as error:
            self.report_failure(error)

    def wait(self) -> None:
        """Wait for the asynchronous save, if any, and for uploads."""
        if self._saving is not None:
            step, saving = self._saving
            try:
                self._report_saved(step, saving.wait())
            except CheckpointError as error:
                self.report_failure(error)
        self._log_mirrored(wait=True)

    def _log_mirrored(self, wait: bool) -> None:
        for mirrored in [] if self._mirror is None else self._mirror.take(wait):
            self._log(mirrored)

    def report_failure(self, error: CheckpointError) -> None:
        """Log a failed save, once: the engine may raise the same failure twice."""
        self._saving = None
        if str(error) != self.save_error:
            self.save_error = str(error)
            self._log(Warned(f"NOT SAVED, and the run goes on: {error}"))

    def _start_saving(self, path: Path, state: RunState, metric: float | None) -> None:
        arguments, options = self._save_arguments(state, metric), self._save_options()
        previous = self._saving
        try:
            saving = self._job.sharded.save_async(path, *arguments, **options)
        except CheckpointError as error:
            if previous is None:
                raise
            self.report_failure(error)  # of the previous save; this one was not started
            previous, saving = None, self._job.sharded.save_async(path, *arguments, **options)
        assert saving is not None  # save_async waits for the previous save
        if previous is not None:
            self.poll()
        self._saving = (state.step, saving)

    def _report_saved(self, step: int, saved: SaveReport) -> None:
        self._saving, self.save_error = None, ""
        path, removed = _relative(saved.path), saved.removed
        self._log(Saved(step, path, saved.nbytes, saved.seconds, removed))
        if self._mirror is not None:
            self._mirror.add(saved.path)

    def _save_arguments(self, state: RunState, metric: float | None) -> tuple[Any, Training]:
        recipe = self._job.recipe
        position = asdict(state) | {
            "sample": state.step * recipe.batch.rows,
            "data": self._data.fingerprint,
            "tokens": list(self._data.tokens),
        }
        # Without the folder, so that equal runs have equal checkpoints.
        config = recipe.model_dump(mode="json", exclude={"run": {"folder"}})
        finite_metric = metric if metric is not None and math.isfinite(metric) else None
        training = replace(self._restored(), step=state.step, position=position, config=config)
        return self._job.optimizer, replace(training, metric=finite_metric)

    def _save_options(self) -> dict[str, Any]:
        config, texts = self._job.recipe.checkpoint, config_texts(self._job, self._data)
        if self._stored is not None:  # its folder is an adapter's, and no whole model's
            del texts["config.json"]
        return {
            "save_total_limit": config.save_total_limit,
            "keep_best": "lowest" if config.keep_best else None,
            "kind": config.kind,
            "names": self._stored,
            "files": {FILE: self._data.tokenizer.to_str(), **texts},
        }


def _read_document(path: Path) -> Document | None:
    """The training state document of a checkpoint; ``None`` if it has none.

    Raises:
        DamagedCheckpoint: the document is damaged.
        CheckpointError: a later version wrote it, or it cannot be read.
    """
    file = path / TRAINING_FILE
    data = retried(f"reading {file}", lambda: _read_bytes(file))
    return None if data is None else Document.decode(data, str(file))


def _read_bytes(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _not_of_a_run(path: Path) -> ConfigError:
    why = "it has no step of a run" if path.exists() else "nothing is there"
    return ConfigError(
        f"{path} is not a checkpoint of `shardwise train`: {why}. Name another in "
        "checkpoint.resume."
    )


def _relative(path: Path) -> str:
    """``path`` relative to the working directory, if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
