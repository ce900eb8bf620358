"""bitsandbytes' 8-bit AdamW on shards: whole quantisation blocks, and the whole's decision.

It keeps one scale for each 256 elements, counted from the first that it sees, and quantises what
has 4,096 elements or more. A shard that is cut inside a block, or is smaller than its parameter,
would have other state than the parameter in one process. So shards must be cut between blocks
(``blocksize=256`` of ``shard()``), and state is made here, by the size of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.options import BLOCK, blocks
from shardwise.errors import OptimizerError
from shardwise.memory.parameters import Bucket
from shardwise.memory.sharding import sharding_of
from shardwise.memory.whole import gather_parts

ADAMW = "bitsandbytes.optim.adamw"  # by name, so that none has to be imported
SCALES = frozenset({"absmax1", "absmax2"})  # one for each block
TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}  # what the 256 codes mean; in no checkpoint


def is_blockwise(optimizer: Any) -> bool:
    """Is it bitsandbytes' ``AdamW8bit``, or ``AdamW(optim_bits=8)``, which transformers makes?"""
    is_adamw = any(kind.__module__ == ADAMW for kind in type(optimizer).__mro__)
    return is_adamw and optimizer.args.optim_bits == 8


def block_of(key: str) -> int:
    """Elements of the parameter for each element of state of this name."""
    return BLOCK if key in SCALES else 1


def state_shape(key: str, shape: torch.Size) -> torch.Size:
    """The shape of state of this name, of a parameter or a part of that ``shape``."""
    return torch.Size([blocks(shape.numel())]) if key in SCALES else shape


def without_tables(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved of a parameter's state."""
    return {key: value for key, value in state.items() if key not in TABLES}


def check_blocks(optimizer: Any, params: Iterable[nn.Parameter]) -> None:
    """Raises ``OptimizerError`` if quantised state is cut inside a block.

    A frozen parameter has no state, unless it was loaded or made before.
    """
    for param in params:
        has_state = param.grad is not None or optimizer.state.get(param)
        if (param.requires_grad or has_state) and (text := cut_inside(optimizer, param)):
            raise OptimizerError(text)


def cut_inside(optimizer: Any, param: Tensor) -> str:
    """That ``param`` is cut inside a block and has quantised state; empty if it is not so."""
    if (sharding := sharding_of(param)) is None:
        return ""
    layout, slot = sharding.layout, sharding.slot
    starts = [layout.owned(slot, shard)[0] for shard in layout.owners(slot)]
    if slot.numel < optimizer.args.min_8bit_size or not any(start % BLOCK for start in starts):
        return ""
    return (
        f"{type(optimizer).__name__} keeps one scale for each {BLOCK} elements, and "
        f"parameter {slot.name!r} is cut at {starts[1:]}, inside such blocks, so its state "
        f"would depend on the number of ranks. Pass blocksize={BLOCK} to sw.shard(); if the "
        "parameter was frozen then, call sharded.relayout() once it is trained."
    )


def make_state(optimizer: Any, own: Iterable[nn.Parameter]) -> None:
    """Make the state of parameters that have none, as for the whole parameter."""
    ids, args, tables = {id(param) for param in own}, optimizer.args, optimizer.name2qmap
    optimizer.check_overrides()  # such as embeddings in 32 bits
    least = args.min_8bit_size
    for number, group in enumerate(optimizer.param_groups):
        for at, param in enumerate(group["params"]):
            sharding, state = sharding_of(param), optimizer.state.get(param)
            if id(param) not in ids or sharding is None or param.grad is None:
                continue
            if not state:
                check_blocks(optimizer, [param])  # it may have been frozen until now
                args.min_8bit_size = 0 if sharding.slot.numel >= least else least
                optimizer.init_state(group, param, number, at)
                args.min_8bit_size = least
            elif "absmax1" in state and "qmap1" not in state:  # it was loaded
                tables.update({name: table.to(param.device) for name, table in tables.items()})
                state.update({key: tables[name] for key, name in TABLES.items()})


def whole_of_parts(
    bucket: Bucket, key: str, parts: Sequence[Tensor | None], dtype: torch.dtype
) -> list[Tensor]:
    """Same as ``gather_parts``, of named state; scales travel once per element."""
    if key not in SCALES:
        return gather_parts(bucket, parts, dtype)
    each = [
        None if part is None else part.repeat_interleave(BLOCK)[: stop - start]
        for part, (start, stop) in zip(parts, bucket.spec.ranges, strict=True)
    ]
    return [whole.reshape(-1)[::BLOCK] for whole in gather_parts(bucket, each, dtype)]
