"""Is the engine right on this device and over this backend? The suite that answers, rank by rank.

Owners of hardware run it as one command; what the documents claim of an accelerator is what its
result shows. Each check issues all of its collectives first and compares afterwards, so that a
rank that finds something wrong leaves no other waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import optim
from shardwise.api.shard import shard
from shardwise.api.sharded import Sharded
from shardwise.checkpoint.collectives import all_gather_object, broadcast_object
from shardwise.comm.machine.accelerators import row
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.reduction import Reduction
from shardwise.comm.transports.backend import BackendComm
from shardwise.config.precision import Precision, dtype_name
from shardwise.config.strategies import STRATEGIES
from shardwise.doctor.rivals import RIVALS, can_run, parameters_beside
from shardwise.errors import RanksDisagree

SIZES = (1, 513, 65_537)  # elements of a rank's piece; XCCL's AVG was wrong for some sizes only
ROWS = 4  # of a batch, on each rank
STEPS = 3


@dataclass(frozen=True)
class Result:
    """The outcome of one check, the same on every rank.

    Attributes:
        expected: what is right.
        found: what was covered, or what is wrong, by rank.
        seconds: on this rank.
    """

    name: str
    passed: bool
    expected: str
    found: str
    seconds: float


class _Wrong(Exception):
    """A result that is not the right one; the message has both."""


def conform(comm: Comm) -> Iterator[Result]:
    """The result of each check, in turn. A collective. Once the ranks lost each other, it ends."""
    folder = TemporaryDirectory(prefix="shardwise-conformance-")
    with folder as own:
        shared = Path(broadcast_object(comm, own, "folder"))
        for name, (expected, check) in CHECKS.items():
            start = perf_counter()
            try:
                covered, wrong = _outcome(comm, partial(check, comm, shared))
            except RanksDisagree as error:
                yield Result(name, False, expected, str(error), perf_counter() - start)
                return
            yield Result(name, not wrong, expected, wrong or covered, perf_counter() - start)


def _outcome(comm: Comm, check: Callable[[], str]) -> tuple[str, str]:
    """Return what the check says, and what is wrong on any rank: ``""`` if nothing is."""
    covered, wrong = "", ""
    try:
        covered = check()
    except RanksDisagree:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a device does is a result
        wrong = str(error) if isinstance(error, _Wrong) else repr(error)
    texts = all_gather_object(comm, wrong, "what is wrong")
    return covered, "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


# --- bytes and sums --------------------------------------------------------------------------


def _values(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """``[n]``: whole numbers below 128, exact in every dtype."""
    return ((torch.arange(n) + 7 * rank) % 61 + rank % 61).to(dtype)


def _dtypes(comm: Comm) -> tuple[torch.dtype, ...]:
    return row(comm.device).dtypes


def _gather(comm: Comm, _: Path) -> str:
    dtypes = (*_dtypes(comm), torch.int64, torch.uint8)
    pairs = []
    for dtype in dtypes:
        for n in SIZES:
            full = torch.zeros(comm.size, n, dtype=dtype, device=comm.device)
            full[comm.rank] = _values(comm.rank, n, dtype).to(comm.device)
            comm.all_gather(full.view(-1), Label("gather", f"{dtype}")).wait()
            expected = [_values(rank, n, dtype) for rank in range(comm.size)]
            pairs.append((full, torch.stack(expected)))
    _same(pairs)
    return _listed(dtypes)


def _broadcast(comm: Comm, _: Path) -> str:
    pairs = []
    for root in range(comm.size):
        data = _values(comm.rank, 513, torch.float32).to(comm.device)
        comm.broadcast(data, root, Label("broadcast")).wait()
        pairs.append((data, _values(root, 513, torch.float32)))
    _same(pairs)
    return f"from each of {comm.size} ranks"


def _exchange(comm: Comm, _: Path) -> str:
    pairs: list[tuple[Tensor, Tensor]] = []
    for n in SIZES:
        full = torch.cat([_values(comm.rank + to, n, torch.float32) for to in range(comm.size)])
        received: list[Tensor] = []
        comm.exchange(full.to(comm.device), received.extend, Label("exchange")).wait()
        expected = [_values(rank + comm.rank, n, torch.float32) for rank in range(comm.size)]
        pairs += zip([piece.clone() for piece in received], expected, strict=True)
    _same(pairs)
    return f"pieces of {', '.join(f'{n:,}' for n in SIZES)} elements"


def _sum(comm: Comm, _: Path) -> str:
    ways = [
        (wire, total, n)
        for wire in _dtypes(comm)
        for total in dict.fromkeys((wire, torch.promote_types(wire, torch.float32)))
        for n in SIZES
    ]
    worst = max(_roundings(comm, *way) for way in ways)
    if worst > 2 * comm.size:  # a rounding for each addition, and one for the division
        raise _Wrong(f"a mean of {comm.size} ranks is off by {worst:.1f} roundings")
    return f"{_listed(_dtypes(comm))}, within {worst:.1f} roundings"


def _roundings(comm: Comm, wire: torch.dtype, total: torch.dtype, n: int) -> float:
    """Return how many roundings of ``total`` a mean over ranks is off, by ``n`` elements each."""
    full = _values(comm.rank, comm.size * n, wire).to(comm.device)
    reduction = Reduction(wire, total, after=comm.size)
    reducing = reduction.start(full, comm, Label("reduce", f"{wire}"))
    reducing.pending.wait()
    each = [_values(rank, comm.size * n, wire).double() for rank in range(comm.size)]
    expected = torch.stack(each).mean(0).view(comm.size, n)[comm.rank]
    return _error(reducing.out, expected) / torch.finfo(total).eps


def _average(comm: Comm, _: Path) -> str:
    """Report on AVG; no condition: where it is wrong or missing, sums are divided here."""
    if not isinstance(comm, BackendComm):
        return "no AVG of a backend is used: sums are formed here, in rank order"
    if comm.has_average:
        return "AVG passed its self-test, and is used"
    try:
        verdict = "is right" if comm.average_is_right() else "is WRONG"
    except RuntimeError as error:
        verdict = f"is refused ({error})"
    return f"AVG {verdict} here; it is not used: sums are divided here"


# --- computing -------------------------------------------------------------------------------


def _products(comm: Comm, _: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(33, 65, generator=generator).double() for _ in range(2))
    expected = _through_linear(x, weight)
    for dtype in _dtypes(comm):
        computed = _through_linear(x.to(comm.device, dtype), weight.to(comm.device, dtype))
        for one, right in zip(computed, expected, strict=True):
            if _error(one, right) > 64 * torch.finfo(dtype).eps:
                raise _Wrong(f"a linear layer in {dtype} is off by {_error(one, right):.1e}")
    return f"{_listed(_dtypes(comm))}, forward and backward"


def _through_linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[33, 33]`` and the weight's gradient, ``[33, 65]``."""
    weight = weight.clone().requires_grad_()
    out = F.linear(x, weight)
    out.square().mean().backward()
    assert weight.grad is not None
    return out.detach(), weight.grad


