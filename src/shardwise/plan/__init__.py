"""The plan of a model's step, as values: units, layout, schedule, buckets on paper, bytes.

``sw.plan(model, "8xH100", inputs)`` asks what fits and how fast it is: ``forecast.ask.plan``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Plan(ModuleType):
    """This package, which can be called: a function of its name would hide it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from shardwise.plan.forecast.ask import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _Plan
