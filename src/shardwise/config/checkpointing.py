"""Activation checkpointing: the units that are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked

NamedUnits = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Units by their classes, class names, or patterns of their names as ``fnmatch`` reads them."""


@checked
@dataclass(frozen=True)
class ActivationCheckpointing:
    """Units that are recomputed in the backward pass, instead of keeping their activations.

    Attributes:
        units: classes, class names, or patterns of units' names as ``fnmatch`` reads them
            (``"layers.1?"``); none = the units of each class that occurs more than once.
        every: of these units every n-th: with 2 the second, the fourth …
        offload: keep the inputs of these units in host memory until they are recomputed, pinned
            if the device can (``torch.autograd.graph.save_on_cpu``). On CPU they are copies.

    Raises:
        ConfigError: ``every`` is below 1; when applied to a model: a pattern matches no unit.
    """

    units: NamedUnits = ()
    every: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                f"every is {self.every}, so no unit would be recomputed. Pass 1 for all of them, "
                "or activation_checkpointing=False for none."
            )
