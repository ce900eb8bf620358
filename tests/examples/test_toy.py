"""The toy program, started both ways: what it prints, and the loss that it ends with."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import start_processes

from tests.examples.run import EXAMPLES, lines_of, run, torchrun
from tests.forked import forked
from tests.test_surface import Source, calls_of_one_vendor

TOY = EXAMPLES / "toy.py"


def final_loss(iterations: int, world: int) -> str:
    """The loss of one process, which takes the mean of all rows."""
    torch.manual_seed(0)
    rows = torch.rand(world, 3)
    model = torch.nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(iterations):
        loss = model(rows).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return f"Final loss: {loss.item():.6f}"


def assert_printed(text: str, loss: str, ranks: int) -> None:
    """One rank has printed the loss, all that they are done; a line may begin in another rank's."""
    assert text.count(loss) == 1
    assert text.count("All done") == ranks
    assert len(text) == len(loss) + ranks * len("All done")


def start_ranks_by(method: str) -> None:
    """In the program that is forked from here: new interpreters take seconds each."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    vars(torch.multiprocessing)["spawn"] = partial(start_processes, start_method=method)


@pytest.mark.spawn
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.prove)])
@forked
def test_it_spawns_its_ranks_and_names_the_port_that_it_takes(tmp_path: Path, method: str) -> None:
    start_ranks_by(method)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("", 12355))
            other.listen()
        except OSError:
            pass  # somebody uses it already
        first, *rest = run(TOY, "--iterations", 4, folder=tmp_path)
    assert re.fullmatch(r"port 12355 is in use: the ranks meet at port 12\d{3}", first)
    assert_printed("".join(rest), final_loss(4, 2), 2)


@pytest.mark.spawn
@forked
def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    first, second = torchrun(TOY, folder=tmp_path)
    assert_printed("".join(first), final_loss(5, 2), 1)
    assert second == ["All done"]


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun (openmpi-bin)")
@pytest.mark.parametrize("program", ["toy.py", "trace_zero2.py"])
def test_mpirun_starts_each_rank_and_it_starts_no_others(tmp_path: Path, program: str) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
    printed = "".join(run(EXAMPLES / program, folder=tmp_path, by=mpirun))
    if program == "toy.py":
        assert_printed(printed, final_loss(5, 2), 2)
    else:
        assert "gradients equal True, collectives equal True" in printed


@pytest.mark.spawn
@forked
def test_the_command_of_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    (options,) = re.findall(r"`python examples/toy.py (--[^`]+)`", lines_of("seeds.md"))
    assert options == "--iterations 5 --ws 8 -v"
    start_ranks_by("fork")
    assert_printed("".join(run(TOY, *options.split(), folder=tmp_path)), final_loss(5, 8), 8)


@pytest.mark.parametrize("option", ["-v", "--verbose"])
def test_torch_is_imported_after_the_variables_that_it_reads(tmp_path: Path, option: str) -> None:
    names = ("_CPP_LOG_LEVEL", "_DISTRIBUTED_DEBUG", "_SHOW_CPP_STACKTRACES", "DYNAMO_VERBOSE")
    values = ", ".join(f"os.environ['TORCH{name}']" for name in names)
    (tmp_path / "torch.py").write_text(f"import os; print({values}); raise SystemExit")
    assert run(TOY, option, folder=tmp_path, path=tmp_path) == ["INFO DETAIL 1 1"]


@pytest.mark.parametrize("name", ["toy", "mnist"])
def test_the_programs_name_no_device(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert calls_of_one_vendor(Source(name, text)) == []
    assert re.findall(r"[\"'](?:cuda|xpu|hpu)\b", text) == []


@pytest.mark.parametrize("row", ["device", "model", "FSDP"])
def test_the_table_of_five_lines_has_the_programs_own(row: str) -> None:
    (line,) = re.findall(rf"^\| {row} \| .*\| `([^`]+)` \|$", lines_of("seeds.md"), re.MULTILINE)
    assert line in TOY.read_text("utf-8")
