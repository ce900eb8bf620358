"""Two hosts, which are namespaces, over cables that are counted, are cut and come back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.hosts import Host, hosts, problem
from benchmarks.slowlinks.run import METHODS, least_nbytes, measured
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(problem()), reason=problem()),
    pytest.mark.timeout(120),
]

WORKER = """
import sys, time, torch, shardwise as sw
number, pause, *addresses = sys.argv[1:]
net = torch.nn.Linear(8, 8)
sharded = sw.shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
workers = [f"{address}:29600" for address in addresses]
options = dict(worker=int(number), every=4, patience=1.5, token="secret")
outer = sw.DiLoCo(sharded, optimizer, workers=workers, **options)
print("steps", outer.steps, flush=True)
while True:
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    outer.step()
    print("workers", *outer.workers, flush=True)
    time.sleep(float(pause))
"""


class Started:
    """A program of a host, and what it has said."""

    def __init__(self, host: Host, output: Path, *words: str) -> None:
        self._output = output
        with output.open("w") as file:
            arguments = (sys.executable, *words)
            self.process = host.start(*arguments, stdout=file, stderr=subprocess.STDOUT)

    @property
    def text(self) -> str:
        return self._output.read_text()

    def wait_for_last(self, line: str) -> None:
        wait_for(lambda: self.text.splitlines()[-1:] == [line], seen=lambda: self.text)


def worker(pair: list[Host], number: int, output: Path, pause: float = 0.02) -> Started:
    addresses = [host.address for host in pair]
    return Started(pair[number], output, "-c", WORKER, str(number), str(pause), *addresses)


@pytest.mark.parametrize("method", ["full_shard", "hybrid_shard"])
def test_what_goes_over_the_cable_is_what_has_to(method: str) -> None:
    result = measured(1_000, method, {"steps": 4})
    least = least_nbytes(METHODS[method], result["numel"], result["last"])
    # 66 of 1,514 bytes are headers, each way.
    assert least < result["sent"] < 1.06 * least


def program(pair: list[Host], folder: Path, **words: Any) -> list[Started]:
    addresses = [host.address for host in pair]
    started = []
    for rank, host in enumerate(pair):
        run = {"method": "hybrid_shard", "rank": rank, "addresses": addresses, **words}
        module = ("-m", "benchmarks.slowlinks.program", json.dumps(run))
        started.append(Started(host, folder / str(rank), *module))
    wait_for(
        lambda: pair[0].nbytes()["sent"] > 20e6, seen=lambda: [one.text for one in started]
    )  # they train
    return started


def test_a_cable_that_is_cut_for_three_seconds_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "secret")
    with hosts(2) as pair:
        ranks = program(pair, tmp_path, steps=20)
        pair[1].cut()
        time.sleep(3)
        assert [rank.process.poll() for rank in ranks] == [None, None]
        pair[1].mend()
        assert [rank.process.wait(60) for rank in ranks] == [0, 0], ranks[0].text


def test_parts_of_a_cut_network_go_on_and_the_one_that_is_behind_joins_the_other(
    tmp_path: Path,
) -> None:
    with hosts(2) as pair:
        ahead, behind = worker(pair, 0, tmp_path / "0"), worker(pair, 1, tmp_path / "1", 0.1)
        for one in (ahead, behind):
            one.wait_for_last("workers 0 1")
        pair[1].cut()
        ahead.wait_for_last("workers 0")
        behind.wait_for_last("workers 1")
        pair[1].mend()
        for one in (ahead, behind):
            one.wait_for_last("workers 0 1")
        assert "worker 0 (10.77.0.1:29600) leads, too, and has come further" in behind.text
        assert "leads, too" not in ahead.text


def test_a_killed_worker_that_is_started_again_goes_on_where_the_other_is(tmp_path: Path) -> None:
    with hosts(2) as pair:
        stays, dies = worker(pair, 0, tmp_path / "0"), worker(pair, 1, tmp_path / "1")
        stays.wait_for_last("workers 0 1")
        dies.process.kill()
        dies.process.wait()
        stays.wait_for_last("workers 0")
        exchanges = stays.text.count("workers")
        again = worker(pair, 1, tmp_path / "again")
        for one in (stays, again):
            one.wait_for_last("workers 0 1")
        [summary] = [line for line in again.text.splitlines() if line.startswith("steps")]
        assert int(summary.split()[1]) >= exchanges
