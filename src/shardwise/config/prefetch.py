"""Number of units gathered ahead of their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked


@checked
@dataclass(frozen=True)
class Prefetch:
    """The bytes that are gathered ahead, and the moment, in both passes.

    Attributes:
        forward: bytes gathered ahead in the forward pass; 0 = off. ``None`` = the largest unit, or
            all units where gathered parameters keep their memory (zero1).
        backward: the same in the backward pass.
        when: ``"pre"``: the next gather is issued before this unit's gradients are computed
            (BACKWARD_PRE); ``"post"``: after, before its reduce (BACKWARD_POST).
        limit: gathers in flight at most (``limit_all_gathers``); ``None`` = no limit.
    """

    forward: int | None = None
    backward: int | None = None
    when: Literal["pre", "post"] = "pre"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"prefetch.limit is {self.limit}; at least 1 gather must be in flight."
            )
