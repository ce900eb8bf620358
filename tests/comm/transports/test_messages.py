"""Which messages a collective is, on a transport that only takes note."""

from __future__ import annotations

import torch

from shardwise.comm.protocol import Label
from tests.comm.laws import start_sum
from tests.comm.transports.test_transport import Noted


def test_pieces_go_straight_from_and_to_their_place() -> None:
    comm, full = Noted(1, 4), torch.arange(12.0)
    comm.all_gather(full, Label("gather", "blocks.0"))
    (collective, sends, receives) = comm.posts[0]
    assert collective == (0, "all_gather", "gather", "blocks.0", 48)
    assert list(sends) == list(receives) == [2, 3, 0]
    assert {data.data_ptr() for data in sends.values()} == {full[3:].data_ptr()}
    for peer, place in receives.items():
        assert (place.data_ptr(), place.numel()) == (full[3 * peer :].data_ptr(), 3)


def test_pieces_of_unlike_sizes_are_sent_unless_they_are_empty() -> None:
    comm = Noted(1, 3)
    received = comm.all_to_all(torch.arange(4.0), [[0, 0, 1], [2, 1, 1], [0, 3, 0]], Label("send"))
    (collective, sends, receives) = comm.posts[0]
    assert collective == (0, "all_to_all", "send", "", 4 * 8)
    assert {peer: data.tolist() for peer, data in sends.items()} == {0: [0.0, 1.0], 2: [3.0]}
    assert {peer: place.data_ptr() for peer, place in receives.items()} == {
        2: received[1:].data_ptr()
    }
    assert received[0] == 2.0


def test_a_reduction_sends_slices_of_the_buffer_itself() -> None:
    comm, full = Noted(0, 3), torch.arange(6.0)
    start_sum(comm, full)
    _, sends, receives = comm.posts[0]
    assert {peer: data.tolist() for peer, data in sends.items()} == {1: [2.0, 3.0], 2: [4.0, 5.0]}
    assert all(data.untyped_storage().data_ptr() == full.data_ptr() for data in sends.values())
    assert list(receives) == [1, 2]


def test_an_empty_piece_is_received_from_every_peer() -> None:
    """From one alone, the others' messages found no buffer: four ranks waited for each other."""
    for dtype in (torch.float32, torch.bfloat16):
        comm = Noted(0, 4)
        start_sum(comm, torch.empty(0, dtype=dtype))
        _, sends, receives = comm.posts[0]
        assert list(receives) == list(sends) == [1, 2, 3]


def test_what_one_of_the_first_two_ranks_sends_is_received_where_the_sum_is_formed() -> None:
    """Only the first two addends of a sum in rank order may lie in it."""
    for rank, first in enumerate((1, 0, 0)):
        comm, full = Noted(rank, 3), torch.arange(6.0)
        reduction = start_sum(comm, full)
        _, _, receives = comm.posts[0]
        place = reduction.out.data_ptr()
        assert [peer for peer in receives if receives[peer].data_ptr() == place] == [first]
        assert len({data.data_ptr() for data in receives.values()}) == 2


def test_a_sum_in_a_wider_dtype_is_formed_elsewhere() -> None:
    comm = Noted(0, 2)
    reduction = start_sum(comm, torch.arange(4.0).bfloat16())
    _, _, receives = comm.posts[0]
    assert receives[1].dtype is torch.bfloat16
    assert receives[1].data_ptr() != reduction.out.data_ptr()
