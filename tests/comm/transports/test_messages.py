"""Which messages a collective is, on a transport that only takes note."""

from __future__ import annotations

from collections.abc import Callable

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


def test_memory_for_what_peers_send_is_used_again_once_the_sum_is_there() -> None:
    comm = Noted(0, 2)

    def issue(n: int) -> tuple[int, Callable[[], None]]:
        pending = start_sum(comm, torch.zeros(2 * n)).pending
        return comm.posts[-1][2][1].data_ptr(), pending.wait

    first, wait_first = issue(100)
    second, wait_second = issue(1000)
    assert first != second
    wait_second()
    wait_first()
    assert issue(100)[0] == first  # the smallest that is large enough
    assert issue(500)[0] == second


def test_a_larger_buffer_for_what_peers_send_takes_the_place_of_a_smaller_one() -> None:
    comm = Noted(0, 2)
    for n in (100, 1000, 1000):
        start_sum(comm, torch.zeros(2 * n)).pending.wait()
    places = [receives[1].data_ptr() for _, _, receives in comm.posts]
    assert places[1] == places[2] != places[0]
    assert [memory.nbytes for memory in comm._scratch._free] == [4000]
