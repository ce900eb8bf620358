"""From files to shards: each rank reads the byte ranges that it holds.

What is converted is read as a whole, one tensor at a time; of experts that are stored one by one,
one expert at a time, and only those that lie in this rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from shardwise.checkpoint.local_shards import ShardedModel, param_shards
from shardwise.checkpoint.read_requests import read_into, request_for
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.hf.file_map import Conversion, FileMap

__all__ = ["read"]

Parts = Mapping[Tensor, tuple[Tensor, int]]
"""This rank's part of a tensor of the model, and which element of the whole its first one is."""


def read(reader: CheckpointReader, file_map: FileMap, sharded: ShardedModel) -> None:
    """Fill this rank's shards, and whole buffers. No communication."""
    values: dict[Tensor, tuple[Tensor, int]] = {t: (t.view(-1), 0) for t in sharded.model.buffers()}
    for shard in param_shards(sharded.buckets):
        values[shard.member.param] = shard.value.detach().view(-1), shard.start
    requests = [
        request_for(place, start, part[: max(0, prod(place.stored.shape) - start)])
        for tensor, place in file_map.direct.items()
        for part, start in [values[tensor]]
    ]
    read_into(reader, requests, sharded.comm.rank, sharded.comm.size)
    for conversion in file_map.conversions:
        _convert(reader, conversion, values)
    for bucket in sharded.buckets:
        bucket.expire()


def _convert(reader: CheckpointReader, conversion: Conversion, values: Parts) -> None:
    rows = conversion.rows
    for row in range(max(rows, 1)):
        spans = dict[str, tuple[int, int, int]]()
        for name, (tensor, numel) in conversion.targets.items():
            (part, start), size = values[tensor], numel // max(rows, 1)
            first, last = max(start, row * size), min(start + len(part), (row + 1) * size)
            if first < last:
                spans[name] = first, last, row * size
        if not spans:
            continue
        made = conversion.run(lambda place: _whole(reader, place), row if rows else None)
        for name, (first, last, offset) in spans.items():
            part, start = values[conversion.targets[name][0]]
            part[first - start : last - start].copy_(
                made[name].reshape(-1)[first - offset : last - offset]
            )


def _whole(reader: CheckpointReader, place: TensorLocation) -> Tensor:
    value = torch.empty(place.stored.shape, dtype=dtype_of(place.stored.dtype))
    reader.read_into(place.file, place.stored.start, value.view(-1).view(torch.uint8).numpy())
    return value