class _Small(nn.Module):
    """Sizes that no number of ranks divides, and blocks that become units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        blocks = (nn.Sequential(nn.LayerNorm(13), nn.Linear(13, 13), nn.GELU()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(13, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, 7]``."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Way:
    """A way to train the small model, and how far it may be from the plain one."""

    strategy: str = "full_shard"
    compute: torch.dtype | None = None
    adamw: bool = False
    accumulation: int = 1
    tolerance: float = 1e-5


def _parity(comm: Comm, _: Path, way: _Way) -> str:
    """Losses, gradient norms and parameters of ``STEPS`` steps, against one process."""
    right = _of_one_process(comm, way)  # first: beside a sharded model its optimizer is warned of
    computed = _of_ranks(comm, way)
    worst = max(map(_error, computed, right))
    if worst > way.tolerance:
        raise _Wrong(f"differs from one process by {worst:.1e}, and {way.tolerance:.0e} is allowed")
    return f"equals one process within {worst:.1e}"


def _of_one_process(comm: Comm, way: _Way) -> list[Tensor]:
    """Losses and norms of the plain model, on all ranks' rows; then its parameters."""
    model, numbers = _model(comm), list[Tensor]()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    for batches in _steps(comm, way):
        losses = [F.cross_entropy(model(x), y) / len(batches) for x, y in batches]
        total = torch.stack(losses).sum()
        total.backward()
        numbers += [total.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return [*numbers, *model.state_dict().values()]


def _of_ranks(comm: Comm, way: _Way) -> list[Tensor]:
    """Return the same of the sharded model, in the same order."""
    model, numbers = _model(comm), list[Tensor]()
    sharded = shard(model, way.strategy, comm=comm, precision=Precision(param_dtype=way.compute))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way.adamw:
        optimizer = optim.AdamW(sharded, lr=0.01, eps=1e-4)
    for batches in _steps(comm, way):
        numbers += _sharded_step(sharded, batches, comm)
        optimizer.step()
        optimizer.zero_grad()
    values = model.state_dict().values()
    sharded.unshard()
    return [*numbers, *values]


def _steps(comm: Comm, way: _Way) -> list[list[tuple[Tensor, Tensor]]]:
    return [[_batch(comm, step, n) for n in range(way.accumulation)] for step in range(STEPS)]


def _model(comm: Comm) -> nn.Module:
    """The same on every rank, from a generator of its own: ranks may be threads."""
    generator = torch.Generator().manual_seed(0)
    model = _Small()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3, generator=generator)
    return model.to(comm.device)


