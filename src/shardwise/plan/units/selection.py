"""Units that a policy names: by their classes, or by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from shardwise.config.checkpointing import ActivationCheckpointing, NamedUnits
from shardwise.errors import ConfigError, nearest
from shardwise.plan.units.units import Unit


def select(option: str, given: NamedUnits, units: Sequence[Unit]) -> list[Unit]:
    """The ``units`` that are ``given`` to an option, or a ``ConfigError`` for what fits none."""
    listed = (given,) if isinstance(given, str | type) else given
    patterns = [one if isinstance(one, str) else one.__name__ for one in listed]
    for pattern in patterns:
        if not any(_matches(unit, pattern) for unit in units):
            raise _no_such_unit(option, pattern, units)
    return [unit for unit in units if any(_matches(unit, pattern) for pattern in patterns)]


def checkpointed(policy: ActivationCheckpointing, units: Sequence[Unit]) -> list[nn.Module]:
    """Return the modules of ``units`` to recompute, in order of registration."""
    # A unit of several modules (a tied embedding and head) is not one call, nor is the root.
    called = [unit for unit in units if len(unit.modules) == 1 and unit.name]
    names = [unit.class_name for unit in called]
    chosen = [unit for unit in called if names.count(unit.class_name) > 1]
    if policy.units:
        chosen = select("activation_checkpointing", policy.units, called)
    return [unit.modules[0] for unit in chosen[policy.every - 1 :: policy.every]]


def _matches(unit: Unit, pattern: str) -> bool:
    return unit.class_name == pattern or fnmatchcase(unit.title, pattern)


def _no_such_unit(option: str, pattern: str, units: Sequence[Unit]) -> ConfigError:
    known = dict.fromkeys((*(unit.class_name for unit in units), *(unit.title for unit in units)))
    hint = f"Nearest first: {', '.join(nearest(pattern, known, limit=8))}. Name one of these."
    return ConfigError(
        f"{option} names {pattern!r}, which is neither the class nor the name of a unit that it "
        f"can choose. {hint if known else 'There is none: make some with wrap=.'}"
    )
