"""The training state is one document that comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shardwise as sw
from shardwise.checkpoint.state import Document, encode, local_text


class Counter:
    """Anything with a state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 3, "pairs": {1: (2, 3)}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    def __bool__(self) -> bool:
        return False  # as an empty container


def test_it_comes_back_as_it_was() -> None:
    position = {"rows": (1, 2), "seen": {5, 6}}
    locals_ = [local_text(sw.Training(local=rank)) for rank in (b"0", b"1")]
    data = encode(sw.Training(7, Counter(), None, position, {"lr": 0.1}), [{"class": "X"}], locals_)
    assert Document.decode(data, "there") == Document(
        step=7,
        world=2,
        optimizers=[{"class": "X"}],
        scheduler=Counter().state,
        scaler=None,
        position=position,
        config={"lr": 0.1},
        local=[b"0", b"1"],
    )


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(sw.CheckpointError, match=r"training.position\['model'\] is a builtins"):
        encode(sw.Training(position={"model": object()}), [], ["null"])
    with pytest.raises(sw.CheckpointError, match=r"training.local is a builtins.object"):
        local_text(sw.Training(local=object()))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": 1}', b"[" * 99_999, b"\xff"])
def test_other_documents_are_refused(data: bytes) -> None:
    with pytest.raises(sw.CheckpointError, match="there is damaged"):
        Document.decode(data, "there")


def test_a_later_version_asks_for_a_later_shardwise() -> None:
    data = encode(sw.Training(), [], ["null"])
    later = json.dumps({**json.loads(data), "version": 2}).encode()
    with pytest.raises(sw.CheckpointError, match="Install a later shardwise"):
        Document.decode(later, "there")
