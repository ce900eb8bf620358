"""One process of ``shardwise train``."""

from __future__ import annotations

import pytest
import torch

from shardwise.cli.train_rank import unused_devices


def test_one_process_among_several_devices_is_told_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.cli.train_rank.device_count", lambda: 8)
    sentence = "devices   1 of 8 is used: --nproc 8 uses all of them"
    assert unused_devices(torch.device("cuda", 0)) == sentence
    assert unused_devices(torch.device("cpu")) == ""
    monkeypatch.setattr("shardwise.cli.train_rank.device_count", lambda: 1)
    assert unused_devices(torch.device("cuda", 0)) == ""
