"""Trackers: the numbers of a run for TensorBoard, trackio, wandb or mlflow, beside metrics.jsonl.

They get numbers by name and step, and neither the recipe nor the environment. Where a tracker can
send, it writes into the run's folder instead, unless its own environment variable says otherwise.
One that fails is left out from then on, and the run continues.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import ConfigError
from shardwise.recipe.logging_config import LoggingConfig
from shardwise.train.records import Evaluated, Record, Stepped, Warned


def check_installed(config: LoggingConfig) -> None:
    """Raise ``ConfigError`` if a tracker is not installed, before anything is prepared."""
    wanted = [kind for kind in config.trackers if kind not in sys.modules]
    missing = [kind for kind in wanted if importlib.util.find_spec(kind) is None]
    if missing:
        raise ConfigError(
            f"logging.trackers names {' and '.join(missing)}, which is not installed: run "
            f"pip install 'shardwise[{','.join(missing)}]', or leave it out."
        )


class Tracker(NamedTuple):
    """Called after a step, and at the end of the run."""

    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


class Place(NamedTuple):
    """Folder and name under which a tracker writes."""

    folder: Path
    project: str
    name: str


def tensorboard(place: Place) -> Tracker:
    """Event files in ``FOLDER/tensorboard``."""
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        place.folder / "tensorboard"
    )

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def trackio(place: Place) -> Tracker:
    """A local database in ``FOLDER/trackio``, or where ``TRACKIO_DIR`` says."""
    os.environ.setdefault("TRACKIO_DIR", str(place.folder / "trackio"))
    module: Any = importlib.import_module("trackio")
    module.init(project=place.project, name=place.name)
    return Tracker(lambda step, values: module.log(dict(values), step=step), module.finish)


def wandb(place: Place) -> Tracker:
    """An offline run in ``FOLDER/wandb``, for ``wandb sync``; ``WANDB_MODE=online`` sends it."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    module: Any = importlib.import_module("wandb")
    quiet = module.Settings(
        console="off", disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
    )
    run = module.init(
        project=place.project,
        name=place.name,
        dir=str(place.folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        settings=quiet,
    )
    return Tracker(lambda step, values: run.log(dict(values), step=step), run.finish)


def mlflow(place: Place) -> Tracker:
    """A database ``FOLDER/mlflow.db``, or the server of ``MLFLOW_TRACKING_URI``."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    module: Any = importlib.import_module("mlflow")
    local = f"sqlite:///{place.folder.absolute()}/mlflow.db"
    module.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", local))
    module.set_experiment(place.project)
    module.start_run(run_name=place.name)
    return Tracker(lambda step, values: module.log_metrics(dict(values), step=step), module.end_run)


OPEN: dict[str, Callable[[Place], Tracker]] = {
    "tensorboard": tensorboard,
    "trackio": trackio,
    "wandb": wandb,
    "mlflow": mlflow,
}


def numbers_of(record: Record) -> dict[str, float]:
    """The finite numbers of a step or a validation, by name; of other records none."""
    if not isinstance(record, Stepped | Evaluated):
        return {}
    values = asdict(record)
    part = "train"
    if isinstance(record, Evaluated):
        part, values["perplexity"] = "eval", record.perplexity
    left_out = "step", "steps", "seconds_left"
    shown = {n: v for n, v in values.items() if v is not None and n not in left_out}
    return {f"{part}/{name}": value for name, value in shown.items() if math.isfinite(value)}


@dataclass
class Trackers:
    """Trackers of a run, on rank 0. None of their errors is raised.

    Args:
        config: which.
        folder: of the run.
        warn: called with what failed.
    """

    config: LoggingConfig
    folder: Path
    warn: Callable[[Warned], object]
    opened: dict[str, Tracker] = field(default_factory=dict)

    def open(self) -> None:
        """Open each of them."""
        place = Place(self.folder, self.config.project, self.config.name or self.folder.name)
        for kind in self.config.trackers:
            self._try(kind, "starting", partial(self._open, kind, place))

    def log(self, record: Record) -> None:
        """Give its numbers to each of them."""
        if values := numbers_of(record):
            step = record.step  # type: ignore[union-attr]  # it has numbers
            for kind, tracker in list(self.opened.items()):
                self._try(kind, f"step {step}", partial(tracker.log, step, values))

    def close(self) -> None:
        """Close each of them; afterwards nothing is logged."""
        for kind, tracker in list(self.opened.items()):
            self._try(kind, "the end", tracker.close)
            self.opened.pop(kind, None)

    def _open(self, kind: str, place: Place) -> None:
        self.opened[kind] = OPEN[kind](place)

    def _try(self, kind: str, at: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run continues
            self.opened.pop(kind, None)
            says = f"{type(error).__name__}: {error}"
            self.warn(Warned(f"{kind} failed at {at} and gets no more numbers: {says}"))
