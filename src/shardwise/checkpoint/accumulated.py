"""Gradients in the middle of an accumulation, so that a step can go on where it stopped.

A micro-batch that was reduced has left its mean in the shards' ``.grad``: element-wise, so it is
stored by ranges like a parameter and any number of ranks reads it. One that was not reduced has
left whole gradients on each rank, which differ: they are stored for each rank, ``[world, …]``, and
only as many ranks can go on with them.

    gradients.safetensors     reduced/NAME      the parameter's shape
                              collected/NAME    [world, …], in the dtype of sums
                              arrived           [world, parameters] uint8: which of them a rank had
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.buffers import Bucket
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.holdings import Holding, Home, own_rows
from shardwise.checkpoint.meeting import share
from shardwise.checkpoint.reader import Want, wanted
from shardwise.checkpoint.source import Place
from shardwise.comm.protocol import Comm
from shardwise.errors import ScheduleError

__all__ = ["GRADIENTS", "Gradients", "check_reduced", "gradients_of"]

GRADIENTS = "gradients"
REDUCED, COLLECTED, ARRIVED = "reduced/", "collected/", "arrived"


def gradients_of(buckets: Sequence[Bucket], places: Sequence[Home], comm: Comm) -> list[Holding]:
    """What there is to store of gradients. A collective.

    Args:
        places: every parameter of ``buckets``.
    """
    reduced = {name: value for bucket in buckets for name, value in _reduced(bucket)}
    found = [
        home.holding(REDUCED + home.member.name, reduced[home.member.name])
        for home in places
        if home.member.name in reduced
    ]
    here = {name: value for bucket in buckets for name, value in _collected(bucket)}
    said = share(comm, json.dumps(sorted(here)), "names of collected gradients")
    asked = {name for names in said for name in json.loads(names)}
    if not asked:
        return found
    own: dict[str, Tensor] = {}
    for bucket in buckets:
        for member in bucket.members:
            if member.name in asked:
                zeros = torch.zeros(tuple(member.shape), dtype=bucket.dtypes.sum)
                own[COLLECTED + member.name] = here.get(member.name, zeros)
    names = [home.member.name for home in places]
    own[ARRIVED] = torch.tensor([name in here for name in names], dtype=torch.uint8)
    return found + own_rows(own, comm.rank, comm.size)


def check_reduced(buckets: Sequence[Bucket]) -> None:
    """Raises ``ScheduleError`` where gradients wait that a checkpoint would miss."""
    for bucket in buckets:
        if not bucket.gradients.is_reduced():
            raise ScheduleError(
                f"unit {bucket.unit or '(root)'!r} holds gradients that were accumulated and never "
                "reduced, so this checkpoint would miss them. Save after the last micro-batch of "
                "the step, or store them, too, with sw.Training(accumulating=True)."
            )


def _reduced(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    for index, member in enumerate(bucket.members):
        if (grad := bucket.gradients.delivered(index)) is not None:
            yield member.name, grad


def _collected(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    for index, value in bucket.gradients.collected().items():
        yield bucket.members[index].name, value


@dataclass(frozen=True)
class _Carried:
    """One bucket's collected gradients on their way back."""

    bucket: Bucket
    full: Tensor  # [W * S]
    places: Mapping[int, Place]


class Gradients:
    """Stored gradients on their way back into a model.

    Args:
        places: every parameter of ``buckets``.
        stored: the tensors of ``gradients.safetensors``; none if the step had ended.

    Attributes:
        problems: one line for each thing that does not fit.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        places: Sequence[Home],
        stored: Mapping[str, Place],
        comm: Comm,
    ) -> None:
        self._buckets, self._places, self._stored, self._comm = buckets, places, stored, comm
        self.problems = list(self._misfits())
        self._reduced: list[tuple[Home, Tensor]] = []
        self._carried: list[_Carried] = []
        self._arrived = torch.empty(len(places), dtype=torch.uint8)

    def _misfits(self) -> Iterator[str]:
        names = {home.member.name for home in self._places}
        for name, (_, stored) in self._stored.items():
            kind, _, param = name.partition("/")
            if param and param not in names:
                yield f"{param}: a gradient is stored, and the model has no such parameter"
            elif kind != REDUCED.rstrip("/") and stored.shape[:1] != (self._comm.size,):
                yield (
                    f"{param or kind}: {stored.shape[0]} ranks stored gradients that they had not "
                    f"reduced, and {self._comm.size} load; as many ranks can go on with them"
                )

    def wants(self) -> Iterator[Want]:
        """What is to be read. Nothing of the model changes before ``apply``."""
        if self.problems:
            return
        for home in self._places:
            if place := self._stored.get(REDUCED + home.member.name):
                value = torch.empty_like(home.value, dtype=DTYPES[place.stored.dtype])
                self._reduced.append((home, value))
                yield wanted(place, home.start, value)
        if ARRIVED in self._stored:
            yield self._row(self._stored[ARRIVED], self._arrived)
        for bucket in self._buckets:
            names = enumerate(member.name for member in bucket.members)
            found = {k: self._stored.get(COLLECTED + name) for k, name in names}
            there = {k: place for k, place in found.items() if place is not None}
            if there:
                yield from self._bucket(bucket, there)

    def _bucket(self, bucket: Bucket, there: Mapping[int, Place]) -> Iterator[Want]:
        spec = bucket.spec
        full = spec.comm.allocate(spec.layout.numel, spec.dtypes.sum)
        views = spec.full_views(full)
        self._carried.append(_Carried(bucket, full, there))
        for index, place in there.items():
            yield self._row(place, views[index])

    def _row(self, place: Place, value: Tensor) -> Want:
        return wanted(place, self._comm.rank * value.numel(), value)

    def apply(self) -> None:
        """Every gradient is now as it was saved; those that were not saved are gone."""
        for bucket in self._buckets:
            bucket.gradients.drop()
            for param in bucket.params:
                param.grad = None
        for home, value in self._reduced:
            home.member.param.grad = value
        names = (home.member.name for home in self._places)
        arrived = dict(zip(names, self._arrived.tolist(), strict=True))
        for carried in self._carried:
            members = carried.bucket.members
            here = {index for index in carried.places if arrived[members[index].name]}
            if here:
                carried.bucket.gradients.take_up(carried.full, here)
