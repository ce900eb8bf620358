"""One rank's bytes into files: in place, each block's checksum on the way, then synced.

    rank 0    make the files, full size      write      sync      headers, JSON, manifest, rename
    rank 1                                   write      sync

Files have their full size before anybody writes, so a full disk is found first, and ranks write
beside each other without a gather. They cannot be read before their headers are there, which
rank 0 writes when every rank has said that its bytes are on the disk.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from torch import Tensor

from shardwise.checkpoint import checksum
from shardwise.checkpoint.checksum import Piece
from shardwise.checkpoint.disk import explained, free_bytes
from shardwise.checkpoint.plan import FilePlan, cut_at_blocks
from shardwise.checkpoint.points import reached
from shardwise.errors import CheckpointError
from shardwise.listing import size

__all__ = ["Chunk", "Part", "Writer", "allocate", "pieces_of", "write_header"]

VECTORS = 512  # pieces of memory in one system call; Linux allows 1,024


class Chunk(NamedTuple):
    """Bytes ``[start, stop)`` of a file, within one block, and where they are in memory."""

    file: str
    start: int
    stop: int
    pieces: tuple[Tensor, ...]


class Part(NamedTuple):
    """What one rank wrote, by file; or why it could not."""

    pieces: Mapping[str, Sequence[Piece]]
    error: str = ""

    def encode(self) -> str:
        """As a text for rank 0."""
        return json.dumps({"pieces": self.pieces, "error": self.error}, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Part:
        found = json.loads(text)
        pieces = {name: [tuple(p) for p in ps] for name, ps in found["pieces"].items()}
        return cls(pieces, found["error"])


def allocate(folder: Path, files: Sequence[FilePlan], more: int) -> None:
    """Make every file with its full size, all zeros. Rank 0's.

    Args:
        more: bytes of what else will be written.

    Raises:
        CheckpointError: the disk has no room; with the numbers.
    """
    needed, there = sum(file.size for file in files) + more, free_bytes(folder)
    if needed > there:
        raise CheckpointError(
            f"this checkpoint needs {size(needed)}, and {folder.parent} has {size(there)} free, "
            "so it was not begun. Free space, lower save_total_limit, or save elsewhere. Complete "
            "checkpoints that were there before are as they were."
        )
    for file in files:
        opened = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            # Not only of that length: blocks that exist are written 2.4 times as fast (ext4).
            os.posix_fallocate(opened, 0, file.size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            os.ftruncate(opened, file.size)
        finally:
            os.close(opened)


@dataclass
class Writer:
    """This rank's hand on the files of a partial folder. Use it as a context.

    Attributes:
        folder: the partial folder.
        rank: this one.
        total: bytes that it will write.
        written: bytes that it has written.
        pieces: their checksums, by file.
    """

    folder: Path
    rank: int
    total: int
    written: int = 0
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._open: dict[str, int] = {}
        self._stack = ExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, chunk: Chunk) -> None:
        """Write one chunk. On a GPU its bytes pass through host memory, 4 MiB at a time."""
        with explained(f"writing {self.folder.name}/{chunk.file}"):
            buffers = [piece.cpu().numpy().data for piece in chunk.pieces]
            value = 0
            for buffer in buffers:
                value = checksum.running(buffer, value)
            opened = self._file(chunk.file)
            _write_at(opened, buffers, chunk.start)
            _set_off(opened, chunk.start, chunk.stop - chunk.start)
        self.pieces.setdefault(chunk.file, []).append((chunk.start, chunk.stop, value))
        before, self.written = self.written, self.written + chunk.stop - chunk.start
        if 2 * before < self.total <= 2 * self.written:
            reached("half of the data written", self.rank)

    def finish(self) -> Part:
        """Everything is on the disk when this returns."""
        reached("data written", self.rank)
        with explained(f"syncing {self.folder.name}"):
            for opened in self._open.values():
                os.fsync(opened)
        reached("data synced", self.rank)
        return Part(self.pieces)

    def _file(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self.folder / name, os.O_RDWR)
            self._stack.callback(os.close, self._open[name])
        return self._open[name]


def _write_at(file: int, buffers: Sequence[memoryview], at: int) -> None:
    for k in range(0, len(buffers), VECTORS):
        some = list(buffers[k : k + VECTORS])
        while some:
            done = os.pwritev(file, some, at)
            at += done
            while some and done >= some[0].nbytes:
                done -= some.pop(0).nbytes
            if some:
                some[0] = some[0][done:]


def _set_off(file: int, start: int, count: int) -> None:
    """Let the kernel begin to write to the disk now, while the next bytes are prepared.

    Otherwise it begins when all are there, and ``fsync`` waits for the whole. A hint: what goes
    wrong with the disk, ``fsync`` says.
    """
    if _sync_file_range is not None:
        _sync_file_range(file, start, count, LINUX_SYNC_FILE_RANGE_WRITE)


def _found() -> Callable[[int, int, int, int], int] | None:
    """Linux alone has it, and Python has no name for it."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


LINUX_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = _found()


def write_header(folder: Path, file: FilePlan) -> list[Piece]:
    """Make a file readable: its header, synced. Rank 0's, when every part is known."""
    opened = os.open(folder / file.name, os.O_RDWR)
    try:
        _write_at(opened, [memoryview(file.header)], 0)
        os.fsync(opened)
    finally:
        os.close(opened)
    ends = cut_at_blocks(0, len(file.header))
    return [(lo, hi, checksum.running(file.header[lo:hi])) for lo, hi in ends]


def pieces_of(parts: Iterable[Part], name: str) -> list[Piece]:
    """What all ranks wrote of one file."""
    return [piece for part in parts for piece in part.pieces.get(name, ())]
