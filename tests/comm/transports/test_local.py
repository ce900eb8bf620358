"""One rank alone pays for nothing. That it keeps every law is tested in test_contract.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.protocol import Label
from shardwise.comm.transports.local import LocalComm
from shardwise.comm.transports.transport import Shutdown
from shardwise.errors import ConfigError
from tests.comm.laws import sum_of


class Operations(TorchDispatchMode):
    """Every tensor operation, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_is_copied_and_nothing_is_counted() -> None:
    full = torch.arange(4.0)
    with LocalComm() as comm, Operations() as operations:
        comm.all_gather(full, Label("gather")).wait()
        assert sum_of(comm, full, by="mean") is full
        comm.broadcast(full, 0, Label("broadcast")).wait()
        comm.agree({"a": "1"})
    assert operations.names == []
    assert comm.counters.calls == {}
    assert full.tolist() == [0, 1, 2, 3]


def test_a_sum_in_another_dtype_is_one_copy() -> None:
    narrow = torch.arange(4.0).bfloat16()
    with Operations() as operations:
        out = sum_of(LocalComm(), narrow)
    assert operations.names == ["aten._to_copy.default"]
    assert out.tolist() == [0, 1, 2, 3]


def test_what_is_exchanged_comes_back_at_once_and_both_axes_are_itself() -> None:
    comm, full = LocalComm(), torch.arange(4.0)
    received: list[Tensor] = []
    comm.exchange(full, received.extend, Label("reduce")).wait()
    assert received == [full]
    assert comm.axes(1, 1) == (comm, comm)


def test_it_has_no_sum_of_its_own() -> None:
    comm, full = LocalComm(), torch.ones(2)
    assert (comm.has_reduce_scatter, comm.has_average) == (False, False)
    with pytest.raises(ConfigError, match="reduce head: this transport has no reduce_scatter"):
        comm.reduce_scatter(full, full, False, Label("reduce", "head"))


def test_what_comes_after_it_is_called_once() -> None:
    ended: list[str] = []
    comm = LocalComm(shutdown=Shutdown(callback=lambda: ended.append("closed")))
    comm.close()
    comm.close()
    assert ended == ["closed"]
