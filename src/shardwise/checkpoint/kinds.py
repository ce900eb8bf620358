"""The three kinds of state dict, by FSDP's words, and who has which tensors of it.

kind       FSDP1's word         a rank has                                   loads at
full       FULL_STATE_DICT      whole tensors under the usual names          any number of ranks
sharded    SHARDED_STATE_DICT   its pieces, and where in the whole they are  any, once joined
local      LOCAL_STATE_DICT     its shards as they are                       the same layout alone
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, ConfigError, nearest

__all__ = ["KINDS", "Piece", "StateDict", "join", "kind_of"]

KINDS = ("full", "sharded", "local")


class Piece(TypedDict):
    """A rank's part of a tensor, in types that ``torch.load(weights_only=True)`` knows.

    ``value`` is ``[n]``: the elements ``start`` to ``start + n`` of the flattened tensor, which as
    a whole has ``shape``.
    """

    value: Tensor
    start: int
    shape: tuple[int, ...]


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
                f"rank0_only=True with kind={self.kind!r}: every rank has pieces of its own, so "
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


# Set here, because a frozen class has no instances while it is being made.
StateDict.FULL = StateDict("full")
StateDict.SHARDED = StateDict("sharded")
StateDict.LOCAL = StateDict("local")


def join(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whole tensors from every rank's ``"sharded"`` state dict, in any order.

    Args:
        states: of a model, name → ``Piece``; or of an optimizer, ``{"state", "param_groups"}``.

    Returns:
        The same of kind ``"full"``. What is one value for a parameter (``step``) is as in the
        first.

    Raises:
        CheckpointError: pieces are missing, are of unlike wholes, or differ where they overlap.
    """
    if states and all(isinstance(state.get("param_groups"), list) for state in states):
        return {
            "state": _joined_state([state["state"] for state in states]),
            "param_groups": copy.deepcopy(states[0]["param_groups"]),
        }
    return {name: _joined(name, pieces) for name, pieces in _collected(states).items()}


def _joined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of optimizers: parameter → key → whole."""
    found: dict[str, Any] = {}
    for name, ones in _collected(states).items():
        found[name] = {
            key: _joined(f"{key} of {name}", values) if _is_piece(values[0]) else values[0]
            for key, values in _collected(ones).items()
        }
    return found


def _collected(states: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for state in states:
        for name, one in state.items():
            found.setdefault(name, []).append(one)
    return found


def _is_piece(value: object) -> bool:
    return isinstance(value, Mapping) and set(value) == {"value", "start", "shape"}


def _joined(name: str, pieces: Sequence[Any]) -> Tensor:
    if odd := [piece for piece in pieces if not _is_piece(piece)]:
        raise CheckpointError(
            f"{name!r} is a {type(odd[0]).__qualname__}, and no piece with value, start and shape. "
            "Pass state dicts of kind 'sharded': those of 'full' are whole, and those of 'local' "
            "do not say where in the whole they are."
        )
    shape, dtype = tuple(pieces[0]["shape"]), pieces[0]["value"].dtype
    whole = torch.empty(shape, dtype=dtype)
    flat, at = whole.view(-1), 0
    alike = all((tuple(p["shape"]), p["value"].dtype) == (shape, dtype) for p in pieces)
    for piece in sorted(pieces, key=lambda p: (p["start"], len(p["value"]))) if alike else ():
        start, stop = piece["start"], piece["start"] + len(piece["value"])
        if start > at or stop > prod(shape):
            break
        if not _same_bits(flat[start : min(at, stop)], piece["value"][: max(0, at - start)]):
            raise CheckpointError(
                f"the pieces of {name!r} overlap from element {start:,} on, and do not hold the "
                "same there, so they are not of one moment. Pass the state dicts that all ranks "
                "made at once."
            )
        flat[start:stop] = piece["value"]
        at = max(at, stop)
    if not alike or at != prod(shape):
        raise CheckpointError(
            f"the pieces of {name!r} do not make up a tensor of shape {shape}: elements from "
            f"{at:,} on are not there, or a piece is of another shape or dtype. Pass the state "
            "dicts of all ranks that made them, each once."
        )
    return whole


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.contiguous().cpu().view(torch.uint8))
