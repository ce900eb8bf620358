"""Hosts on this machine: each has its own network, processes and name; cables join them.

    host 0, 10.77.0.1 ── cable ──┐
    host 1, 10.77.0.2 ── cable ──┼── a switch, which is a host without an address
    host 2, 10.77.0.3 ── cable ──┘

They are Linux namespaces, which belong to a process of each. They end with it, and it ends with
this process, in whatever way this one ends. Files are those of this machine, but for /etc/hosts,
which names all of them. Root makes them. Interfaces have different names, as those of rented
machines may.
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
NOWHERE = "02:00:00:00:00:01"  # an address of Ethernet that no host has
BOUND = ("setpriv", "--pdeathsig", "KILL")  # what runs on a host ends with who started it
SETUP = """
names=$(mktemp); chmod a+r "$names"; mount --bind "$names" /etc/hosts; rm "$names"
mount -t sysfs none /sys; hostname "$0"; ip link set dev lo up; echo ready; exec cat
"""


def problem() -> str:
    """Why there can be none here; ``""`` if there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root may make"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    words = ("unshare", "--net", "--pid", "--fork", "--mount", "true")
    result = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603
    return result.stderr.strip()


class Host:
    """One host. Final.

    Attributes:
        name: as its processes see it.
        address: in the network of all hosts, on ``interface``.
        process: the id of the process to which its namespaces belong.
    """

    def __init__(self, number: int, process: int, switch: Sequence[str]) -> None:
        self.name, self.address = f"host{number}", f"10.77.0.{number + 1}"
        self.interface, self.process = f"eth{number}", process
        self._port, self._switch = f"port{number}", switch
        self._started: list[subprocess.Popen[Any]] = []

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        """The command that runs ``words`` on this host, in this folder or the present one."""
        return _on(self.process, *words, folder=folder)

    def start(
        self, *words: str, folder: Path | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on this host. It ends with the host; options are those of ``Popen``."""
        command = self.command(*words, folder=folder)
        self._started.append(subprocess.Popen(command, **options))  # noqa: S603
        return self._started[-1]

    def wait(self) -> None:
        """Wait until all that was started has ended."""
        for process in self._started:
            process.wait()

    def nbytes(self) -> dict[str, int]:
        """Bytes that went over its cable, with all headers: ``sent`` and ``received``."""
        files = (f"/sys/class/net/{self.interface}/statistics/{way}_bytes" for way in ("tx", "rx"))
        sent, received = _run(*self.command("cat", *files)).split()
        return {"sent": int(sent), "received": int(received)}

    def resolve(self, *lines: str) -> None:
        """Resolve names by these lines of /etc/hosts, beside ``localhost``."""
        words = ("sh", "-c", 'printf "%s\\n" "$@" >/etc/hosts', "sh", "127.0.0.1 localhost", *lines)
        _run(*self.command(*words))

    def limit(self, mbits: float) -> None:
        """Let so many megabits a second through its cable, each way."""
        rate = ("root", "tbf", "rate", f"{mbits}mbit", "burst", "64kb", "latency", "50ms")
        _run(*self.command("tc", "qdisc", "replace", "dev", self.interface, *rate))
        _run(*self._switch, "tc", "qdisc", "replace", "dev", self._port, *rate)

    def cut(self) -> None:
        """Cut its cable: what it sends, and what is sent to it, is lost without an answer."""
        _run(*self._switch, "ip", "link", "set", "dev", self._port, "down")

    def mend(self) -> None:
        """Mend its cable."""
        _run(*self._switch, "ip", "link", "set", "dev", self._port, "up")

    def lose_packets_to(self, other: Host) -> None:
        """Lose what it sends to another host from now on; what that one sends still comes."""
        words = ("lladdr", NOWHERE, "dev", self.interface, "nud", "permanent")
        _run(*self.command("ip", "neighbour", "replace", other.address, *words))


@contextmanager
def hosts(count: int, mbits: float = 0.0) -> Iterator[list[Host]]:
    """Hosts that reach each other, until the block ends, and their processes with it.

    Args:
        mbits: megabits a second of each cable; 0: as fast as this machine copies.
    """
    with ExitStack() as stack:
        process = stack.enter_context(_namespaces("switch"))
        switch = _on(process)
        _run(*switch, "ip", "link", "add", "name", "bridge0", "type", "bridge")
        _run(*switch, "ip", "link", "set", "dev", "bridge0", "up")
        namespaces = [
            Host(number, stack.enter_context(_namespaces(f"host{number}")), switch)
            for number in range(count)
        ]
        for number, host in enumerate(namespaces):
            _join(switch, process, number, host)
            host.resolve(*(f"{other.address} {other.name}" for other in namespaces))
            if mbits:
                host.limit(mbits)
        try:
            yield namespaces
        finally:
            stack.close()
            for host in namespaces:
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
            yield child(process.pid)
        finally:
            process.stdin.close()


def child(process: int) -> int:
    """The first child of a process, such as what ``nsenter`` has started on a host; 0: none."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    return int(children[0]) if children else 0


def _join(switch: Sequence[str], process: int, number: int, host: Host) -> None:
    """Lay the cable of a host to the switch, whose namespaces belong to ``process``."""
    port = f"port{number}"
    peer = ("peer", "name", host.interface, "netns", str(host.process))
    _run("ip", "link", "add", "name", port, "netns", str(process), "type", "veth", *peer)
    _run(*switch, "ip", "link", "set", "dev", port, "up", "master", "bridge0")
    address = ("add", f"{host.address}/24", "dev", host.interface)
    _run(*host.command("ip", "address", *address))
    _run(*host.command("ip", "link", "set", "dev", host.interface, "up"))
    for enter, end in ((switch, port), (host.command(), host.interface)):
        one_cpu = f"echo 1 >/sys/class/net/{end}/queues/rx-0/rps_cpus"
        _run(*enter, "sh", "-c", one_cpu)  # so that packets come in the order in which they went


def _on(process: int, *words: str, folder: Path | None = None) -> list[str]:
    """The command that runs ``words`` in the namespaces of a process."""
    enter = ("nsenter", f"--target={process}", "--net", "--mount", "--uts", "--pid")
    return [*enter, "env", f"--chdir={folder or Path.cwd()}", *BOUND, *words]


def sent_nbytes() -> int:
    """Bytes that the host on which this is called has sent over its cable."""
    [cable] = Path("/sys/class/net").glob("eth*")
    return int((cable / "statistics" / "tx_bytes").read_text())


def _run(*words: str) -> str:
    ended = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout
