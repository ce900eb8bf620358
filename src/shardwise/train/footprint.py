"""Bytes of parameters, gradients, optimizer state and buffers, measured from the tensors.

The table adds up the storages that exist at the end of a step, each once. So it includes padding,
counts memory that tensors share once, and divides memory that ranks of one host share among them.
What ``offload`` keeps in host memory has rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.api.sharded import Sharded
from shardwise.comm.protocol import Comm
from shardwise.config.options import blocks
from shardwise.memory.parameters import Bucket
from shardwise.optim.blockwise import SCALES, TABLES, without_tables
from shardwise.torch_internals import disable_torch_function
from shardwise.train.collectives import all_gather_floats
from shardwise.train.records import Bytes, Placed

KINDS = ("parameters", "gradients", "optimizer state")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors``; a shared storage counts once."""
    with disable_torch_function():
        storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def footprint(sharded: Sharded, optimizer: Optimizer, comm: Comm) -> Placed:
    """Bytes of the training state on every rank. A collective.

    Call it between ``optimizer.step()`` and ``zero_grad()``, when all four kinds exist.
    """
    buffers = storage_bytes(sharded.model.buffers())
    rows = [*_kinds(sharded, optimizer, in_host=False), ("buffers", buffers, buffers)]
    if any(bucket.spec.in_host for bucket in sharded.buckets):
        kinds = _kinds(sharded, optimizer, in_host=True)
        rows += [(f"{kind} in host memory", nbytes, whole) for kind, nbytes, whole in kinds]
    local = [nbytes for _, nbytes, _ in rows]
    per_rank = all_gather_floats(comm, local, "footprint").long().T.tolist()
    counted = zip(rows, per_rank, strict=True)
    return Placed(tuple(Bytes(kind, tuple(ranks), whole) for (kind, _, whole), ranks in counted))


def _kinds(sharded: Sharded, optimizer: Optimizer, in_host: bool) -> list[tuple[str, int, int]]:
    """Each kind, its bytes on this rank, and those in one unsharded process."""
    buckets = [bucket for bucket in sharded.buckets if bucket.spec.in_host is in_host]
    staged = [bucket.staged for bucket in sharded.buckets if bucket.spec.in_host and not in_host]
    params = [param for bucket in buckets for param in bucket.params]
    states = (optimizer.state.get(param, {}).values() for param in params)
    on_this_rank = (
        sum(map(_shard_bytes, buckets)) + storage_bytes(t for t in staged if t is not None),
        storage_bytes(param.grad for param in params if param.grad is not None),
        storage_bytes(value for state in states for value in state if isinstance(value, Tensor)),
    )
    return list(zip(KINDS, on_this_rank, _unsharded(buckets, optimizer), strict=True))


def _shard_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket's shard; this rank's part of a bucket that is shared, or stays gathered."""
    nbytes = storage_bytes([bucket.shard])
    is_part = bucket.allocation.aliased and (bucket.allocation.shared or bucket.spec.kept)
    return nbytes // bucket.spec.shard.size if is_part else nbytes


def _unsharded(buckets: Sequence[Bucket], optimizer: Optimizer) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state in one unsharded process."""
    states = [optimizer.state.get(param, {}) for bucket in buckets for param in bucket.params]
    # All parameters share the tables of an 8-bit optimizer.
    state = storage_bytes(held[key] for held in states for key in TABLES if key in held)
    parameters = gradients = 0
    for bucket in buckets:
        itemsize = bucket.dtypes.stored.itemsize
        for member, param in zip(bucket.members, bucket.params, strict=True):
            numel = bucket.layout.by_name[member.name].numel
            parameters += numel * itemsize
            gradients += numel * itemsize * bool(bucket.gradients.trained)
            state += _unsharded_state(param, numel, optimizer)
    return parameters, gradients, state


def _unsharded_state(param: nn.Parameter, numel: int, optimizer: Optimizer) -> int:
    """Tensors of the shard's shape count as unsharded; others, such as a step, as they are."""
    state = without_tables(optimizer.state.get(param, {}))
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return sum(
        _unsharded_numel(key, tensor, param, numel) * tensor.itemsize
        for key, tensor in tensors.items()
    )


def _unsharded_numel(key: str, tensor: Tensor, param: nn.Parameter, numel: int) -> int:
    if key in SCALES:
        return blocks(numel)
    return numel if tensor.shape == param.shape else tensor.numel()
