"""Shards from files: each rank reads the byte ranges that it holds.

What is converted is read as a whole, one tensor at a time; of experts that are stored one by one,
one expert at a time, and only those that lie in this rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.local_shards import ignored_params, param_shards
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.read_requests import read_into, request_for
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.errors import CheckpointError
from shardwise.hf.file_map import Conversion, FileMap
from shardwise.optim.sharded_model import ShardedModel

Parts = Mapping[Tensor, tuple[Tensor, int]]
"""This rank's part of a tensor of the model, and which element of the whole its first one is."""


def read(reader: CheckpointReader, file_map: FileMap, sharded: ShardedModel) -> None:
    """Fill this rank's shards, and whole buffers. No communication."""
    whole = (*sharded.model.buffers(), *ignored_params(sharded.model).values())
    values: dict[Tensor, tuple[Tensor, int]] = {t: (t.detach().view(-1), 0) for t in whole}
    for shard in param_shards(sharded):
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


def check_twice(reader: CheckpointReader, file_map: FileMap, rank: int, world: int) -> None:
    """Compare this rank's part of tensors that are stored by two names. No communication.

    Raises:
        CheckpointError: they differ, and the model has one tensor for both.
    """
    for alias, (one, other) in file_map.twice.items():
        nbytes = one.stored.stop - one.stored.start
        for first in range(nbytes * rank // world, nbytes * (rank + 1) // world, BLOCK):
            size = min(BLOCK, nbytes - first)
            pieces = np.empty((2, size), np.uint8)
            for place, piece in zip((one, other), pieces, strict=True):
                reader.read_into(place.file, place.stored.start + first, piece)
            if one.stored.shape != other.stored.shape or (pieces[0] != pieces[1]).any():
                raise CheckpointError(
                    f"{file_map.tied[alias]} and {alias} are one tensor of the model, since its "
                    "config ties them, and the files hold two different ones. Set "
                    "tie_word_embeddings to false in config.json, or remove one from the files."
                )


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
        converted = conversion.run(lambda place: _whole(reader, place), row if rows else None)
        for name, (first, last, offset) in spans.items():
            part, start = values[conversion.targets[name][0]]
            part[first - start : last - start].copy_(
                converted[name].reshape(-1)[first - offset : last - offset]
            )


def _whole(reader: CheckpointReader, place: TensorLocation) -> Tensor:
    value = torch.empty(place.stored.shape, dtype=dtype_of(place.stored.dtype))
    reader.read_into(place.file, place.stored.start, value.view(-1).view(torch.uint8).numpy())
    return value
