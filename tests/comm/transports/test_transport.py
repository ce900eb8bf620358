"""What every group has in common, on a transport that only takes note."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.protocol import Label
from shardwise.comm.transports.messages import MessagesComm
from shardwise.comm.transports.transport import IMMEDIATE, Shutdown, end_group
from shardwise.comm.watchdog.desync import Collective
from shardwise.errors import ConfigError, RanksDisagree


class Noted(MessagesComm):
    """Keeps what it was given; every peer answers with ``answer`` of this rank's text."""

    def __init__(
        self,
        rank: int,
        size: int,
        answer: Callable[[str], str] = str,
        shutdown: Shutdown = IMMEDIATE,
    ) -> None:
        super().__init__(rank, size, torch.device("cpu"), shutdown)
        self.posts: list[tuple[Collective, Mapping[int, Tensor], Mapping[int, Tensor]]] = []
        self.texts: list[str] = []
        self.left: list[str] = []
        self.fenced: list[Label] = []
        self._answer = answer

    def _post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        self.posts.append((collective, sends, receives))
        return lambda: None

    def _gather_texts(self, collective: Collective, text: str) -> list[str]:
        self.posts.append((collective, {}, {}))
        self.texts.append(text)
        return [text, *[self._answer(text)] * (self.size - 1)]

    def _fail(self, reason: str) -> RanksDisagree:
        return RanksDisagree(reason)

    def _leave(self, how: str) -> None:
        self.left.append(how)

    def fence(self, label: Label) -> None:
        self.fenced.append(label)
        super().fence(label)


def test_collectives_are_numbered_as_they_are_issued() -> None:
    comm = Noted(0, 2)
    comm.broadcast(torch.zeros(1), 1, Label("broadcast", "head"))
    comm.agree({})
    comm.all_gather(torch.zeros(2), Label("gather", "head"))
    assert [collective for collective, _, _ in comm.posts] == [
        Collective(0, "broadcast from rank 1", "broadcast", "head", 4),
        Collective(1, "agree", "agree", "", 0),
        Collective(2, "all_gather", "gather", "head", 8),
    ]


def test_the_end_of_a_with_block_tells_whether_it_was_an_error() -> None:
    ended: list[str] = []
    comm = Noted(0, 2, shutdown=Shutdown(callback=lambda: ended.append("after it left")))
    with comm:
        pass
    comm.close()
    assert comm.left == ["it closed its communicator"]
    assert ended == ["after it left"]
    with pytest.raises(KeyError), Noted(0, 2) as comm:
        raise KeyError("x")
    assert comm.left == ["it raised KeyError('x')"]


@pytest.mark.parametrize("forked", [False, True])
def test_an_end_that_nobody_uses_any_more_closes_but_not_in_a_fork(forked: bool) -> None:
    destroyed: list[str] = []
    comm = Noted(0, 2, shutdown=Shutdown(callback=lambda: destroyed.append("a group again")))
    comm._opened()
    left = comm.left
    if forked:
        comm._process = -1
    del comm
    gc.collect()
    assert left == ([] if forked else ["nobody used it any more"])
    assert destroyed == []


def test_facts_travel_only_if_their_digests_differ() -> None:
    comm = Noted(0, 2)
    comm.agree({"a": "1"})
    assert [len(text) for text in comm.texts] == [64]
    other = Noted(0, 2, lambda text: text.replace("1", "2") if text[0] == "{" else "other digest")
    with pytest.raises(RanksDisagree, match="a: rank 0: 1; rank 1: 2"):
        other.agree({"a": "1"})
    assert other.texts[-1] == '{"a": "1"}'


def test_its_axes_are_made_once_for_each_grid_and_end_with_it() -> None:
    pairs: list[tuple[Noted, Noted]] = []

    def open_axes(replicate: int, shard: int) -> tuple[Noted, Noted]:
        pairs.append((Noted(0, replicate), Noted(0, shard)))
        return pairs[-1]

    comm = Noted(0, 6, shutdown=Shutdown(open_axes=open_axes))
    assert comm.axes(2, 3) == comm.axes(2, 3) == pairs[0]
    assert comm.axes(3, 2) == pairs[1]
    comm.agree({"a": "1"})
    comm.fence(Label("fence"))
    axes = [axis for pair in pairs for axis in pair]
    assert [(len(axis.texts), axis.fenced) for axis in axes] == [(1, [Label("fence")])] * 4
    comm.close("the test is over")
    assert [axis.left for pair in pairs for axis in pair] == [["the test is over"]] * 4


def test_a_part_of_the_processes_cannot_be_made_a_grid() -> None:
    with pytest.raises(ConfigError, match="cannot be made a grid of 2 × 3 ranks"):
        Noted(0, 6).axes(2, 3)


def test_the_order_of_facts_does_not_matter() -> None:
    one, other = Noted(0, 2), Noted(0, 2)
    one.agree({"a": "1", "b": "2"})
    other.agree({"b": "2", "a": "1"})
    assert one.texts == other.texts


def test_a_group_that_the_program_has_ended_is_left_alone() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    end_group(group)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    end_group(group)
    assert dist.is_initialized()  # the program's next group
    end_group(dist.group.WORLD)
    assert not dist.is_initialized()
