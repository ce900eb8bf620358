"""The engine on a device that torch takes for a real one, beside plain torch on the same device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from shardwise.comm.machine import connect
from shardwise.comm.protocol import Comm
from shardwise.doctor.conformance import CHECKS, Result, conform
from shardwise.errors import ShardwiseError
from shardwise.recipe.recipe import Recipe
from shardwise.torch_internals import tree_map_only
from shardwise.train.loop import train
from shardwise.train.records import Record, Stepped
from tests.device import DEVICE, build, see
from tests.programs import random_checkpoints
from tests.programs.__main__ import namespace
from tests.programs.processes import Process, difference
from tests.programs.random_programs import program_text
from tests.ranks import outcomes_of, run_threads
from tests.train.tiny import tiny_recipe

pytestmark = [pytest.mark.prove, pytest.mark.slow]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.__version__ < "2.13":
        pytest.skip("the device is written for the headers of torch 2.13")
    if shutil.which("c++") is None and "CI" not in os.environ:
        pytest.skip("there is no C++ compiler: not installed")
    return build(tmp_path_factory.mktemp("device"))


def on_ranks(world: int, library: Path, program: Callable[..., Any], *args: Any) -> list[Any]:
    """``program(group, *args)`` on each rank, whose group and device are the default ones."""
    outcomes = outcomes_of(world, _on_rank, library, program, *args)
    assert [outcome.error for outcome in outcomes] == [""] * world
    return [outcome.value for outcome in outcomes]


def _on_rank(
    rank: int, world: int, folder: str, library: Path, program: Callable[..., Any], *args: Any
) -> Any:
    see(library)
    torch.accelerator.set_device_index(rank)
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group("mockccl", store=store, rank=rank, world_size=world)
    result = program(dist.group.WORLD, *args)
    dist.destroy_process_group()
    return result


# --- the device itself ---------------------------------------------------------------------------


def test_a_tensor_of_the_host_among_the_devices_is_an_error(library: Path) -> None:
    on_ranks(1, library, mixed)


def mixed(_: Any) -> None:
    ours, hosts = torch.ones(2, device=DEVICE), torch.ones(2)
    with pytest.raises(RuntimeError, match="is on cpu, and others are on the device"):
        torch.cat([ours, hosts])
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(hosts)


def test_what_is_not_waited_for_is_not_there(library: Path) -> None:
    on_ranks(2, library, late)


def late(_: Any) -> None:
    here, other = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    values, hosts = torch.zeros(2, device=DEVICE), torch.zeros(2).pin_memory()
    with other:
        values.fill_(1)
    assert values.tolist() == [0, 0]
    here.wait_stream(other)
    assert values.tolist() == [1, 1]
    hosts.copy_(values, non_blocking=True)
    assert hosts.tolist() == [0, 0]
    here.synchronize()
    assert hosts.tolist() == [1, 1]
    work = dist.all_reduce(values, async_op=True)
    assert values.tolist() == [1, 1]
    work.wait()
    assert values.tolist() == [2, 2]


def test_memory_that_ended_holds_no_number_for_a_stream_that_nobody_recorded(library: Path) -> None:
    on_ranks(1, library, ended)


def ended(_: Any) -> None:
    here, other = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    copy = torch.zeros(2, device=DEVICE)
    for is_recorded in (True, False):
        source = torch.ones(2, device=DEVICE)
        other.wait_stream(here)
        with other:
            copy.copy_(source)
        if is_recorded:
            source.record_stream(other)
        del source
        here.synchronize()
        other.synchronize()
        assert (copy.tolist() == [1, 1]) == is_recorded


# --- the engine on it ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_check_of_the_doctor_passes(world: int, library: Path) -> None:
    for results in on_ranks(world, library, checked):
        assert [(one.name, one.found) for one in results if not one.passed] == []
        assert [one.name for one in results] == list(CHECKS)


def checked(ranks: Any) -> list[Result]:
    with connect.over(ranks) as comm:
        assert comm.device.type == DEVICE
        return list(conform(comm))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_programs_are_equal_to_one_process_on_the_device(
    world: int, library: Path, tmp_path: Path
) -> None:
    for wrong in on_ranks(world, library, programs, world, tmp_path):
        assert wrong == []


def programs(ranks: Any, world: int, folder: Path) -> list[str]:
    return [found for seed in range(30) if (found := judged(ranks, seed, world, folder))]


def judged(ranks: Any, seed: int, world: int, folder: Path) -> str:
    text = program_text(seed, world)
    names, device = namespace(text), torch.device(DEVICE, dist.get_rank())
    one = Process(tuple(range(world)), world, device=device)
    try:
        names["program"](one)
    except (RuntimeError, ValueError):  # the device has no kernel for it, or torch refuses it
        return ""
    with connect.over(ranks) as comm:
        mine = Process((comm.rank,), world, comm, device=device, folder=folder / str(seed))
        try:
            names["program"](mine)
        except ShardwiseError:  # alike on the CPU
            return ""
    what = difference(one.seen, mine.seen, names["TOLERANCE"])
    return f"{what}\n\n{text}" if what else ""


@pytest.mark.parametrize("world", [2, 4])
def test_random_checkpoints_are_resumed_to_the_bit(
    world: int, library: Path, tmp_path: Path
) -> None:
    for wrong in on_ranks(world, library, checkpoints, tmp_path):
        assert wrong == []


def checkpoints(ranks: Any, folder: Path) -> list[str]:
    random_checkpoints.X = random_checkpoints.X.to(DEVICE)
    return [found for seed in range(20) if (found := resumed(ranks, seed, folder / str(seed)))]


def resumed(ranks: Any, seed: int, folder: Path) -> str:
    case = random_checkpoints.case(seed)
    with connect.over(ranks) as comm:
        saved = random_checkpoints.save(case, folder, comm)
    with connect.over(ranks) as comm:
        name, values = random_checkpoints.resume(case, folder, comm)
    expected, found = tree_map_only(torch.Tensor, torch.Tensor.cpu, [saved[name], values])
    what = difference(expected, found, 0.0)
    return f"{what}\n{case}" if what else ""


# --- and what is beside it -----------------------------------------------------------------------

WAYS = {
    "usual": "",
    "offload": "sharding.offload=everything checkpoint.asynchronous=true",
    "bf16": "sharding.precision.param_dtype=bfloat16 optimizer.ema=0.9",
    "activations": "sharding.activation_checkpointing=true sharding.activation_offload=true",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_has_the_losses_of_the_cpu(way: str, library: Path, tmp_path: Path) -> None:
    recipes = [tiny_recipe(tmp_path / place, *WAYS[way].split()) for place in ("device", "cpu")]
    expected = run_threads(2, losses, recipes[1])[0]
    found = on_ranks(2, library, recipe_losses, recipes[0])[0]  # rank 0 has the records
    assert found == pytest.approx(expected, rel=2e-3 if way == "bf16" else 1e-5)


def recipe_losses(ranks: Any, recipe: Recipe) -> list[float]:
    with connect.over(ranks) as comm:
        return losses(comm, recipe)


def losses(comm: Comm, recipe: Recipe) -> list[float]:
    records: list[Record] = []
    train(recipe, comm, records.append)
    return [record.loss for record in records if isinstance(record, Stepped)]


def test_a_program_that_ends_its_group_first_ends_without_a_word(library: Path) -> None:
    program = f"""
import torch
from pathlib import Path
from tests.device import see
see(Path({str(library)!r}))
import torch.distributed as dist, shardwise as sw
dist.init_process_group("mockccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
sw.shard(model)
model(torch.ones(1, 2, device="mock")).sum().backward()
dist.destroy_process_group()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
