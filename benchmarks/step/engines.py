"""Every engine as the same two calls: compute (forward and backward) and update.

Each is set up as its own documentation sets it up, with the same units for all that have units:
those that ``sw.shard`` chooses by itself (each block, the embedding, the head with the last
norm). Where a rival's best-known user does better than its defaults, that is used:

    fsdp2        the last unit stays gathered between forward and backward, as in torchtitan
    ddp          gradient_as_bucket_view: no second copy of the gradients
    deepspeed_*  in processes of their own, beside a plain step of their own: it replaces
                 functions of torch when it is imported
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from benchmarks.models import ON_CPU, Task
from benchmarks.programs import PROGRAMS
from benchmarks.training import Batch, Engine, apply_fsdp2, trained, training, unit_modules
from shardwise.comm.machine.connect import over

PLAIN = "plain"
SEED = 0
ADAMW: dict[str, Any] = {"lr": 3e-4, "eps": 1e-6}  # that eps keeps rounding from being amplified


@dataclass(frozen=True)
class Setup:
    """What is the same for all engines of a run."""

    model: str  # a name in ``ON_CPU`` or ``PROGRAMS``
    # "adamw" is torch's fused kernel, and ``sw.optim`` for ours; "torch" and "sgd" torch's loop
    optimizer: str = "adamw"

    @property
    def task(self) -> Task:
        return (ON_CPU | PROGRAMS)[self.model]

    def new_model(self) -> nn.Module:
        """The same values for every engine and rank."""
        torch.manual_seed(SEED)
        return self.task.build()


def optimizer_for(params: Iterable[nn.Parameter], name: str) -> Optimizer:
    """Torch's."""
    if name != "sgd":
        return torch.optim.AdamW(params, fused=name == "adamw" or None, **ADAMW)
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def _by_torch(setup: Setup, model: nn.Module) -> Engine:
    return training(model, setup.task.loss, optimizer_for(trained(model), setup.optimizer))


# ---- the engines ---------------------------------------------------------------------------


def _plain(setup: Setup) -> Engine:
    """No communication: each rank trains alone."""
    return _by_torch(setup, setup.new_model())


def _shardwise(
    strategy: str, setup: Setup, transport: str = "messages", compiles: bool | str = False
) -> Engine:
    model = setup.new_model()
    comm = over(dist.group.WORLD, transport=transport)
    sharded = sw.shard(model, strategy=strategy, comm=comm, compile=compiles)
    flat = setup.optimizer == "adamw"
    optimizer = (
        sw.optim.AdamW(sharded, **ADAMW) if flat else optimizer_for(trained(model), setup.optimizer)
    )
    return training(model, setup.task.loss, optimizer, comm.counters)


def _fsdp2(reshard: bool, setup: Setup, compiles: bool = False) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh

    model = setup.new_model()
    for module in (part for parts in unit_modules(model) if compiles for part in parts):
        module.compile()
    apply_fsdp2(model, reshard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return _by_torch(setup, model)


def _fsdp1(setup: Setup) -> Engine:
    """FULL_SHARD. It wraps modules, not groups of them: the last norm stays with the root."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    model = setup.new_model()
    largest = {max(group, key=_numel) for group in unit_modules(model)}
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in largest),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return _by_torch(setup, wrapped)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _ddp(setup: Setup) -> Engine:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(setup.new_model(), gradient_as_bucket_view=True)
    return _by_torch(setup, model)


def _deepspeed(stage: int, setup: Setup) -> Engine:
    import deepspeed

    model = setup.new_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_for(trained(model), setup.optimizer),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # its default is a norm of 1, and nobody else clips
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def compute(batch: Batch) -> Tensor:
        loss = setup.task.loss(engine, batch)
        engine.backward(loss)
        return loss.detach()

    return Engine(compute, engine.step)


ENGINES: dict[str, Callable[[Setup], Engine]] = {
    PLAIN: _plain,
    "no_shard": partial(_shardwise, "no_shard"),
    "zero1": partial(_shardwise, "zero1"),
    "shard_grad_op": partial(_shardwise, "shard_grad_op"),
    "full_shard": partial(_shardwise, "full_shard"),
    "full_shard_inductor": partial(_shardwise, "full_shard", compiles="inductor"),
    "no_shard_memory": partial(_shardwise, "no_shard", transport="memory"),
    "zero1_memory": partial(_shardwise, "zero1", transport="memory"),
    "shard_grad_op_memory": partial(_shardwise, "shard_grad_op", transport="memory"),
    "full_shard_memory": partial(_shardwise, "full_shard", transport="memory"),
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": partial(_fsdp2, True),
    "fsdp2_inductor": partial(_fsdp2, True, compiles=True),
    "fsdp2_keep": partial(_fsdp2, False),
    "deepspeed_zero2": partial(_deepspeed, 2),
    "deepspeed_zero3": partial(_deepspeed, 3),
}

#: Run when they are named: those that compile for seconds, and those of the part "programs".
WHEN_NAMED = ("full_shard_inductor", "fsdp2_inductor", "no_shard_memory", "zero1_memory")


def absent(name: str) -> str:
    """Why an engine cannot be run here, ``""`` if it can."""
    package = name.partition("_")[0]
    if package != "deepspeed" or find_spec(package) is not None:
        return ""
    return f"{package} is not installed: pip install -c constraints.txt -e '.[bench]'"
