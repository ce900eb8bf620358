"""Small training runs in all modes of the engine, and the same on the CPU without lateness."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import local
from tests.elsewhere import backward_elsewhere, nodes_ahead
from tests.fake import FakeComm
from tests.nets import Batch, Decoder, decoder_batch, loss
from tests.recorder.clocks import DEVICE
from tests.recorder.collectives import late_comm
from tests.recorder.device import Device

__all__ = ["Program", "plainly", "recorded"]


class Net(Decoder):
    """A decoder whose blocks are checkpointed from outside, and one of which may raise."""

    def __init__(self, recomputes: str, tied: bool) -> None:
        super().__init__(tied=tied)
        self.recomputes, self.raises = recomputes, ""
        self.scale = nn.Parameter(torch.ones(16))  # the root's own, used between the blocks

    def forward(self, ids: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids) * self.scale + shift
        for number, block in enumerate(self.blocks):
            if self.recomputes and torch.is_grad_enabled():
                reentrant = self.recomputes == "reentrant"
                x = checkpoint(
                    block, x * self.scale, use_reentrant=reentrant, preserve_rng_state=False
                )
            else:
                x = block(x)
            if number == 1 and self.raises == "forward":
                raise KeyError
            if number == 1 and self.raises == "backward":
                x.register_hook(_raise)
        out: Tensor = self.lm_head(self.norm(x * self.scale))
        return out


def _raise(_: Tensor) -> None:
    raise KeyError


def batch(seed: int) -> Batch:
    """Tokens, a number that has a gradient and is no leaf, and the tokens that follow."""
    ids, following = decoder_batch(seed, 2)
    ids, following = ids.to(DEVICE), following.to(DEVICE)
    return ids, torch.zeros(1, device=DEVICE, requires_grad=True) * 1.0, following


@dataclass(frozen=True)
class Program:
    """A training run."""

    strategy: str = "full_shard"
    options: dict[str, Any] = field(default_factory=dict)
    recomputes: str = ""
    tied: bool = True
    micro: int = 2
    evaluates: bool = True
    raises: str = ""  # "forward" or "backward": a pass before each step stops half-way
    flat: bool = False
    ahead: int = 0
    steps: int = 2

    @property
    def world(self) -> int:
        return prod(self.options.get("mesh", (2,)))

    def run(self, comm: Comm) -> dict[str, Tensor]:
        """Losses, and this rank's parameters at the end."""
        torch.manual_seed(0)
        model = Net(self.recomputes, self.tied)
        sharded = sw.shard(model, self.strategy, comm=comm, **self.options)
        optimizer: Any = (
            sw.optim.AdamW(sharded, lr=0.01, max_norm=0.4)
            if self.flat
            else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        results = {}
        for step in range(self.steps):
            if self.raises:
                self._stop(model, step)
            results[f"loss {step}"] = self._step(sharded, model, step)
            if not self.flat:
                sharded.clip_grad_norm_(0.4)
            optimizer.step()
            optimizer.zero_grad()
            if self.evaluates:
                with torch.no_grad():
                    results[f"evaluation {step}"] = loss(model, batch(9)).clone()
        for name, param in model.named_parameters():
            results[name] = local(param.detach()).clone()
        return results

    def _step(self, sharded: sw.Sharded, model: nn.Module, step: int) -> Tensor:
        for micro in range(self.micro):
            with sharded.accumulate(last=micro == self.micro - 1):
                nodes_ahead(self.ahead)
                value = loss(model, batch(10 * step + micro))
                value.backward()
        return value.detach().clone()

    def _stop(self, model: Net, step: int) -> None:
        model.raises = self.raises
        with suppress(KeyError):
            loss(model, batch(step)).backward()
        model.raises = ""


def plainly(program: Program) -> dict[str, Tensor]:
    """Everything at once, in one thread; every peer has what this rank has."""
    with Device(is_late=False).installed():
        return program.run(FakeComm(0, program.world, DEVICE))


def recorded(program: Program, own_stream: bool = False) -> tuple[dict[str, Tensor], Device]:
    """Run as if on a device, backward passes in a thread of their own."""
    device = Device(own_stream)
    with (
        device.installed(),
        backward_elsewhere(device.modes),
        late_comm(device, program.world) as comm,
    ):
        results = program.run(comm)
    return results, device
