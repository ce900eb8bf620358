"""What an optimizer holds of one bucket: its slots, and their state, which is flat too.

State has no padding and no foreign slots: the slots that this optimizer updates lie one behind
the other, in the order of the bucket, so that what touches in the bucket touches here too.

    shard       | a a a | x x | b b b b · · | c c |        x is another optimizer's, · is padding
    exp_avg     | a a a   b b b b   c c |

``optimizer.state`` shows each parameter its views, in the shape of its shard: what torch's own
optimizer would keep there, for whoever reads, saves or loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.buffers import Bucket
from shardwise.comm.malloc import in_huge_pages
from shardwise.errors import ConfigError
from shardwise.optim.runs import Run
from shardwise.sharding import sharding_of
from shardwise.torch_internals import get_version

__all__ = ["STEP", "Held", "Share", "State"]

State = MutableMapping[Any, dict[str, Any]]
"""``optimizer.state``: by parameter, by name."""

STEP = "step"
"""The state that is one number for a parameter: how often it was updated."""


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's part of a parameter.

    Attributes:
        param: the parameter.
        index: which of the bucket's.
        group: the position of its parameter group.
        view: its values at rest, a view of the bucket's shard.
        start, stop: its elements in the bucket's shard.
        at: the first of them in flat state.
    """

    param: nn.Parameter
    index: int
    group: int
    view: Tensor
    start: int
    stop: int
    at: int

    def part_of(self, value: Tensor, name: str) -> Tensor:
        """State in the shape of this shard: as it is, or cut from the whole parameter's."""
        sharding = sharding_of(self.param)
        if value.shape == self.view.shape:
            return value
        if sharding is not None and value.shape == sharding.shape:
            return sharding.cut(value, self.view.shape)
        raise ConfigError(
            f"state {name!r} of parameter {'' if sharding is None else sharding.name!r} has shape "
            f"{tuple(value.shape)}; the shard here is {tuple(self.view.shape)}, so it is another "
            "rank's, or of another world size. Load this rank's own state, or whole state."
        )


def _shares(bucket: Bucket, groups: Mapping[int, int]) -> list[Share]:
    """In order of place."""
    views = bucket.spec.rest_views(bucket.shard)
    first, found, at = bucket.shard.storage_offset(), list[Share](), 0
    for index in sorted(range(len(views)), key=lambda index: views[index].storage_offset()):
        param, view = bucket.params[index], views[index]
        if id(param) in groups:
            start, numel = int(view.storage_offset() - first), view.numel()
            found.append(Share(param, index, groups[id(param)], view, start, start + numel, at))
            at += numel
    return found


class Held:
    """The slots of one bucket that an optimizer updates, with their state.

    Args:
        bucket: the bucket.
        groups: the position of a parameter's group, by its ``id``; other slots are left alone.

    Attributes:
        shares: what this rank has of each parameter, in order of place.
        solid: the positions of those that have elements; an empty tensor has no address.
        steps: ``[shares]``, fp32: how often each was updated, where that is counted.
    """

    def __init__(self, bucket: Bucket, groups: Mapping[int, int]) -> None:
        self.bucket, self.shard = bucket, bucket.shard
        self.shares = _shares(bucket, groups)
        self.params = [share.param for share in self.shares]
        sizes = [share.stop - share.start for share in self.shares]
        self.solid = [position for position, size in enumerate(sizes) if size]
        self.steps = torch.zeros(len(sizes), device=self.shard.device)
        self._counters = self.steps.unbind()  # 0-dim views
        self._version = get_version(self.steps)
        self._numel = sum(sizes)
        self._flat: dict[str, Tensor] = {}
        self._shown: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._views: list[tuple[dict[str, Any], str, Tensor]] = []  # what was shown, by name
        self._solid_params = [self.params[position] for position in self.solid]
        self._places = [self.shares[position].view.data_ptr() for position in self.solid]

    # ---- state -------------------------------------------------------------------------------

    def take(self, state: State) -> None:
        """Let the state there is be views of flat memory, with the values that it has."""
        for position, share in enumerate(self.shares):
            mine = state.get(share.param) or {}
            for name, value in mine.items():
                if name == STEP:
                    mine[name] = self.state(name, position).fill_(float(value))
                elif isinstance(value, Tensor):
                    mine[name] = self.state(name, position).copy_(share.part_of(value, name))
            self._show(share.param, mine)
        self._version = get_version(self.steps)

    def make(self, state: State, position: int, names: Iterable[str]) -> bool:
        """Let a share have all the state it needs, of zeros; was there any missing?"""
        mine = state[self.shares[position].param]
        missing = [name for name in names if mine.get(name) is None]
        mine.update((name, self.state(name, position)) for name in missing)
        if missing:
            self._show(self.shares[position].param, mine)
        return bool(missing)

    def _show(self, param: nn.Parameter, mine: dict[str, Any]) -> None:
        if mine:
            self._shown.append((param, mine))
            self._views += [(mine, name, mine[name]) for name in mine]

    def shows(self, state: State) -> bool:
        """Is the state there is still what was shown? Its user may have put other in its place."""
        return all(mine.get(name) is view for mine, name, view in self._views) and all(
            state.get(param) is mine for param, mine in self._shown
        )

    def state(self, name: str, position: int) -> Tensor:
        """A share's state of this name: a view of the flat one, in the shape of the shard."""
        if name == STEP:
            return self._counters[position]
        share = self.shares[position]
        flat = self._flat_state(name)[share.at : share.at + share.stop - share.start]
        return flat.view(share.view.shape)

    def state_of(self, name: str, run: Run[Any]) -> Tensor:
        """The same of a run: flat, or 0-dim if it is one number."""
        if name == STEP:
            return self._counters[run.first]
        share = self.shares[run.first]
        start = share.at + run.start - share.start
        return self._flat_state(name)[start : start + run.stop - run.start]

    def _flat_state(self, name: str) -> Tensor:
        if name not in self._flat:
            self._flat[name] = in_huge_pages(self.shard.new_zeros(self._numel))
        return self._flat[name]

    def count(self, more: Tensor) -> None:
        """Add to the counts of steps: ``[shares]`` or 0-dim."""
        self.steps.add_(more)
        self._version = get_version(self.steps)

    @property
    def recounted(self) -> bool:
        """Did somebody else change the counts of steps? Views share their version."""
        return get_version(self.steps) != self._version

    # ---- values ------------------------------------------------------------------------------

    def adopt(self) -> bool:
        """Take over values that were put in by ``param.data = ...``; is the memory the same?"""
        if list(map(Tensor.data_ptr, self._solid_params)) != self._places:
            self.bucket.adopt()
        return self.bucket.shard is self.shard
