"""A model computes in one stream of its device."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm.one_stream import OneStream
from shardwise.errors import ScheduleError


def test_the_stream_of_the_first_call_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["stream 7"]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[-1])
    stream = OneStream(torch.device("cuda", 0))
    for _ in range(2):
        stream.check()
    current.append("stream 0")
    with pytest.raises(ScheduleError, match="called in stream 0, and the first one was called in"):
        stream.check()


def test_the_cpu_has_no_streams() -> None:
    OneStream(torch.device("cpu")).check()
