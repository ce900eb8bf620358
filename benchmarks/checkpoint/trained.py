"""Two models with their optimizers, ours and FSDP2's: the same state, cut differently.

Units are the same for both: each block, and the rest with the root. Each is set up as its
documentation says; the fused AdamW is the fastest that each has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.checkpoint.state import KINDS, Part, Size, drawn, unlike
from benchmarks.training import Batch, next_token_loss
from shardwise.checkpoint.local_shards import param_shards

RATE = 1e-4

Bits = dict[tuple[str, str], Tensor]
"""(kind, name of the parameter) → this rank's part, flat."""

Places = Iterator[tuple[nn.Parameter, str, Tensor, int]]
"""Parameters with their names, this rank's part, and the first element of that."""


@dataclass
class TrainedModel:
    """A model that is trained, and the state that a checkpoint of it must bring back."""

    model: nn.Module  # as it is called
    optimizer: Optimizer  # its AdamW
    sharded: sw.Sharded | None  # ours, ``None`` for FSDP2
    places: Callable[[], Places]
    new_optimizer: Callable[[], Optimizer]  # another one, that has taken no step
    bucket: int  # bytes of the largest unit, whole

    def parts(self) -> list[Part]:
        """Everything that this rank holds; of a fresh optimizer nothing."""
        parts = []
        for param, name, value, start in self.places():
            parts.append(Part("param", name, start, value))
            state = self.optimizer.state.get(param, {})
            moments = ((kind, state[kind]) for kind in KINDS if kind in state)
            parts += [Part(kind, name, start, _local(moment)) for kind, moment in moments]
        return parts

    def fill(self) -> None:
        """Give it the state that everybody has. It must have taken a step."""
        for part in self.parts():
            values = drawn(part.kind, part.name, part.start, part.start + part.value.numel())
            part.value.copy_(values.view(part.value.shape))

    def copy(self) -> Bits:
        """The bits that it has now."""
        return {(part.kind, part.name): part.value.reshape(-1).clone() for part in self.parts()}

    def put(self, bits: Bits) -> None:
        """Give it bits that it had once."""
        for part in self.parts():
            part.value.view(-1).copy_(bits[part.kind, part.name])

    def renew(self) -> None:
        """As just built: no number of before is left, and the optimizer has taken no step."""
        for _, _, value, _ in self.places():
            value.fill_(float("nan"))
        self.optimizer = self.new_optimizer()

    @property
    def steps(self) -> set[float]:
        """What the optimizer has counted, of all parameters: one number, or something is wrong."""
        return {float(state["step"]) for state in self.optimizer.state.values()}

    def check(self, bits: Bits, steps: set[float], method: str) -> None:
        """Raises ``RuntimeError`` where its state is not these bits after so many steps."""
        wrong = unlike(self.parts(), bits)
        if self.steps != steps or len(steps) != 1:
            wrong.append(f"steps, {self.steps} instead of {steps}")
        if wrong:
            raise RuntimeError(
                f"{method} did not bring back what was saved: {len(wrong)} of {len(bits)} parts "
                f"differ, the first is {wrong[0]}, so there is nothing to compare."
            )

    def step(self, batch: Batch) -> None:
        """One step of training."""
        next_token_loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _local(value: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def ours(size: Size) -> TrainedModel:
    """``sw.shard`` and ``sw.optim.AdamW``, on this rank. A collective."""
    model = size.new_model()
    sharded = sw.shard(model)

    def places() -> Places:
        for shard in param_shards(sharded.buckets):
            yield shard.member.param, shard.member.name, shard.value.detach(), shard.start

    def new_optimizer() -> Optimizer:
        return sw.optim.AdamW(sharded, lr=RATE)

    largest = max(bucket.shard.nbytes for bucket in sharded.buckets) * dist.get_world_size()
    trained = TrainedModel(model, new_optimizer(), sharded, places, new_optimizer, largest)
    return _ready(trained, size)


def fsdp2(size: Size) -> TrainedModel:
    """``fully_shard`` of each block and the root, on this rank. A collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = size.new_model()
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def places() -> Places:
        for name, param in model.named_parameters():
            rows, rest = param.shape[0], param.shape[1:].numel()
            start = min(rows, rank * -(-rows // world)) * rest  # as torch.chunk cuts rows
            yield param, name, _local(param), start

    def new_optimizer() -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    return _ready(TrainedModel(model, new_optimizer(), None, places, new_optimizer, 0), size)


def _ready(trained: TrainedModel, size: Size) -> TrainedModel:
    """With one step taken, so that there are moments, and with everybody's state."""
    trained.step(size.batch(dist.get_rank()))
    trained.fill()
    return trained
