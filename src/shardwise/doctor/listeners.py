"""Sockets that listen: which processes wait for connections, at which addresses.

Read from ``/proc``, so on Linux alone; elsewhere none are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
LISTENS = "0A"  # the state's number in /proc/net/tcp


class Listener(NamedTuple):
    """A socket that listens for TCP connections, and a process that has it."""

    pid: int
    program: str
    address: str
    port: int

    @property
    def is_open(self) -> bool:
        """Does it listen on every interface?"""
        return ip_address(self.address).is_unspecified


def listeners(pids: Collection[int] | None = None) -> list[Listener]:
    """The listeners of these processes; without any, of all that this user may look at."""
    if pids is None:
        pids = [int(entry.name) for entry in PROC.glob("[0-9]*")]
    return [listener for pid in pids for listener in _of_process(pid)]


def _of_process(pid: int) -> Iterator[Listener]:
    with suppress(OSError):  # it has ended, or is another user's
        sockets = set(_sockets(pid))
        program = (PROC / str(pid) / "comm").read_text("utf-8").strip()
        for table in ("tcp", "tcp6") if sockets else ():
            lines = (PROC / str(pid) / "net" / table).read_text("ascii").splitlines()[1:]
            for words in map(str.split, lines):
                if words[3] == LISTENS and words[9] in sockets:
                    yield Listener(pid, program, *_place(words[1]))


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of the process's sockets."""
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):
            name = str(descriptor.readlink())  # "socket:[4711]"
            if name.startswith("socket:["):
                yield name[8:-1]


def _place(text: str) -> tuple[str, int]:
    """``"0100007F:1F90"`` → ``("127.0.0.1", 8080)``: words of four bytes, in the host's order."""
    bits, port = text.split(":")
    words = [bytes.fromhex(bits[at : at + 8])[::-1] for at in range(0, len(bits), 8)]
    address = ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)
