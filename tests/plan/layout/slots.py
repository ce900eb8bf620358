"""Slots of parameters of given shapes, and worlds to lay them out over."""

from __future__ import annotations

from shardwise.plan.layout.layout import Slot

Shape = tuple[int, ...]
WORLDS = (3, 5, 7, 8, 64)


def specs(*shapes: Shape) -> list[Slot]:
    return [Slot(f"p{index}", shape) for index, shape in enumerate(shapes)]
