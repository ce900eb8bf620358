"""Where the engine's tensors lie, by what they are for.

    shard      parameters at rest, one rank's part
    full       a bucket that is gathered into; its memory goes and comes back between uses
    gradient   gradient buckets, their sums, and everything else that peers read

The engine asks a ``Memory`` and never a device: a transport may keep full buckets where all ranks
of a host map them, and shards may lie in pinned host memory while the rest is on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage

from shardwise.comm.arena import CommonHeap, Heap

__all__ = ["Memory", "SharedMemory"]


class Memory:
    """A rank's own memory on one device.

    All tensors are ``[numel]``, uninitialised, with a storage of their own, and can be trained
    with: ``torch.inference_mode`` may be on when they are asked for.

    Attributes:
        shared: is ``full`` the same memory on every rank, so that a gather moves nothing? It is
            never freed then, and goes with its tensors.
    """

    shared = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """For parameters at rest."""
        return self._new(numel, dtype)

    def full(self, numel: int, dtype: torch.dtype) -> Tensor:
        """For a full bucket; asked for in the same order on every rank."""
        return self._new(numel, dtype)

    def gradient(self, numel: int, dtype: torch.dtype) -> Tensor:
        """For what is sent or summed."""
        return self._new(numel, dtype)

    def free(self, storage: UntypedStorage) -> None:
        """Let the memory of a full bucket go. Its tensors and views stay, for ``refill``."""
        storage.resize_(0)

    def refill(self, storage: UntypedStorage, nbytes: int) -> None:
        """Give a full bucket memory again, uninitialised."""
        storage.resize_(nbytes)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not torch.is_inference_mode_enabled():  # leaving a mode costs more than asking
            return torch.empty(numel, dtype=dtype, device=self._device)
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self._device)


class SharedMemory(Memory):
    """Memory that the ranks of one host map: full buckets once per host, the rest once per rank.

    Args:
        own: blocks that this rank writes and its peers read.
        common: blocks that are the same on every rank, because every rank asks in the same order.
    """

    shared = True

    def __init__(self, own: Heap, common: CommonHeap) -> None:
        super().__init__(torch.device("cpu"))
        self._own, self._common = own, common

    def full(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return self._common.allocate(numel, dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return self._own.allocate(numel, dtype)
