"""`shardwise doctor --nodes` on two hosts: what each fault is called, where it is seen."""

from __future__ import annotations

import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness.hosts import Host, hosts
from shardwise.cli.plan import PlanOptions
from shardwise.comm.machine import meeting as meeting_module
from shardwise.comm.machine.environment import Launch
from shardwise.doctor.node_findings import Finding
from shardwise.doctor.nodes import Report, examine
from shardwise.errors import RanksDisagree
from tests.forked import forked
from tests.hosts import needs_hosts, shardwise
from tests.ranks import free_port

TOKEN = {"SHARDWISE_RUN_TOKEN": "a secret"}


def test_two_ranks_of_one_host_examine_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "_meetings", iter([7] * 2))  # each "process" has its first
    monkeypatch.setenv("SHARDWISE_RUN_TOKEN", "a secret")
    port, findings = free_port(), list[Finding]()

    def rank(number: int) -> Report:
        launch = Launch(number, 2, 0, "127.0.0.1", port)
        return examine(launch, 20.0, tmp_path, findings.extend)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert findings == []
    assert [(link.source, link.target, link.problem) for link in first.links] == [
        (0, 1, ""),
        (1, 0, ""),
    ]
    assert not [finding for finding in first.findings if finding.stops]
    assert not any("shared" in finding.what for finding in first.findings)
    assert second.links == first.links
    assert not any(tmp_path.iterdir())
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(first.as_json()), "utf-8")
    between = PlanOptions(gpus="8xH100", nodes=2, link="measured", machines=path).machine().between
    assert between.bandwidth == min(link.bandwidth for link in first.links)


def test_a_port_that_another_program_has_is_told_before_anybody_waits(tmp_path: Path) -> None:
    findings = list[Finding]()
    with socket.create_server(("127.0.0.1", 0)) as other:
        launch = Launch(0, 2, 0, "127.0.0.1", other.getsockname()[1])
        with pytest.raises(RanksDisagree):
            examine(launch, 0.2, tmp_path, findings.extend)
    assert f"port {launch.port} of node-rank 0" in findings[0].what
    assert "is taken by " in findings[0].what


# --- hosts that are network namespaces ---------------------------------------------------------


def examined(
    folder: Path,
    machines: list[Host],
    *,
    master: str = "host0:29500",
    ranks: tuple[int, ...] = (0, 1),
    timeout: int = 60,
    variables: tuple[dict[str, str], ...] = ({}, {}),
) -> list[tuple[int, str]]:
    """Status and output of the doctor on each host."""
    options = ["--recipe=demo", f"--master={master}", f"--timeout={timeout}", f"--folder={folder}"]
    started = [
        shardwise(
            host,
            *("doctor", "--nodes", f"--nnodes={max(ranks) + 1}"),
            *(f"--node-rank={rank}", f"--output={folder / 'nodes.json'}", *options),
            **TOKEN | own,
        )
        for host, rank, own in zip(machines, ranks, variables, strict=True)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, outputs, strict=True)]


def carry_out(host: Host, words: str) -> None:
    subprocess.run(host.command(*words.split()), check=True)


@needs_hosts
@pytest.mark.spawn
@forked
def test_a_slow_link_is_measured_and_the_listeners_are_at_one_address(tmp_path: Path) -> None:
    with hosts(2) as machines:
        sends = "tbf rate 50mbit burst 32kbit latency 400ms"
        carry_out(machines[0], f"tc qdisc add dev eth0 root {sends}")
        results = examined(tmp_path, machines)
    assert [status for status, _ in results] == [0, 0], results
    written = json.loads((tmp_path / "nodes.json").read_text("utf-8"))
    assert [(node["host"], node["interface"]) for node in written["nodes"]] == [
        ("host0", "eth0"),
        ("host1", "eth1"),
    ]
    assert written["nodes"][0]["open"] == []
    bandwidth = written["links"]["measured"]["bandwidth"]
    assert 5e5 < bandwidth < 6.5e6  # 50 Mbit/s are 6.25 MB/s; on busy processors it is less
    assert "from rank 0 on host0 to rank 1 on host1 carries" in results[0][1]


@needs_hosts
@pytest.mark.spawn
@forked
def test_an_endpoint_that_is_another_host_s(tmp_path: Path) -> None:
    with hosts(2) as machines:
        results = examined(tmp_path, machines, master="10.77.0.3:29500", timeout=4)
    assert "node-rank 0 is 10.77.0.1 but endpoint says 10.77.0.3" in results[0][1]
    assert "--master 10.77.0.1:29500 (MASTER_ADDR) on all nodes" in results[0][1]
    assert "rank 1 is not there" in results[0][1]
    assert "host1 cannot reach port 29500 of 10.77.0.3 by eth1" in results[1][1]
    assert [status for status, _ in results] == [1, 1]


@needs_hosts
@pytest.mark.spawn
@forked
def test_a_name_that_leads_to_loopback_on_one_and_to_nothing_on_another(tmp_path: Path) -> None:
    with hosts(2) as machines:
        machines[0].resolve("127.0.1.1 host0")
        machines[1].resolve()
        results = examined(tmp_path, machines, timeout=4)
    assert "host0 is 127.0.1.1 on node-rank 0, host0" in results[0][1]
    assert "rank 0 listens at 10.77.0.1" in results[0][1]
    assert "the name host0 does not resolve on host1" in results[1][1]


@needs_hosts
@pytest.mark.spawn
@forked
def test_packets_that_are_dropped_one_way(tmp_path: Path) -> None:
    with hosts(2) as machines:
        machines[1].lose_packets_to(machines[0])
        results = examined(tmp_path, machines, timeout=4)
    assert "host1 cannot reach port 29500 of host0" in results[1][1]
    assert "ip route get 10.77.0.1" in results[1][1]
    assert "rank 1 is not there" in results[0][1]


@needs_hosts
@pytest.mark.spawn
@forked
def test_an_interface_that_others_cannot_reach(tmp_path: Path) -> None:
    with hosts(2) as machines:
        for words in (
            "ip link add dummy0 type veth peer name dummy1",
            "ip addr add 172.30.0.1/24 dev dummy0",
            "ip link set dummy0 up",
            "ip link set dummy1 up",
        ):
            carry_out(machines[1], words)
        results = examined(tmp_path, machines, variables=({}, {"GLOO_SOCKET_IFNAME": "dummy0"}))
    assert "rank 1 on host1 cannot be reached at 172.30.0.1 (dummy0) from host0" in results[0][1]
    assert "on host1: export GLOO_SOCKET_IFNAME=eth1" in results[0][1]
    assert [status for status, _ in results] == [1, 1]


@needs_hosts
@pytest.mark.spawn
@forked
def test_two_nodes_of_one_rank_are_named_by_their_hosts(tmp_path: Path) -> None:
    with hosts(3) as machines:
        results = examined(tmp_path, machines, ranks=(0, 2, 2), timeout=20, variables=({}, {}, {}))
    second = next(text for _, text in results[1:] if "two processes are rank 2" in text)
    assert "on host1" in second
    assert "on host2" in second
    assert "rank 2 could not connect: two processes are rank 2 of 3" in results[0][1]
