"""All that a checkpoint holds: files, tensors, training state, and what is wrong with it.

Loading stops at the first error; here every part is read for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from shardwise.checkpoint.disk import check_is_folder, explained
from shardwise.checkpoint.folder import resolve
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.read_requests import read_into, request_for
from shardwise.checkpoint.reader import OF_TORCH, PARTS, CheckpointReader, TensorLocation
from shardwise.checkpoint.recognise import files_in, is_leftover, step_of
from shardwise.checkpoint.run_folder import check_complete, manifest_lost, read_manifest
from shardwise.checkpoint.safetensors_format import INNER, dtype_of
from shardwise.checkpoint.save_plan import MODEL
from shardwise.checkpoint.training_state import NAME as TRAINING
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.plan.layout.layout import cut_at_multiples

T = TypeVar("T")

SUFFIX = ".safetensors"
_NUMBERED = re.compile(rf"(?:{INNER}/)?(.+?)(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors")


@dataclass(frozen=True)
class OneFile:
    """A file of a checkpoint, and what the manifest holds of it."""

    name: str
    size: int | None  # bytes on the disk; None if it is missing
    expected: int | None = None  # bytes that were written
    digest: str = ""
    blocks: int = 0  # number of checksums

    @property
    def is_whole(self) -> bool:
        """Has it the size that was written?"""
        return self.size is not None and self.expected in (None, self.size)


Listing = dict[str, TensorLocation]
"""Tensors by name: in which file, and where in it."""


@dataclass(frozen=True)
class Damage:
    """A file whose bytes are not those that were written, or that cannot be read."""

    file: str
    tensors: tuple[str, ...] = ()  # names of those with damaged bytes, if the header can be read
    unreadable: str = ""  # why the file could not be read to its end


@dataclass(frozen=True)
class Catalogue:
    """Contents of one checkpoint, one folder of weights, or one safetensors file."""

    path: Path
    manifest: Manifest | None  # None for what shardwise did not write
    problems: tuple[str, ...]  # why it cannot be loaded, as far as names and sizes show
    files: tuple[OneFile, ...]
    strangers: tuple[str, ...]  # names of files in the folder that are not the checkpoint's
    groups: Mapping[str, Listing]  # kind ("model", "optimizer" …) → tensors
    training: Mapping[str, Any] | None  # training.json, not decoded
    scalars: Mapping[str, Mapping[str, Any]]  # kind → values of tensors of one number

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors → the stored one."""
        return {} if self.manifest is None else self.manifest.aliases

    @classmethod
    def read(cls, path: Path) -> Self:
        """Everything that can be read of the checkpoint that ``path`` means."""
        with explained(f"looking at {path}", reads=True):
            checkpoint = resolve(path)
            if checkpoint.is_file():
                return cls._of_file(checkpoint)
            check_is_folder(checkpoint)
            return cls._of_folder(checkpoint)

    @classmethod
    def _of_folder(cls, folder: Path) -> Self:
        problems: list[str] = []
        manifest = _tried(problems, lambda: read_manifest(folder))
        if not problems:
            _tried(problems, lambda: (check_complete if manifest else check_foreign)(folder))
        files, strangers = _files(folder, manifest)
        names = [file.name for file in files if file.size is not None]
        with CheckpointReader(folder, None if problems else manifest) as source:
            groups: dict[str, Listing] = {}
            for name in filter(stem_of, names):
                groups.setdefault(stem_of(name), {}).update(_tensors(source, name, problems))
            state = _tried(problems, lambda: source.json(TRAINING)) if TRAINING in names else None
            training = state if isinstance(state, dict) else None
            scalars = {stem: _scalars(source, places, problems) for stem, places in groups.items()}
            if manifest is None or not problems:
                for stem in {MODEL: None, **groups}:  # the index, and what is missing
                    _tried(problems, partial(source.tensors, stem))
        if not groups and not problems:
            problems.append(_no_tensors(folder))
        unique = tuple(dict.fromkeys(problems))
        return cls(folder, manifest, unique, files, strangers, groups, training, scalars)

    @classmethod
    def _of_file(cls, path: Path) -> Self:
        problems = [_no_tensors(path)] if path.suffix in OF_TORCH else []
        with CheckpointReader(path.parent, None) as source:
            tensors = _tensors(source, path.name, problems) if not problems else {}
            scalars = _scalars(source, tensors, problems)
        files, groups = (OneFile(path.name, path.stat().st_size),), {MODEL: tensors}
        return cls(path, None, tuple(problems), files, (), groups, None, {MODEL: scalars})


