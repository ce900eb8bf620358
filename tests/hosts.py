"""Hosts that are network namespaces of this machine, with a name and a virtual cable each.

sw0 (10.77.0.1) ─┐
sw1 (10.77.0.2) ─┼─ a bridge in a namespace of its own        needs root, and iproute2
sw2 (10.77.0.3) ─┘
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest


def problem() -> str:
    """Why there can be no such hosts here; ``""`` if there can."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed (iproute2, util-linux)"
    asked = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=False)
    return "this container may make no namespaces" if asked.returncode else ""


needs_hosts = pytest.mark.skipif(
    bool(problem()) and not (os.environ.get("CI") and os.geteuid() == 0), reason=problem() or "-"
)


ENTER = """
import ctypes, os, platform, runpy, socket, subprocess, sys
space, name, hosts, *words = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
with open(f"/run/netns/{space}") as file:
    assert libc.setns(file.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
assert libc.unshare(0x04000000 | 0x00020000) == 0, os.strerror(ctypes.get_errno())
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
socket.sethostname(name)
platform._uname_cache = None
sys.argv = ["shardwise", *words]
runpy.run_module("shardwise.cli", run_name="__main__", alter_sys=True)
"""


class Host(NamedTuple):
    """A namespace with a name of its own."""

    name: str
    space: str
    address: str
    etc_hosts: Path

    def ip(self, command: str) -> None:
        """``ip`` with these words in this host."""
        subprocess.run(["ip", "-n", self.space, *command.split()], check=True)

    def shape(self, command: str) -> None:
        """``tc qdisc add dev eth0 root`` with these words."""
        words = ["tc", "-n", self.space, *["qdisc", "add", "dev", "eth0", "root"], *command.split()]
        subprocess.run(words, check=True)

    def shardwise(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """The command line of this tree on this host; forked where a test is."""
        place = (self.space, self.name, str(self.etc_hosts))
        return subprocess.Popen(
            [sys.executable, "-c", ENTER, *place, *words],
            env=_clean(os.environ) | {"OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    hidden = ("GLOO_SOCKET_IFNAME", "SHARDWISE_RUN_TOKEN")
    return {name: value for name, value in environ.items() if name not in hidden}


@contextmanager
def hosts(folder: Path, *names: str, others: str = "") -> Iterator[list[Host]]:
    """Hosts that reach each other; their /etc/hosts has all names, and the lines ``others``."""
    spaces = [f"sw{os.getpid()}-{number}" for number in range(len(names))]
    bridge = f"sw{os.getpid()}-b"
    lines = [f"10.77.0.{number + 1} {name}" for number, name in enumerate(names)]
    try:
        _ip(f"netns add {bridge}")
        _ip(f"-n {bridge} link add br0 type bridge")
        _ip(f"-n {bridge} link set br0 up")
        made = []
        for number, (name, space) in enumerate(zip(names, spaces, strict=True)):
            _ip(f"netns add {space}")
            _ip(f"-n {space} link add eth0 type veth peer name port{number} netns {bridge}")
            _ip(f"-n {bridge} link set port{number} master br0 up")
            _ip(f"-n {space} addr add 10.77.0.{number + 1}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")
            etc_hosts = folder / f"hosts-{number}"
            etc_hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, others, ""]), "utf-8")
            made.append(Host(name, space, f"10.77.0.{number + 1}", etc_hosts))
        yield made
    finally:
        for space in [*spaces, bridge]:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
