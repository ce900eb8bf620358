"""One program in two forms: by one plain process, and by ranks that shard; and how they compare.

A program is a function of a ``Process``. The plain one runs each rank's rows in turn and averages
their losses, so both forms mean the same numbers, but for the order of sums.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.errors import ShardwiseError
from shardwise.torch_internals import tree_map_only

DIVERGED = 1e8  # a run is compared until a number is larger
ROWS = 12  # of a batch: as many for each of 1, 2, 3 and 4 ranks
CPU = torch.device("cpu")
Losses = Tensor | tuple[Tensor, ...]


def fill(net: nn.Module) -> nn.Module:
    """Give all values without a generator, of which threads have one together."""
    with torch.no_grad():
        for number, tensor in enumerate([*net.parameters(), *net.buffers()]):
            if tensor.is_floating_point() or tensor.is_complex():
                values = torch.linspace(0.3 + number, 7.0 + number, tensor.numel()).sin() * 0.4
                tensor.copy_(values.to(tensor.dtype).view(tensor.shape))
    return net


@dataclass
class Process:
    """What a program asks of the process that runs it.

    Attributes:
        parts: the ranks whose rows this process computes.
        world: number of ranks.
        comm: of a sharded run.
        seen: everything that is compared, in order.
        device: that of the model and of its batches.
    """

    parts: tuple[int, ...]
    world: int
    comm: Comm | None = None
    seen: list[Any] = field(default_factory=list)
    handles: dict[nn.Module, sw.Sharded] = field(default_factory=dict)
    folder: Path = Path()
    device: torch.device = CPU

    def shard(self, net: nn.Module, **options: Any) -> nn.Module:
        """Shard ``net`` in place, in a sharded run; move it to the device."""
        if self.comm is None:
            return net.to(self.device)
        self.handles[net] = sw.shard(net, comm=self.comm, **options)
        return net

    def batch(self, step: float, width: int) -> Tensor:
        """``[ROWS, width]`` in float64, the same on every rank."""
        values = (torch.arange(ROWS * width).double().reshape(ROWS, width) * 0.37 + step).cos()
        return values.to(self.device)

    def backward(self, losses: Callable[[Tensor], Losses], batch: Tensor) -> None:
        """Run the backward pass of each loss of each part of the batch; see the mean losses."""
        rows = batch.chunk(self.world)
        means: list[list[float]] = []
        for part in self.parts:
            several = losses(rows[part])
            each = several if isinstance(several, tuple) else (several,)
            for number, loss in enumerate(each, start=1):
                (loss / len(self.parts)).backward(retain_graph=number < len(each))
            means.append([float(loss.detach()) for loss in each])
        self.see("losses", torch.tensor(self._of_all(means)).double().mean(0))

    def forward(self, values: Callable[[Tensor], Tensor], batch: Tensor) -> None:
        """See what a forward pass without gradients gives for the whole batch."""
        rows = batch.chunk(self.world)
        with torch.no_grad():
            outputs = [values(rows[part]).tolist() for part in self.parts]
        self.see("outputs", torch.tensor(self._of_all(outputs)))

    def _of_all(self, values: list[Any]) -> list[Any]:
        if self.comm is None:
            return values
        return [one for each in all_gather_object(self.comm, values, "values") for one in each]

    def see(self, what: str, value: Any) -> None:
        self.seen.append((what, tree_map_only(Tensor, Tensor.cpu, value)))

    def see_weights(self, net: nn.Module) -> None:
        self.see("weights", {name: value.clone() for name, value in net.state_dict().items()})

    def see_gradients(self, net: nn.Module) -> None:
        """See whole gradients, by name."""
        with self.handles[net].full_params() if net in self.handles else nullcontext():
            gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
            self.see("gradients", {name: grad.detach().clone() for name, grad in gradients.items()})

    def see_state(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See the optimizer's whole state, by the parameter's name and the key."""
        if net in self.handles:
            state = self.handles[net].optimizer_state_dict(optimizer)["state"]
        else:
            names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
            state = {names[param]: values for param, values in optimizer.state.items()}
        flat = {f"{n}.{key}": v for n, values in state.items() for key, v in values.items()}
        self.see("state", {key: torch.as_tensor(value).clone() for key, value in flat.items()})

    def accumulate(self, net: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return self.handles[net].accumulate(last=last) if net in self.handles else nullcontext()

    def clip(self, net: nn.Module, norm: float) -> None:
        """Clip the gradients; see their norm."""
        if net in self.handles:
            value = self.handles[net].clip_grad_norm_(norm)
        else:
            value = nn.utils.clip_grad_norm_(net.parameters(), norm)
        self.see("norm", torch.as_tensor(value).detach().clone())

    def relayout(self, net: nn.Module) -> None:
        """Shard the model again, which drops gradients."""
        if net in self.handles:
            # Ranks that are threads share torch's dict of hooks: none may be in a step.
            self._of_all([None])
            self.handles[net].relayout()
        net.zero_grad()

    def save_and_load(self, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Save, spoil the weights, and load; a plain run has lost nothing."""
        if net not in self.handles:
            return
        path = self.folder / f"step-{step}"
        self.handles[net].save(path, optimizer)
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.5)
        self.handles[net].load(path, optimizer)


Program = Callable[[Process], None]


def plain(program: Program, world: int) -> list[Any]:
    """Everything that one plain process sees."""
    process = Process(tuple(range(world)), world)
    program(process)
    return process.seen


def on_threads(program: Program, world: int) -> list[list[Any]]:
    """What each of ``world`` ranks sees."""
    with tempfile.TemporaryDirectory() as folder:

        def run(comm: Comm) -> list[Any]:
            process = Process((comm.rank,), world, comm, folder=Path(folder))
            program(process)
            return process.seen

        return threads.run(world, run)


@dataclass(frozen=True)
class Verdict:
    """``equal``, ``refused``, ``wrong`` or ``crashed``, and why; ``impossible`` is so in torch."""

    word: str
    why: str = ""


def verdict(
    program: Program,
    world: int,
    tolerance: float,
    on_ranks: Callable[[int], list[list[Any]]] | None = None,
) -> Verdict:
    """Compare the program's two forms.

    Args:
        tolerance: of a number, relative to the largest of its tensor.
        on_ranks: what each of so many ranks sees; by default they are threads.
    """
    try:
        expected = plain(program, world)
    except Exception as error:  # noqa: BLE001 - a second derivative that torch has not, and the like
        return Verdict("impossible", f"{type(error).__name__}: {error}")
    try:
        first, *others = on_ranks(world) if on_ranks else on_threads(program, world)
    except ShardwiseError as error:
        return Verdict("refused", str(error))
    except Exception as error:  # noqa: BLE001 - anything else is what this is looking for
        return Verdict("crashed", f"{type(error).__name__}: {error}")
    for other in others:
        if (what := difference(first, other, 0.0)) is not None:
            return Verdict("wrong", f"ranks differ: {what}")
    message = difference(expected, first, tolerance)
    return Verdict("equal") if message is None else Verdict("wrong", message)


def difference(expected: list[Any], got: list[Any], tolerance: float) -> str | None:
    """The first thing that differs."""
    for number, ((what, left), (_, right)) in enumerate(zip(expected, got, strict=True)):
        pairs = _pairs(left, right)
        if pairs is None:
            return f"{what} {number}: names {sorted(left)} and {sorted(right)}"
        for name, one, other in pairs:
            if one.numel() and one.abs().max() > DIVERGED:
                return None  # rounding grows with it
            if not _equal(one, other, tolerance):
                return f"{what} {number} {name}: {one.flatten()[:4]} and {other.flatten()[:4]}"
    return None


def _pairs(left: Any, right: Any) -> Iterator[tuple[str, Tensor, Tensor]] | None:
    if isinstance(left, Tensor):
        return iter([("", left, right)])
    if left.keys() != right.keys():
        return None
    return ((name, left[name], right[name]) for name in left)


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.numel():
        return True
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    largest = one.abs().nan_to_num().max().item()
    close = torch.isclose(one, other, rtol=0.0, atol=tolerance * max(largest, 1e-3), equal_nan=True)
    return bool(close.all())