def _no_tensors(path: Path) -> str:
    what = f"{path} holds no safetensors files"
    if path.suffix in OF_TORCH or (path / ".metadata").exists():
        return f"{what}, but pickles of torch. `shardwise export` makes a checkpoint of them."
    return f"{what}, so there is nothing to load."


def check_foreign(folder: Path) -> None:
    """Raises ``DamagedCheckpoint`` where a folder without a manifest should have one."""
    is_ours = step_of(folder.name) is not None or is_leftover(folder.name)
    if is_ours or (folder / TRAINING).exists():
        raise manifest_lost(folder)


def _files(folder: Path, manifest: Manifest | None) -> tuple[tuple[OneFile, ...], tuple[str, ...]]:
    """The files of the checkpoint, and the names of others in its folder."""
    sizes = {name: path.stat().st_size for name, path in sorted(files_in(folder).items())}
    if manifest is None:
        return tuple(OneFile(name, size) for name, size in sizes.items()), ()
    files = tuple(
        OneFile(name, sizes.get(name), record.size, record.digest, len(record.blocks) // 8)
        for name, record in manifest.files.items()
    )
    return files, tuple(name for name in sizes if name not in manifest.files and name != NAME)


def _tensors(source: CheckpointReader, name: str, problems: list[str]) -> Listing:
    """The tensors of one file, from an unchecked header where the checked one is damaged."""
    header = _tried(problems, lambda: source.header(name))
    if header is None and source.manifest is not None:
        with CheckpointReader(source.folder, None) as unchecked:
            header = _tried([], lambda: unchecked.header(name))
    return {tensor: TensorLocation(name, stored) for tensor, stored in (header or {}).items()}


def _scalars(source: CheckpointReader, listing: Listing, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    broken: set[str] = set()  # a damaged block would be read again for each number in it
    for name, place in listing.items():
        if place.stored.shape == () and place.file not in broken:
            value = torch.empty((), dtype=dtype_of(place.stored.dtype))
            try:
                read_into(source, [request_for(place, 0, value)])
                values[name] = value.item()
            except CheckpointError as error:
                problems.append(str(error))
                broken.add(place.file)
    return values


def stem_of(name: str) -> str:
    """``"model-00001-of-00003.safetensors"`` → ``"model"``; ``""`` for other files."""
    match = _NUMBERED.fullmatch(name)
    stem = match[1] if match else ""
    return MODEL if stem in PARTS else stem


def _tried(problems: list[str], read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns; or ``None``, and its error is added to ``problems``."""
    try:
        return read()
    except CheckpointError as error:
        problems.append(str(error))
        return None


def damage_of(catalogue: Catalogue) -> Iterator[tuple[int, Damage | None]]:
    """Compare every block of every file with its checksum, one block in memory at a time.

    Yields:
        The bytes that were read since the last one; after a file that is damaged, its damage.
    """
    if catalogue.manifest is None:
        return
    with CheckpointReader(catalogue.path, catalogue.manifest) as source:
        for file in catalogue.files:
            if file.size is None or not file.expected:
                continue
            damaged: list[tuple[int, int]] = []
            unreadable = ""
            for start, stop in cut_at_multiples(0, file.expected, catalogue.manifest.block):
                try:
                    source.check(file.name, start, stop)
                except DamagedCheckpoint:
                    damaged.append((start, stop))
                except CheckpointError as error:  # the rest cannot be read either
                    damaged.append((start, file.expected))
                    unreadable = str(error)
                    yield file.expected - start, None
                    break
                yield stop - start, None
            if damaged:
                yield 0, Damage(file.name, _within(catalogue, file.name, damaged), unreadable)


def _within(catalogue: Catalogue, file: str, ranges: list[tuple[int, int]]) -> tuple[str, ...]:
    """Names of the file's tensors that have bytes in one of the ranges."""
    return tuple(
        name
        for listing in catalogue.groups.values()
        for name, (other, stored) in listing.items()
        if other == file and any(stored.start < hi and lo < stored.stop for lo, hi in ranges)
    )
