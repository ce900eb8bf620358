"""Allocation of the engine's tensors, by purpose.

    shard      one rank's part of the parameters
    full       a gathered bucket, whose memory is freed and refilled between uses
    gradient   gradient buckets, their sums, and everything else that peers read

The engine allocates from a ``Memory``, so a transport can put full buckets in memory that all
ranks of a host map, and shards in pinned host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from shardwise.comm.pages import LARGE, pages
from shardwise.comm.transports.arena import Heap, SymmetricHeap


class Memory:
    """Memory of one rank on one device.

    All tensors are ``[numel]``, uninitialised, with a storage of their own, and not inference
    tensors, even if ``torch.inference_mode`` is on.
    """

    # ``full`` returns the same memory on every rank, so a gather moves nothing. It is not freed
    # before its tensors die.
    shared = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory for sharded parameters."""
        return self._new(numel, dtype)

    def full(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a full bucket; called in the same order on every rank."""
        return self._paged(numel, dtype)

    def gradient(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate tensors that are sent or summed."""
        return self._paged(numel, dtype)

    def free(self, storage: UntypedStorage) -> None:
        """Free the memory of a full bucket. Its tensors and views stay, for ``refill``.

        Memory that ``Tensor.numpy`` handed out is not resizable: the array reads it, so it stays.
        """
        if storage.nbytes() >= LARGE and pages.holds(storage.data_ptr()):
            pages.take(storage.data_ptr())
        elif storage.resizable():
            storage.resize_(0)

    def refill(self, storage: UntypedStorage, nbytes: int) -> None:
        """Allocate the memory of a full bucket again, uninitialised, if it was freed."""
        if not storage.nbytes():
            storage.resize_(nbytes)
        elif nbytes >= LARGE and pages.holds(storage.data_ptr()):
            pages.lend(storage.data_ptr())

    def _paged(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.shared or self._device.type != "cpu" or numel * dtype.itemsize < LARGE:
            return self._new(numel, dtype)
        with torch.inference_mode(False):
            return pages.tensor(numel, dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not torch.is_inference_mode_enabled():  # cheaper than entering the context
            return torch.empty(numel, dtype=dtype, device=self._device)
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)


class SharedMemory(Memory):
    """Memory that the ranks of one host map: full buckets once per host, the rest once per rank.

    Args:
        own: blocks that this rank writes and its peers read.
        common: blocks that are the same on every rank.
    """

    shared = True

    def __init__(self, own: Heap, common: SymmetricHeap) -> None:
        super().__init__(torch.device("cpu"))
        self._own, self._common = own, common

    def full(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return self._common.allocate(numel, dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return self._own.allocate(numel, dtype)
