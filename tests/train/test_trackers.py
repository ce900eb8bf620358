"""Trackers: what each is given, what it may not be given, and a run that outlives them.

TensorBoard is real; wandb, trackio and mlflow are stand-ins with the functions that are called.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.errors import ConfigError
from shardwise.recipe.logging_config import LoggingConfig
from shardwise.train.loop import train
from shardwise.train.records import Evaluated, Record, Sampled, Stepped, Warned
from shardwise.train.run_logger import RunLogger
from shardwise.train.trackers import OPEN, check_installed, numbers_of
from tests.train.tiny import tiny_recipe

STEPPED = Stepped(3, 9, 2.5, 1e-3, math.inf, 100.0, 4096, 7.0)
EVALUATED = Evaluated(3, 0.0, 0.5, 4.0, 64, 0.1)
SECRETS = {
    "HF_TOKEN": "hf_" + "planted" * 4,
    "WANDB_API_KEY": "w" * 40,
    "AWS_SECRET_ACCESS_KEY": "a5" * 20,
}

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What stand-ins for trackio, wandb and mlflow are called with, in order."""
    calls: Calls = []

    def recorder(name: str, result: object = None) -> Any:
        def call(*given: Any, **named: Any) -> object:
            calls.append((name, *given, named))
            return result

        return call

    run = SimpleNamespace(log=recorder("log"), finish=recorder("finish"))
    trackio = SimpleNamespace(init=recorder("init"), log=recorder("log"), finish=recorder("finish"))
    wandb = SimpleNamespace(init=recorder("init", run), Settings=SimpleNamespace)
    names = "set_tracking_uri", "set_experiment", "start_run", "log_metrics", "end_run"
    mlflow = SimpleNamespace(**{name: recorder(name) for name in names})
    for name, module in {"trackio": trackio, "wandb": wandb, "mlflow": mlflow}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("TRACKIO_DIR", "WANDB_MODE", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return calls


def ran(folder: Path, *overrides: str, records: tuple[Record, ...] = (STEPPED,)) -> list[Record]:
    """The records that a run of one rank emits when it logs ``records`` and nothing else."""
    logged: list[Record] = []
    recipe = tiny_recipe(folder, *overrides)

    def rank(comm: Comm) -> None:
        with RunLogger.open_run(recipe, comm, logged.append) as (logger, start):
            logger.start_run(start, 0, {})
            for record in records:
                logger.log(record)

    threads.run(1, rank, 60)
    return logged


def test_finite_numbers_of_steps_and_validations_are_given_by_name() -> None:
    assert numbers_of(STEPPED) == {
        "train/loss": 2.5,
        "train/lr": 1e-3,
        "train/tokens_per_second": 100.0,
        "train/memory": 4096,
        "train/tokens": 0,
    }
    assert numbers_of(EVALUATED)["eval/perplexity"] == 1.0
    assert numbers_of(Sampled("a", "b")) == {}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    ran(tmp_path, "logging.trackers=[tensorboard]", records=(STEPPED, EVALUATED))
    (folder,) = tmp_path.glob("**/tensorboard")
    events = EventAccumulator(str(folder)).Reload()
    (loss,) = events.Scalars("train/loss")
    assert (loss.step, loss.value) == (3, 2.5)
    assert events.Scalars("eval/accuracy")[0].value == 0.5


def test_wandb_is_offline_in_the_runs_folder_and_takes_nothing_else(
    tmp_path: Path, calls: Calls
) -> None:
    ran(tmp_path, "logging.trackers=[wandb]", "logging.project=p", "logging.name=n")
    (_, begun), (_, values, step), (end, _) = calls
    settings = vars(begun.pop("settings"))
    folder = begun.pop("dir")
    assert begun == {"project": "p", "name": "n", "mode": "offline"}
    assert Path(folder).is_relative_to(tmp_path)
    assert settings["disable_git"]
    assert settings["x_disable_meta"]
    assert (values["train/loss"], step, end) == (2.5, {"step": 3}, "finish")
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_trackio_and_mlflow_write_into_the_runs_folder(tmp_path: Path, calls: Calls) -> None:
    ran(tmp_path, "logging.trackers=[trackio, mlflow]", "logging.name=n")
    names = [call[0] for call in calls]
    assert names == [
        *("init", "set_tracking_uri", "set_experiment", "start_run"),
        *("log", "log_metrics", "finish", "end_run"),
    ]
    assert calls[0][1] == {"project": "shardwise", "name": "n"}
    assert Path(os.environ["TRACKIO_DIR"]).is_relative_to(tmp_path)
    assert str(calls[1][1]).startswith(f"sqlite:///{tmp_path}")


def test_a_tracker_that_fails_is_left_out_with_a_warning(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(sys.modules["trackio"], "log", fails)
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    logged = ran(tmp_path, "logging.trackers=[wandb, trackio, mlflow]", records=(STEPPED, STEPPED))
    warned = [record.message for record in logged if isinstance(record, Warned)]
    assert [text.partition(" and ")[0] for text in warned] == [
        "wandb failed at starting",
        "trackio failed at step 3",
    ]
    assert "OSError: no route" in warned[1]
    assert [call[0] for call in calls].count("log_metrics") == 2


def test_nothing_that_a_run_writes_has_a_secret(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the environment; and a recipe that has one in a path is refused."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    recipe = tiny_recipe(tmp_path, f"logging.trackers=[{', '.join(OPEN)}]", "run.steps=4")
    threads.run(1, lambda comm: train(recipe, comm, lambda _: None), 60)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    for value in SECRETS.values():
        assert not any(value.encode() in data for data in written)
        assert value not in str(calls)


@pytest.mark.parametrize(
    "text", ["https://me:planted@host/corpus", SECRETS["HF_TOKEN"]], ids=["in a URL", "a token"]
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"folder holds what looks like a secret") as refused:
        tiny_recipe(tmp_path, f"run.folder={text}")
    assert "planted" not in str(refused.value)


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed(LoggingConfig())
    recipe = tiny_recipe(tmp_path, "logging.trackers=[wandb]")
    with pytest.raises(ConfigError, match=r"names wandb, which is not .*'shardwise\[wandb\]'"):
        threads.run(2, lambda comm: train(recipe, comm, lambda _: None))
    assert not (tmp_path / "run").exists()
