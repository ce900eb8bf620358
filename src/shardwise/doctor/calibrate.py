"""Calibration: what this machine reaches, measured in under a minute, as an entry of a table.

A forecast for it then asks for its name. What is measured is what a step has: layers whose weights
come from memory, blocks so small that the host takes all the time, alone and in the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.api.shard import shard
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.reduction import Reduction
from shardwise.doctor.laps import Measured, medians
from shardwise.launch.machine_memory import machine_memory
from shardwise.optim.fused import AdamW
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.observe import observe
from shardwise.plan.units.units import choose_units
from shardwise.plan.units.wrap import Wrap, by_class, whole

SIZES = ((64, 256, 256), (64, 512, 512), (256, 512, 512), (512, 512, 1024), (1024, 1024, 1024))
"""Products, ``m, n, k``: from those that reading a matrix bounds to those that reach a rate."""
NARROW = SIZES[2]  # is measured in bf16, too
WEIGHTS = 2**24  # bytes that take turns: more than caches hold
ATTENTION = {"long": (256, 64, True), "short": (64, 64, False), "narrow": (64, 16, False)}
"""Lengths, sizes of heads, and whether it is causal."""
HEADS = 16  # of both rows
LAYERS, WIDTH, PARAMETERS = (8, 32), 32, 6  # of models so small that the host takes all the time
ELEMENTWISE = 512, 512, 4  # rows, width and layers
SENT = (2**12, 2**24)  # bytes of a collective, for latency and bandwidth
ROUNDS = 20
# Of blocks of the forward pass: glibc's holes beside them, in steps of three models:
# docs/planning.md.
KEPT = 0.24


def calibrate(comm: Comm, name: str) -> str:
    """A file like ``machines.toml`` with one accelerator, ``name``, and its link. A collective."""
    device = comm.device
    waits = device.type == "cpu"
    process = _process() if waits else {}  # before large tensors come
    seconds = medians(comm, _computing(device) | _of_engine(comm), ROUNDS)
    peers, between = max(1, comm.size - 1), f"{name}, between ranks"
    kernel = seconds[f"plain {LAYERS[1]}"] / _work(_blocks(LAYERS[1]), torch.ones(2, WIDTH))[0]
    rate, small = _products(seconds, kernel)
    link = _link(seconds, peers)
    attention = _attention(seconds, kernel)
    kernels, moved = _work(*_elementwise())
    elementwise = seconds["elementwise"]
    bandwidth = moved / max(elementwise - kernels * kernel, elementwise / 5)
    entry = {
        "bf16": rate * seconds[f"linear {NARROW}"] / seconds["bf16"],
        "fp32": rate,
        "products": 1.0,
        "best": 1.0,
        "memory": _memory(comm),
        "host_memory": _beside(device),
        "bandwidth": bandwidth / known().constants.bandwidth,
        "kernel": kernel,
        "waits": waits,
        "small": small,
        "contention": 1.0 if waits else known().constants.contention,
        "inside": between,
        "between": between,
        "host": between,
        "per_host": comm.size,
        "device": device.type,
        "source": "measured here",
    }
    entry |= attention | {"attention": attention["attention"] / rate}
    entry |= _engine(seconds, 2 * peers * link["latency"], kernel) | process
    links = link | {"source": "measured here"}
    return f"{_table('accelerators', name, entry)}\n{_table('links', between, links)}"


def _table(kind: str, name: str, entries: Mapping[str, object]) -> str:
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
    return f"[{kind}.{json.dumps(name)}]\n{''.join(lines)}"


# ---- what is measured ----------------------------------------------------------------------


def _computing(device: torch.device) -> dict[str, Measured]:
    """A device's own work."""
    measured = {f"linear {size}": _linear(device, torch.float32, size) for size in SIZES}
    measured["bf16"] = _linear(device, torch.bfloat16, NARROW)
    measured |= {kind: _attended(device, *shape) for kind, shape in ATTENTION.items()}
    for layers in LAYERS:
        measured[f"plain {layers}"] = _plain(device, _blocks(layers), torch.ones(2, WIDTH))
    measured["elementwise"] = _plain(device, *_elementwise())
    return measured


