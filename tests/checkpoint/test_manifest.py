"""A manifest is believed whole or not at all."""

from __future__ import annotations

import json
import random

import pytest

from shardwise.checkpoint.checksum import of_bytes
from shardwise.checkpoint.manifest import Manifest, record_of
from shardwise.errors import CheckpointError


def a_manifest(**changes: object) -> Manifest:
    data = b"some bytes"
    fields = {
        "token": "0123456789abcdef",
        "created": "2026-01-01T00:00:00+00:00",
        "step": 7,
        "world": 2,
        "strategy": "full_shard",
        "versions": {"torch": "2.13"},
        "metric": 0.1,
        "aliases": {"lm_head.weight": "embed.weight"},
        "files": {"model.safetensors": record_of(of_bytes(data), len(data))},
    }
    return Manifest.model_validate({**fields, **changes})


def test_what_was_encoded_is_decoded() -> None:
    manifest = a_manifest()
    assert Manifest.decode(manifest.encode(), "there") == manifest
    assert manifest.files["model.safetensors"].checksums() == of_bytes(b"some bytes")


def test_its_line_counts_ranks() -> None:
    words = [a_manifest(world=world, kind="full").line.split(";")[0] for world in (1, 3)]
    assert words[0] == "full safetensors, written by 1 rank"
    assert words[1] == "full safetensors, written by one of 3 ranks"


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    data = a_manifest().encode().rstrip()
    chance = random.Random(0)
    for _ in range(500):
        broken = bytearray(data)
        broken[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with pytest.raises(CheckpointError):
            Manifest.decode(bytes(broken), "there")
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=r"there is damaged: .* counts as incomplete"):
            Manifest.decode(data[:length], "there")


def signed(fields: dict[str, object]) -> bytes:
    """The manifest with a digest by somebody who knows how it is made."""
    from shardwise.checkpoint.manifest import _digest

    return json.dumps({**fields, "digest": _digest(fields)}).encode()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "a\\b", "C:x", "x\n"])
def test_only_plain_names_are_listed(name: str) -> None:
    fields = a_manifest().model_dump()
    fields["files"] = {name: fields["files"]["model.safetensors"]}
    with pytest.raises(CheckpointError, match="no plain file name"):
        Manifest.decode(signed(fields), "there")


def test_checksums_must_cover_the_file() -> None:
    fields = a_manifest().model_dump()
    fields["files"]["model.safetensors"]["size"] = 5 << 20
    with pytest.raises(CheckpointError, match="do not fit its size"):
        Manifest.decode(signed(fields), "there")


def test_an_old_one_that_says_who_wrote_what_is_read() -> None:
    fields = a_manifest().model_dump()
    fields["files"]["model.safetensors"]["writers"] = [[10, 0]]
    assert Manifest.decode(signed(fields), "there").encode() == a_manifest().encode()


def test_a_later_version_asks_for_a_later_shardwise() -> None:
    fields = {**a_manifest().model_dump(), "version": 3}
    with pytest.raises(CheckpointError, match="version 3, and this shardwise reads versions to 2"):
        Manifest.decode(signed(fields), "there")


@pytest.mark.parametrize("change", [{"world": 0}, {"more": 1}, {"checksum": "none"}, {"step": -1}])
def test_other_fields_and_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.decode(signed({**a_manifest().model_dump(), **change}), "there")


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b"{}", b"[" * 100_000, b"\xff"])
def test_other_json_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.decode(data, "there")
