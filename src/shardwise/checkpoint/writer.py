"""One rank's bytes into files: in place, each block's checksum on the way, then synced.

    rank 0    make the files, full size      write      sync      headers, JSON, manifest, rename
    rank 1                                   write      sync

Files have their full size before anybody writes, so a full disk is found first. They cannot be
read before their headers are there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import Tensor

from shardwise.checkpoint import checksum
from shardwise.checkpoint.checksum import Piece
from shardwise.checkpoint.collectives import joined_message
from shardwise.checkpoint.disk import MODE, check_room, explained, host, make_folder, text_of
from shardwise.checkpoint.failpoints import hit
from shardwise.checkpoint.plan import BLOCK, FilePlan
from shardwise.errors import CheckpointError
from shardwise.plan.layout.layout import cut_at_multiples

STEP = 512 << 10
"""Bytes that are written in one call, then read for their checksum, from a core's cache still."""


class Chunk(NamedTuple):
    """Bytes ``[start, stop)`` of a file, at most ``BLOCK``, and where they are in memory."""

    file: str
    start: int
    stop: int
    pieces: tuple[Tensor, ...]


def copy_pieces(pieces: Iterable[Tensor], into: Tensor) -> None:
    """Copy the pieces one after the other to the beginning of ``into``, which is uint8 as well."""
    at = 0
    for piece in pieces:
        into[at : at + len(piece)].copy_(piece)
        at += len(piece)


class Part(NamedTuple):
    """The bytes that one rank wrote, by file, and its host; or the error that stopped it."""

    pieces: Mapping[str, Sequence[Piece]]
    error: str = ""
    host: str = ""

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> Part:
        """Rebuild from JSON, which has lists for tuples."""
        pieces, error, host = fields
        return cls({name: [tuple(p) for p in some] for name, some in pieces.items()}, error, host)


def check_parts(parts: Sequence[Part]) -> None:
    """Raises ``CheckpointError`` with the errors of all ranks that failed."""
    if failed := {rank: part.error for rank, part in enumerate(parts) if part.error}:
        raise CheckpointError(joined_message(failed, len(parts)))


