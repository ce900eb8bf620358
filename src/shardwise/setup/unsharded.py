"""A model's handle after the model is plain again."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from shardwise.errors import ConfigError

T = TypeVar("T")


@cache
def unsharded(kind: type[T]) -> type[T]:
    """The class of a handle of this ``kind`` after ``unshard()``: its calls and properties raise.

    Fields stay, such as ``handle.model``.
    """

    def refuse(handle: Any, name: str) -> Any:
        if name.startswith("_") or name not in vars(kind):
            return object.__getattribute__(handle, name)
        raise ConfigError(
            f"{name} of a handle whose {type(handle.model).__name__} is not sharded any more, "
            "after unshard(): there are no shards to use. Use the model itself, which is plain; "
            "or shard it again, and use the handle that sw.shard() returns."
        )

    def described(handle: Any) -> str:
        return f"{kind.__name__}({type(handle.model).__name__}, after unshard())"

    return type(kind.__name__, (kind,), {"__getattribute__": refuse, "__repr__": described})
