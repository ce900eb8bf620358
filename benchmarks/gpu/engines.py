"""Both engines as the same two calls, compute and update, on rank 0 of a group without peers.

    full_shard, shard_grad_op   ours, over ``BackendComm``: the path that NCCL takes
    fsdp2, fsdp2_keep           ``fully_shard`` with and without reshard_after_forward
    plain                       bf16, whole, no communication and no optimizer: for scale

All compute in bf16 on fp32 shards, with torch's fused AdamW and the same units: those that
``sw.shard`` chooses by itself. The last unit stays gathered in fsdp2, as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.gpu.simulated import EchoStore, Link
from benchmarks.models import ON_GPU, Task
from benchmarks.training import Batch, Engine, apply_fsdp2, training
from shardwise.comm.transports.backend import BackendComm
from shardwise.plan.units.units import choose_units
from shardwise.train.decoder import Rotary

PLAIN = "plain"
RIVALS = {"full_shard": "fsdp2", "shard_grad_op": "fsdp2_keep"}
"""Each of ours, and the rival that holds the same at the same time."""
OPTIMIZERS = ("torch", "flat")
WIRES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "own": (None, torch.float32),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, None),
}
"""How gradients travel → ``reduce_dtype`` of ``sw.Precision`` and of FSDP2."""
SEED = 0
RATE = 3e-4


@dataclass(frozen=True)
class Setup:
    """What is the same for all engines of a run."""

    model: str  # a name in ``ON_GPU``
    world: int  # ranks of the group; one of them is here
    device: str  # ``"cuda"`` or ``"cpu"``
    link: Link  # how long collectives take
    # how gradients travel: a name in ``WIRES``. Under ``"own"`` each engine does as its users do:
    # fsdp2 sends and sums fp32, ours sends bf16 and sums fp32.
    wire: str = "own"
    optimizer: str = "torch"  # ``"flat"``: ours uses ``sw.optim.AdamW``

    @property
    def task(self) -> Task:
        return ON_GPU[self.model]

    @property
    def place(self) -> torch.device:
        return torch.device(self.device, 0) if self.device != "cpu" else torch.device("cpu")

    def new_model(self, device: torch.device | None = None) -> nn.Module:
        """The same values for every engine, in fp32, on the device.

        Its table of positions is in bf16, or each block would cast it once more, in an engine's
        account or in the model's, as the engine has it.
        """
        torch.manual_seed(SEED)
        with device or self.place:
            model = self.task.build()
        for module in model.modules():
            if isinstance(module, Rotary):
                module.bfloat16()
        return model

    def batch(self, seed: int) -> Batch:
        """A batch on the device."""
        batch = self.task.batch(torch.Generator().manual_seed(seed))
        return tuple(rows.to(self.place) for rows in batch)


def start(setup: Setup) -> None:
    """The fake process group of this process, once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if setup.device != "cpu":
        torch.cuda.set_device(setup.place)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.world)


def slice_numel(setup: Setup) -> int:
    """Elements of the largest unit that one rank owns: what a gather must cast."""
    units = choose_units(setup.new_model(torch.device("meta")))
    return max(unit.numel for unit in units) // setup.world


def _plain(setup: Setup) -> Engine:
    return training(setup.new_model().bfloat16(), setup.task.loss, None)


def _shardwise(strategy: str, setup: Setup) -> Engine:
    model, world = setup.new_model(), dist.group.WORLD
    assert world is not None  # `start` made it
    comm = BackendComm(world, setup.place, EchoStore(), has_average=False, timeout=600)
    precision = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=WIRES[setup.wire][0])
    sharded = sw.shard(model, strategy, comm=comm, precision=precision)
    flat = setup.optimizer == "flat"
    optimizer = sw.optim.AdamW(sharded, lr=RATE) if flat else _fused(model)
    return training(model, setup.task.loss, optimizer)


def _fsdp2(reshard: bool, setup: Setup) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = setup.new_model()
    mesh = init_device_mesh(setup.device, (setup.world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=WIRES[setup.wire][1])
    apply_fsdp2(model, reshard, mesh=mesh, mp_policy=policy)
    return training(model, setup.task.loss, _fused(model))


def _fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


ENGINES: dict[str, Callable[[Setup], Engine]] = {
    "full_shard": partial(_shardwise, "full_shard"),
    "fsdp2": partial(_fsdp2, True),
    "shard_grad_op": partial(_shardwise, "shard_grad_op"),
    "fsdp2_keep": partial(_fsdp2, False),
    PLAIN: _plain,
}