def _linear(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int]) -> Measured:
    """The three products of linear layers, as deep as weights and gradients leave the caches."""
    m, n, k = size
    layers = max(2, min(16, WEIGHTS // (4 * n * k)))
    weights = [torch.randn(n, k, device=device).to(dtype).requires_grad_() for _ in range(layers)]
    x = torch.randn(m, k, device=device).to(dtype).requires_grad_()
    gradient = torch.ones(m, n, device=device, dtype=dtype)

    def run() -> list[tuple[Tensor, ...]]:
        return [torch.autograd.grad(F.linear(x, w), (x, w), gradient) for w in weights]

    return Measured(run, per=layers)


def _attended(device: torch.device, length: int, size: int, causal: bool) -> Measured:
    shape = 2, HEADS // 2, length, size
    query, key, value = (torch.randn(shape, device=device).requires_grad_() for _ in range(3))
    gradient = torch.ones(shape, device=device)

    def run() -> None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        torch.autograd.grad(mixed, (query, key, value), gradient)

    return Measured(run, times=2)


def _plain(device: torch.device, model: nn.Module, x: Tensor) -> Measured:
    model = model.to(device)
    return Measured(partial(_step, model, x.to(device), model.zero_grad), times=4)


class _Block(nn.Module):
    """A feed-forward block beside a skip: 6 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` → the same."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class _Gated(nn.Module):
    """Kernels that memory bounds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, width]`` → the same."""
        return x + F.silu(self.norm(x)) * x


def _blocks(layers: int) -> nn.Module:
    return nn.Sequential(*(_Block() for _ in range(layers)))


def _elementwise() -> tuple[nn.Module, Tensor]:
    rows, width, layers = ELEMENTWISE
    model = nn.Sequential(*(_Gated(width) for _ in range(layers)), nn.LogSoftmax(-1))
    return model, torch.randn(rows, width)


def _step(model: nn.Module, x: Tensor, update: Callable[[], object]) -> None:
    model(x).sum().backward()
    update()


def _of_engine(comm: Comm) -> dict[str, Measured]:
    """Work of the engine: its host's time, and collectives as it has them."""
    measured = {}
    for layers in LAYERS:
        measured[f"engine {layers}"] = _sharded(comm, layers, whole())
    measured["units"] = _sharded(comm, LAYERS[0], by_class(_Block))
    for nbytes in SENT:
        label = Label("calibrate", f"{nbytes} bytes for each rank")
        full = torch.zeros(comm.size * nbytes // 4, device=comm.device)
        measured[f"gather {nbytes}"] = Measured(partial(_gather, comm, full, label), times=2)
        measured[f"reduce {nbytes}"] = Measured(partial(_reduce, comm, full, label), times=2)
    return measured


def _sharded(comm: Comm, layers: int, wrap: Wrap) -> Measured:
    model = _blocks(layers).to(comm.device)
    optimizer = AdamW(shard(model, "zero1", wrap, comm), lr=0.0)
    x = torch.ones(2, WIDTH, device=comm.device)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Measured(partial(_step, model, x, update), times=4)


def _gather(comm: Comm, full: Tensor, label: Label) -> None:
    comm.all_gather(full, label).wait()


def _reduce(comm: Comm, full: Tensor, label: Label) -> None:
    Reduction(full.dtype, full.dtype, after=comm.size).start(full, comm, label).pending.wait()


# ---- what follows --------------------------------------------------------------------------


def _work(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Kernels of a step, and the bytes that those besides products move."""
    work = observe(model, choose_units(model, whole()), (x,), {}, loss=torch.sum)
    units = (*work.units.values(), work.rest)
    parts = [part for unit in units for part in (unit.forward, unit.backward)]
    return sum(part.kernels for part in parts), sum(part.moved for part in parts)


def _products(seconds: Mapping[str, float], kernel: float) -> tuple[float, float]:
    """FLOP/s of large products, and how much longer others take; see ``Constants.small``."""
    rows, of_flop = [], []
    for m, n, k in SIZES:
        seconds_taken = seconds[f"linear {(m, n, k)}"] / 3
        rows.append([1.0, 1 / m + 1 / n + 1 / k])
        of_flop.append(max(seconds_taken - kernel, 0.2 * seconds_taken) / (2 * m * n * k))
    weights = 1 / torch.tensor(of_flop, dtype=torch.float64)  # errors count relative
    sides = torch.tensor(rows, dtype=torch.float64) * weights[:, None]
    solution = torch.linalg.lstsq(sides, torch.ones(len(rows), 1, dtype=torch.float64)).solution
    each, edge = solution[:, 0].tolist()
    if each <= 0:  # no size has reached its rate
        return 1 / min(of_flop), 0.0
    return 1 / each, max(0.0, edge / each)


def _attention(seconds: Mapping[str, float], kernel: float) -> dict[str, float]:
    """FLOP/s of attention, where half of a masked one counts, and its ``Constants``."""
    of_flop = {}
    for kind, (length, size, causal) in ATTENTION.items():
        flops = 7 * 2 * HEADS * length * length * size / (1 + causal)
        of_flop[kind] = max(seconds[kind] - 2 * kernel, 0.2 * seconds[kind]) / flops
    (far, wide, _), (near, *_), (_, size, _) = ATTENTION.values()
    narrow = _edge((of_flop["short"], wide), (of_flop["narrow"], size))
    short = _edge((of_flop["long"], far), (of_flop["short"], near))
    edges = (1 + short / far) * (1 + narrow / wide)
    return {"attention": edges / of_flop["long"], "short": short, "narrow": narrow}


def _edge(far: tuple[float, int], near: tuple[float, int]) -> float:
    """The ``edge`` of seconds that are as ``1 + edge / size``, from two of them."""
    (less, large), (more, small) = far, near
    slope = max(0.0, (more - less) / (1 / small - 1 / large))
    return slope / max(less - slope / large, less / 10)


def _link(seconds: Mapping[str, float], others: int) -> dict[str, float]:
    """Seconds of a small collective for each further rank, and bytes per second of a large one."""
    small, large = ((seconds[f"gather {n}"] + seconds[f"reduce {n}"]) / 2 for n in SENT)
    return {
        "bandwidth": SENT[1] * others / max(large - small, large / 2),
        "latency": small / others,
    }


def _engine(seconds: Mapping[str, float], latency: float, kernel: float) -> dict[str, float]:
    """Seconds of the host that the engine takes.

    Args:
        latency: of a unit's gather and reduce. It may hide behind what the host does meanwhile, so
            no more than four fifths of a unit's time are taken for it.
        kernel: to start one; the two calls of a unit start one each at least.
    """
    few, many = LAYERS
    added = {n: seconds[f"engine {n}"] - seconds[f"plain {n}"] for n in LAYERS}
    parameter = max(0.0, (added[many] - added[few]) / (many - few) / PARAMETERS)
    units = seconds["units"] - seconds[f"engine {few}"]  # one for each block, and not one for all
    unit = max(units / (few - 1) - latency, units / (few - 1) / 5, 2 * kernel)
    step = max(0.0, added[few] - few * PARAMETERS * parameter - unit - latency)
    return {"step": step, "unit": unit, "parameter": parameter}


def _memory(comm: Comm) -> float:
    if comm.device.type == "cpu":
        return float(machine_memory(pinned=True)) / comm.size
    return float(torch.accelerator.get_memory_info(comm.device)[1])


def _beside(device: torch.device) -> float:
    """Bytes of host memory beside the devices; beside a CPU there is none."""
    return 0.0 if device.type == "cpu" else float(machine_memory(pinned=True))


def _process() -> dict[str, object]:
    """Measure what a process on CPU holds beside tensors."""
    held, x = proportional_bytes(), torch.ones(1, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()  # torch imports its compiler
    recomputing = max(0, proportional_bytes() - held)
    return {"reserved": held, "recomputing": recomputing, "kept": KEPT}


def proportional_bytes() -> int:
    """Bytes of this process: of pages that ranks share, such as libraries, a part."""
    file = Path("/proc/self/smaps_rollup")  # Linux
    lines = file.read_text("ascii").splitlines() if file.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
