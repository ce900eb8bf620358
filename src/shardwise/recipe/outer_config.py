"""A recipe's section about other workers: the arguments of ``shardwise.DiLoCo``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from shardwise.errors import ConfigError
from shardwise.recipe.section import Positive, Section


class OuterConfig(Section):
    """Training with other workers over slow links; the same for all of them but ``worker``."""

    method: Literal["none", "diloco"] = Field(
        "none", description="diloco: workers train apart, and average every so many steps"
    )
    workers: tuple[str, ...] = Field((), description="HOST:PORT of rank 0 of each worker")
    worker: int | None = Field(
        None, ge=0, description="number of this worker; null = the environment's SHARDWISE_WORKER"
    )
    every: Positive = Field(500, description="local steps between two exchanges of a unit")
    delay: int | None = Field(
        None, ge=0, description="steps from sending to applying; null = an eighth of every"
    )
    outer_lr: float = Field(0.7, gt=0, description="of the outer SGD; 1 without momentum averages")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="of the outer SGD, Nesterov's")
    wire: Literal["float32", "float16", "int8"] = Field(
        "float16", description="dtype in which workers send how far they have moved"
    )
    patience: float = Field(10.0, gt=0, description="seconds of silence until a worker is lost")
    timeout: float = Field(600.0, gt=0, description="seconds to wait for the others at the start")

    @model_validator(mode="after")
    def _workers_are_named(self) -> Self:
        if (self.method == "diloco") != bool(self.workers):
            raise ConfigError(
                f"outer.method is {self.method} and outer.workers names {len(self.workers)}: "
                "name an address for each worker, such as [10.0.0.1:29600, 10.0.0.2:29600], with "
                "method: diloco, or neither."
            )
        return self
