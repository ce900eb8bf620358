"""The three kinds of state dict: who has which tensors, in which form, and when it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import StateDictType

import shardwise as sw
from shardwise.checkpoint.kinds import KINDS, StateDict, kind_of


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
        ("local", {"rank0_only": True}, "every rank has shards of its own"),
        (StateDict.FULL, {"rank0_only": True}, "says all of it"),
    ],
)
def test_what_means_nothing_is_an_error(kind: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(sw.ConfigError, match=said):
        StateDict.of(kind, how)
