"""The soak: what its tables say, and a short one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.hosts import problem
from benchmarks.harness.report import Row, read
from benchmarks.soak.run import faults_table, kept_table
from benchmarks.soak.scene import last_step


def test_a_table_has_a_row_for_each_kind_of_fault_and_for_each_longest_lived_process() -> None:
    table = faults_table({"link cut": [(1.0, 2.0), (5.0, 0.5), (2.0, 1.0)]})
    assert table.rows == (("link cut", 3, 2.0, 5.0, 2.0),)
    first: Row = {"MiB": 10.0, "files": 5, "threads": 7}
    last: Row = {**first, "MiB": 11.0}
    longest = kept_table({("rank 0", 17): [first, first, last], ("rank 0", 18): [last]})
    assert longest.rows == (("rank 0", 2, 10.0, 11.0, 5, 5, 7, 7),)


def test_the_last_step_is_read_with_its_commas() -> None:
    printed = (
        b"step     999/1,000,000  loss 5\nstep   1,003/1,000,000  loss 4\nwarning   step 9/9\n"
    )
    assert last_step(printed) == 1003
    assert last_step(b"step") == 0


@pytest.mark.cluster
@pytest.mark.skipif(bool(problem()), reason=problem())
@pytest.mark.timeout(240)
def test_a_run_under_faults_is_exact_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    words = ["--kinds", "torchrun killed,bit flipped,clock jump", "--faults", "3", "--mbits", "40"]
    command = [sys.executable, "-m", "benchmarks", "soak", *words, "--json", str(path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = read(path)
    assert report.failures == 0
    assert sum(row[1] for row in report.tables[0].rows if isinstance(row[1], int)) == 3