def _batch(comm: Comm, step: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """All ranks' rows, ``[size * ROWS, 7]``, and their classes."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(comm.size * ROWS, 7, generator=generator)
    y = torch.randint(5, (comm.size * ROWS,), generator=generator)
    return x.to(comm.device), y.to(comm.device)


def _sharded_step(
    sharded: Sharded, batches: list[tuple[Tensor, Tensor]], comm: Comm
) -> tuple[Tensor, Tensor]:
    """The mean loss over ranks and micro-batches, and the norm before clipping."""
    own = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    total = torch.zeros(1, device=comm.device)
    for number, (x, y) in enumerate(batches):
        with sharded.accumulate(last=number == len(batches) - 1):
            loss = F.cross_entropy(sharded.model(x[own]).float(), y[own]) / len(batches)
            loss.backward()
        total += loss.detach()
    return comm.gather_rows(total, Label("gather", "losses")).mean(), sharded.clip_grad_norm_(1.0)


def _beside(comm: Comm, _: Path, engine: str) -> str:
    """Parameters after ``STEPS`` steps of SGD, against an engine of torch's on the same ranks."""
    if not can_run():
        return "not run: one rank, and no process group"
    own = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    batches = [(x[own], y[own]) for x, y in (_batch(comm, step) for step in range(STEPS))]
    pairs = parameters_beside(comm, _model(comm), RIVALS[engine](_model(comm)), batches)
    worst = max(_error(computed, right) for computed, right in pairs)
    if worst > _Way.tolerance:
        raise _Wrong(f"parameters differ from {engine}'s by {worst:.1e}")
    return f"within {worst:.1e}"


# --- to disk and back ------------------------------------------------------------------------


def _save_and_load(comm: Comm, folder: Path) -> str:
    """Saved after one step, loaded after another: shards and optimizer state are the old ones."""
    model = _model(comm)
    sharded = shard(model, comm=comm)
    optimizer = optim.AdamW(sharded)
    everywhere = all(all_gather_object(comm, folder.is_dir(), "folder"))
    kind = "sharded" if everywhere else "full"

    def step(number: int) -> None:
        _sharded_step(sharded, [_batch(comm, number)], comm)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    sharded.save(folder / "step-1", optimizer, kind=kind)
    step(1)
    after = deepcopy(model.state_dict())
    sharded.load(folder / "step-1", optimizer)
    step(1)
    pairs = [(value, after[name]) for name, value in model.state_dict().items()]
    sharded.unshard()
    _same(pairs)
    return f"kind {kind}: a step after loading has the same bits as before"


# --- comparing -------------------------------------------------------------------------------


def _error(computed: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where one is nan."""
    one, other = computed.detach().double().cpu(), right.detach().double().cpu()
    scale = other.abs().max().item() or 1.0
    error = (one - other).abs().max().item() / scale
    return math.inf if math.isnan(error) else error  # max() would lose a nan


def _same(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for computed, right in pairs:
        if not torch.equal(computed.cpu(), right.cpu()):
            different = int((computed.cpu() != right.cpu()).sum())
            raise _Wrong(f"{different:,} of {right.numel():,} {right.dtype} elements differ")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(dtype_name, dtypes))


def _ways() -> Iterator[tuple[str, _Way]]:
    yield from ((name, _Way(name)) for name in reversed(STRATEGIES))
    yield "bf16", _Way(compute=torch.bfloat16, tolerance=0.03)
    yield "AdamW", _Way(adamw=True, tolerance=1e-4)
    yield "accumulation", _Way(accumulation=3)


CHECKS: dict[str, tuple[str, Callable[[Comm, Path], str]]] = {
    "all-gather": ("every rank's bytes", _gather),
    "broadcast": ("the root's values", _broadcast),
    "all-to-all": ("every rank's piece for this one", _exchange),
    "reduce-scatter": ("means within two roundings a rank", _sum),
    "dtypes": ("products within 64 roundings of fp64", _products),
    **{
        f"parity {name}": (f"one process within {way.tolerance:.0e}", partial(_parity, way=way))
        for name, way in _ways()
    },
    **{
        f"parity with {engine}": (
            f"its parameters within {_Way.tolerance:.0e}",
            partial(_beside, engine=engine),
        )
        for engine in RIVALS
    },
    "save and load": ("the same bits after a step", _save_and_load),
    # Last: a backend that refuses it may leave its group unusable.
    "average": ("no condition: sums are divided where AVG is wrong", _average),
}
"""By name, in the order in which they run: what is right, and a call that says what it found, or
raises."""
