"""One program for three engines: what differs between them is a method here.

``Plain`` is the truth: one process that plays both ranks in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.machine.connect import over


class Plain:
    """Both ranks in one process. ``ranks``: those whose batches it computes."""

    ranks: Sequence[int] = (0, 1)

    def __init__(self, folder: str) -> None:
        self.folder = folder  # shared by all ranks

    def shard(self, model: nn.Module, units: Sequence[str] = (), **options: Any) -> nn.Module:
        """``units``: names of modules, instead of blocks. ``options``: of ``sw.shard`` alone."""
        return model

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """A micro-batch, whose gradients are reduced if it is the ``last``."""
        return nullcontext()

    def full_params(self, model: nn.Module) -> AbstractContextManager[None]:
        """Whole parameters, which may be written."""
        return nullcontext()

    def forward_method(self, model: nn.Module, name: str) -> None:
        """A method other than ``forward`` may be called from outside."""

    def muon(self, model: nn.Module) -> Optimizer:
        """Muon for a model that has matrices only, and no head."""
        return torch.optim.Muon(model.parameters(), lr=0.05)

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def save(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._saved = (self.whole(model), copy.deepcopy(optimizer.state_dict()))

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.load_state_dict(self._saved[0])
        optimizer.load_state_dict(self._saved[1])

    def load_whole(self, model: nn.Module, states: dict[str, Tensor]) -> None:
        model.to_empty(device="cpu").load_state_dict(states)


class FSDP2:
    """PyTorch's ``fully_shard``, as its tutorials use it."""

    def __init__(self, rank: int, folder: str, timeout: float) -> None:
        self.folder, self.ranks = folder, (rank,)
        _set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)

    def shard(self, model: nn.Module, units: Sequence[str] = (), **options: Any) -> nn.Module:
        """Each unit, then the model, as PyTorch's tutorial does."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        known = {key: options[key] for key in ("offload_policy",) if key in options}
        mesh = init_device_mesh("cpu", (2,))
        names = units or [f"blocks.{n}" for n in range(len(model.get_submodule("blocks")))]  # type: ignore[arg-type]
        for module in [*map(model.get_submodule, names), model]:
            fully_shard(module, mesh=mesh, **known)
        return model

    @contextmanager
    def accumulate(self, model: Any, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    @contextmanager
    def full_params(self, model: nn.Module) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.unshard()
        yield
        for unit in units:
            unit.reshard()

    def muon(self, model: nn.Module) -> Optimizer:
        return torch.optim.Muon(model.parameters(), lr=0.05)

    def forward_method(self, model: nn.Module, name: str) -> None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, name)

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return dict(whole)

    def save(self, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._states(model, optimizer), checkpoint_id=self.folder)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        states = self._states(model, optimizer)
        load(states, checkpoint_id=self.folder)
        set_state_dict(model, optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])

    def load_whole(self, model: nn.Module, states: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model.to_empty(device="cpu"), {**states}, options=options)

    def _states(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip("mo", get_state_dict(model, optimizer), strict=True))


class Shardwise:
    """This library, over gloo messages."""

    handle: sw.Sharded

    def __init__(self, rank: int, folder: str, timeout: float) -> None:
        self.folder, self.ranks = folder, (rank,)
        self.comm = over(dist.group.WORLD, timeout=timeout, transport="messages")

    def shard(self, model: nn.Module, units: Sequence[str] = (), **options: Any) -> nn.Module:
        if options.pop("offload_policy", None):
            options["offload"] = "everything"
        # Units as small as these would be one: they stand for large ones.
        wrap = sw.wrap.by_hand(*units) if units else sw.wrap.automatic(joined_nbytes=0)
        self.handle = sw.shard(model, wrap=wrap, comm=self.comm, **options)
        return model

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        return self.handle.accumulate(last)

    def full_params(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.handle.full_params(writeback=True)

    def muon(self, model: nn.Module) -> Optimizer:
        groups = [{"params": [*model.parameters()], "algorithm": "muon"}]
        return sw.optim.Muon(self.handle, groups, lr=0.05)

    def forward_method(self, model: nn.Module, name: str) -> None:
        self.handle.register_forward_method(model, name)

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.state_dict())

    def save(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.handle.save(f"{self.folder}/step-1", optimizer)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.handle.load(f"{self.folder}/step-1", optimizer)

    def load_whole(self, model: nn.Module, states: dict[str, Tensor]) -> None:
        self.handle.load_state_dict(states)


Engine = Plain | FSDP2 | Shardwise
