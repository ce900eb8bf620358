"""One rank's bytes out of files, each range straight to where it belongs.

Ranges are read in the order of the files, whatever order the model has, so no block is read or
checked twice, and beyond the destination there is one block for each thread in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.comm.protocol import Comm, Label
from shardwise.plan.layout.layout import cut_at_multiples

WINDOW = 16 << 20
"""Bytes of a file that one thread reads at once: a multiple of every size that blocks have."""
THREADS = 4


class ReadRequest(NamedTuple):
    """Elements of a stored tensor, and the memory they are for."""

    place: TensorLocation
    start: int  # the first element of the flattened tensor
    out: Tensor  # ``[n]``, contiguous, of any dtype, on any device: as many elements as are wanted

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.place.stored.dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the stored elements."""
        return self.out.numel() * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Can the stored bytes be read straight into ``out``?"""
        return self.out.device.type == "cpu" and self.out.dtype == self.dtype

    @property
    def at(self) -> tuple[str, int]:
        """The file, and the first byte in it."""
        return self.place.file, self.place.stored.start + self.start * self.dtype.itemsize

    def cut(self) -> Iterator[ReadRequest]:
        """The same in parts, each of which begins in another window of the file."""
        item, (_, at), done = self.dtype.itemsize, self.at, 0
        while done < self.out.numel():
            room = WINDOW - (at + done * item) % WINDOW
            part = self.out[done : done - (-room // item)]
            yield ReadRequest(self.place, self.start + done, part)
            done += part.numel()


def request_for(place: TensorLocation, start: int, value: Tensor) -> ReadRequest:
    """The elements from ``start`` on that fill ``value``, which is contiguous."""
    return ReadRequest(place, start, value.detach().view(-1))


def read_into(
    source: CheckpointReader, requests: Iterable[ReadRequest], rank: int = 0, world: int = 1
) -> None:
    """Fill the memory of all ``requests``.

    A few threads read windows of files, and no two of them the same block. Ranks begin in
    different files, so that they do not all ask one server for one file.
    """
    windows: dict[tuple[str, int], list[ReadRequest]] = {}
    for request in requests:
        for part in request.cut():
            windows.setdefault((part.at[0], part.at[1] // WINDOW), []).append(part)
    files = sorted({file for file, _ in windows})
    first = files[len(files) * rank // world] if files else ""
    order = sorted(windows, key=lambda key: (key[0] < first, key))
    tasks = deque(windows[key] for key in order)
    threads = min(THREADS, len(tasks))
    if threads < 2:
        _fill(source, tasks)
        return
    inference = torch.is_inference_mode_enabled()  # which is each thread's own

    def work(_: int) -> None:
        with torch.inference_mode(inference), source.another() as mine:
            _fill(mine, tasks)

    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(work, range(threads)), maxlen=0)  # raises what a thread raised


def _fill(source: CheckpointReader, tasks: deque[list[ReadRequest]]) -> None:
    while tasks:
        try:
            task = tasks.popleft()
        except IndexError:  # another thread has taken the last one
            break
        try:
            for run in _runs(sorted(task, key=lambda request: request.at)):
                _read(source, run)
        except BaseException:
            tasks.clear()  # no other thread shall go on
            raise


def _read(source: CheckpointReader, run: list[ReadRequest]) -> None:
    if run[0].is_direct:
        views = (request.out.view(torch.uint8).numpy() for request in run)
        source.read_into(*run[0].at, *views)
    else:
        _convert(source, run[0])


def _runs(requests: Iterable[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """Group neighbours in a file that can be read in one call."""
    run: list[ReadRequest] = []
    end: tuple[str, int] | None = None
    for request in requests:
        if not request.nbytes:
            continue
        if run and not (request.at == end and request.is_direct and run[0].is_direct):
            yield run
            run = []
        run.append(request)
        end = (request.at[0], request.at[1] + request.nbytes)
    if run:
        yield run


def _convert(source: CheckpointReader, request: ReadRequest) -> None:
    """Read by way of one block of host memory: for another dtype, or for a device."""
    (file, first), item = request.at, request.dtype.itemsize
    step = BLOCK // item
    buffer = np.empty(min(step, request.out.numel()) * item, np.uint8)
    for k in range(0, request.out.numel(), step):
        part = request.out[k : k + step]
        data = buffer[: part.numel() * item]
        source.read_into(file, first + k * item, data)
        part.copy_(torch.from_numpy(data).view(request.dtype))


def read_from_rank_0(comm: Comm, source: CheckpointReader, requests: Iterable[ReadRequest]) -> None:
    """Fill every rank's ``requests`` from files that rank 0 alone can read. A collective."""
    by_file: dict[str, list[ReadRequest]] = {}
    for request in requests:
        by_file.setdefault(request.place.file, []).append(request)
    names_by_rank = all_gather_object(comm, list(by_file), "files that are read")
    for name in sorted({name for names in names_by_rank for name in names}):
        assert source.manifest is not None  # a folder of this kind has one
        size, length = source.manifest.files[name].size, source.manifest.block
        for start, stop in cut_at_multiples(0, size, length):
            # The last byte is 1 if rank 0 could read the others.
            block = torch.zeros(stop - start + 1, dtype=torch.uint8)
            try:
                if comm.rank == 0:
                    source.read_into(name, start, block[:-1].numpy())
                    block[-1] = 1
            finally:
                sent = block.to(comm.device)
                comm.broadcast(sent, 0, Label("broadcast", name)).wait()
            if not sent[-1]:
                return
            for request in by_file.get(name, ()):
                _take(request, start, sent[:-1])


def _take(request: ReadRequest, start: int, block: Tensor) -> None:
    """Copy what is wanted of the bytes that begin at ``start`` of the file.

    Tensors lie at multiples of their item size, so no element is cut in two.
    """
    first, item = request.at[1], request.dtype.itemsize
    begin, end = max(start, first), min(start + len(block), first + request.nbytes)
    if begin < end:
        part = block[begin - start : end - start].view(request.dtype)
        request.out[(begin - first) // item : (end - first) // item].copy_(part)
