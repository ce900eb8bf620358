"""Checkpoints at a URL: to an object store, and from it, by fsspec.

An object store has no rename, so the order of writing says what is complete:

    upload      uploading (the token of this save) → its files → manifest.json → no uploading
    download    manifest.json → its files into a hidden folder → rename

Without a manifest there is no checkpoint at the URL, whatever files are there. An upload that died
goes on where it was if the token is that of the same save, and begins anew if not. One that has the
name of another save lies beside it, as ``step-100.5f0c81d2``, until it is complete. Bytes are
compared with the manifest's checksums when the checkpoint is loaded.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from shardwise.checkpoint.disk import sync_folder
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.run_folder import check_complete
from shardwise.errors import CheckpointError, DamagedCheckpoint

UPLOADING = "uploading"

log = logging.getLogger("shardwise")


class Remote(NamedTuple):
    """A complete checkpoint at a URL."""

    url: str
    manifest: Manifest


def upload(folder: str | Path, url: str, limit: int | None = None) -> Remote:
    """Copy a complete checkpoint to ``url/NAME``, the manifest last. Called by one process.

    Args:
        folder: the checkpoint, such as ``run/step-100``.
        url: of the run, for any file system that fsspec knows: ``s3://bucket/run``.
        limit: how many checkpoints stay at ``url``, the newest; ``None``: all.

    Raises:
        CheckpointError: it is not complete, or could not be written; what was at ``url`` still is.
    """
    source = Path(folder)
    manifest, place = check_complete(source), f"{url.rstrip('/')}/{source.name}"
    with _explained(f"uploading {source} to {url}"):
        replaced = _complete_at(place)
        if replaced is not None and replaced.manifest.token != manifest.token:
            place += _suffix(manifest)
        _copy(source, manifest, place)
    complete = remote_checkpoints(url)
    for old in complete[len(complete) if limit is None else limit :]:
        _remove(old.url)
    if replaced is not None and replaced.url != place:
        _remove(replaced.url)
    return Remote(place, manifest)


def _copy(source: Path, manifest: Manifest, place: str) -> None:
    fs, root = url_to_fs(place)
    sizes = _sizes(fs, root)
    if NAME in sizes:
        return
    token, marker = manifest.token.encode(), f"{root}/{UPLOADING}"
    if UPLOADING not in sizes or fs.cat_file(marker) != token:
        if sizes:
            fs.rm(root, recursive=True)
        sizes = {}
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(marker, token)
    for name, record in manifest.files.items():
        if sizes.get(name) != record.size:
            fs.makedirs(str(PurePosixPath(root, name).parent), exist_ok=True)
            fs.put_file(str(source / name), f"{root}/{name}")
    fs.put_file(str(source / NAME), f"{root}/{NAME}")
    fs.rm_file(marker)


def remote_checkpoints(url: str) -> list[Remote]:
    """The complete checkpoints of a run at ``url``, the newest first; none where there is nothing.

    Raises:
        CheckpointError: the store cannot be read.
    """
    with _explained(f"looking into {url}"):
        fs, root = url_to_fs(url.rstrip("/"))
        fs.invalidate_cache()
        paths = fs.ls(root, detail=False) if fs.exists(root) else []
        places = (f"{url.rstrip('/')}/{PurePosixPath(path).name}" for path in paths)
        complete = [one for place in places if (one := _complete_at(place))]
    return sorted(complete, key=lambda one: (one.manifest.created, one.url), reverse=True)


def download(url: str, run: str | Path) -> Path:
    """Copy a checkpoint from ``url`` into the folder ``run``; returns where it is.

    Args:
        url: of a checkpoint, or of a run: the newest of its checkpoints.
        run: the folder to put it into. If it holds this save already, nothing is copied.

    Raises:
        CheckpointError: there is none at ``url``, or it could not be read.
        DamagedCheckpoint: a file at ``url`` does not have its size.
    """
    with _explained(f"reading {url}"):
        given = _complete_at(url.rstrip("/"))
    newest = [given] if given else remote_checkpoints(url)[:1]
    if not newest:
        raise CheckpointError(
            f"{url} holds no complete checkpoint: no folder there has a {NAME}. An upload that "
            "died goes on when its run saves again."
        )
    return _fetch(newest[0], Path(run))


def _fetch(remote: Remote, run: Path) -> Path:
    name = remote.url.rpartition("/")[2].removesuffix(_suffix(remote.manifest))
    target, partial = run / name, run / f".{name}{_suffix(remote.manifest)}.download"
    with suppress(CheckpointError):
        if check_complete(target).token == remote.manifest.token:
            return target
    if target.exists():
        raise CheckpointError(
            f"{target} is there, and is not the checkpoint of this name at {remote.url}. Remove or "
            "rename it, or download into another folder."
        )
    with _explained(f"downloading {remote.url} to {target}"):
        fs, root = url_to_fs(remote.url)
        for file, record in remote.manifest.files.items():
            path = partial / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.stat().st_size != record.size:
                fs.get_file(f"{root}/{file}", str(path))
        (partial / NAME).write_bytes(remote.manifest.encode())
        try:
            check_complete(partial)
        except DamagedCheckpoint:
            shutil.rmtree(partial)
            raise
        partial.rename(target)
        sync_folder(run)
    return target


def _complete_at(place: str) -> Remote | None:
    """The complete checkpoint at a URL, if it is one."""
    fs, root = url_to_fs(place)
    try:
        data = fs.cat_file(f"{root}/{NAME}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    try:
        return Remote(place, Manifest.decode(data, f"{place}/{NAME}"))
    except DamagedCheckpoint as error:
        log.warning("%s", error)
        return None


def _suffix(manifest: Manifest) -> str:
    """The end of the name of a checkpoint that lies beside one of the same name."""
    return f".{manifest.token[:8]}"


def _sizes(fs: Any, root: str) -> dict[str, int]:
    """The files at ``root``, by name, with their sizes."""
    fs.invalidate_cache()
    if not fs.exists(root):
        return {}
    files = fs.find(root, detail=True).items()
    return {str(PurePosixPath(path).relative_to(root)): info["size"] for path, info in files}


def _remove(url: str) -> None:
    """Remove a checkpoint; the manifest goes first, so that what is left is none."""
    try:
        fs, root = url_to_fs(url)
        fs.rm_file(f"{root}/{NAME}")
        fs.rm(root, recursive=True)
    except Exception as error:  # noqa: BLE001 - of any store; the new one is complete
        log.warning("%s is no longer needed and could not be removed: %s", url, error)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the error of any store into a ``CheckpointError`` that says ``what`` failed."""
    try:
        yield
    except CheckpointError:
        raise
    except ImportError as error:
        raise CheckpointError(f"{what} needs a package that is not there: {error}.") from error
    except Exception as error:
        raise CheckpointError(
            f"{what} failed: {type(error).__name__}: {error}. Complete checkpoints that were there "
            "before are as they were; a second try goes on where this one ended."
        ) from error
