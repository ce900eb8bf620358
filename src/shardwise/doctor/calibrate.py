"""Calibration: what this machine reaches, measured in seconds, as an entry of its own of a table.

A forecast for it then asks for its name. All ranks measure at once, as they compute at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.comm.protocol import Comm, Label
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.observe import observe
from shardwise.plan.units.units import choose_units
from shardwise.plan.units.wrap import whole

SIZES = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 256, 1024), (1024, 1024, 1024))
"""Products, ``m, n, k``: from those that a host's time bounds to those that reach a rate."""
BATCH, HEADS, LENGTH, HEAD = 2, 8, 256, 64  # of attention
LAYERS, WIDTH = 16, 32  # of a model so small that the host takes all the time
WEIGHTS = 4  # that take turns
ELEMENTS = 2**20  # of what is elementwise: 4 MiB
SENT = (2**12, 2**24)  # bytes of a gather, for latency and bandwidth
LAPS = 7
# Of activations: glibc's holes beside them, in steps of a decoder that recomputes nothing:
# docs/planning.md.
KEPT = 0.5


def calibrate(comm: Comm, name: str) -> str:
    """A file like ``machines.toml`` with one accelerator, ``name``, and its link. A collective."""
    device, floats = comm.device, torch.float32
    kernel = _kernel_seconds(device)
    waits = device.type == "cpu"
    process = _process() if waits else {}  # before large tensors come
    rate, small = _product_rate(device, floats, kernel)
    narrow, _ = _product_rate(device, torch.bfloat16, kernel)
    latency, bandwidth = _link(comm)
    link = f"{name}, between ranks"
    entry = {
        "bf16": narrow,
        "fp32": rate,
        "products": 1.0,
        "best": 1.0,
        "attention": _attention_rate(device, floats) / rate,
        "memory": _memory(comm),
        "bandwidth": _bandwidth(device) / known().constants.bandwidth,
        "kernel": kernel,
        "waits": waits,
        "small": small,
        "contention": 1.0 if waits else known().constants.contention,
        "inside": link,
        "between": link,
        "host": link,
        "per_host": comm.size,
        "device": device.type,
        "source": "measured here",
    } | process
    links = {"bandwidth": bandwidth, "latency": latency, "source": "measured here"}
    return f"{_table('accelerators', name, entry)}\n{_table('links', link, links)}"


def _table(kind: str, name: str, entries: dict[str, object]) -> str:
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
    return f"[{kind}.{json.dumps(name)}]\n{''.join(lines)}"


def _seconds(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """The median of some laps, each of as many runs; the first lap does not count."""
    laps = []
    for _ in range(LAPS + 1):
        start = perf_counter()
        for _ in range(times):
            run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        laps.append((perf_counter() - start) / times)
    return median(laps[1:])


def _kernel_seconds(device: torch.device) -> float:
    """Seconds of the host for one kernel of a model, with its part of the calls of modules."""
    blocks = ((nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    model = nn.Sequential(*(nn.Sequential(*block) for block in blocks)).to(device)
    x = torch.ones(2, WIDTH, device=device)
    work = observe(model, choose_units(model, whole()), (x,), {})
    parts = (*work.units.values(), work.rest)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return _seconds(step, device) / sum(p.forward.kernels + p.backward.kernels for p in parts)


def _product_rate(device: torch.device, dtype: torch.dtype, kernel: float) -> tuple[float, float]:
    """FLOP/s of large products, and how much longer small ones take; see ``Constants.small``."""
    rows, seconds = [], []
    for m, n, k in SIZES:
        taken = _linear_seconds(device, dtype, (m, n, k)) / 3
        flops = 2 * m * n * k
        rows.append([1.0, 1 / m + 1 / n + 1 / k])
        seconds.append(max(taken - kernel, 0.2 * taken) / flops)
    weights = 1 / torch.tensor(seconds, dtype=torch.float64)  # errors count relative
    sides = torch.tensor(rows, dtype=torch.float64) * weights[:, None]
    solution = torch.linalg.lstsq(sides, torch.ones(len(rows), 1, dtype=torch.float64)).solution
    each, edge = solution[:, 0].tolist()
    if each <= 0:  # no size has reached its rate
        return 1 / min(seconds), 0.0
    return 1 / each, max(0.0, edge / each)


def _linear_seconds(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int]) -> float:
    """Seconds of the three products of a linear layer; weights come from memory, as in a model."""
    m, n, k = size
    weights = [torch.randn(n, k, device=device).to(dtype).requires_grad_() for _ in range(WEIGHTS)]
    x = torch.randn(m, k, device=device).to(dtype).requires_grad_()
    gradient = torch.ones(m, n, device=device, dtype=dtype)

    def step() -> None:
        for weight in weights:
            torch.autograd.grad(F.linear(x, weight), (x, weight), gradient)

    return _seconds(step, device) / WEIGHTS


def _attention_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, forward and backward, where half of it counts."""
    shape = BATCH, HEADS, LENGTH, HEAD
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()

    constants = known().constants
    flops = 7 * 2 * BATCH * HEADS * LENGTH * LENGTH * HEAD / 2
    edges = (1 + constants.short / LENGTH) * (1 + constants.narrow / HEAD)
    return flops * edges / _seconds(step, device, times=2)


def _bandwidth(device: torch.device) -> float:
    """Bytes per second of elementwise kernels as a decoder has them."""
    x, y = (torch.randn(ELEMENTS, device=device) for _ in range(2))
    kernels: tuple[tuple[Callable[[], Tensor], int], ...] = (
        (lambda: x + y, 3),
        (lambda: x * y, 3),
        (lambda: F.silu(x), 2),
        (x.square, 2),
    )
    moved = sum(tensors for _, tensors in kernels) * 4 * ELEMENTS
    return moved / sum(_seconds(kernel, device, times=4) for kernel, _ in kernels)


def _link(comm: Comm) -> tuple[float, float]:
    """Seconds of a small gather for each further rank, and bytes per second of a large one."""
    taken = []
    for nbytes in SENT:
        full = torch.zeros(nbytes * comm.size, dtype=torch.uint8, device=comm.device)
        gather = partial(_gather, comm, full, Label("gather", f"{nbytes} bytes"))
        taken.append(_seconds(gather, comm.device, times=4))
    others, (small, large) = max(1, comm.size - 1), taken
    return small / others, SENT[1] * others / max(large - small, large / 2)


def _gather(comm: Comm, full: Tensor, label: Label) -> None:
    comm.all_gather(full, label).wait()


def _memory(comm: Comm) -> float:
    if comm.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / comm.size
    return float(torch.accelerator.get_memory_info(comm.device)[1])


def _process() -> dict[str, object]:
    """Measure what a process on CPU holds beside tensors."""
    held, x = _held(), torch.ones(1, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()  # torch imports its compiler
    recomputing = max(0, _held() - held)
    return {"reserved": held, "recomputing": recomputing, "kept": KEPT, "host_memory": 0.0}


def _held() -> int:
    """Bytes of this process without a model: the interpreter, torch, its libraries, the group.

    Its proportional set size: of pages that the ranks share, such as libraries, a part.
    """
    file = Path("/proc/self/smaps_rollup")  # Linux
    lines = file.read_text("ascii").splitlines() if file.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
