"""Bytes of parameters, gradients, optimizer state and buffers, counted from the tensors.

A table computed from the model's size would repeat what the strategy promises. This one adds
up the storages that exist when a step has ended, each once, so padding is in it, and
memory that two tensors share is not in it twice; what ranks of one host share is divided among
them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm
from shardwise.sharded import Sharded
from shardwise.train.exchange import gathered
from shardwise.train.metrics import Bytes, Placed

__all__ = ["footprint", "storage_bytes"]

KINDS = ("parameters", "gradients", "optimizer state", "buffers")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind ``tensors``; what several of them share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def footprint(sharded: Sharded, optimizer: Optimizer, comm: Comm) -> Placed:
    """Where the training state lies now, on every rank. A collective.

    Call it between ``optimizer.step()`` and ``zero_grad()``, where all four kinds exist.
    """
    model = sharded.model
    here = (
        sum(map(_at_rest, sharded.buckets)),
        storage_bytes(p.grad for p in model.parameters() if p.grad is not None),
        storage_bytes(_state(optimizer)),
        storage_bytes(model.buffers()),
    )
    everywhere = gathered(comm, here, "footprint").long().T.tolist()
    whole = (*_whole(sharded, optimizer), here[-1])
    return Placed(
        tuple(
            Bytes(kind, tuple(ranks), total)
            for kind, ranks, total in zip(KINDS, everywhere, whole, strict=True)
        )
    )


def _at_rest(bucket: Bucket) -> int:
    """Memory of a bucket's shard; of a bucket that all ranks map, this rank's part."""
    nbytes = storage_bytes([bucket.shard])
    shared = bucket.home.aliased and bucket.home.shared
    return nbytes // bucket.spec.shard.size if shared else nbytes


def _state(optimizer: Optimizer) -> Iterable[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _whole(sharded: Sharded, optimizer: Optimizer) -> tuple[int, int, int]:
    """Parameters, gradients and optimizer state of one process that shards nothing."""
    parameters = gradients = state = 0
    for bucket in sharded.buckets:
        itemsize = bucket.dtypes.stored.itemsize
        for member, param in zip(bucket.members, bucket.params, strict=True):
            numel = bucket.layout.slot(member.name).numel
            parameters += numel * itemsize
            gradients += numel * itemsize * bucket.trainable
            state += _whole_state(param, numel, optimizer)
    return parameters, gradients, state


def _whole_state(param: nn.Parameter, numel: int, optimizer: Optimizer) -> int:
    """A tensor of the parameter's shape would be whole; a step count stays what it is."""
    tensors = [t for t in optimizer.state.get(param, {}).values() if isinstance(t, Tensor)]
    return sum(
        (numel if tensor.shape == param.shape else tensor.numel()) * tensor.itemsize
        for tensor in tensors
    )
