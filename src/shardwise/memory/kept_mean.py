"""The memory of a bucket's mean gradients, with its views, to be used again in the next step.

To allocate it and to cut it costs a microsecond for each parameter. It is used again only if nobody
holds it, a view, or what shares its memory: who keeps ``param.grad`` keeps the values of its step.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount

from torch import Tensor

from shardwise.torch_internals import storage_uses, tensor_uses, untracked_views


class KeptMean:
    """The last mean that was cut, ``[S]``, if it ``keeps`` one."""

    def __init__(self, cut: Callable[[Tensor], list[Tensor]], keeps: bool) -> None:
        self._cut, self._keeps = cut, keeps
        self._last: tuple[Tensor, list[Tensor], int] | None = None  # it, its views, their number

    @property
    def memory(self) -> Tensor | None:
        """The mean that is kept, whoever holds it."""
        return None if self._last is None else self._last[0]

    def unheld(self) -> Tensor | None:
        """Its memory, if nobody else holds it."""
        if self._last is None:
            return None
        mean, views, uses = self._last
        here = {*map(getrefcount, views)} == {_ALONE} and {*map(tensor_uses, views)} == {1}
        return mean if here and storage_uses(mean) == uses else None

    def views(self, mean: Tensor) -> list[Tensor]:
        """``[S] →`` a view for each parameter, whose version is its own."""
        if self._last is not None and self._last[0] is mean:
            return self._last[1]
        with untracked_views():
            views = self._cut(mean)
        if self._keeps:
            self._last = mean, views, storage_uses(mean)
        return views


_ALONE = next(map(getrefcount, [object()]))  # of what is in one list
