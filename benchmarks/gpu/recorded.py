"""A step on a device that is not there, counted: overlap, waits of the host, launches, memory.

Rank 0 of a large group runs on the CPU under the recorder of streams (``tests/recorder``), which
knows which operation waits for which, and what torch's allocator would take. It knows no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

import shardwise as sw
from benchmarks.harness.command import Log
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import MIB, Column, Report, Row, Table
from benchmarks.models import blocks, shape
from benchmarks.training import apply_fsdp2
from shardwise.config.strategies import PRESETS
from shardwise.doctor.steps import planned_peak
from shardwise.train.decoder import Rotary
from tests.recorder.clocks import DEVICE
from tests.recorder.collectives import late_comm
from tests.recorder.device import Device
from tests.recorder.fully_shard import fsdp2_mesh
from tests.recorder.overlap import Flight

MESHES = {8: (2, 4), 64: (8, 8)}  # ranks → a hybrid's: copies, and ranks of a shard
LAYERS = 6
TASK = blocks(shape(LAYERS, 256, 4, 2, 688), tokens=4)
BF16 = torch.bfloat16
SMALL = 2**16  # bytes: a smaller collective agrees on something, and moves no parameters
KINDS = ("gathers", "sums", "copies")
COLUMNS = (
    Column("engine"), *map(Column, KINDS), Column("at once", "d"), Column("MB", ".2f"),
    Column("waits", "d"), Column("clipping", "d"), Column("launches", ".1f"),
    Column("peak MiB", ".2f"), Column("reserved", ".0f"), Column("pinned", ".2f"),
    Column("plan MiB", ".2f"),
)  # fmt: skip
NOTES = """
gathers   of parameters, sums of gradients, and collectives between a hybrid's copies: how many
          units may be computed beside one × how many of them there are
at once   of them, those beside which nothing is computed, and their MB
waits     of the host for the device in a step, without logging; clipping: those that it adds
launches  of operations and collectives, beyond those of the plain model, for each unit
MiB       peak: in use, in blocks of 512 bytes; reserved: in segments of 2 and 20 MiB; pinned: in
          powers of two, since the beginning; plan: the engine's peak as it is foretold, without
          activations
