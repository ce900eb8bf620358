"""What is decided before a message is sent, on a wire that only takes note."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from shardwise.comm.desync import Collective
from shardwise.comm.messages import MessagesComm, agree, sum_in_rank_order
from shardwise.comm.protocol import Label
from shardwise.errors import RanksDisagree

CPU = torch.device("cpu")


class Notes:
    """A wire that keeps what it was given."""

    def __init__(self) -> None:
        self.posts: list[tuple[Collective, Mapping[int, Tensor], Mapping[int, Tensor]]] = []
        self.closed: list[str] = []

    def post(
        self, collective: Collective, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        self.posts.append((collective, sends, receives))
        return lambda: None

    def share(self, collective: Collective, text: str) -> list[str]:
        self.posts.append((collective, {}, {}))
        return [text]

    def fail(self, reason: str) -> RanksDisagree:
        return RanksDisagree(reason)

    def close(self, how: str) -> None:
        self.closed.append(how)


def test_pieces_go_straight_from_and_to_their_place() -> None:
    wire = Notes()
    full = torch.arange(12.0)
    MessagesComm(1, 4, CPU, wire).all_gather(full, Label("gather", "blocks.0"))
    (collective, sends, receives) = wire.posts[0]
    assert collective == (0, "all_gather", "gather", "blocks.0", 48)
    assert list(sends) == list(receives) == [2, 3, 0]
    assert {data.data_ptr() for data in sends.values()} == {full[3:].data_ptr()}
    for peer, place in receives.items():
        assert (place.data_ptr(), place.numel()) == (full[3 * peer :].data_ptr(), 3)


def test_a_reduction_sends_slices_of_the_buffer_itself() -> None:
    wire = Notes()
    full = torch.arange(6.0)
    MessagesComm(0, 3, CPU, wire).reduce_scatter(torch.empty(2), full, Label("reduce"))
    _, sends, receives = wire.posts[0]
    assert {peer: data.tolist() for peer, data in sends.items()} == {1: [2.0, 3.0], 2: [4.0, 5.0]}
    assert all(data.untyped_storage().data_ptr() == full.data_ptr() for data in sends.values())
    assert list(receives) == [1, 2]


def test_memory_for_what_peers_send_is_used_again_once_the_sum_is_there() -> None:
    wire = Notes()
    comm = MessagesComm(0, 2, CPU, wire)

    def issue(n: int) -> tuple[int, Callable[[], None]]:
        pending = comm.reduce_scatter(torch.empty(n), torch.zeros(2 * n), Label("reduce"))
        return wire.posts[-1][2][1].data_ptr(), pending.wait

    first, wait_first = issue(100)
    second, wait_second = issue(1000)
    assert first != second
    wait_first()
    wait_second()
    assert issue(500)[0] == second
    assert issue(100)[0] == first


def test_collectives_are_numbered_as_they_are_issued() -> None:
    wire = Notes()
    comm = MessagesComm(0, 2, CPU, wire)
    comm.broadcast(torch.zeros(1), 1, Label("broadcast"))
    comm.agree({})
    comm.all_gather(torch.zeros(2), Label("gather"))
    assert [collective.seq for collective, _, _ in wire.posts] == [0, 1, 2]


def test_the_end_of_a_with_block_tells_whether_it_was_an_error() -> None:
    wire = Notes()
    with MessagesComm(0, 2, CPU, wire):
        pass
    with pytest.raises(KeyError), MessagesComm(0, 2, CPU, wire):
        raise KeyError("x")
    assert wire.closed == ["it closed its end of the group", "it raised KeyError('x')"]


def test_sums_go_from_rank_to_rank_and_are_wide() -> None:
    tiny = 2.0**-10
    pieces = [torch.tensor([1.0]), torch.tensor([tiny]), torch.tensor([-1.0])]
    narrow = [piece.bfloat16() for piece in pieces]
    wide, rounded = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    sum_in_rank_order(wide, narrow)
    sum_in_rank_order(rounded, narrow)
    assert wide.item() == tiny  # each addend was widened first
    assert rounded.item() == 0.0  # 1 + 2^-10 is 1 in bfloat16
    sum_in_rank_order(wide, narrow, float(len(narrow)))
    assert wide.item() == pytest.approx(tiny / 3)


def test_a_sum_leaves_its_pieces_alone_and_needs_no_graph() -> None:
    pieces = [torch.ones(3, requires_grad=True), torch.ones(3)]
    out = torch.empty(3)
    sum_in_rank_order(out, pieces)
    assert not out.requires_grad
    assert torch.equal(pieces[1], torch.ones(3))


def test_facts_travel_only_if_their_digests_differ() -> None:
    sent: list[str] = []

    def alone(text: str) -> list[str]:
        sent.append(text)
        return [text, text]

    def beside_another(text: str) -> list[str]:
        sent.append(text)
        return [text, text.replace("1", "2")] if text.startswith("{") else [text, "another digest"]

    assert agree({"a": "1"}, alone) == ""
    assert [len(text) for text in sent] == [64]
    assert "a: rank 0: 1; rank 1: 2" in agree({"a": "1"}, beside_another)
    assert sent[-1] == '{"a": "1"}'
