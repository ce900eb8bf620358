"""An optimizer's part of one bucket: flat state, and the gradients in one piece.

State has neither padding nor slots of other optimizers: the slots that this one updates follow each
other in the order of the bucket, so that neighbours in the bucket are neighbours here, too.

    shard       | a a a | x x | b b b b · · | c c |        x is another optimizer's, · is padding
    exp_avg     | a a a   b b b b   c c |

``optimizer.state`` shows each parameter its views, in the shape of its shard: what torch's own
optimizer would keep there, for whoever reads, saves or loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.malloc import in_huge_pages
from shardwise.errors import OptimizerError
from shardwise.memory.parameters import Bucket
from shardwise.torch_internals import disable_torch_function, get_version

State = MutableMapping[Any, dict[str, Any]]  # ``optimizer.state``: by parameter, by name
STEP = "step"  # the state that is one number for a parameter: how often it was updated


@dataclass(frozen=True)
class FlatGradient:
    """Gradients, laid out like the shard."""

    flat: Tensor  # [S]; elements that belong to no gradient are undefined
    copied: Sequence[tuple[Tensor, Tensor]] = ()  # gradients outside ``flat``, and their copies

    def copy_back(self) -> None:
        """Write the copies, which the update has changed, back to the gradients."""
        for gradient, copy in self.copied:
            gradient.copy_(copy)


class FlatState:
    """The slots of one bucket that an optimizer updates, with their state.

    Lists have one entry for each of these slots, in order of place. ``groups`` has the position of
    a parameter's group, by its ``id``; other slots are left alone.
    """

    def __init__(self, bucket: Bucket, groups: Mapping[int, int]) -> None:
        self.bucket, self.shard = bucket, bucket.shard
        spec, views = bucket.spec, bucket.spec.rest_views(bucket.shard)
        ours = (i for i, param in enumerate(bucket.params) if id(param) in groups)
        #: Their positions in ``bucket.params``.
        self.indices = sorted(ours, key=lambda i: (spec.slots[i].start, spec.slots[i].stop))
        self.params = [bucket.params[index] for index in self.indices]
        self.groups = [groups[id(param)] for param in self.params]
        #: What this rank holds of each, a view of the bucket's shard, and where that lies.
        self.values = [views[index] for index in self.indices]
        self.ranges = [spec.ranges[index] for index in self.indices]
        self._starts = list(accumulate((stop - start for start, stop in self.ranges), initial=0))
        #: The positions of those that have elements here; an empty tensor has no address.
        self.solid = [at for at, (start, stop) in enumerate(self.ranges) if start < stop]
        self._solid_params = [self.params[at] for at in self.solid]
        self._addresses = [self.values[at].data_ptr() for at in self.solid]
        #: [slots]: how often each was updated, where that is counted.
        self.steps = torch.zeros(len(self.params), device=self.shard.device)
        self._counters = self.steps.unbind()  # 0-dim views
        self._version = get_version(self.steps)
        self._flat: dict[str, Tensor] = {}
        self._shown: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._views: list[tuple[dict[str, Any], str, Tensor]] = []  # what was shown, by name

    # ---- state -------------------------------------------------------------------------------

    def take(self, state: State, names: Sequence[Sequence[str]]) -> None:
        """Show the state of these names, by group, as views of flat memory; others' stays."""
        for at, param in enumerate(self.params):
            of_param = state.get(param) or {}
            for name, value in of_param.items():
                if name == STEP:
                    of_param[name] = self.state(name, at).fill_(float(value))
                elif isinstance(value, Tensor) and name in names[self.groups[at]]:
                    if value.shape != (shape := self.values[at].shape):
                        raise OptimizerError(f"state {name!r} is {value.shape}, its shard {shape}.")
                    of_param[name] = self.state(name, at).copy_(value)
            self._show(param, of_param)
        self._version = get_version(self.steps)

    def add_missing(self, state: State, at: int, names: Iterable[str]) -> bool:
        """Give a slot zeros for each of these names that it lacks; did it lack any?"""
        of_param = state[self.params[at]]
        missing = [name for name in names if of_param.get(name) is None]
        of_param.update((name, self.state(name, at)) for name in missing)
        if missing:
            self._show(self.params[at], of_param)
        return bool(missing)

    def _show(self, param: nn.Parameter, of_param: dict[str, Any]) -> None:
        if of_param:
            self._shown.append((param, of_param))
            self._views += [(of_param, name, of_param[name]) for name in of_param]

    def is_shown_by(self, state: State) -> bool:
        """Does ``state`` still hold these views? The user may have replaced some."""
        return all(of_param.get(name) is view for of_param, name, view in self._views) and all(
            state.get(param) is of_param for param, of_param in self._shown
        )

    def state(self, name: str, at: int) -> Tensor:
        """A slot's state of this name: a view of the flat one, in the shape of the shard."""
        if name == STEP:
            return self._counters[at]
        flat = self._flat_state(name)[self._starts[at] : self._starts[at + 1]]
        return flat.view(self.values[at].shape)

    def state_of_run(self, name: str, first: int, start: int, stop: int) -> Tensor:
        """State of elements ``[start, stop)`` of the shard, flat; 0-dim if it is one number.

        ``first`` is the position of the slot in which they start.
        """
        if name == STEP:
            return self._counters[first]
        moved = self._starts[first] - self.ranges[first][0]
        return self._flat_state(name)[start + moved : stop + moved]

    def _flat_state(self, name: str) -> Tensor:
        if name not in self._flat:
            self._flat[name] = in_huge_pages(self.shard.new_zeros(self._starts[-1]))
        return self._flat[name]

    def count(self, more: Tensor) -> None:
        """Add to the counts of steps: ``[slots]`` or 0-dim."""
        self.steps.add_(more)
        self._version = get_version(self.steps)

    @property
    def is_recounted(self) -> bool:
        """Did somebody else change the counts of steps? Views share their version."""
        return get_version(self.steps) != self._version

    # ---- values and gradients ------------------------------------------------------------------

    def adopt(self) -> bool:
        """Copy values that were put in by ``param.data = ...``; is the memory still the same?"""
        with disable_torch_function():
            is_same = list(map(Tensor.data_ptr, self._solid_params)) == self._addresses
        if not is_same:
            self.bucket.adopt()
        return self.bucket.shard is self.shard

    def flat_gradient(self, gradients: Sequence[Tensor | None]) -> FlatGradient:
        """The gradients of these slots, or ``None``, in one piece.

        A backward pass leaves each parameter a view of one buffer that is laid out like the shard.
        Addresses tell whether gradients still are its views: inside the memory of a living storage
        there is nothing else. Where the user put other tensors in their place, they are copied.
        """
        own = self._memory_of(gradients)
        if own is not None:
            return FlatGradient(own)
        flat = torch.empty_like(self.shard)
        views = self.bucket.spec.rest_views(flat)
        pairs = zip(self.indices, gradients, strict=True)
        copied = [(grad, views[index]) for index, grad in pairs if grad is not None]
        for gradient, view in copied:
            view.copy_(gradient)
        return FlatGradient(flat, copied)

    def _memory_of(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The buffer that the gradients are views of, if they are."""
        itemsize, dtype = self.shard.element_size(), self.shard.dtype
        pairs = [(grad, at) for at in self.solid if (grad := gradients[at]) is not None]
        some = [gradient for gradient, _ in pairs]
        if not some or not all(map(Tensor.is_contiguous, some)):
            return None
        offsets = [self.ranges[at][0] * itemsize for _, at in pairs]
        bases = set(map(sub, map(Tensor.data_ptr, some), offsets))
        if len(bases) > 1 or {gradient.dtype for gradient in some} != {dtype}:
            return None
        storage = some[0].untyped_storage()
        start = bases.pop() - storage.data_ptr()  # bytes
        if start < 0 or start + self.shard.nbytes > storage.nbytes():
            return None
        return some[0].as_strided(self.shard.shape, (1,), start // itemsize)
