"""Hosts on one machine: network namespaces that a wire joins; they need root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def problem() -> str:
    """Say why there can be none here; ``""`` if there can."""
    if shutil.which("ip") is None:
        return "not installed: ip (iproute2)"
    made = subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True)
    return f"no network namespace can be made here: {made.stderr.decode()}" * (made.returncode != 0)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Words before a command that run it on the one host or the other.

    Their addresses are 10.77.0.1 and 10.77.0.2, and their interfaces have different names, as those
    of rented machines may.
    """
    names = [f"shardwise-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"sw{os.getpid() % 100_000}x{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name, "name", f"eth{number}")
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", f"eth{number}")
            for interface in ("lo", f"eth{number}"):
                ip("-n", name, "link", "set", interface, "up")
        one, other = (["ip", "netns", "exec", name] for name in names)
        yield one, other
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
