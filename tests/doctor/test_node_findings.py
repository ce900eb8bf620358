"""Facts of nodes as a table, and what is found in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.doctor.links import Measured
from shardwise.doctor.node_facts import Meets, NodeFacts
from shardwise.doctor.node_findings import Finding, findings_after, findings_before, unreached

HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "docker0": "172.17.0.1"}
FIRST = Meets(0, "alpha", "10.0.0.2", 29500, ("10.0.0.2",), HERE, {}, "eth0", is_first=True)
SECOND = Meets(1, "beta", "alpha", 29500, ("10.0.0.2",), HERE | {"eth0": "10.0.0.3"}, {}, "eth0")
GLOO = "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize("seen", [FIRST, SECOND])
def test_a_node_where_all_is_well(seen: Meets) -> None:
    assert findings_before(seen) == []


@pytest.mark.parametrize(
    ("seen", "changes", "what", "change"),
    [
        (
            FIRST,
            {"name": "10.0.0.3", "resolved": ("10.0.0.3",)},
            "node-rank 0 is 10.0.0.2, 172.17.0.1 but endpoint says 10.0.0.3",
            "--master 10.0.0.2:29500 (MASTER_ADDR) on all nodes",
        ),
        (
            FIRST,
            {"name": "alpha", "resolved": ("127.0.1.1",)},
            "alpha is 127.0.1.1 on node-rank 0, alpha, so the endpoint is its loopback interface",
            "--master 10.0.0.2:29500 (MASTER_ADDR) on all nodes",
        ),
        (
            FIRST,
            {"holder": "nginx (process 7, at 0.0.0.0)"},
            "port 29500 of node-rank 0, alpha, is taken by nginx (process 7, at 0.0.0.0)",
            "--master 10.0.0.2:29501 (MASTER_PORT) on all nodes, or end that program",
        ),
        (
            FIRST,
            {"has_token": False},
            "SHARDWISE_RUN_TOKEN is not set",
            "export SHARDWISE_RUN_TOKEN=$(openssl rand -hex 16), the same on all nodes",
        ),
        (
            SECOND,
            {"resolved": ()},
            "the name alpha does not resolve on beta",
            (
                "--master ADDRESS:29500 (MASTER_ADDR) with rank 0's address on all nodes, or "
                "echo 'ADDRESS alpha' >> /etc/hosts"
            ),
        ),
        (
            SECOND,
            {"chosen": {GLOO: "eth9"}},
            (
                f"{GLOO} is eth9, and beta has no such interface, but lo (127.0.0.1), eth0 "
                "(10.0.0.3), docker0 (172.17.0.1)"
            ),
            f"export {GLOO}=eth0",
        ),
    ],
)
def test_what_a_node_finds_on_its_own(
    seen: Meets, changes: dict[str, Any], what: str, change: str
) -> None:
    (finding,) = findings_before(replace(seen, **changes))
    assert (finding.what, finding.change) == (what, change)
    assert finding.stops == ("TOKEN" not in what and "loopback" not in what)


@pytest.mark.parametrize(
    ("problem", "what", "change"),
    [
        (
            "10.0.0.2 does not answer",
            "beta cannot reach port 29500 of alpha by eth0: 10.0.0.2 does not answer",
            (
                "on node-rank 0: ufw allow from 10.0.0.3; or --master with an address of a network "
                "that both have (ip route get 10.0.0.2)"
            ),
        ),
        (
            "no program listens at port 29500 of alpha, where rank 0 serves the store",
            (
                "no program listens at port 29500 of alpha, where rank 0 serves the store; beta "
                "reaches the host by eth0"
            ),
            "start node-rank 0; its own output names the address for --master (port 29500)",
        ),
    ],
)
def test_why_a_node_cannot_reach_rank_0(problem: str, what: str, change: str) -> None:
    finding = unreached(SECOND, problem)
    assert (finding.what, finding.change) == (what, change)


# --- together --------------------------------------------------------------------------------

ALPHA = NodeFacts(
    0,
    "alpha",
    "eth0",
    "10.0.0.2",
    4000,
    route="eth0",
    versions={"torch": "2.13.0", "numpy": "2.4"},
    folder="/runs",
    free=2**40,
    write=1e9,
    recipe={"batch.rows": "16"},
)
BETA = replace(ALPHA, rank=1, host="beta", address="10.0.0.3")
LINKS = [Measured(0, 1, 1e-4, 1e9), Measured(1, 0, 1e-4, 1e9)]


def findings(
    beta: NodeFacts = BETA, links: list[Measured] = LINKS, sharing: tuple[int, ...] = (0, 1)
) -> list[Finding]:
    return findings_after([ALPHA, beta], links, sharing)


def test_nodes_that_are_alike_are_fine() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("changes", "what", "change", "stops"),
    [
        (
            {"versions": {"torch": "2.12.1", "numpy": "2.4"}},
            "the version of torch differs: 2.13.0 on alpha (rank 0); 2.12.1 on beta (rank 1)",
            "on all nodes: pip install torch==2.13.0",
            True,
        ),
        (
            {"versions": {"torch": "2.13.0"}},
            "the version of numpy differs: 2.4 on alpha (rank 0); nothing on beta (rank 1)",
            "on all nodes: pip install numpy==2.4",
            False,
        ),
        (
            {"variables": {"NCCL_PROTO": "LL"}},
            "the value of NCCL_PROTO differs: nothing on alpha (rank 0); LL on beta (rank 1)",
            "on all nodes: unset NCCL_PROTO",
            False,
        ),
        (
            {"recipe": {"batch.rows": "8"}},
            "the recipe's batch.rows differs: 16 on alpha (rank 0); 8 on beta (rank 1)",
            "on all nodes: copy the recipe of alpha",
            True,
        ),
        (
            {"write": 0.0},
            "nothing can be written to /runs on beta",
            "on beta: ls -ld /runs; or --run.folder with another folder",
            True,
        ),
        (
            {"free": 2 * 10**9},
            "/runs on beta has 2.0 GB free and takes 1,000 MB/s",
            "--run.folder with a folder of a larger or faster disk",
            False,
        ),
        (
            {"open": ["torchrun:29500"]},
            "torchrun on beta listens at port 29500 on every interface",
            "on beta: ufw deny 29500/tcp, after ufw allow from each node's address",
            False,
        ),
    ],
)
def test_what_differs_between_nodes(
    changes: dict[str, Any], what: str, change: str, stops: bool
) -> None:
    (one,) = findings(replace(BETA, **changes))
    assert (one.what, one.change, one.stops) == (what, change, stops)


def test_a_folder_that_is_not_shared() -> None:
    (one,) = findings(sharing=(0,))
    assert one.what == "/runs of alpha is not shared with beta (rank 1)"
    assert not one.stops


def test_a_link_that_drops_packets_names_both_ends() -> None:
    (one,) = findings(links=[LINKS[0]._replace(problem="it does not answer"), LINKS[1]])
    assert one.stops
    assert one.what == (
        "rank 1 on beta cannot be reached at 10.0.0.3 (eth0) from alpha: it does not answer"
    )
    assert one.change.startswith("on beta: ufw allow from 10.0.0.2;")


def test_a_wrong_interface_names_the_variable_and_the_right_one() -> None:
    wrong = replace(BETA, interface="docker0", address="172.17.0.1", chosen={GLOO: "docker0"})
    (one,) = findings(wrong, [LINKS[0]._replace(problem="connection refused"), LINKS[1]])
    assert one.change == f"on beta: export {GLOO}=eth0"
    assert "as GLOO_SOCKET_IFNAME says, and eth0 leads to rank 0" in one.why


def test_a_clock_and_a_slow_link() -> None:
    slow = LINKS[1]._replace(bandwidth=1e8)
    clock, link = sorted(findings(links=[LINKS[0]._replace(skew=-90.0), slow]))
    assert (clock.what, clock.change) == (
        "the clock of beta is 90.0 s behind that of alpha",
        "on beta: timedatectl set-ntp true",
    )
    assert link.what == (
        "the link from rank 1 on beta to rank 0 on alpha carries 100.0 MB/s, and the fastest one "
        "1,000.0 MB/s"
    )