A first gather has nothing before it to be computed meanwhile, and a last sum nothing after it.
An operator that torch has for fsdp2 alone counts as one launch, whatever it launches.
""".strip().splitlines()


class Ready(NamedTuple):
    """A model that is ready to train."""

    model: nn.Module
    clip: Callable[[float], object]
    planned: int | None = None  # bytes


Opened = Callable[[Device, int], AbstractContextManager[Ready]]
"""An engine on a device, of so many ranks."""


@contextmanager
def _ours(strategy: str, options: dict[str, Any], device: Device, world: int) -> Iterator[Ready]:
    # Blocks are units that are freed, as large ones are.
    large: dict[str, Any] = {"wrap": sw.wrap.automatic(joined_nbytes=0), "unsharded": 0}
    options = {"precision": sw.Precision(param_dtype=BF16)} | large | options
    if PRESETS[strategy].hybrid:
        options["mesh"] = MESHES[world]
    with late_comm(device, world) as comm:
        model = _model(device).to(DEVICE)
        planned = planned_peak(model, strategy, (0, world), **options)
        sharded = sw.shard(model, strategy, comm=comm, **options)
        yield Ready(model, sharded.clip_grad_norm_, planned)


@contextmanager
def _fsdp2(reshard: bool, hybrid: bool, device: Device, world: int) -> Iterator[Ready]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with fsdp2_mesh(device, MESHES[world] if hybrid else (world,)) as mesh:
        model = _model(device)
        policy = MixedPrecisionPolicy(BF16, reduce_dtype=torch.float32)
        apply_fsdp2(model, reshard, mesh=mesh, mp_policy=policy)
        yield Ready(model, partial(nn.utils.clip_grad_norm_, model.parameters()))


@contextmanager
def _plain(device: Device, _: int) -> Iterator[Ready]:
    model = _model(device).to(DEVICE, BF16)
    yield Ready(model, partial(nn.utils.clip_grad_norm_, model.parameters()))


def _model(device: Device) -> nn.Module:
    torch.manual_seed(0)
    model = TASK.build()
    for module in model.modules():
        if isinstance(module, Rotary):  # or each block would cast its table
            module.bfloat16()
    for layer in model.get_submodule("layers").children():
        device.overlap.watch(layer.get_submodule("post_attention_layernorm"))
    return model


FSDP2 = {
    "fsdp2": partial(_fsdp2, True, False),
    "fsdp2, keeps": partial(_fsdp2, False, False),
    "fsdp2, hybrid": partial(_fsdp2, True, True),
}
ENGINES: dict[str, Opened] = {
    **{strategy: partial(_ours, strategy, {}) for strategy in PRESETS},
    "full_shard, in host": partial(_ours, "full_shard", {"offload": "everything"}),
    **FSDP2,
}


def run(log: Log) -> Iterator[Report]:
    """Yield a report with a table for each number of ranks."""
    settings = (f"rank 0 of a group, under the recorder; bf16 on fp32 shards: {TASK.summary}",)
    tables: tuple[Table, ...] = ()
    for world in MESHES:
        rows: dict[str, Row] = {}
        for name in ENGINES:
            log(f"{name}, {world} ranks")
            rows[name] = row_of(name, world)
        tables += (Table.of(f"{world} ranks", COLUMNS, rows),)
        yield Report(this_machine(), settings, tables, tuple(NOTES))


def row_of(name: str, world: int) -> Row:
    """The costs of one engine's step."""
    row = _counted(ENGINES[name], world, has_host=name not in FSDP2)
    return row | {"launches": (row["launches"] - _plain_launches()) / LAYERS}


@cache
def _plain_launches() -> int:
    launches: int = _counted(_plain, world=1, has_host=True)["launches"]
    return launches


def _counted(opened: Opened, world: int, has_host: bool) -> dict[str, Any]:
    device = Device(is_late=False, has_host=has_host)
    with device.installed(), opened(device, world) as ready:
        optimizer = torch.optim.AdamW(ready.model.parameters(), fused=True)
        batch = tuple(rows.to(DEVICE) for rows in TASK.batch(torch.Generator().manual_seed(0)))

        def step(clips: bool = False) -> None:
            device.begin_step()
            TASK.loss(ready.model, batch).backward()
            if clips:
                ready.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()

        step()  # it makes the optimizer's state
        step()
        row = _costs(device)
        step(clips=True)
        row["clipping"] = len(device.waits) - row["waits"]
    return row | {"plan MiB": ready.planned and ready.planned / MIB}


def _costs(device: Device) -> dict[str, Any]:
    """Costs of the step that was taken last."""
    flights = [flight for flight in device.overlap.flights if flight.nbytes >= SMALL]
    at_once = [flight for flight in flights if not flight.units]
    memory = device.accesses.allocator
    return {kind: _distances(flights, kind) for kind in KINDS} | {
        "at once": len(at_once),
        "MB": sum(flight.nbytes for flight in at_once) / 1e6,
        "waits": len(device.waits),
        "launches": device.launches + len(device.overlap.flights),
        "peak MiB": memory.peak / MIB,
        "reserved": memory.reserved / MIB,
        "pinned": memory.pinned_peak / MIB,
    }


def _distances(flights: Sequence[Flight], kind: str) -> str | None:
    units = Counter(flight.units for flight in flights if _kind(flight) == kind)
    return ", ".join(f"{n}×{units[n]}" for n in sorted(units)) or None


def _kind(flight: Flight) -> str:
    if flight.axis == "replicate":
        return "copies"
    return "gathers" if flight.op == "all_gather" else "sums"
