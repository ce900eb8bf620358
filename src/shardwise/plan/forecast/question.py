"""A training run that is asked about: what no candidate chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm.grid import Grid
from shardwise.config.precision import Dtypes, Precision
from shardwise.errors import ConfigError
from shardwise.plan.forecast.candidate import Candidate
from shardwise.plan.forecast.machine import Machine
from shardwise.plan.forecast.observe import Loss, loss_of
from shardwise.plan.forecast.passes import Passes, passes_of

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Question:
    """A training run that is asked about.

    Attributes:
        model: on the meta device.
        inputs: rows of a micro-batch → arguments of the model's forward.
        machine: of the ranks.
        ranks: how many there are.
        rows: of a step, over all ranks; ``None``: one micro-batch of each rank.
        optimizer: its name; see ``memory.OPTIMIZERS`` and ``memory.AVERAGED``.
        arguments: of ``shard()`` that no candidate chooses, such as ``wrap`` and ``precision``.
        loss: of what the model returns.
        shared: ranks of one host map one full bucket, as they can on a CPU.
        each: gradients are reduced in each micro-batch, and not once in a step.
    """

    model: nn.Module
    inputs: Callable[[int], Inputs]
    machine: Machine
    ranks: int
    rows: int | None = None
    optimizer: str = "adamw"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss = loss_of
    shared: bool = False
    each: bool = False

    @property
    def precision(self) -> Precision:
        """Return the argument of ``shard()``."""
        precision: Precision = self.arguments.get("precision", Precision())
        return precision

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of what is trained, if no candidate says others."""
        trained = (param.dtype for param in self.model.parameters() if param.requires_grad)
        return self.precision.of(next(trained, torch.float32), trainable=True)

    @property
    def gathered(self) -> int:
        """Bytes of all parameters, at least, on a rank that has gathered them."""
        itemsize = self.dtypes.param.itemsize
        whole = sum(p.numel() * min(itemsize, p.itemsize) for p in self.model.parameters())
        return whole // min(self.ranks, self.machine.per_host) if self.shared else whole

    def sharing(self, grid: Grid) -> Grid:
        """Return ``grid``, of which the axes within a host share memory, if ranks do."""
        most = self.machine.per_host if self.shared else 0
        shard = grid.shard._replace(shared=1 < grid.shard.size <= most)
        copies = grid.replicate._replace(shared=grid.replicate.size > 1 and self.ranks <= most)
        return Grid(shard, copies)

    def micro_batches(self, candidate: Candidate) -> int:
        """Micro-batches of a step on each rank."""
        return 1 if self.rows is None else self.rows // (candidate.micro_batch * self.ranks)

    def passes(self, candidate: Candidate) -> list[Passes]:
        """The passes of a step on each rank."""
        return passes_of(self.micro_batches(candidate), self.each)

    def rows_of(self, candidate: Candidate) -> int:
        """Return the rows for which its step is compared with others': of as many, one."""
        return candidate.micro_batch if self.rows is None else 1

    def check(self, candidate: Candidate) -> None:
        """Raises ``ConfigError`` if the rows of a step cannot be split so."""
        at_a_time = candidate.micro_batch * self.ranks
        if self.rows is not None and (self.rows < at_a_time or self.rows % at_a_time):
            raise ConfigError(
                f"{self.rows:,} rows in a step cannot be split into micro-batches of "
                f"{candidate.micro_batch:,} on each of {self.ranks:,} ranks. Choose a multiple of "
                f"{at_a_time:,}, such as {max(1, round(self.rows / at_a_time)) * at_a_time:,}."
            )
