"""Both engines as the same two calls, compute and update, on rank 0 of a group without peers.

    full_shard, shard_grad_op   ours, over ``BackendComm``: the path that NCCL takes
    fsdp2, fsdp2_keep           ``fully_shard`` with and without reshard_after_forward
    plain                       bf16, whole, no communication and no optimizer: for scale

All compute in bf16 on fp32 shards, with torch's fused AdamW and the same units: those that
``sw.shard`` chooses by itself. The last unit stays gathered in fsdp2, as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.gpu.models import Batch, Shape, build, loss_of
from benchmarks.gpu.peers import Echo, Link
from shardwise.comm.backend import BackendComm
from shardwise.units import choose_units

__all__ = ["ENGINES", "OPTIMIZERS", "PLAIN", "RIVALS", "WIRES", "Engine", "Setup", "start"]

PLAIN = "plain"
RIVALS = {"full_shard": "fsdp2", "shard_grad_op": "fsdp2_keep"}
"""Each of ours, and the rival that holds the same at the same time."""

OPTIMIZERS = ("torch", "flat")
WIRES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "own": (None, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, None),
}
"""How gradients travel → the dtype for ``sw.Precision(wire=)`` and for FSDP2's reduce_dtype."""

SEED = 0
RATE = 3e-4


@dataclass(frozen=True)
class Engine:
    """A model that is ready to train.

    Attributes:
        compute: forward and backward on a batch; the detached loss, 0-dim.
        update: the optimizer's step, and no gradients afterwards.
        slice_numel: elements of the largest unit that one rank owns: what a gather must cast.
    """

    compute: Callable[[Batch], Tensor]
    update: Callable[[], None]
    slice_numel: int


@dataclass(frozen=True)
class Setup:
    """What is the same for all engines of a run.

    Attributes:
        model: a name in ``SHAPES``.
        shape: that shape, or one with other layers or tokens.
        world: ranks of the group; one of them is here.
        device: ``"cuda"`` or ``"cpu"``.
        link: how long collectives take.
        wire: how gradients travel: a name in ``WIRES``. Under ``"own"`` each engine does as its
            users do: fsdp2 sends and sums fp32, ours sends bf16 and sums fp32.
        optimizer: ``"torch"``: ``torch.optim.AdamW(fused=True)`` for every engine; ``"flat"``:
            ``sw.optim.AdamW`` for ours.
    """

    model: str
    shape: Shape
    world: int
    device: str
    link: Link
    wire: str = "own"
    optimizer: str = "torch"

    @property
    def place(self) -> torch.device:
        return torch.device(self.device, 0) if self.device != "cpu" else torch.device("cpu")

    def new_model(self) -> nn.Module:
        """The same values for every engine, in fp32, on the device."""
        torch.manual_seed(SEED)
        with self.place:
            return build(self.shape)


def start(setup: Setup) -> None:
    """The fake process group of this process, once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if setup.device != "cpu":
        torch.cuda.set_device(setup.place)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.world)


def _training(
    setup: Setup, model: nn.Module, optimizer: Optimizer | None, slice_numel: int
) -> Engine:
    loss_function = loss_of(setup.shape)

    def compute(batch: Batch) -> Tensor:
        loss = loss_function(model, batch)
        loss.backward()
        return loss.detach()

    def update() -> None:
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    return Engine(compute, update, slice_numel)


def _largest_slice(setup: Setup, model: nn.Module) -> int:
    return max(unit.numel for unit in choose_units(model)) // setup.world


def _plain(setup: Setup) -> Engine:
    model = setup.new_model().bfloat16()
    return _training(setup, model, None, _largest_slice(setup, model))


def _ours(strategy: str, setup: Setup) -> Engine:
    model, world = setup.new_model(), dist.group.WORLD
    assert world is not None  # `start` made it
    slice_numel = _largest_slice(setup, model)
    comm = BackendComm(world, setup.place, Echo(), averages=False, timeout=600)
    precision = sw.Precision(compute=torch.bfloat16, wire=WIRES[setup.wire][0])
    sharded = sw.shard(model, strategy, comm=comm, precision=precision)
    flat = setup.optimizer == "flat"
    optimizer = sw.optim.AdamW(sharded, lr=RATE) if flat else _fused(model.parameters())
    return _training(setup, model, optimizer, slice_numel)


def _fsdp2(reshard: bool, setup: Setup) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = setup.new_model()
    slice_numel = _largest_slice(setup, model)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(setup.device, (setup.world,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=WIRES[setup.wire][1]),
    }
    units = [unit.modules for unit in choose_units(model) if model not in unit.modules]
    for modules in units:
        frees = reshard and modules is not units[-1]
        fully_shard(list(modules), reshard_after_forward=frees, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return _training(setup, model, _fused(model.parameters()), slice_numel)


def _fused(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=RATE, fused=True)


ENGINES: dict[str, Callable[[Setup], Engine]] = {
    "full_shard": partial(_ours, "full_shard"),
    "fsdp2": partial(_fsdp2, True),
    "shard_grad_op": partial(_ours, "shard_grad_op"),
    "fsdp2_keep": partial(_fsdp2, False),
    PLAIN: _plain,
}
