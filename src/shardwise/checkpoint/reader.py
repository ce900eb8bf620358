"""A checkpoint's folder, opened for reading: tensors by name, bytes that were checked.

With a manifest, whatever is read is read by whole blocks, each checked against its checksum, and
no block twice in a row. A plain Hugging Face folder has none: then bytes are read as they are.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from shardwise.checkpoint.checked_file import Bytes, CheckedFile, Kept
from shardwise.checkpoint.disk import check_is_folder, explained, retried
from shardwise.checkpoint.folder import resolve
from shardwise.checkpoint.manifest import NAME, Manifest
from shardwise.checkpoint.plan import BLOCK, INDEX, place_of
from shardwise.checkpoint.recognise import files_in
from shardwise.checkpoint.run_folder import check_complete
from shardwise.checkpoint.safetensors_format import CAP, Stored, decode, inside, is_plain, length_of
from shardwise.checkpoint.wrappers import bare, renamed
from shardwise.errors import CheckpointError, DamagedCheckpoint

PARTS = ("adapter_model", "rest")
"""Stems of files that hold weights of a part of a model, in a checkpoint of it."""
OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that hold pickles."""
NO_PICKLES = (
    "Files of pickles (.bin, .pt) are not read, since a pickle can run anybody's code; `shardwise "
    "export FILE` converts one."
)


class TensorLocation(NamedTuple):
    """The place of a tensor: its file, and its bytes in that file."""

    file: str
    stored: Stored


def find_stored(
    names: Iterable[str], stored: Container[str], aliases: Mapping[str, str]
) -> str | None:
    """The name by which a tensor of these names is stored; ``None`` if it is not."""
    candidates = (candidate for name in names for candidate in (name, aliases.get(name, name)))
    return next((candidate for candidate in candidates if candidate in stored), None)


