from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwise.comm.transports import threads
from shardwise.errors import ConfigError
from shardwise.recipe.outer_config import OuterConfig
from shardwise.train.loop import train
from shardwise.train.records import Built, Evaluated, Prepared, Record, Saved, Stopped
from shardwise.train.requests import SignalRequests
from shardwise.train.worker import Exchanged, Worker, worker_of
from tests.outer.test_diloco import free_addresses
from tests.train.test_loop import losses
from tests.train.tiny import tiny_recipe


def run_both(folder: Path, addresses: list[str], *overrides: str) -> list[list[Record]]:
    """Two workers of one rank each; the records of each."""

    def work(number: int) -> list[Record]:
        options = {"method": "diloco", "every": "2", "worker": str(number), "timeout": "20"}
        options["workers"] = f"[{', '.join(addresses)}]"
        words = [f"--outer.{name}={value}" for name, value in options.items()]
        recipe, records = tiny_recipe(folder / str(number), *words, *overrides), list[Record]()
        threads.run(1, lambda comm: train(recipe, comm, records.append))
        return records

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_two_runs_exchange_and_each_saves_what_it_has(tmp_path: Path) -> None:
    addresses = free_addresses(2)
    by_worker = run_both(tmp_path, addresses)
    for records in by_worker:
        exchanged = [record for record in records if isinstance(record, Exchanged)]
        assert [record.step for record in exchanged] == [2, 4]
        assert exchanged[0].workers == (0, 1)
        assert exchanged[1].sent > exchanged[0].sent > 0
        assert any(isinstance(record, Saved) for record in records)
        (built,) = [record for record in records if isinstance(record, Built)]
        (prepared,) = [record for record in records if isinstance(record, Prepared)]
        assert built.epochs == 2 * 4 * 12 / prepared.rows[0]  # of both
    assert losses(by_worker[0])[:1] != losses(by_worker[1])[:1]  # each trains on rows of its own
    more = ("--run.steps=6", "--checkpoint.save_every=0", "--outer.delay=1", "--sharding.wrap=none")
    again = run_both(tmp_path, addresses, *more)
    for records in again:
        assert [r.step for r in records if isinstance(r, Exchanged)] == [6]
    # What was in flight after the last step is in what is validated, and in the model.
    one, other = ([r.loss for r in records if isinstance(r, Evaluated)][-1] for records in again)
    assert one == other
    models = [(tmp_path / number / "run" / "model.safetensors").read_bytes() for number in "01"]
    assert models[0] == models[1]


def test_a_run_that_waits_for_other_workers_stops_on_request(tmp_path: Path) -> None:
    workers = f"--outer.workers=[{', '.join(free_addresses(2))}]"
    recipe = tiny_recipe(
        tmp_path, "--outer.method=diloco", "--outer.worker=0", workers, "--outer.every=4"
    )
    requests, records = SignalRequests(), list[Record]()
    requests.stop()
    outcome = threads.run(1, lambda comm: train(recipe, comm, records.append, requests))[0]
    assert outcome.stopped
    assert isinstance(records[-1], Stopped)
    assert records[-1].step == 0


def test_a_worker_takes_its_number_from_the_recipe_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = OuterConfig(method="diloco", workers=("a:1", "b:1", "c:1"))
    monkeypatch.setenv("SHARDWISE_WORKER", "2")
    assert worker_of(config) == Worker(2, 3)
    assert worker_of(config.model_copy(update={"worker": 0})) == Worker(0, 3)
    assert worker_of(OuterConfig()) == Worker(0, 1)
    monkeypatch.setenv("SHARDWISE_WORKER", "3")
    with pytest.raises(ConfigError, match="names 3 workers, and which of them this is, is 3"):
        worker_of(config)
    monkeypatch.delenv("SHARDWISE_WORKER")
    with pytest.raises(ConfigError, match="SHARDWISE_WORKER=0, 1"):
        worker_of(config)


def test_a_method_needs_workers_and_workers_a_method() -> None:
    with pytest.raises(ValueError, match="method: diloco, or neither"):
        OuterConfig(method="diloco")
    with pytest.raises(ValueError, match="method: diloco, or neither"):
        OuterConfig(workers=("a:1",))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("workers=[127.0.0.1:1, host]", "'host' is not HOST:PORT"),
        ("workers=[127.0.0.1:1, 127.0.0.1:1]", "each needs an address of its own"),
        ("delay=7", "Choose a delay from 0 to 4"),
        ("wire=int8", "every is 5 and the run has 4 steps: .* Write outer.every: 4, or less"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_before_anything_is_written(
    option: str, text: str, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        tmp_path,
        *("outer.method=diloco", "outer.workers=[127.0.0.1:1, 127.0.0.1:2]", "outer.worker=0"),
        *("outer.every=5", f"outer.{option}"),
    )
    with pytest.raises(ConfigError, match=text):
        threads.run(1, lambda comm: train(recipe, comm, lambda _: None))
    assert not Path(recipe.run.folder).exists()
