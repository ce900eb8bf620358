"""One model under each strategy, beside torch's DDP and FSDP2, on the ranks that are here.

Steps of all engines take turns in one process group, so what disturbs the machine disturbs all of
them. Values are random: a step takes as long whatever it learns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.api.shard import shard
from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm
from shardwise.config.precision import Precision
from shardwise.config.strategies import STRATEGIES
from shardwise.doctor.calibrate import proportional_bytes
from shardwise.doctor.rivals import ddp, fsdp2
from shardwise.errors import ConfigError
from shardwise.torch_internals import buffers_of, parameters_of, tree_map_only

RIVALS = ("ddp", "fsdp2")
ENGINES = (*STRATEGIES, *RIVALS)
WARM = 2  # steps of each engine before anything is measured
SAMPLED = 0.005  # seconds between two looks at a process's memory


@dataclass(frozen=True)
class Subject:
    """A model that every engine trains.

    Attributes:
        model: on the meta device, or with values, which are not used.
        args, kwargs: of its forward; of tensors only shapes and dtypes matter.
        loss: of what it returns.
        arguments: of ``shard()``, but the strategy.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    arguments: Mapping[str, Any]

    @property
    def precision(self) -> Precision:
        """Return the option of ``shard()``."""
        return self.arguments.get("precision") or Precision()


@dataclass(frozen=True)
class Engine:
    """A copy of the model that is trained; ``step`` takes one step."""

    step: Callable[[], None]
    comm: Comm | None  # which counts the bytes that were sent; ``None``: nobody does


@dataclass(frozen=True)
class Measured:
    """One engine on all ranks.

    Attributes:
        milliseconds: of a step, until its slowest rank is done; the median.
        sent: bytes that rank 0 sends in a step; ``None``: nobody counts.
        shared: ranks map one full bucket.
    """

    engine: str
    milliseconds: float
    sent: int | None
    shared: bool


@contextmanager
def process_group() -> Iterator[int]:
    """Join torch's default process group, of the launcher's ranks; the value is this rank."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(None if device is not None else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def measure(
    subject: Subject, names: Sequence[str], rounds: int, say: Callable[[str], None]
) -> list[Measured]:
    """Time each engine, in turns. A collective over the default process group."""
    engines = {}
    for name in names:
        say(f"building {name}")
        engines[name] = _engine(name, subject)
        for _ in range(WARM):
            engines[name].step()
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, int | None] = {}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name, engine in engines.items():
            if engine.comm is not None:
                engine.comm.counters.reset()
            times[name].append(_over_ranks(_seconds(engine.step), dist.ReduceOp.MAX))
            counted = None if engine.comm is None else engine.comm.counters
            sent[name] = None if counted is None else sum(counted.bytes_sent.values())
    shared = {name: engine.comm and engine.comm.memory.shared for name, engine in engines.items()}
    return [
        Measured(name, 1e3 * median(times[name]), sent[name], bool(shared[name])) for name in names
    ]


def peak_memory(subject: Subject, name: str, steps: int) -> int:
    """Bytes at most in a step, over all ranks, beyond those before the model. A collective.

    On a CPU proportional set sizes, in which what ranks share counts once; on an accelerator what
    its allocator has given out.
    """
    _engine(name, _SMALL).step()  # what is loaded by a first step is no memory of the model's
    with _peak() as peak:
        engine = _engine(name, subject)
        for _ in range(steps):
            engine.step()
    return int(_over_ranks(peak[0], dist.ReduceOp.SUM))


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Fill a list with the bytes that this process takes at most in the block."""
    result = [0]
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
        yield result
        result[0] = torch.accelerator.max_memory_allocated()
        return
    before, done = proportional_bytes(), threading.Event()

    def look() -> None:
        while not done.wait(SAMPLED):
            result[0] = max(result[0], proportional_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()


def _seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    start = perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter() - start


def _over_ranks(value: float, how: Any) -> float:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    reduced = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(reduced, how)
    return float(reduced.item())


_SMALL = Subject(
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(2, 8),), {}, torch.sum, {}
)


# ---- the engines -------------------------------------------------------------------------------


def _engine(name: str, subject: Subject) -> Engine:
    comm = over(dist.group.WORLD)
    model = with_values(subject.model, comm.device)
    if name in STRATEGIES:
        shard(model, name, comm=comm, **subject.arguments)
        return _training(model, subject, comm, nullcontext)
    if name == "ddp":
        return _training(ddp(model), subject, None, lambda: _autocast(subject, comm))
    if name == "fsdp2":
        dtypes = subject.precision.param_dtype, subject.precision.reduce_dtype
        model = fsdp2(model, MixedPrecisionPolicy(*dtypes))
        return _training(model, subject, None, nullcontext)
    raise ConfigError(f"no engine is called {name!r}. Choose among {', '.join(ENGINES)}.")


def _training(
    model: nn.Module, subject: Subject, comm: Comm | None, context: Callable[[], Any]
) -> Engine:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, device = torch.optim.AdamW(trained), trained[0].device
    batch = tree_map_only(Tensor, lambda t: _values(t, device), (subject.args, subject.kwargs))

    def step() -> None:
        args, kwargs = batch
        with context():
            loss = subject.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Engine(step, comm)


def _autocast(subject: Subject, comm: Comm) -> Any:
    """DDP has no dtype of its own to compute in."""
    dtype = subject.precision.param_dtype
    return nullcontext() if dtype is None else torch.autocast(comm.device.type, dtype)


def with_values(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of ``model`` with small random values on ``device``; ties are kept.

    Raises:
        ConfigError: some of its weights are codes, which random values are not.
    """
    copied, copies = deepcopy(model), dict[Tensor, Tensor]()
    for module in copied.modules():
        own: Any
        for own in (parameters_of(module), buffers_of(module)):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = copies.setdefault(tensor, _like(tensor, device))
    return copied


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return _values(tensor, device)
    if not tensor.is_floating_point():
        raise ConfigError(
            "the model has weights in 4 or 8 bits, and random values are no codes. Measure it with "
            "its own: shardwise train prints tokens per second."
        )
    return nn.Parameter(_values(tensor, device), tensor.requires_grad)


def _values(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.empty_like(tensor, device=device)
    return values.normal_(std=0.02) if values.is_floating_point() else values.zero_()
