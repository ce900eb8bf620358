"""Bytes that a rank has sent, and a checkpoint's files: their size, and how the disk is asked."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.harness.memory import proc_number

IN_MEMORY = ("tmpfs", "ramfs")
LINUX_TCP_BYTES_SENT = 200  # where tcpi_bytes_sent lies in struct tcp_info


class Sent(NamedTuple):
    """What one rank has sent so far."""

    collectives: int  # how many it took part in
    nbytes: int  # that left it for other ranks


def sent(sharded: sw.Sharded | None) -> Sent:
    """By our comm's own counters, since shared memory has no connections; by the kernel's else.

    Every group of torch numbers its collectives, also those of a library's own thread.
    """
    if sharded is not None:
        counters = sharded.comm.counters
        return Sent(sum(counters.calls.values()), sum(counters.bytes_sent.values()))
    groups: Any = dist.distributed_c10d._world.pg_map  # noqa: SLF001 - it has no public name
    backends = [group._get_backend(torch.device("cpu")) for group in groups]  # noqa: SLF001
    numbers = [int(each._get_sequence_number_for_group()) for each in backends]  # noqa: SLF001
    nbytes = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now, or no TCP connection
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    nbytes += struct.unpack_from("Q", info, LINUX_TCP_BYTES_SENT)[0]
    return Sent(sum(numbers), nbytes)


def kind_of(folder: Path) -> str:
    """Its file system, as the kernel calls it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    over = [(at, kind) for at, kind in mounts if folder.resolve().is_relative_to(at)]
    return max(over, key=lambda mount: len(mount[0]))[1]


def nbytes_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove_together(folder: Path) -> None:
    """Every rank is done with a checkpoint: it goes, and what points at it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        (folder.parent / "latest").unlink(missing_ok=True)
    dist.barrier()


def forget(folder: Path) -> None:
    """Let the kernel drop what it keeps of the files' bytes; memory file systems keep them."""
    for path in folder.rglob("*"):
        if path.is_file():
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)  # bytes that are not on the disk cannot be dropped
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(opened)


def from_disk() -> int:
    """Bytes that this process made the kernel fetch from a disk so far."""
    return proc_number("/proc/self/io", "read_bytes:")