def allocate(folder: Path, files: Sequence[FilePlan], more: int, cure: str = "") -> None:
    """Make every file with its full size, and room for ``more`` bytes besides. On rank 0.

    Where there is no room, ``check_room`` says the ``cure``.
    """
    check_room(folder.parent, sum(file.size for file in files) + more, "this checkpoint", cure)
    for file in files:
        make_folder((folder / file.name).parent)
        opened = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, MODE)
        try:
            # Blocks that exist on the disk are written 2.4 times as fast (ext4).
            fallocate(opened, file.size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
            os.ftruncate(opened, file.size)
        finally:
            os.close(opened)


def fallocate(file: int, size: int) -> None:
    """Give the file this length and blocks on the disk. ``OSError`` where a file system cannot.

    ``os.posix_fallocate`` must not be called: where a file system cannot (NFS before 4.2, CephFS),
    glibc writes a byte into every block instead, from rank 0 alone. In memory nothing is gained:
    this rank would fill every page with zeros, while the others wait.
    """
    if _fallocate is None or _is_in_memory(file):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _fallocate(file, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _is_in_memory(file: int) -> bool:
    status = (ctypes.c_long * 32)()  # of which the first is the kind of file system
    known = _fstatfs is not None and _fstatfs(file, ctypes.addressof(status)) == 0
    return known and status[0] == TMPFS_MAGIC


@dataclass
class Writer:
    """Writes this rank's bytes, one file open at a time. Use it as a context."""

    folder: Path
    rank: int
    total: int  # bytes that this rank will write
    block: int = BLOCK  # bytes that have one checksum
    written: int = 0  # and has written
    # Checksums of what is written, by file
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._name, self._opened = "", -1  # the file that is open
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened >= 0:
            os.close(self._opened)

    def write(self, chunk: Chunk) -> None:
        """Write one chunk. On a GPU its bytes pass through host memory, 4 MiB at a time."""
        with explained(f"writing {self.folder.name}/{chunk.file}"):
            if chunk.file != self._name:
                self._turn_to(chunk.file)
            at = chunk.start
            for piece in chunk.pieces:
                self._write(piece.cpu().numpy().data, at)
                at += len(piece)
            _set_off(self._opened, chunk.start, chunk.stop - chunk.start)
        before, self.written = self.written, self.written + chunk.stop - chunk.start
        if 2 * before < self.total <= 2 * self.written:
            hit("half of the data written", self.rank)

    def _write(self, data: memoryview, at: int) -> None:
        """Write bytes to the open file, and add to the checksums of their blocks."""
        pieces = self.pieces.setdefault(self._name, [])
        for start, stop in cut_at_multiples(at, at + len(data), min(self.block, STEP)):
            step = data[start - at : stop - at]
            _write_at(self._opened, step, start)
            # Once written they are in the cache; read before, they would come from memory alone.
            goes_on = pieces and pieces[-1][1] == start and start % self.block
            first, _, value = pieces.pop() if goes_on else (start, start, 0)
            pieces.append((first, stop, checksum.crc32(step, value)))

    def finish(self) -> Part:
        """Everything is on the disk when this returns."""
        hit("data written", self.rank)
        with explained(f"syncing {self.folder.name}"):
            self._turn_to("")
        hit("data synced", self.rank)
        return Part(self.pieces, host=host())

    def _turn_to(self, name: str) -> None:
        """Sync and close the file that is open, and open the one of this name, if it is one."""
        before, self._opened = self._opened, -1
        if before >= 0:
            try:
                os.fsync(before)
            finally:
                os.close(before)
        self._name = name
        if name:
            self._opened = os.open(self.folder / name, os.O_RDWR)


def write_part(writer: Writer, chunks: Iterable[Chunk]) -> Part:
    """Write all of a rank's chunks. An error is returned in the part, for all ranks.

    After an error the other chunks are still taken: the bytes of other ranks come by collectives.
    """
    failed: Part | None = None
    with writer:
        for chunk in chunks:
            try:
                if failed is None:
                    writer.write(chunk)
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                failed = Part({}, text_of(error))
        try:
            return failed or writer.finish()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            return Part({}, text_of(error))


def _write_at(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def _set_off(file: int, start: int, count: int) -> None:
    """Ask the kernel to begin writing to the disk now, so that ``fsync`` waits for less.

    The result is not looked at: ``fsync`` reports errors of the disk.
    """
    if _sync_file_range is not None:
        _sync_file_range(file, start, count, LINUX_SYNC_FILE_RANGE_WRITE)


def _of_linux(name: str, *types: Any) -> Callable[..., int] | None:
    """A function of Linux's C library that Python does not offer."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function


_INT, _LONG = ctypes.c_int, ctypes.c_int64
LINUX_SYNC_FILE_RANGE_WRITE = 2
TMPFS_MAGIC = 0x01021994
_sync_file_range = _of_linux("sync_file_range", _INT, _LONG, _LONG, ctypes.c_uint)
_fstatfs = _of_linux("fstatfs", _INT, ctypes.c_void_p)
_fallocate = _of_linux("fallocate", _INT, _INT, _LONG, _LONG)


def write_header(folder: Path, file: FilePlan) -> list[Piece]:
    """Make a file readable: write its header, and sync it. On rank 0, when all parts are known."""
    opened = os.open(folder / file.name, os.O_RDWR)
    try:
        _write_at(opened, memoryview(file.header), 0)
        os.fsync(opened)
    finally:
        os.close(opened)
    ends = cut_at_multiples(0, len(file.header), file.block)
    return [(lo, hi, checksum.crc32(file.header[lo:hi])) for lo, hi in ends]


def check_hosts(folder: Path, names: Iterable[str], parts: Sequence[Part]) -> None:
    """Read one piece of each file back for every host that wrote to it. On rank 0, after syncs.

    Mounted object stores keep the file of the host that closed it last, and lose the others' bytes.

    Raises:
        CheckpointError: something is not what its host wrote.
    """
    for name in names:
        wrote = {part.host: part.pieces[name] for part in parts if name in part.pieces}
        for where, pieces in wrote.items() if len(wrote) > 1 else ():
            start, stop, value = max(pieces, key=lambda piece: piece[1] - piece[0])
            with (folder / name).open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
            if checksum.crc32(data) != value:
                raise CheckpointError(
                    f"{folder.name}/{name} does not hold what {where} wrote to it, so it is not "
                    "published: this file system keeps what one host writes to a file and loses "
                    "the others', as mounted object stores do. Save to one that several hosts may "
                    "write to (NFS, Lustre), and copy the folder from there."
                )