@dataclass
class CheckpointReader:
    """An open checkpoint. Use it as a context."""

    folder: Path
    # What it should consist of; ``None`` for a folder that shardwise did not write
    manifest: Manifest | None
    only: str = ""  # the one file that is read, whatever lies beside it; ``""``: the folder
    _files: dict[str, CheckedFile] = field(default_factory=dict, repr=False)
    _kept: Kept = field(default_factory=Kept, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open what ``path`` means: a complete folder, ``latest``, or one safetensors file."""
        given = Path(path).expanduser().absolute()
        resolved = retried(f"opening {given}", lambda: resolve(given))
        if retried(f"opening {resolved}", resolved.is_file):
            if resolved.suffix in OF_TORCH:
                raise CheckpointError(f"{resolved} is no safetensors file. {NO_PICKLES}")
            return cls(resolved.parent, None, resolved.name)
        check_is_folder(resolved)
        paths = retried(f"opening {resolved}", lambda: list(resolved.iterdir()))
        return cls(resolved, check_complete(resolved) if resolved / NAME in paths else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def another(self) -> Self:
        """The same checkpoint, opened for another thread."""
        return replace(self, _files={}, _kept=Kept())

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors → the stored one, as far as a manifest tells them."""
        ties = {} if self.manifest is None else self.manifest.aliases
        return {bare(alias): bare(name) for alias, name in ties.items()}

    def has(self, name: str) -> bool:
        """Does the checkpoint have a file of this name? One of ours: does the manifest list it?"""
        if self.only or self.manifest is not None:
            return name == self.only or name in self.listed()
        return inside(self.folder, name).is_file()

    def names(self, stem: str) -> list[str]:
        """The safetensors files of ``"model"`` or another stem."""
        if (index := self._index(stem)) is not None:
            return list(dict.fromkeys(index.values()))
        single = self.only if stem == "model" and self.only else f"{self._place(stem)}.safetensors"
        return [single] if self.has(single) else []

    def listed(self) -> list[str]:
        """Names of its files: those of the manifest, or all in the folder; none for ``only``."""
        if self.only or self.manifest is not None:
            return [] if self.manifest is None else list(self.manifest.files)
        with explained(f"looking into {self.folder}", reads=True):
            return sorted(files_in(self.folder))

    def _place(self, stem: str) -> str:
        """``place_of`` the stem, or itself: earlier versions had all files in one folder."""
        place = place_of(stem)
        is_there = self.has(f"{place}.safetensors") or self.has(f"{place}{INDEX}")
        return place if is_there else stem

    def _index(self, stem: str) -> dict[str, str] | None:
        """Tensor → file, as the index of a stem says; ``None`` where there is no index."""
        name = f"{self._place(stem)}{INDEX}"
        if not self.has(name):
            return None
        index = self.json(name)
        weights = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weights, dict) or not weights:
            raise DamagedCheckpoint(
                f"{self.folder / name} has no weight_map that says which file holds what. Fetch "
                "or write it again."
            )
        for file in weights.values():
            if not is_plain(file):
                inside(self.folder, file)  # raises, and says why
        within = name.rpartition("/")[0]
        return {t: f"{within}/{file}" if within else file for t, file in weights.items()}

    def tensors(self, stem: str) -> dict[str, TensorLocation]:
        """Every tensor of a stem, by its name without wrappers."""
        index = self._index(stem) or {}
        names = self.names(stem)
        if stem == "model" and self.manifest is not None:  # of a part of a model: see ``Part``
            names += [name for kind in PARTS for name in self.names(kind)]
        locations = self.tensors_in(names)
        if lost := [name for name in index if name not in locations]:
            more = f" and {len(lost) - 1:,} more" * (len(lost) > 1)
            raise DamagedCheckpoint(
                f"{self.folder}: the index says that {lost[0]!r:.200}{more} is in "
                f"{index[lost[0]]!r:.80}, and it is not. The index or the file is of another "
                "model; fetch both again."
            )
        if stem == "model":
            self._check_ties(locations)
        return renamed(locations)

    def weights(self) -> dict[str, TensorLocation]:
        """Parameters and buffers by name. Raises ``CheckpointError`` if there are none."""
        if locations := self.tensors("model"):
            return locations
        files = f"; it has {', '.join(self.listed()[:8])}" if self.listed() else ""
        raise CheckpointError(
            f"{self.folder} holds no model.safetensors and no index of several, so it holds no "
            f"weights{files}. Name a folder that shardwise or a Hugging Face library wrote. "
            f"{NO_PICKLES}"
        )

    def _check_ties(self, locations: Mapping[str, TensorLocation]) -> None:
        for alias, name in self.manifest.aliases.items() if self.manifest is not None else ():
            if alias in locations or name not in locations:
                stored = f"{alias!r:.200} is stored, too"
                fact = stored if alias in locations else "that is not stored"
                raise DamagedCheckpoint(
                    f"{self.folder / NAME} ties {alias!r:.200} to {name!r:.200}, and {fact}. It "
                    "does not fit the files beside it; load another checkpoint."
                )

    def tensors_in(self, names: Iterable[str]) -> dict[str, TensorLocation]:
        """Every tensor of some files, by name."""
        locations: dict[str, TensorLocation] = {}
        for name in names:
            inside(self.folder, name)
            if not self.has(name):
                raise DamagedCheckpoint(
                    f"{self.folder}: {name} is missing, and the index says that it holds tensors. "
                    "Fetch it again, or load another checkpoint."
                )
            for tensor, stored in self.header(name).items():
                if tensor in locations:
                    raise DamagedCheckpoint(
                        f"{self.folder}: {locations[tensor].file} and {name} both hold {tensor!r}, "
                        "so it is not clear which is meant. Remove what does not belong there."
                    )
                locations[tensor] = TensorLocation(name, stored)
        return locations

    def header(self, name: str) -> dict[str, Stored]:
        """A file's header, checked against the file's size."""
        file = self._file(name)
        length = length_of(bytes(file.read(0, min(8, file.size))), file.size, file.title)
        return decode(bytes(file.read(8, 8 + length)), file.size, file.title)

    def bytes(self, name: str) -> bytes:
        """A small file, whole and checked."""
        file = self._file(name)
        if file.size > CAP:
            raise DamagedCheckpoint(
                f"{file.title} has {file.size:,} bytes; {CAP:,} at most are expected of it. "
                "Load another checkpoint."
            )
        return bytes(file.read(0, file.size))

    def json(self, name: str) -> Any:
        """A small JSON file, checked and parsed."""
        try:
            return json.loads(self.bytes(name))
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{self.folder / name} is not JSON ({str(error)[:200]}). Fetch or write it again."
            ) from None

    def check(self, name: str, start: int, stop: int) -> None:
        """Compare bytes ``[start, stop)`` of a file with their checksums."""
        self._file(name).check(start, stop)

    def read_into(self, name: str, start: int, *into: Bytes) -> None:
        """Fill arrays, one after the other, with the bytes from ``start`` on, checked."""
        self._file(name).read_into(start, *into)

    def _file(self, name: str) -> CheckedFile:
        if name not in self._files:
            path = inside(self.folder, name)
            record = None if self.manifest is None else self.manifest.files[name]
            sums = None if record is None else record.checksums()
            block = BLOCK if self.manifest is None else self.manifest.block
            file = CheckedFile(str(path), sums, self._kept, block)
            file.open()
            self._files[name] = file
        return self._files[name]
