"""The network interfaces of this host: which one leads to an address, which one peers can reach.

gloo listens at the address that the host's name resolves to, which on many systems is 127.0.1.1:
ranks of other hosts then wait for ever. The interface that leads to rank 0 is the right one.
"""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from shardwise.comm.machine.accelerators import Accelerator, row

SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
# Networks of this host alone: containers and virtual machines.
OF_THIS_HOST = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "podman")


GLOO_INTERFACE = row("cpu").socket_interface


class Interface(NamedTuple):
    """One network interface and one of its addresses."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Every interface that has an address; on other systems than Linux none is known."""
    if platform.system() != "Linux":
        return []
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> list[Interface]:
    import fcntl  # of Unix alone

    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(client, SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            interfaces.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return interfaces


def _ipv6() -> list[Interface]:
    """Addresses that are valid beyond one link."""
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        return []
    parts = (line.split() for line in lines)
    interfaces = [Interface(name, str(IPv6Address(int(bits, 16)))) for bits, *_, name in parts]
    return [one for one in interfaces if not ip_address(one.address).is_link_local]


def interface_to(host: str) -> Interface | None:
    """The interface by which this host sends to ``host``; ``None`` if that is not known."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.connect(place)  # of UDP: looks at the routes, and sends nothing
            source = client.getsockname()[0]
    except OSError:
        return None
    return next((one for one in interfaces() if one.address == source), None)


def choose_interface(accelerator: Accelerator, address: str) -> None:
    """Set what ``interface_variables`` says, unless the user has set it."""
    for name, value in interface_variables(accelerator, address).items():
        os.environ.setdefault(name, value)


def interface_variables(accelerator: Accelerator, address: str) -> dict[str, str]:
    """Variables that name the interface to rank 0 at ``address``; none if it is not known.

    A name that leads to this host's loopback may lead elsewhere on others, so it says nothing.
    """
    interface = interface_to(address)
    if interface is None or (
        ip_address(interface.address).is_loopback and address != interface.address
    ):
        return {}
    return dict.fromkeys((GLOO_INTERFACE, accelerator.socket_interface), interface.name)


def reachable(interfaces: Sequence[Interface]) -> list[Interface]:
    """Interfaces that other hosts may reach: private networks first, then IPv4. Pure."""
    others = [one for one in interfaces if not one.name.startswith(OF_THIS_HOST)]
    parsed = {one: ip_address(one.address) for one in others}
    return sorted(others, key=lambda one: (not parsed[one].is_private, parsed[one].version))
