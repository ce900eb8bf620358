"""The files of a complete checkpoint: every file's size and checksums.

The manifest is the last file that is written to a checkpoint's folder, so all that it lists was on
the disk before. It holds a digest of itself: a flipped bit in it must not be taken for damage of
the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.checkpoint import checksum
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.safetensors_format import PAGE, is_listed
from shardwise.errors import CheckpointError, DamagedCheckpoint

NAME = "manifest.json"
VERSION = 2  # 1: optimizer and rank state lay beside the weights
CAP = 1 << 30
"""Bytes of a manifest at most: a quarter of a million blocks take two million."""

Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class FileRecord(_Frozen):
    """One file as it was written."""

    size: Count
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="of size and block checksums")
    blocks: str = Field(pattern=r"^([0-9a-f]{8})*$", description="8 hex digits for each block")
    writers: Any = Field(None, exclude=True, description="only in old manifests")

    def checksums(self) -> list[int]:
        """Return the checksum of each block of the file, in order."""
        return [int(self.blocks[k : k + 8], 16) for k in range(0, len(self.blocks), 8)]


class Manifest(_Frozen):
    """All that ``manifest.json`` holds but its digest."""

    format: Literal["shardwise"] = "shardwise"
    version: Literal[1, 2] = 2
    token: str = Field(min_length=8, description="of this save alone")
    created: str = Field(description="UTC, ISO 8601; sorted as texts, the order is that of time")
    step: Count | None = Field(description="optimizer steps taken")
    world: int = Field(ge=1, description="ranks that wrote it")
    strategy: str
    kind: Literal["sharded", "full"] = "sharded"
    ranks: None = Field(None, exclude=True, description="only in old manifests")
    versions: dict[str, str]
    checksum: Literal["crc32"] = "crc32"
    block: int = Field(default=BLOCK, ge=PAGE, le=BLOCK, multiple_of=PAGE, description="bytes")
    metric: float | None = Field(default=None, description="``Training.metric``, if one was given")
    aliases: dict[str, str] = Field(description="further names of tied parameters → stored name")
    files: dict[str, FileRecord]

    @property
    def line(self) -> str:
        """Say in one line the kind of checkpoint, who wrote it, and who can load it."""
        ranks = f"{self.world} rank{'s' * (self.world != 1)}"
        writer = "one of " * (self.kind == "full" and self.world > 1)
        return f"{self.kind} safetensors, written by {writer}{ranks}; any number of ranks loads it"

    def encode(self) -> bytes:
        """The file, with a digest of all the rest."""
        fields = self.model_dump()
        return json.dumps({**fields, "digest": _digest(fields)}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Read it.

        Raises:
            DamagedCheckpoint: it is not what ``encode`` returned.
            CheckpointError: a later version of shardwise wrote it.
        """
        try:
            fields = json.loads(data)
            if not isinstance(fields, dict):
                raise ValueError("it is no JSON object")
            _check_readable(fields, where)
            digest = fields.pop("digest", None)
            if digest != _digest(fields):
                raise ValueError("its digest does not match its content")
            manifest = cls.model_validate(fields)
        except (ValueError, RecursionError, ValidationError) as error:
            fact = str(error).splitlines()[0][:200]
            raise DamagedCheckpoint(
                f"{where} is damaged: {fact}. Without it the files beside it cannot be checked, so "
                "the checkpoint counts as incomplete. Load another one."
            ) from None
        manifest._check_files(where)
        return manifest

    def _check_files(self, where: str) -> None:
        for name, record in self.files.items():
            blocks = record.checksums()
            whole = len(blocks) == -(-record.size // self.block)
            fits = record.digest == checksum.digest_of(blocks, record.size)
            if not (is_listed(name) and whole and fits):
                raise DamagedCheckpoint(
                    f"{where} lists {name!r:.80} with checksums that do not fit its size, or by a "
                    "name that is no plain file name. Load another checkpoint."
                )


def record_of(blocks: Sequence[int], size: int) -> FileRecord:
    """The record of a file, from the checksums of its blocks."""
    digest, texts = checksum.digest_of(blocks, size), "".join(f"{block:08x}" for block in blocks)
    return FileRecord(size=size, digest=digest, blocks=texts)


def _check_readable(fields: dict[str, Any], where: str) -> None:
    if fields.get("format") == "shardwise" and fields.get("version") not in (None, 1, VERSION):
        raise CheckpointError(
            f"{where} is of version {fields['version']!r:.20}, and this shardwise reads versions "
            f"to {VERSION}. Install a later shardwise."
        )
    if fields.get("kind") == "local":
        raise CheckpointError(
            f"{where} is of kind 'local', with separate files for each rank, which is no longer "
            "read. Load it with the shardwise that saved it, and save it with kind='sharded'."
        )


def _digest(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
