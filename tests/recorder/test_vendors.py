"""Programs run end to end on the documented calls of torch.xpu and of torch.hpu, on two ranks."""

from __future__ import annotations

import inspect
import json
import os
import sys
from argparse import Namespace
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from examples import mnist, toy
from shardwise.cli.doctor import run_doctor
from shardwise.comm.machine.accelerators import row
from shardwise.comm.machine.connect import connect
from shardwise.comm.machine.devices import device_module
from shardwise.config.strategies import STRATEGIES
from shardwise.doctor import conformance, steps
from shardwise.doctor.conformance import CHECKS
from shardwise.recipe.read import read_recipe
from shardwise.train.loop import train
from shardwise.train.records import Record, Stepped
from tests.plugins import write_plugins
from tests.ranks import free_port, outcomes_of
from tests.recorder.vendors import Hpu, Xpu, streams_of

WORLD = 2


# --- the modules -----------------------------------------------------------------------------


def calls(module: type[Xpu]) -> dict[str, Any]:
    own = {name: value for one in module.__mro__[::-1] for name, value in vars(one).items()}
    return {name: value for name, value in own.items() if callable(value) and name[0] != "_"}


def test_torch_xpu_has_each_call_with_these_arguments() -> None:
    for name, call in calls(Xpu).items():
        parameters = inspect.signature(getattr(torch.xpu, name)).parameters
        assert [*inspect.signature(call).parameters][1:] == [*parameters], name


def test_torch_hpu_has_other_statistics_and_one_device_of_a_process() -> None:
    module = Hpu()
    module.set_device(1)
    assert module.current_device() == 0
    assert module.memory_reserved() == Hpu.total
    with pytest.raises(RuntimeError, match="hpu supports only device 0"):
        module.get_rng_state("hpu:1")
    with pytest.raises(NotImplementedError, match=r"torch\.hpu\.can_device_access_peer is not"):
        module.can_device_access_peer(0, 1)


# --- the programs ----------------------------------------------------------------------------


def run_toy(_: Path, rank: int) -> None:
    toy.simple_demo(rank, WORLD, Namespace(iterations=2))


def run_mnist(folder: Path, rank: int) -> None:
    """One batch to train with and one to test, loaded without processes of their own."""
    images = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    if rank == 0:
        torch.save([(images, torch.arange(4))] * 2, folder / "digits.pt")
    mnist.DataLoader = lambda *args, **options: DataLoader(
        *args, **options | {"num_workers": 0, "persistent_workers": False}
    )
    mnist.fsdp_main(rank, mnist.parse_args(["--epochs=1", f"--data={folder}"]))


def run_lora(folder: Path, _: int) -> None:
    """Four steps, a checkpoint after each second one, and the adapter's files."""

    def tell(record: Record) -> None:
        if isinstance(record, Stepped):
            sys.stdout.write(f"loss {record.loss}\n")

    run = ["run.device=null", f"run.folder={folder / 'run'}"]
    with connect() as comm:
        train(read_recipe(folder.parent / "tiny.yaml", run), comm, tell)


def run_conformance(folder: Path, _: int) -> None:
    """``shardwise doctor --conformance``, of fewer steps, and of a smaller model where it times."""
    with (
        mock.patch.multiple(steps, WIDTH=32, LAYERS=2, WARM=1, STEPS=1),
        mock.patch.object(conformance, "STEPS", 2),
    ):
        run_doctor(conformance=True, device=None, nproc=None, output=folder / "result.json")


PROGRAMS = (run_toy, run_mnist)
MODULES: dict[str, type[Xpu]] = {"xpu": Xpu, "hpu": Hpu}


def run_all(
    rank: int, world: int, folder: str, base: Path, ports: list[int], proved: list[str]
) -> list[list[str]]:
    """The losses of each program on each device; with ``proved``, of an adapter, too.

    The suite of conformance runs on the devices ``proved``.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    losses = list[list[str]]()
    for device in ("cpu", *MODULES):
        programs = [*PROGRAMS, *[run_lora] * bool(proved), *[run_conformance] * (device in proved)]
        losses.append([])
        if device != "cpu":
            write_plugins(Path(folder) / str(rank), device)
            sys.path.insert(0, str(Path(folder) / str(rank)))
            module = device_module(row(device))
            module.set_device(rank)
        for program in programs:
            os.environ["MASTER_PORT"] = str(ports.pop())
            with ExitStack() as stack:
                printed = stack.enter_context(redirect_stdout(StringIO()))
                recorder = None if device == "cpu" else stack.enter_context(streams_of(module))
                program(base / device, rank)
            if recorder is not None and program is not run_conformance:  # it copies numbers itself
                assert recorder.faults == [], recorder.faults[:3]
            lines = printed.getvalue().splitlines()
            losses[-1] += [line for line in lines if "loss" in line.lower()]
    return losses


@pytest.mark.spawn
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "proved", [[], *[pytest.param([name], marks=pytest.mark.prove) for name in MODULES]], ids=str
)
def test_programs_end_as_on_a_cpu_and_wait_for_all_that_they_need(
    tmp_path: Path, proved: list[str]
) -> None:
    if proved:
        from tests.train.test_adapter import recipe  # and so transformers, which ranks need not

        recipe(tmp_path)
    for device in ("cpu", *MODULES):
        (tmp_path / device).mkdir()
    ports = [free_port() for _ in range(3 * (len(PROGRAMS) + 2))]
    outcomes = outcomes_of(WORLD, run_all, tmp_path, ports, proved)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    on_cpu, on_xpu, on_hpu = outcomes[0].value
    assert on_cpu == on_xpu == on_hpu
    assert len(on_cpu) == 1 + 2 + 4 * bool(proved)
    for device in proved:
        module = MODULES[device]
        result = json.loads((tmp_path / device / "result.json").read_text("utf-8"))
        assert (result["device"], result["device_name"]) == (device, module.model)
        assert [one["name"] for one in result["checks"] if one["passed"]] == list(CHECKS)
        assert [cost["strategy"] for cost in result["steps"] if cost["peak"]] == list(STRATEGIES)
        page = (tmp_path / device / "result.txt").read_text("utf-8").splitlines()
        lines = [line for line in page if line.startswith(("pass", "step"))]
        assert len(lines) == len(CHECKS) + len(STRATEGIES)
        assert all("expected " in line and "found " in line for line in lines)
