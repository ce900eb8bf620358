"""Parameter groups of a sharded model: whose parameters, and with which options.

As torch has them, and stricter: a parameter of another model, an option that does not exist or a
pattern that finds nothing is an error here, where torch would train something else in silence.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from shardwise.errors import ConfigError, OptimizerError, nearest
from shardwise.memory.parameters import Bucket
from shardwise.memory.sharding import sharding_of
from shardwise.plan.units.units import Member

# Options of torch's groups that have one value here.
FIXED = {"maximize": False, "decoupled_weight_decay": True}


class Policy(Protocol):
    """The options of an optimizer: a frozen dataclass that checks itself."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def max_norm(self) -> float | None:
        """The largest global norm of gradients; not a group's, but the optimizer's."""


def defaults(policy: Policy) -> dict[str, Any]:
    """The options that a group may have its own of."""
    names = (item.name for item in fields(policy) if item.name != "max_norm")
    return {name: getattr(policy, name) for name in names}


def resolved(
    group: Mapping[str, Any], buckets: Sequence[Bucket], taken: Container[int], policy: Policy
) -> dict[str, Any]:
    """A group with checked options, whose ``"params"`` are pairs of name and parameter.

    Args:
        group: ``"params"``: parameters, pairs, or regular expressions that match whole names.
        buckets: those of the sharded model.
        taken: the ``id`` of each parameter of an earlier group, which patterns leave out.
        policy: the options that the group does not give.
    """
    given = group["params"]
    if isinstance(given, set):  # torch says what is wrong with that
        return dict(group)
    _check_options(group, policy)
    members = {id(m.param): m for bucket in buckets for m in bucket.members}
    selected: dict[int, Member] = {}
    for entry in [given] if isinstance(given, str | Tensor) else given:
        if isinstance(entry, str):
            by_name = matching(entry, members.values())
            selected |= {key: m for m in by_name if (key := id(m.param)) not in taken}
        else:
            param = entry[1] if isinstance(entry, tuple) else entry
            if id(param) not in members:
                raise _foreign(param)
            selected[id(param)] = members[id(param)]
    _check_dtypes(selected.values())
    pairs = [(member.name, member.param) for member in selected.values()]
    # torch gives an empty group no names, and then refuses to have it beside one with names.
    return {**group, "params": pairs, "param_names": [name for name, _ in pairs]}


def _check_options(group: Mapping[str, Any], policy: Policy) -> None:
    if "max_norm" in group:
        raise ConfigError(
            "a parameter group has a max_norm; the norm is that of all gradients, so there is one "
            "for all groups. Pass it to the optimizer."
        )
    _check_fixed(group)
    known = defaults(policy)
    replace(policy, **{name: group[name] for name in known if name in group})


def _check_fixed(group: Mapping[str, Any]) -> None:
    for name, value in FIXED.items():
        if group.get(name, value) != value:
            raise ConfigError(
                f"a parameter group has {name}={group[name]!r}, and the fused optimizers of "
                f"sw.optim have {value!r} only. Use torch.optim's."
            )


def check_loaded(group: Mapping[str, Any], policy: Policy) -> None:
    """Raises ``ConfigError`` where a group of a state dict is not one of this optimizer."""
    _check_fixed(group)
    if missing := [name for name in defaults(policy) if name not in group]:
        raise ConfigError(
            f"a parameter group of the state dict has no {missing[0]!r}, so it was saved by "
            "another optimizer, whose state would be misread. Load it into one of that kind."
        )


def matching(pattern: str, members: Iterable[Member]) -> list[Member]:
    """The trainable parameters one of whose names matches."""
    trainable = [member for member in members if member.param.requires_grad]
    whole = re.compile(pattern).fullmatch
    matching = [member for member in trainable if any(map(whole, member.aliases))]
    if not matching:
        like = nearest(pattern, [name for member in trainable for name in member.aliases])
        raise ConfigError(
            f"no trainable parameter has a name that {pattern!r} matches; the nearest are {like}. "
            "A pattern must match the whole name: r'.*\\.bias' finds the bias of every module."
        )
    return matching


def _foreign(param: object) -> OptimizerError:
    sharding = sharding_of(param) if isinstance(param, Tensor) else None
    what = type(param).__name__ if sharding is None else f"parameter {sharding.name!r}"
    return OptimizerError(
        f"{what} is in a parameter group and is none of this sharded model's parameters, so this "
        "optimizer cannot update it. Give it an optimizer of its own."
    )


def _check_dtypes(members: Iterable[Member]) -> None:
    for member in members:
        if member.param.requires_grad and not member.param.is_floating_point():
            raise OptimizerError(
                f"parameter {member.name!r} is {member.param.dtype}, and fused kernels update "
                "real floating-point parameters only. Leave it to an optimizer of torch.optim."
            )
