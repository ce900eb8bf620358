"""A flat buffer, cut into the views of its parameters in one call.

Slicing and reshaping in Python costs more than two microseconds for each parameter; torch can
cut a flat tensor like a list of others all at once (as data-parallel training does with its
buckets), and the others may be on the meta device, where they have shapes and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.torch_internals import split_flat

__all__ = ["Cuts", "Place"]


class Place(NamedTuple):
    """A range of a flat buffer, and the shape in which it is seen."""

    start: int
    stop: int
    shape: Sequence[int]


class Cuts:
    """How flat buffers of ``numel`` elements are cut into ``places``, which do not overlap."""

    def __init__(self, places: Sequence[Place], numel: int) -> None:
        order = sorted(range(len(places)), key=lambda index: places[index][:2])
        stops = [0, *(places[index].stop for index in order)]
        starts = [*(places[index].start for index in order), numel]
        self.gaps = [(a, b) for a, b in zip(stops, starts, strict=True) if a < b]
        pieces = [(place.start, place.stop, place.shape, i) for i, place in enumerate(places)]
        pieces += [(start, stop, (stop - start,), -1) for start, stop in self.gaps]
        pieces.sort(key=lambda piece: piece[:2])
        self._like = [torch.empty(shape, device="meta") for _, _, shape, _ in pieces]
        positions = {index: at for at, (_, _, _, index) in enumerate(pieces)}
        self._positions = [positions[index] for index in range(len(places))]
        self._empty: dict[tuple[int, ...], list[int]] = {}  # by shape
        for index, place in enumerate(places):
            if not all(place.shape):
                self._empty.setdefault(tuple(place.shape), []).append(index)

    def views(self, flat: Tensor) -> list[Tensor]:
        """``[numel] →`` one view for each place, in the order of the places."""
        pieces = split_flat(flat, self._like)
        views = [pieces[at] for at in self._positions]
        for shape, indices in self._empty.items():  # else they would have memory of their own
            alike = flat[:0].view(len(indices), *shape).unbind()
            for index, view in zip(indices, alike, strict=True):
                views[index] = view
        return views
