"""Runs over two and three hosts whose links or machines fail: who is waited for is named in 10 s.

A link that comes back and a rank that starts again are in ``test_clusters`` and ``tests/outer``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.hosts import Host, child, hosts, problem

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(problem()), reason=problem()),
    pytest.mark.timeout(200),
]
RECIPE = """\
model: {width: 32, layers: 1, heads: 2, kv_heads: 2, hidden: 64, tied: true}
tokenizer: {vocabulary: 300}
data: {source: stdlib, max_bytes: 100_000, context: 32, validation: 0.1}
batch: {rows: 12, micro: 2}
sample: {tokens: 0}
run: {folder: run, device: cpu, steps: 100_000, eval_rows: 8, log_every: 1, plan: false}
"""
SECONDS = 10.0  # in which somebody is named


class Ranks:
    """A rank on each host, started by nobody: what a launcher sets is set here."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self._machines, self._folder = machines, folder
        self.started = dict[int, subprocess.Popen[bytes]]()
        (folder / "my.yaml").write_text(RECIPE, "utf-8")

    def start(self, number: int, *options: str) -> None:
        size, master = len(self._machines), self._machines[0].address
        launch = {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        launch |= {"MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
        variables = {name: str(value) for name, value in launch.items()}
        command = (sys.executable, "-u", "-m", "shardwise.cli", "train", "my.yaml", *options)
        with self._path(number).open("w") as output:
            self.started[number] = self._machines[number].start(
                *command,
                folder=self._folder,
                env=os.environ | variables | {"MASTER_ADDR": master},
                stdout=output,
                stderr=output,
            )

    def _path(self, number: int) -> Path:
        return self._folder / f"rank-{number}.out"

    def text(self, number: int) -> str:
        return self._path(number).read_text("utf-8", "replace")

    def step(self) -> int:
        steps = re.findall(r"^step +(\d+)/", self.text(0), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def wait(self, is_so: Callable[[], object], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, "\n====\n".join(
                self.text(number) for number in self.started
            )
            time.sleep(0.05)

    def says(self, number: int, pattern: str, seconds: float = SECONDS) -> None:
        self.wait(lambda: re.search(pattern, self.text(number)), seconds)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[Host], Ranks]]:
    with hosts(2) as pair:
        ranks = Ranks(pair, tmp_path)
        for number in range(2):
            ranks.start(number, "--timeout", "25")
        ranks.wait(lambda: ranks.step() >= 3)
        yield pair, ranks


def test_a_link_that_is_cut_for_good_is_named_and_ends_the_run(
    two: tuple[list[Host], Ranks],
) -> None:
    pair, ranks = two
    pair[1].cut()
    ranks.says(0, "rank 1 has sent no heartbeat")
    ranks.says(1, "the store of the ranks has not answered for")
    assert [ranks.started[number].wait(60) for number in range(2)] == [1, 1]
    assert "rank 1 has not come within" in ranks.text(0)


def test_a_frozen_rank_is_named_and_goes_on_and_once_it_is_killed_its_peer_ends_within_a_second(
    two: tuple[list[Host], Ranks],
) -> None:
    _, ranks = two
    process = child(ranks.started[1].pid)
    os.kill(process, signal.SIGSTOP)
    ranks.says(0, "rank 1 has sent no heartbeat for .* The last one: process .* on host1")
    ranks.says(0, "stack of rank 1: ")
    step = ranks.step()
    ranks.started[1].send_signal(signal.SIGCONT)  # of nsenter, which stops and goes on with it
    ranks.wait(lambda: ranks.step() > step + 2)
    os.kill(process, signal.SIGKILL)
    assert ranks.started[0].wait(1.0) == 1  # measured: 0.3 to 0.4 s
    assert "rank 1 ended without a reason" in ranks.text(0)


def test_packets_that_are_lost_one_way_are_named(two: tuple[list[Host], Ranks]) -> None:
    pair, ranks = two
    pair[1].lose_packets_to(pair[0])
    ranks.says(0, "rank 1 has sent no heartbeat")
    ranks.says(1, "the store of the ranks has not answered for")
    assert [ranks.started[number].wait(60) for number in range(2)] == [1, 1]


def test_a_head_node_that_is_lost_is_named_and_the_same_lines_go_on(
    two: tuple[list[Host], Ranks],
) -> None:
    _, ranks = two
    step = ranks.step()
    ranks.started[0].send_signal(signal.SIGKILL)
    assert ranks.started[1].wait(SECONDS) == 1
    assert "rank 0" in ranks.text(1).splitlines()[-1]
    ranks.start(1)
    ranks.says(1, "rank 1 has waited 5 s to meet .*no program listens at port 29500", 20)
    ranks.start(0)
    ranks.wait(lambda: ranks.step() > step)


def test_three_hosts_of_which_one_comes_late(tmp_path: Path) -> None:
    with hosts(3) as machines:
        ranks = Ranks(machines, tmp_path)
        for number in range(2):
            ranks.start(number)
        for number in range(2):
            ranks.says(
                number, r"has waited 5 s to meet the others at [^\n]*rank 2 is not there", 20
            )
        ranks.start(2)
        ranks.wait(lambda: ranks.step() >= 3)
        machines[2].cut()
        named = "rank 2 has sent no heartbeat"
        ranks.wait(lambda: named in ranks.text(0) + ranks.text(1), SECONDS)
