from __future__ import annotations

import errno
import json
import logging
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError, RanksDisagree
from shardwise.recipe.read import read_recipe
from shardwise.recipe.recipe import Recipe
from shardwise.train.metrics_log import MetricsLog
from shardwise.train.records import Busy, Finished, Record, Saved, Warned
from shardwise.train.requests import Request
from shardwise.train.run_logger import RunLogger
from shardwise.train.start import FIRST_ATTEMPT, Attempt, Start
from tests.train.tiny import tiny_recipe

FINISHED = Finished("run", (), 1.0, 4)
SAVED = Saved(2, "run/checkpoints/step-2", 1, 0.1, ())


def open_run(recipe: Recipe, attempt: Attempt = FIRST_ATTEMPT) -> Start:
    with RunLogger.open_run(recipe, LocalComm(), lambda _: None, attempt) as (_, start):
        return start


def begun(recipe: Recipe, *records: Record, attempt: Attempt = FIRST_ATTEMPT) -> Start:
    """A run that has begun and told ``records``."""
    with RunLogger.open_run(recipe, LocalComm(), lambda _: None, attempt) as (logger, start):
        logger.start_run(start, 0, {"tokenizer.json": f"seed {recipe.run.seed}"})
        for record in records:
            logger.log(record)
        return start


def test_every_rank_knows_how_the_run_begins_and_only_rank_0_has_a_folder(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)

    def rank(comm: Comm) -> tuple[Start, bool]:
        with RunLogger.open_run(recipe, comm, lambda _: None) as (logger, start):
            logger.start_run(start, 0, {})
            return start, logger.folder is not None

    for expected in (Start.NEW, Start.RESUME):
        assert threads.run(3, rank) == [(expected, True), (expected, False), (expected, False)]
    assert read_recipe(Path(recipe.run.folder) / "recipe.yaml") == recipe


def test_a_folder_of_somebody_else_stays_without_a_trace(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    Path(recipe.run.folder).mkdir()
    (Path(recipe.run.folder) / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not an earlier run"):
        open_run(recipe)
    assert [path.name for path in Path(recipe.run.folder).iterdir()] == ["thesis.txt"]


def test_what_the_engine_warns_of_is_told_and_recorded(tmp_path: Path) -> None:
    recipe, records = tiny_recipe(tmp_path), list[Record]()
    with RunLogger.open_run(recipe, LocalComm(), records.append) as (logger, _):
        logger.start_run(Start.NEW, 0, {})
        logging.getLogger("shardwise").warning("SKIPPED %s", "step-4")
        logger.log(Warned("later"))
        logging.getLogger("shardwise").warning("at the end")
    assert records == [Warned("SKIPPED step-4"), Warned("later"), Warned("at the end")]
    lines = (Path(recipe.run.folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["message"] for line in lines] == [
        "SKIPPED step-4",
        "later",
        "at the end",
    ]


def test_what_a_thread_warns_of_is_told_while_this_rank_waits(tmp_path: Path) -> None:
    recipe, records = tiny_recipe(tmp_path), list[Record]()
    warn = logging.getLogger("shardwise").warning
    with RunLogger.open_run(recipe, LocalComm(), records.append) as (logger, _):
        logger.start_run(Start.NEW, 0, {})
        thread = threading.Thread(target=warn, args=["rank 0 has waited"])
        thread.start()
        thread.join()
        assert records == [Warned("rank 0 has waited")]
        logger.log(None)
        assert records == logger.metrics_log.records == [Warned("rank 0 has waited")]


def test_what_takes_long_is_told_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.train.run_logger.BUSY_AFTER", 0.01)
    records: SimpleQueue[Record] = SimpleQueue()
    with RunLogger.open_run(tiny_recipe(tmp_path), LocalComm(), records.put) as (logger, _):
        with logger.busy("reading text"):
            assert records.get(timeout=30) == Busy("reading text", 0.01)
        assert logger.metrics_log.records == []


def test_of_a_rank_that_died_only_that_is_said(tmp_path: Path) -> None:
    records: list[Record] = []

    def dies(error: Exception) -> None:
        with RunLogger.open_run(tiny_recipe(tmp_path), LocalComm(), records.append):
            logging.getLogger("shardwise").warning("a forward pass was interrupted")
            raise error

    with pytest.raises(RanksDisagree):
        dies(RanksDisagree("rank 1 is gone"))
    assert records == []
    with pytest.raises(ConfigError):
        dies(ConfigError("an error of its own"))
    assert records == [Warned("a forward pass was interrupted")]


def test_files_ask_on_rank_0(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with RunLogger.open_run(recipe, LocalComm(), lambda _: None) as (logger, _):
        assert logger.requested() is Request.NONE
        (Path(recipe.run.folder) / "save").touch()
        assert logger.requested() is Request.SAVE
        logger.clear_requests()
        assert logger.requested() is Request.NONE


# --- nothing changes until a start is proven, and nothing good goes before what replaces it ---


def results(recipe: Recipe) -> dict[str, str]:
    folder = Path(recipe.run.folder)
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def test_to_open_it_changes_nothing(tmp_path: Path) -> None:
    begun(tiny_recipe(tmp_path), FINISHED)
    other = tiny_recipe(tmp_path, "run.seed=1", "run.overwrite=true")
    before = results(other)
    assert open_run(other) is Start.NEW
    assert results(other) == before


def test_the_run_that_is_replaced_goes_when_the_new_one_has_saved(tmp_path: Path) -> None:
    old = tiny_recipe(tmp_path)
    begun(old, FINISHED)
    before = results(old)
    new = tiny_recipe(tmp_path, "run.seed=1", "run.overwrite=true")
    assert begun(new) is Start.NEW
    assert {name: results(new)[f"replaced-1/{name}"] for name in before} == before
    assert results(new)["tokenizer.json"] == "seed 1"
    assert begun(new, SAVED) is Start.RESUME
    assert set(results(new)) == {"recipe.yaml", "metrics.jsonl", "tokenizer.json"}


def test_what_cannot_be_written_leaves_the_run_that_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tiny_recipe(tmp_path), FINISHED)
    new = tiny_recipe(tmp_path, "run.seed=1", "run.overwrite=true")
    before = results(new)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsLog, "start", full)
    with pytest.raises(OSError, match="No space left"):
        begun(new)
    assert results(new) == before


def test_ranks_that_are_started_again_go_on_with_the_run_that_their_launcher_began(
    tmp_path: Path,
) -> None:
    recipe = tiny_recipe(tmp_path, "run.overwrite=true")
    begun(recipe, FINISHED, attempt=Attempt(0, "old"))
    assert open_run(recipe, Attempt(1, "new")) is Start.NEW  # killed before it began
    assert begun(recipe, attempt=Attempt(1, "new")) is Start.NEW
    assert begun(recipe, FINISHED, attempt=Attempt(2, "new")) is Start.RESUME
    assert open_run(recipe, Attempt(3, "new")) is Start.FINISHED
    assert open_run(recipe, Attempt(0, "next")) is Start.NEW
