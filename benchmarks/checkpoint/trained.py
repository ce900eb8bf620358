"""What is saved: two models with their optimizers, ours and FSDP2's, the same bits cut differently.

Every number follows from the name of its tensor and its place in it, so a rank makes just what it
holds. Units are the same for both: each block, and the rest with the root. Each is set up as its
documentation says; the fused AdamW is the fastest that each has.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.training import Batch, decoder_config, next_token_loss, token_batch
from shardwise.checkpoint.local_shards import param_shards
from shardwise.recipe.model_config import ModelConfig
from shardwise.train.decoder import Decoder

TOKENS = 32
BYTES = 12  # of a parameter with Adam's two moments, all float32
KINDS = {"param": 0.02, "exp_avg": 1e-3, "exp_avg_sq": 1e-5}  # and the largest value of each
RATE = 1e-4

Bits = dict[tuple[str, str], Tensor]
"""(kind, name of the parameter) → this rank's part of it."""
Places = Iterator[tuple[nn.Parameter, str, Tensor, int]]
"""Parameters with their names, this rank's part, and the first element of that."""


@dataclass(frozen=True)
class Size:
    """A decoder with about this much state."""

    gigabytes: float  # 10⁹ bytes of parameters and both moments

    @property
    def width(self) -> int:
        return 768 if self.gigabytes >= 0.4 else 64

    @property
    def vocabulary(self) -> int:
        return 8_192 if self.width > 64 else 512

    @property
    def config(self) -> ModelConfig:
        """A configuration with as many blocks as fit; their number is what varies."""
        block = 4 * self.width**2 + 3 * self.width * (self.width * 43 // 16)
        rest = self.gigabytes * 1e9 / BYTES - 2 * self.vocabulary * self.width
        return decoder_config(self.width, max(1, round(rest / block)))

    def new_model(self) -> Decoder:
        """The same on every rank."""
        torch.manual_seed(0)
        return Decoder(self.config, self.vocabulary, TOKENS)

    def batch(self, rank: int) -> Batch:
        """Inputs and targets, ``[1, TOKENS]`` int64."""
        return token_batch(torch.Generator().manual_seed(rank), self.vocabulary, 1, TOKENS)


@dataclass
class TrainedModel:
    """A model that is trained, and the state that a checkpoint of it must bring back."""

    model: nn.Module  # as it is called
    optimizer: Optimizer  # its AdamW
    sharded: sw.Sharded | None  # ours, ``None`` for FSDP2
    places: Callable[[], Places]
    new_optimizer: Callable[[], Optimizer]  # another one, that has taken no step
    bucket: int  # bytes of the largest unit, whole

    def parts(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Kind, name, first element and values of all that this rank holds."""
        for param, name, value, start in self.places():
            yield "param", name, start, value
            state = self.optimizer.state.get(param, {})  # none where it is fresh
            for kind in KINDS:
                if kind in state:
                    yield kind, name, start, _local(state[kind])

    def fill(self) -> None:
        """Give it the state that everybody has. It must have taken a step."""
        for kind, name, start, value in self.parts():
            value.copy_(drawn(kind, name, start, start + value.numel()).view(value.shape))

    def copy(self) -> Bits:
        """The bits that it has now."""
        return {(kind, name): value.clone() for kind, name, _, value in self.parts()}

    def put(self, bits: Bits) -> None:
        """Give it bits that it had once."""
        for kind, name, _, value in self.parts():
            value.copy_(bits[kind, name])

    def renew(self) -> None:
        """Make it as just built: no earlier number is left, and the optimizer has taken no step."""
        for _, _, value, _ in self.places():
            value.fill_(float("nan"))
        self.optimizer = self.new_optimizer()

    @property
    def steps(self) -> set[float]:
        """What the optimizer has counted, of all parameters: one number, or something is wrong."""
        return {float(state["step"]) for state in self.optimizer.state.values()}

    def check(self, bits: Bits, steps: set[float], method: str) -> None:
        """Raises ``RuntimeError`` where its state is not these bits after so many steps."""
        wrong = unlike({(kind, name): value for kind, name, _, value in self.parts()}, bits)
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


def drawn(kind: str, name: str, start: int, stop: int) -> Tensor:
    """Elements ``[start, stop)`` of a tensor, float32: 24 bits of each vary, and none is wild."""
    mixed = torch.arange(start, stop).mul_(2_654_435_761).add_(zlib.crc32(name.encode()))
    bits = mixed.bitwise_xor_(mixed >> 13).bitwise_and_(0xFFFFFF)
    return bits.to(torch.float32).mul_(KINDS[kind] / (1 << 24))


def unlike(values: Mapping[tuple[str, str], Tensor], expected: Bits) -> list[str]:
    """The parts that are not, bit for bit, what is expected; and what is not there at all."""
    return [
        f"{kind} of {name}"
        for (kind, name), value in expected.items()
        if (kind, name) not in values
        or not torch.equal(values[kind, name].view(torch.int32), value.view(torch.int32))
    ]


def _local(value: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def ours(size: Size) -> TrainedModel:
    """``sw.shard`` and ``sw.optim.AdamW``, on this rank. A collective."""
    model = size.new_model()
    sharded = sw.shard(model)

    def places() -> Places:
        for shard in param_shards(sharded):
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
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)

    def places() -> Places:
        for name, param in model.named_parameters():
            rows, rest = param.shape[0], param.shape[1:].numel()
            start = min(rows, rank * -(-rows // world)) * rest  # as torch.chunk cuts rows
            yield param, name, _local(param), start

    def new_optimizer() -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    return _ready(TrainedModel(model, new_optimizer(), None, places, new_optimizer, 0), size)


def _ready(trained: TrainedModel, size: Size) -> TrainedModel:
    """The model with one step taken, so that there are moments, and with everybody's state."""
    trained.step(size.batch(dist.get_rank()))
    trained.fill()
    return trained
