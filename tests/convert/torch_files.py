"""What torch itself writes and reads: FSDP2 and FSDP1 on two gloo processes, and plain torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.optim import Optimizer

from tests.ranks import gloo_group

WholeState = tuple[dict[str, Tensor], dict[str, Any]]


class Net(nn.Module):
    """Rows that two ranks cannot share out evenly, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))


def steps(model: nn.Module, optimizer: Optimizer, count: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        model(torch.randn(6, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: Optimizer) -> WholeState:
    """Whole tensors, as torch gathers them."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states: Any
    states, optim = get_state_dict(model, optimizer, options=options)
    return states, optim


def fsdp2(world: int) -> tuple[nn.Module, Optimizer]:
    model = net()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def fsdp_saves(rank: int, world: int, folder: str, run: str) -> WholeState:
    """All that FSDP2 and FSDP1 may leave on a disk after the same two steps; what FSDP2 says."""
    with gloo_group(rank, world, folder):
        fsdp1_saves(rank, run)
        return fsdp2_saves(world, run)


def fsdp2_saves(world: int, run: str) -> WholeState:
    """A DCP folder of model, optimizer and step; one more with the optimizer flattened."""
    model, optimizer = fsdp2(world)
    steps(model, optimizer)
    states, optim = get_state_dict(model, optimizer)
    dcp_save({"model": states, "optimizer": optim, "step": 2}, checkpoint_id=f"{run}/dcp")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    dcp_save({"model": states, "optim": flat}, checkpoint_id=f"{run}/flat")
    return whole_state(model, optimizer)


def fsdp2_loads(rank: int, world: int, folder: str, run: str) -> WholeState:
    """A fresh model and optimizer, filled from a DCP folder."""
    with gloo_group(rank, world, folder):
        model, _ = fsdp2(world)
        optimizer = torch.optim.AdamW(model.named_parameters())  # which asks for the names, too
        steps(model, optimizer, 1)  # other values, and state to be filled
        states, optim = get_state_dict(model, optimizer)
        state = {"model": states, "optimizer": optim, "step": 0}
        dcp_load(state, checkpoint_id=f"{run}/dcp")
        assert state["step"] == 2
        set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=optim)
        return whole_state(model, optimizer)


def fsdp1_saves(rank: int, run: str) -> None:
    """Full state dicts, pickled by rank 0: in one file, and in two."""
    kind = StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = adamw(model)
        steps(model, optimizer)
        # offload_to_cpu=True makes torch 2.13 crash where everything is on the CPU already
        how = (FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False))
        with FullyShardedDataParallel.state_dict_type(model, kind, *how):
            states = model.state_dict()
            optim = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": states, "optim": optim, "epoch": 1}, f"{run}/both.pt")
        torch.save(states, f"{run}/pytorch_model_fsdp.bin")
        torch.save(optim, f"{run}/optimizer.bin")


def ddp_saves(path: Path, *, numbered: bool) -> WholeState:
    """What a script of DDP saves: prefixed names, and an optimizer that numbers parameters."""
    model = net()
    optimizer = adamw(model)
    steps(model, optimizer)
    states = {f"module.{name}": value for name, value in model.state_dict().items()}
    optim = optimizer.state_dict() if numbered else whole_state(model, optimizer)[1]
    torch.save({"state_dict": states, "optimizer": optim, "global_step": 2}, path)
    return whole_state(model, optimizer)
