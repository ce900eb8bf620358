"""Batches a step ahead: copied beside the step before, and not counted as taken."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from shardwise.comm.host_memory import _Copied
from shardwise.recipe.data_config import BatchConfig
from shardwise.train.ahead import BatchesAhead
from shardwise.train.batches import Batches, Rows
from shardwise.train.streams import StreamBatches
from tests.recorder.clocks import DEVICE
from tests.recorder.device import Device
from tests.train.test_streams import source_in

ROWS = Rows(np.arange(401, dtype=np.int32), 10)


def source() -> Batches:
    return Batches(ROWS, BatchConfig(rows=4, micro=2), 5, 0, 1)


def sums_of(device: Device) -> list[int]:
    """Each step's tokens, added up on the device; nothing waits for the next step's copies."""
    ahead, sums = BatchesAhead(source(), DEVICE), []
    with device.installed():
        for step in range(3):
            batches = ahead.take(step)
            sums.append(torch.stack([batch.ids.sum() for batch in batches.on_device]).sum())
            ahead.prepare(step + 1)
            (copies,) = device.streams
            assert not copies.record_event().query()
        assert device.waits == []
    return [int(value) for value in sums]


def test_the_next_step_is_copied_while_nothing_waits_for_it() -> None:
    device = Device()
    expected = [sum(int(batch.ids.sum()) for batch in source().step(step)) for step in range(3)]
    assert sums_of(device) == expected
    assert device.faults == []


def test_a_step_that_does_not_wait_for_its_copies_is_found() -> None:
    device = Device()
    with mock.patch.object(_Copied, "wait", return_value=None):
        sums_of(device)
    assert any("has not waited for aten::copy_" in fault for fault in device.faults)


def test_a_step_that_was_not_prepared_is_read() -> None:
    ahead = BatchesAhead(source(), torch.device("cpu"))
    ahead.prepare(1)
    for step in (4, 4, 0):
        (first, _), (expected, _) = ahead.take(step).on_device, source().step(step)
        assert torch.equal(first.ids, expected.ids)


def test_the_step_ahead_is_neither_taken_nor_the_end(tmp_path: Path) -> None:
    streamed = source_in(tmp_path, "data.streaming.epochs=1")
    with (
        closing(StreamBatches(streamed, 0, 1)) as plain,
        closing(StreamBatches(streamed, 0, 1)) as s,
    ):
        plain.start([])
        s.start([])
        ahead, step = BatchesAhead(s, torch.device("cpu")), 0
        while not plain.ended():
            assert not ahead.ended()
            batches, expected = ahead.take(step), plain.step(step)
            step += 1
            ahead.prepare(step)
            assert [b.ids.tolist() for b in batches.in_host] == [b.ids.tolist() for b in expected]
            assert ahead.positions() == plain.positions()
        assert ahead.ended()
        assert step > 3
