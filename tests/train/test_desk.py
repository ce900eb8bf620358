from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from shardwise.comm import threads
from shardwise.comm.local import LocalComm
from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError, RanksDisagree
from shardwise.train.config import Recipe
from shardwise.train.desk import Desk, take_over
from shardwise.train.folder import Folder
from shardwise.train.metrics import Busy, Record, Warned
from shardwise.train.recipe import read_recipe
from shardwise.train.requests import Ask
from shardwise.train.start import Start
from tests.train.tiny import tiny_recipe


def opened(recipe: Recipe) -> Start:
    with Desk.opened(recipe, LocalComm(), lambda _: None) as (_, start):
        return start


def test_every_rank_knows_how_the_run_begins_and_only_rank_0_has_a_folder(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)

    def rank(comm: Comm) -> tuple[Start, bool]:
        with Desk.opened(recipe, comm, lambda _: None) as (desk, start):
            return start, desk.folder is not None

    for wanted in (Start.AFRESH, Start.GO_ON):
        assert threads.run(3, rank) == [(wanted, True), (wanted, False), (wanted, False)]
    assert read_recipe(Path(recipe.run.folder) / "recipe.yaml") == recipe


def test_a_folder_of_somebody_else_stays_without_a_trace(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    Path(recipe.run.folder).mkdir()
    (Path(recipe.run.folder) / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not an earlier run"):
        opened(recipe)
    assert [path.name for path in Path(recipe.run.folder).iterdir()] == ["thesis.txt"]


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.folder.PATIENCE", 0.0)
    recipe = tiny_recipe(tmp_path)
    with Folder.held(recipe.run.folder), pytest.raises(ConfigError, match="in use by another"):
        opened(recipe)


def test_what_the_engine_warns_of_is_told_and_recorded(tmp_path: Path) -> None:
    recipe, told = tiny_recipe(tmp_path), list[Record]()
    with Desk.opened(recipe, LocalComm(), told.append) as (desk, _):
        desk.begin(0)
        logging.getLogger("shardwise").warning("SKIPPED %s", "step-4")
        desk.say(Warned("later"))
        logging.getLogger("shardwise").warning("at the end")
    assert told == [Warned("SKIPPED step-4"), Warned("later"), Warned("at the end")]
    lines = (Path(recipe.run.folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["message"] for line in lines] == [
        "SKIPPED step-4",
        "later",
        "at the end",
    ]


def test_what_a_thread_warns_of_is_told_while_this_rank_waits(tmp_path: Path) -> None:
    recipe, told = tiny_recipe(tmp_path), list[Record]()
    warn = logging.getLogger("shardwise").warning
    with Desk.opened(recipe, LocalComm(), told.append) as (desk, _):
        desk.begin(0)
        thread = threading.Thread(target=warn, args=["rank 0 has waited"])
        thread.start()
        thread.join()
        assert told == [Warned("rank 0 has waited")]
        desk.say(None)
        assert told == desk.journal.records == [Warned("rank 0 has waited")]


def test_what_takes_long_is_told_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.train.desk.LONG", 0.01)
    told: SimpleQueue[Record] = SimpleQueue()
    with Desk.opened(tiny_recipe(tmp_path), LocalComm(), told.put) as (desk, _):
        with desk.busy("reading text"):
            assert told.get(timeout=30) == Busy("reading text", 0.01)
        assert desk.journal.records == []


def test_of_a_rank_that_died_only_that_is_said(tmp_path: Path) -> None:
    told: list[Record] = []

    def dies(error: Exception) -> None:
        with Desk.opened(tiny_recipe(tmp_path), LocalComm(), told.append):
            logging.getLogger("shardwise").warning("a forward pass was interrupted")
            raise error

    with pytest.raises(RanksDisagree):
        dies(RanksDisagree("rank 1 is gone"))
    assert told == []
    with pytest.raises(ConfigError):
        dies(ConfigError("an error of its own"))
    assert told == [Warned("a forward pass was interrupted")]


def test_files_ask_on_rank_0(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with Desk.opened(recipe, LocalComm(), lambda _: None) as (desk, _):
        assert desk.asked() is Ask.NOTHING
        (Path(recipe.run.folder) / "save").touch()
        assert desk.asked() is Ask.SAVE
        desk.done()
        assert desk.asked() is Ask.NOTHING


def test_to_take_over_replaces_once_and_ranks_go_on_with_what_they_find(tmp_path: Path) -> None:
    opened(tiny_recipe(tmp_path, "run.seed=1"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.touch()
    take_over(tiny_recipe(tmp_path, "run.overwrite=true"))
    assert not metrics.exists()
    assert opened(tiny_recipe(tmp_path)) is Start.GO_ON
