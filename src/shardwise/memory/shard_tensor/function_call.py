"""A call of one of torch's functions, with shards among its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardUseError
from shardwise.memory.shard_tensor.elementwise import PREDICATES, bare_name, writes
from shardwise.memory.shard_tensor.use_errors import (
    needs_full_tensor,
    recorded_by_autograd,
    sent_by_hand,
)
from shardwise.memory.sharding import Sharding


class Call:
    """A function, and what it was called with; ``kind`` is the class of shards."""

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any
    ) -> None:
        self.func, self.args, self.kwargs, self.kind = func, args, kwargs, kind
        self.name = getattr(func, "__name__", str(func))
        self.values = (*args, *kwargs.values())

    def is_shard(self, value: object) -> bool:
        return isinstance(value, self.kind)

    def shards(self, values: Iterable[Any]) -> list[Any]:
        return [value for value in values if isinstance(value, self.kind)]

    @property
    def first(self) -> Any:
        return next(filter(self.is_shard, self.tensors()))

    @property
    def attribute(self) -> str:
        """The attribute that is read or set: ``T`` of ``Tensor.T.__get__``; else empty."""
        accesses = self.name in ("__get__", "__set__", "__delete__")
        return getattr(getattr(self.func, "__self__", None), "__name__", "") if accesses else ""

    @property
    def written(self) -> object:
        """The argument that the function writes to; ``None``: it writes to none."""
        if self.name == "__setitem__" or writes(self.name):
            return self.values[0]
        return self.kwargs.get("out")

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the arguments, those in lists included."""
        return _tensors(self.values)

    def rows(self) -> list[tuple[Tensor, ...]]:
        """The tensors that are combined element by element; the first may be written to.

        Of lists (foreach) the first tensors are combined, then the second ones, and so on.
        """
        single = [value for value in self.values if isinstance(value, Tensor)]
        lists = [list(_tensors(value)) for value in self.values if isinstance(value, (list, tuple))]
        nonempty = [tensors for tensors in lists if tensors]
        return [(*row, *single) for row in (zip(*nonempty, strict=False) if nonempty else [()])]

    def run(self, replacements: dict[int, Tensor] | None = None) -> Any:
        """Call the function; ``replacements`` stand for tensors of these ids."""
        if not replacements:
            return self.func(*self.args, **self.kwargs)
        args, kwargs = self.with_replacements(replacements)
        return self.func(*args, **kwargs)

    def with_replacements(
        self, replacements: Mapping[int, object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other tensors in place of some, by id."""
        kwargs = {name: _replace(value, replacements) for name, value in self.kwargs.items()}
        return _replace(self.args, replacements), kwargs

    def mark(self, result: Any, sharding: Sharding) -> Any:
        """Make ``result`` a shard, if it is a plain tensor."""
        if type(result) is Tensor:
            result.sharding = sharding  # type: ignore[attr-defined]
            result.__class__ = self.kind
        return result

    def records(self) -> bool:
        """Would autograd record the call, as if the shard were the whole parameter?"""
        recorded = torch.is_grad_enabled() and bare_name(self.name) not in PREDICATES
        return recorded and any(tensor.requires_grad for tensor in self.tensors())

    def recording_error(self) -> ShardUseError:
        return recorded_by_autograd(self.name, self.first)

    def unsupported(self) -> ShardUseError:
        """The error of a call that needs whole parameters."""
        if (getattr(self.func, "__module__", None) or "").startswith("torch.distributed."):
            return sent_by_hand(self.name, self.first)
        return needs_full_tensor(f".{self.attribute}" if self.attribute else self.name, self.first)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _replace(value: Any, replacements: Mapping[int, object]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, replacements) for item in value)
    return replacements.get(id(value), value)
