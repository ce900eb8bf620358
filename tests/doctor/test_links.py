"""Links between nodes: who measures when, and what an answer and its absence say."""

from __future__ import annotations

import socket
from itertools import permutations

import pytest

from shardwise.doctor.links import Answers, measure, rounds


@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 8, 16], [0, 1, 2, 3], list(range(7))])
def test_each_pair_is_measured_both_ways_and_no_node_twice_at_a_time(nodes: list[int]) -> None:
    turns = rounds(nodes)
    assert sorted(pair for pairs in turns for pair in pairs) == sorted(permutations(nodes, 2))
    for pairs in turns:
        taking_part = [node for pair in pairs for node in pair]
        assert len(taking_part) == len(set(taking_part))


def test_a_link_is_measured() -> None:
    answers = Answers("127.0.0.1", b"secret")
    link = measure(0, 1, ("127.0.0.1", answers.port), b"secret")
    answers.close()
    assert (link.source, link.target, link.problem) == (0, 1, "")
    assert 0 < link.latency < 1
    assert link.bandwidth > 1e6
    assert abs(link.skew) < 1


def test_who_does_not_know_the_token_gets_no_answer() -> None:
    answers = Answers("127.0.0.1", b"secret")
    link = measure(0, 1, ("127.0.0.1", answers.port), b"another")
    with socket.create_connection(("127.0.0.1", answers.port)) as foreign:
        foreign.sendall(b"\x00\x00\x00\x05GET /")
        foreign.settimeout(5)
        received = b""
        while part := foreign.recv(4096):
            received += part
    answers.close()
    assert link.problem.startswith("another program answers")
    assert b"answer" not in received


def test_a_port_that_is_closed_is_said() -> None:
    answers = Answers("127.0.0.1", b"secret")
    answers.close()
    link = measure(0, 1, ("127.0.0.1", answers.port), b"secret")
    assert link.problem == "connection refused"
