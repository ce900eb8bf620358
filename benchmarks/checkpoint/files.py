"""A checkpoint's files: their size, where they lie, and how the disk is asked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch.distributed as dist

from benchmarks.harness.memory import proc_number

IN_MEMORY = ("tmpfs", "ramfs")


def kind_of(folder: Path) -> str:
    """Its file system, as the kernel calls it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    over = [(at, kind) for at, kind in mounts if folder.resolve().is_relative_to(at)]
    return max(over, key=lambda mount: len(mount[0]))[1]


def nbytes_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove_together(folder: Path) -> None:
    """Remove a checkpoint with which every rank is done, and the link to it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        (folder.parent / "latest").unlink(missing_ok=True)
    dist.barrier()


def forget(folder: Path) -> None:
    """Let the kernel drop what it keeps of the files' bytes; memory file systems keep them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file)  # bytes that are not on the disk cannot be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_disk() -> int:
    """Bytes that this process made the kernel fetch from a disk so far."""
    return proc_number("/proc/self/io", "read_bytes:")
