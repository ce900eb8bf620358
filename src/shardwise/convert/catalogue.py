"""All that a checkpoint says of itself: files, tensors, training state, and what is wrong.

Loading stops at the first thing that is not as it should be. Whoever looks at a broken
checkpoint wants to know what is still there, so here every part is read for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from shardwise.checkpoint.complete import check_complete, read_manifest
from shardwise.checkpoint.contents import MODEL
from shardwise.checkpoint.disk import check_is_folder, explained, is_unreadable
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.folder import leftovers, resolve, step_of
from shardwise.checkpoint.header import Stored
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.source import Bytes, Source
from shardwise.checkpoint.state import NAME as TRAINING
from shardwise.errors import CheckpointError

__all__ = ["Catalogue", "Damage", "Listing", "OneFile", "damage_of", "stem_of"]

T = TypeVar("T")

SUFFIX = ".safetensors"
OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that hold pickles."""
_NUMBERED = re.compile(r"(.+?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")


@dataclass(frozen=True)
class OneFile:
    """A file of a checkpoint.

    Attributes:
        name: as listed.
        size: bytes on the disk; ``None`` if it is not there.
        expected: bytes that the manifest says; ``None`` if it says nothing of it.
        digest: of all its bytes, as the manifest says.
        blocks: how many of them have a checksum of their own.
    """

    name: str
    size: int | None
    expected: int | None = None
    digest: str = ""
    blocks: int = 0

    @property
    def is_whole(self) -> bool:
        """Has it the size that was written?"""
        return self.size is not None and self.expected in (None, self.size)


class Listing(dict[str, tuple[str, Stored]]):
    """Tensors by name: in which file, and where in it."""


@dataclass(frozen=True)
class Damage:
    """Bytes ``[start, stop)`` of a file: others than were written, cut off, or not readable.

    Attributes:
        tensors: whose they are; empty where the file's header cannot be read.
        header: are bytes of the file's header among them?
        unreadable: why they could not be read, so that nobody knows what they are; empty where
            they could.
    """

    file: str
    start: int
    stop: int
    tensors: tuple[str, ...]
    header: bool
    unreadable: str = ""


