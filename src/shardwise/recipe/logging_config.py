"""``logging`` of a recipe: the trackers that get the run's numbers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shardwise.recipe.section import Section


class LoggingConfig(Section):
    """Trackers that get the run's numbers; metrics.jsonl is always written."""

    trackers: tuple[Literal["tensorboard", "trackio", "wandb", "mlflow"], ...] = Field(
        (), description="tensorboard, trackio, wandb, mlflow"
    )
    project: str = Field("shardwise", min_length=1, description="project, or experiment, of them")
    name: str | None = Field(None, description="of the run; null = the name of run.folder")
