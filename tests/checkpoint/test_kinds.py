"""The three kinds of state dict: who has which tensors, in which form, and when it is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import StateDictType

import shardwise as sw
from shardwise.checkpoint.kinds import KINDS, Piece, StateDict, kind_of


@pytest.mark.parametrize("kind", KINDS)
def test_fsdps_words_mean_the_same(kind: str) -> None:
    words = (kind, kind.upper(), f"{kind.upper()}_STATE_DICT")
    enumerated = StateDictType[f"{kind.upper()}_STATE_DICT"]
    assert {kind_of(word) for word in (*words, enumerated)} == {kind}
    assert getattr(StateDict, kind.upper()) == StateDict(kind)


@pytest.mark.parametrize(
    ("kind", "how", "said"),
    [
        ("ful", {}, "nearest is 'full'"),
        ("full", {"rank_0_only": True}, "nearest is 'rank0_only'"),
        ("local", {"rank0_only": True}, "every rank has pieces of its own"),
        (StateDict.FULL, {"rank0_only": True}, "says all of it"),
    ],
)
def test_what_means_nothing_is_an_error(kind: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(sw.ConfigError, match=said):
        StateDict.of(kind, how)


def piece(start: int, stop: int, shape: tuple[int, ...] = (2, 3), dtype: Any = None) -> Piece:
    return {"value": torch.arange(start, stop, dtype=dtype), "start": start, "shape": shape}


def test_pieces_become_whole_in_any_order() -> None:
    whole = sw.join([{"a": piece(4, 6)}, {"a": piece(0, 0)}, {"a": piece(0, 4)}])
    assert torch.equal(whole["a"], torch.arange(6).view(2, 3))
    copies = sw.join([{"a": piece(0, 6)}, {"a": piece(0, 6)}])  # no_shard: every rank has all
    assert torch.equal(copies["a"], whole["a"])


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, 4)],
        [piece(0, 3), piece(4, 6)],
        [piece(0, 4), piece(4, 7)],
        [piece(0, 4), piece(4, 6, (6,))],
        [piece(0, 4), piece(4, 6, dtype=torch.float32)],
    ],
    ids=["end missing", "hole", "too long", "another shape", "another dtype"],
)
def test_pieces_that_make_no_whole_are_refused(pieces: list[Piece]) -> None:
    with pytest.raises(sw.CheckpointError, match="do not make up a tensor"):
        sw.join([{"a": one} for one in pieces])


def test_pieces_pass_through_a_file_without_trust() -> None:
    file = io.BytesIO()
    torch.save({"a": piece(0, 6)}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert torch.equal(sw.join([read])["a"], torch.arange(6).view(2, 3))


def test_pieces_that_overlap_must_hold_the_same() -> None:
    later: Piece = {"value": torch.tensor([9, 4, 5]), "start": 3, "shape": (2, 3)}
    with pytest.raises(sw.CheckpointError, match="overlap from element 3 on"):
        sw.join([{"a": piece(0, 4)}, {"a": later}])


@pytest.mark.parametrize(
    "second", [piece(0, 6, (3, 2)), piece(6, 6, dtype=torch.float32)], ids=["shape", "dtype"]
)
def test_pieces_of_unlike_wholes_are_refused_though_one_is_whole(second: Piece) -> None:
    with pytest.raises(sw.CheckpointError, match="of another shape or dtype"):
        sw.join([{"a": piece(0, 6)}, {"a": second}])


def test_what_are_no_pieces_is_refused_by_its_kind() -> None:
    with pytest.raises(sw.CheckpointError, match=r"is a Tensor, and no piece .* kind 'sharded'"):
        sw.join([{"a": torch.zeros(3)}])