@dataclass(frozen=True)
class Catalogue:
    """What one checkpoint, one folder of weights, or one safetensors file holds.

    Attributes:
        path: of the folder, or of the one file.
        manifest: who wrote it; ``None`` for what shardwise did not write.
        problems: why it cannot be loaded; empty if it can, as far as names and sizes tell.
        files: those of the checkpoint.
        strangers: names of further files in the folder.
        groups: tensors by kind: ``model``, ``optimizer``, ``ranks``, ``gradients``.
        training: ``training.json`` as it is, if there is one.
        scalars: the values of tensors of one number, by kind and name.
    """

    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...]
    files: tuple[OneFile, ...]
    strangers: tuple[str, ...]
    groups: Mapping[str, Listing]
    training: Mapping[str, Any] | None
    scalars: Mapping[str, Mapping[str, Any]]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors → the stored one."""
        return {} if self.manifest is None else self.manifest.aliases

    def ranks_of(self, file: str, stored: Stored) -> list[int]:
        """Which ranks wrote a tensor; empty where that is not known."""
        record = None if self.manifest is None else self.manifest.files.get(file)
        return record.ranks(stored.start, stored.stop) if record else []

    @classmethod
    def read(cls, path: Path) -> Self:
        """Everything that can be read of the checkpoint that ``path`` means.

        Raises:
            CheckpointError: there is nothing there, or it may not be looked at.
        """
        with explained(f"looking at {path}", reads=True):
            found = resolve(path)
            if found.is_file():
                return cls._of_file(found)
            check_is_folder(found)
            return cls._of_folder(found)

    @classmethod
    def _of_folder(cls, found: Path) -> Self:
        problems: list[str] = []
        manifest = _tried(problems, lambda: _manifest(found))
        if manifest is not None:
            _tried(problems, lambda: check_complete(found))
        files, strangers = _files(found, manifest)
        with Source(found, None if problems else manifest) as source:
            groups: dict[str, Listing] = {}
            for file in files:
                if file.name.endswith(SUFFIX) and file.size is not None:
                    tensors = _tensors(source, file.name, problems)
                    groups.setdefault(stem_of(file.name), Listing()).update(tensors)
            training = None
            if any(file.name == TRAINING and file.size is not None for file in files):
                training = _tried(problems, lambda: _object(source, TRAINING))
            scalars = {stem: _scalars(source, some, problems) for stem, some in groups.items()}
            if manifest is None or not problems:
                for stem in {MODEL: None, **groups}:  # the index, and what is missing
                    _tried(problems, partial(source.tensors, stem))
        if not groups and not problems:
            problems.append(_no_tensors(found))
        shown = tuple(dict.fromkeys(problems))
        return cls(found, manifest, shown, files, strangers, groups, training, scalars)

    @classmethod
    def _of_file(cls, path: Path) -> Self:
        problems = [_no_tensors(path)] if path.suffix in OF_TORCH else []
        with Source(path.parent, None) as source:
            tensors = _tensors(source, path.name, problems) if not problems else Listing()
            scalars = _scalars(source, tensors, problems)
        files, groups = (OneFile(path.name, path.stat().st_size),), {MODEL: tensors}
        return cls(path, None, tuple(problems), files, (), groups, None, {MODEL: scalars})


def _no_tensors(path: Path) -> str:
    what = f"{path} holds no safetensors files"
    if path.suffix in OF_TORCH or (path / ".metadata").exists():
        return (
            f"{what}; it is of torch, and has pickles, which are not opened here. `shardwise "
            "export` makes a checkpoint of it."
        )
    return f"{what}, so there is nothing to load."


def _manifest(folder: Path) -> Manifest | None:
    """It, or ``None`` for a folder that need not have one."""
    found = read_manifest(folder)
    ours = step_of(folder.name) is not None or (folder / TRAINING).exists()
    ours = ours or any(left.path == folder for left in leftovers(folder.parent))
    if found is None and ours:
        raise CheckpointError(
            f"{folder} has no {NAME}, so it was not written to its end, and the integrity of its "
            "files is unknown. Load another checkpoint."
        )
    return found


def _files(folder: Path, manifest: Manifest | None) -> tuple[tuple[OneFile, ...], tuple[str, ...]]:
    """What belongs to the checkpoint, and the names of what does not."""
    there = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    if manifest is None:
        return tuple(OneFile(name, size) for name, size in there.items()), ()
    files = tuple(
        OneFile(name, there.get(name), record.size, record.digest, len(record.blocks) // 8)
        for name, record in manifest.files.items()
    )
    return files, tuple(name for name in there if name not in manifest.files and name != NAME)


def _tensors(source: Source, name: str, problems: list[str]) -> Listing:
    """Those of one file; by an unchecked header where the checked one is damaged."""
    header = _tried(problems, lambda: source.header(name))
    if header is None and source.manifest is not None:
        with Source(source.folder, None) as unchecked:
            header = _tried([], lambda: unchecked.header(name))
    tensors = {} if header is None else header.tensors
    return Listing({tensor: (name, stored) for tensor, stored in tensors.items()})


def _scalars(source: Source, listing: Listing, problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    broken: set[str] = set()  # a damaged block would be read again for each number in it
    for name, (file, stored) in listing.items():
        if stored.shape == () and file not in broken:
            data = np.empty(stored.stop - stored.start, np.uint8)
            if _tried(problems, partial(_fill, source, file, stored.start, data)):
                found[name] = torch.from_numpy(data).view(DTYPES[stored.dtype]).item()
            else:
                broken.add(file)
    return found


def _fill(source: Source, file: str, start: int, data: Bytes) -> bool:
    source.read_into(file, start, data)
    return True


def _object(source: Source, name: str) -> dict[str, Any]:
    found = source.json(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"{source.folder / name} is no JSON object. Load another checkpoint.")
    return found


def stem_of(name: str) -> str:
    """``"model-00001-of-00003.safetensors"`` → ``"model"``; ``""`` for other files."""
    found = _NUMBERED.fullmatch(name)
    return found[1] if found else ""


def _tried(problems: list[str], read: Callable[[], T]) -> T | None:
    """What ``read`` returns; or ``None``, and its error is one of ``problems``."""
    try:
        return read()
    except CheckpointError as error:
        problems.append(str(error))
        return None


def damage_of(catalogue: Catalogue) -> Iterator[tuple[int, Damage | None]]:
    """Compare every block of every file with its checksum, one block in memory at a time.

    Yields:
        The bytes that were read since the last one, and damage where they are not as written.
        Blocks that are damaged side by side are one damage each; a file that cannot be opened, or
        is a link out of its folder, is one as a whole.
    """
    if catalogue.manifest is None:
        return
    with Source(catalogue.path, catalogue.manifest) as source:
        for file in catalogue.files:
            if file.size is None or not file.expected:
                continue
            if error := _error_of(source, file.name, 0, 0):
                yield file.expected, _damage(catalogue, file.name, (0, file.expected), str(error))
                continue
            for number in range(file.blocks):
                place = number * BLOCK, min(file.expected, (number + 1) * BLOCK)
                error, found = _error_of(source, file.name, *place), None
                if error is not None:
                    why = str(error) if is_unreadable(error) else ""
                    found = _damage(catalogue, file.name, place, why)
                yield place[1] - place[0], found


def _error_of(source: Source, file: str, start: int, stop: int) -> CheckpointError | None:
    """What is said when these bytes are read; with no bytes, when the file is opened."""
    try:
        source.read_into(file, start)  # opens it
        for _ in source.read(file, start, stop):
            pass
    except CheckpointError as error:
        return error
    return None


def _damage(catalogue: Catalogue, file: str, place: tuple[int, int], unreadable: str) -> Damage:
    start, stop = place
    stored = [
        (name, place)
        for listing in catalogue.groups.values()
        for name, (where, place) in listing.items()
        if where == file
    ]
    first = min((place.start for _, place in stored), default=0)
    hit = tuple(name for name, p in stored if p.start < stop and start < p.stop)
    return Damage(file, start, stop, hit, start < first, unreadable)
