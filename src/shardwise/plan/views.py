"""A flat buffer as views, made by one call.

Slicing and reshaping in Python costs more than two microseconds for each parameter; torch can
split a flat tensor like a list of others all at once (as data-parallel training does with its
buckets), and the others may be on the meta device, where they have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.torch_internals import split_flat


class Views:
    """The views of flat buffers of ``numel`` elements: call it with such a buffer.

    Views have a start, a stop and a shape each; ``gaps`` are the stretches that are in none.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, Sequence[int]]], numel: int) -> None:
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        stops = [0, *(ranges[index][1] for index in order)]
        starts = [*(ranges[index][0] for index in order), numel]
        self.gaps = [(a, b) for a, b in zip(stops, starts, strict=True) if a < b]
        pieces = [(start, stop, shape, i) for i, (start, stop, shape) in enumerate(ranges)]
        pieces += [(start, stop, (stop - start,), -1) for start, stop in self.gaps]
        pieces.sort()
        self._like = [torch.empty(shape, device="meta") for _, _, shape, _ in pieces]
        positions = {index: at for at, (_, _, _, index) in enumerate(pieces)}
        self._positions = [positions[index] for index in range(len(ranges))]
        self._empty: dict[tuple[int, ...], list[int]] = {}  # by shape
        for index, (_, _, shape) in enumerate(ranges):
            if not all(shape):
                self._empty.setdefault(tuple(shape), []).append(index)

    def __call__(self, flat: Tensor) -> list[Tensor]:
        """``[numel] →`` the views, in the order of the ranges."""
        pieces = split_flat(flat, self._like)
        views = [*map(pieces.__getitem__, self._positions)]
        for shape, indices in self._empty.items():  # else they would have memory of their own
            alike = flat[:0].view(len(indices), *shape).unbind()
            for index, view in zip(indices, alike, strict=True):
                views[index] = view
        return views


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the address at which each tensor's memory begins."""
    return list(map(Tensor.data_ptr, tensors))
