"""What a disk says becomes an error that says what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwise.checkpoint.disk import (
    check_is_folder,
    explained,
    free_bytes,
    sync_folder,
    write_file,
)
from shardwise.errors import CheckpointError


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not do that there"),
        (errno.ENOENT, "moved or unmounted"),
        (errno.EIO, "the disk fails"),
        (errno.EBUSY, "look at that file system"),
    ],
)
def test_each_failure_has_its_advice(number: int, advice: str) -> None:
    with pytest.raises(CheckpointError, match="writing x failed") as caught, explained("writing x"):
        raise OSError(number, os.strerror(number), "/there")
    assert advice in str(caught.value)
    assert "/there" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="mine"), explained("writing x"):
        raise ValueError("mine")


def test_a_small_file_is_written_whole_and_over_a_longer_one(tmp_path: Path) -> None:
    write_file(tmp_path / "x", b"longer")
    write_file(tmp_path / "x", b"short")
    assert (tmp_path / "x").read_bytes() == b"short"
    sync_folder(tmp_path)
    assert free_bytes(tmp_path) > 0


def test_who_only_reads_has_lost_nothing() -> None:
    sentence = "Complete checkpoints that were there before are as they were."
    for reads in (False, True):
        with pytest.raises(CheckpointError) as caught, explained("reading x", reads):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert (sentence in str(caught.value)) is not reads


def test_a_device_is_no_folder(tmp_path: Path) -> None:
    check_is_folder(tmp_path)
    with pytest.raises(CheckpointError, match="/dev/null is neither a folder nor a file"):
        check_is_folder(Path("/dev/null"))
