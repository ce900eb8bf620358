"""Hosts on this machine: each has its own network, processes and name; cables join them.

    host 0, 10.77.0.1 ── cable ──┐
    host 1, 10.77.0.2 ── cable ──┼── a switch, which is a host without an address
    host 2, 10.77.0.3 ── cable ──┘

They are Linux namespaces, which belong to a process of each. They end with it, and it ends with
this process, in whatever way this one ends. Files are those of this machine. Root makes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv")
INTERFACE = "eth0"
STATISTICS = Path("/sys/class/net") / INTERFACE / "statistics"  # as processes of a host see it
NOWHERE = "02:00:00:00:00:01"  # an address of Ethernet that no host has
BOUND = ("setpriv", "--pdeathsig", "KILL")  # what runs on a host ends with who started it
SETUP = 'mount -t sysfs none /sys; hostname "$0"; ip link set dev lo up; echo ready; exec cat'


def problem() -> str:
    """Why there can be none here; ``""`` if there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root may make"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    words = ("unshare", "--net", "--pid", "--fork", "--mount", "true")
    made = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603
    return made.stderr.strip()


class Host:
    """One host. Final.

    Attributes:
        name: as its processes see it.
        address: in the network of all hosts.
    """

    def __init__(self, number: int, process: int, switch: Sequence[str]) -> None:
        self.name, self.address = f"host{number}", f"10.77.0.{number + 1}"
        self._port, self._switch = f"port{number}", switch
        self._enter = _entering(process)
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, *words: str) -> list[str]:
        """The command that runs ``words`` on this host."""
        return [*self._enter, *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host. It ends with the host; options are those of ``Popen``."""
        self._started.append(subprocess.Popen(self.command(*words), **options))  # noqa: S603
        return self._started[-1]

    def wait(self) -> None:
        """Wait until all that was started has ended."""
        for process in self._started:
            process.wait()

    def nbytes(self) -> dict[str, int]:
        """Bytes that went over its cable, with all headers: ``sent`` and ``received``."""
        words = ("cat", str(STATISTICS / "tx_bytes"), str(STATISTICS / "rx_bytes"))
        sent, received = _run(*self.command(*words)).split()
        return {"sent": int(sent), "received": int(received)}

    def limit(self, mbits: float) -> None:
        """Let so many megabits a second through its cable, each way."""
        rate = ("root", "tbf", "rate", f"{mbits}mbit", "burst", "64kb", "latency", "50ms")
        _run(*self.command("tc", "qdisc", "replace", "dev", INTERFACE, *rate))
        _run(*self._switch, "tc", "qdisc", "replace", "dev", self._port, *rate)

    def cut(self) -> None:
        """Cut its cable: what it sends, and what is sent to it, is lost without an answer."""
        _run(*self._switch, "ip", "link", "set", "dev", self._port, "down")

    def mend(self) -> None:
        """Mend its cable."""
        _run(*self._switch, "ip", "link", "set", "dev", self._port, "up")

    def lose_packets_to(self, other: Host) -> None:
        """Lose what it sends to another host from now on; what that one sends still comes."""
        words = ("replace", other.address, "lladdr", NOWHERE, "dev", INTERFACE, "nud", "permanent")
        _run(*self.command("ip", "neighbour", *words))


@contextmanager
def hosts(count: int, mbits: float = 0.0) -> Iterator[list[Host]]:
    """Hosts that reach each other, until the block ends, and their processes with it.

    Args:
        mbits: megabits a second of each cable; 0: as fast as this machine copies.
    """
    with ExitStack() as stack:
        switch = _entering(stack.enter_context(_namespaces("switch")))
        _run(*switch, "ip", "link", "add", "name", "bridge0", "type", "bridge")
        _run(*switch, "ip", "link", "set", "dev", "bridge0", "up")
        made = []
        for number in range(count):
            process = stack.enter_context(_namespaces(f"host{number}"))
            made.append(Host(number, process, switch))
            _join(switch, number, process, made[-1])
            if mbits:
                made[-1].limit(mbits)
        try:
            yield made
        finally:
            stack.close()
            for host in made:
                host.wait()


@contextmanager
def _namespaces(name: str) -> Iterator[int]:
    """A process in namespaces of its own; when it ends, so does all that runs there."""
    kinds = ("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    words = ["unshare", *kinds, "sh", "-c", SETUP, name]
    with subprocess.Popen(words, stdin=-1, stdout=-1) as process:  # noqa: S603
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{name} could not be made")
            yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        finally:
            process.stdin.close()


def _join(switch: Sequence[str], number: int, process: int, host: Host) -> None:
    port = f"port{number}"
    peer = ("peer", "name", INTERFACE, "netns", str(process))
    _run("ip", "link", "add", "name", port, "netns", switch[2], "type", "veth", *peer)
    _run(*switch, "ip", "link", "set", "dev", port, "up", "master", "bridge0")
    address = ("add", f"{host.address}/24", "dev", INTERFACE)
    _run(*host.command("ip", "address", *address))
    _run(*host.command("ip", "link", "set", "dev", INTERFACE, "up"))


def _entering(process: int) -> list[str]:
    return [
        "nsenter",
        "--target",
        str(process),
        "--net",
        "--mount",
        "--uts",
        "--pid",
        "--wd",
        "--",
        *BOUND,
    ]


def _run(*words: str) -> str:
    ended = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout
