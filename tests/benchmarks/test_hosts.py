from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.harness.hosts import Host, hosts, problem

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 9000)) as listener:
    print(flush=True)
    while True:
        client, _ = listener.accept()
        while client.recv(65536): pass
        client.sendall(b"all")
"""
SEND = """
import socket, sys, time
begin = time.monotonic()
with socket.create_connection((sys.argv[1], 9000), float(sys.argv[3])) as client:
    client.settimeout(None)
    client.sendall(bytes(int(sys.argv[2])))
    client.shutdown(socket.SHUT_WR)
    assert client.recv(3) == b"all"
print(time.monotonic() - begin)
"""


def seconds(sender: Host, receiver: Host, nbytes: int = 1, limit: float = 5.0) -> float | None:
    """How long the bytes take; ``None``: no connection is made within the limit."""
    arguments = (receiver.address, str(nbytes), str(limit))
    words = sender.command(sys.executable, "-c", SEND, *arguments)
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    assert ended.returncode == 0 or "TimeoutError" in ended.stderr, ended.stderr
    return float(ended.stdout) if ended.returncode == 0 else None


@contextmanager
def serving(host: Host) -> Iterator[None]:
    words = (sys.executable, "-c", SERVE, host.address)
    with host.start(*words, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield
        finally:
            server.kill()


def test_hosts_have_links_that_are_slow_are_cut_and_are_counted() -> None:
    with hosts(2, mbits=80) as (first, second), serving(second):
        before = first.nbytes()
        took = seconds(first, second, 1_000_000)
        sent = first.nbytes()["sent"] - before["sent"]
        assert 1_000_000 < sent < 1_060_000
        assert took is not None
        assert took > 0.08  # 0.1 s, less the burst
        first.cut()
        assert seconds(first, second, limit=0.3) is None
        first.mend()
        assert seconds(first, second) is not None
        second.lose_packets_to(first)
        assert seconds(first, second, limit=0.3) is None


def test_what_runs_on_a_host_ends_with_it() -> None:
    with hosts(1) as [host]:
        name = subprocess.run(host.command("hostname"), check=False, capture_output=True, text=True)
        assert name.stdout == "host0\n"
        running = host.start("sleep", "60")
    assert running.wait(5) != 0
