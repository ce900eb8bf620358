"""The three kinds of state dict, by FSDP's words, and who has which tensors of it.

kind       FSDP1's word         a rank has                             loads at
full       FULL_STATE_DICT      whole tensors under the usual names    any number of ranks
sharded    SHARDED_STATE_DICT   shards that know their whole           any, by ``full_tensor()``
local      LOCAL_STATE_DICT     its shards as plain tensors            the same layout alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from shardwise.checkpoint.holdings import Home
from shardwise.errors import ConfigError, nearest
from shardwise.shard_tensor import ShardTensor

__all__ = ["KINDS", "StateDict", "kind_of"]

KINDS = ("full", "sharded", "local")


def kind_of(word: object) -> str:
    """``"full"``, ``"FULL"`` or ``"FULL_STATE_DICT"`` → ``"full"``; also a ``StateDictType``.

    Raises:
        ConfigError: there is no such kind.
    """
    text = word if isinstance(word, str) else getattr(word, "name", "")
    kind = str(text).lower().removesuffix("_state_dict")
    if kind not in KINDS:
        like = nearest(kind, KINDS, 1)[0]
        raise ConfigError(
            f"there is no state dict of kind {word!r}; nearest is {like!r}. Kinds are "
            f"{', '.join(KINDS)} (FULL_STATE_DICT, SHARDED_STATE_DICT, LOCAL_STATE_DICT)."
        )
    return kind


@dataclass(frozen=True)
class StateDict:
    """What ``sharded.state_dict`` and ``sharded.optimizer_state_dict`` give.

    ``sw.StateDict.FULL``, ``.SHARDED`` and ``.LOCAL`` are the three with nothing else said.

    Attributes:
        kind: see above.
        offload_to_cpu: the tensors are in host memory, not on the device. On CPU there is only
            host memory.
        rank0_only: of ``"full"``: only rank 0 gets it, the others get nothing, and never hold
            more than one bucket.
        names: which tensors, by name; ``None`` is all. Buckets with none of them are not gathered.
    """

    FULL: ClassVar[StateDict]
    SHARDED: ClassVar[StateDict]
    LOCAL: ClassVar[StateDict]

    kind: str = "full"
    offload_to_cpu: bool = True
    rank0_only: bool = False
    names: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind_of(self.kind))
        if self.rank0_only and self.kind != "full":
            raise ConfigError(
                f"rank0_only=True with kind={self.kind!r}: every rank has shards of its own, so "
                "rank 0's alone would be a part of the model. Leave rank0_only out, or ask for "
                "kind='full'."
            )

    @classmethod
    def of(cls, kind: object, how: Mapping[str, Any]) -> StateDict:
        """From what a caller wrote: a policy, or a kind's name with the other fields beside it."""
        if isinstance(kind, cls):
            if how:
                raise ConfigError(
                    f"{', '.join(how)} beside a StateDict, which says all of it. Put it into that."
                )
            return kind
        known = [item.name for item in fields(cls)]
        for name in how:
            if name not in known:
                like = nearest(name, known, 1)[0]
                raise ConfigError(f"a state dict has no option {name!r}; nearest is {like!r}.")
        return cls(kind_of(kind), **how)

    def wants(self, names: Sequence[str]) -> bool:
        """Is a tensor of these names asked for?"""
        return self.names is None or any(map(self.names, names))

    def facts(self) -> dict[str, str]:
        """What every rank must ask for alike, as short texts to compare."""
        return {"kind of state dict": self.kind, "rank0_only": str(self.rank0_only)}

    def put(self, value: Tensor) -> Tensor:
        """Where it shall be, in memory of its own: a view would keep its whole bucket."""
        value = value.detach()
        return value.cpu() if self.offload_to_cpu and not value.is_cpu else value.clone()

    def part(self, value: Tensor, home: Home) -> Tensor:
        """This rank's part of a parameter, or of state of the same shape, in the form asked for."""
        part = self.put(value)
        if self.kind == "sharded" and home.sharding is not None:
            part.sharding = home.sharding  # type: ignore[attr-defined]
            part.__class__ = ShardTensor
        return part


# Set here, because a frozen class has no instances while it is being made.
StateDict.FULL = StateDict("full")
StateDict.SHARDED = StateDict("sharded")
StateDict.LOCAL = StateDict("local")
