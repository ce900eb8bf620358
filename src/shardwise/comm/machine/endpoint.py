"""The address where ranks meet: what answers there now, and where rank 0 listens for it.

torch's store would listen on all interfaces of the host. Rank 0 gives it a socket that listens at
one address: the loopback interface's for ranks of one host, else that of the interface by which
rank 0's address is reached.
"""

from __future__ import annotations

import errno
import platform
import socket
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address

from shardwise.comm.machine.environment import LOOPBACK, Launch, local_size
from shardwise.comm.machine.interfaces import GLOO_INTERFACE, interface_to, interfaces, reachable
from shardwise.errors import ConfigError

PROBE_TIMEOUT = 2.0  # seconds in which a port has to answer
ALL = "0.0.0.0"  # noqa: S104 - of this host, where no interface was chosen
BACKLOG = 2048  # of the listener, as torch's own


def on_one_host(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """``launch`` with the loopback interface as its address, if all ranks are on this host."""
    if local_size(environ) == launch.size:
        return launch._replace(address=LOOPBACK)
    return launch


def problem(host: str, port: int) -> str:
    """Say why nothing can connect to this address now; ``""`` if it may.

    Raises:
        OSError: this process can open no socket.
    """
    try:
        socket.create_connection((host, port), PROBE_TIMEOUT).close()
    except socket.gaierror as error:
        return f"the name {host} does not resolve on {platform.node()} ({error.strerror})"
    except ConnectionRefusedError:
        return f"no program listens at port {port} of {host}, where rank 0 serves the store"
    except TimeoutError:
        return f"{host} does not answer"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return f"{host} cannot be reached ({error.strerror})"
    return ""


def probe(launch: Launch) -> str:
    """Say what this rank finds now at the address where the ranks are to meet."""
    text = problem(launch.address, launch.port)
    if text.startswith("no program listens") and launch.rank == 0:
        return "the name resolves, and the port is free for rank 0"
    return text or "a program answers: rank 0 of this run, or another program"


def own_endpoint(launch: Launch, environ: Mapping[str, str]) -> str:
    """The address at which rank 0 listens, on its host; see ``own_address``."""
    local = local_size(environ)
    several = GLOO_INTERFACE in environ or (local is not None and local < launch.size)
    resolved, here = addresses_of(launch.address), interfaces()
    is_name = launch.address not in (*resolved, "localhost")
    chosen = environ.get(GLOO_INTERFACE)
    # Where the host's name is its loopback interface's, others may know it by that or another one.
    outward = [one.address for one in reachable(here) if chosen == one.name] if chosen else [ALL]
    leads = interface_to(launch.address)
    return own_address(
        resolved,
        {one.address for one in here},
        leads.address if leads else "",
        outward if several and is_name else (),
    )


def addresses_of(host: str) -> list[str]:
    """Addresses to which the name resolves here; none if it does not."""
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(place[4][0]) for place in places))


def own_address(
    resolved: Sequence[str], here: Collection[str], source: str, outward: Sequence[str]
) -> str:
    """The address where rank 0 listens for ranks that connect to its host's name. Pure.

    Args:
        resolved: the addresses of that name. One of this host is taken. On many systems a host's
            own name leads to its loopback interface there, and elsewhere to another one.
        here: this host's addresses; none if they are not known.
        source: the address from which this host sends to that name, as where it is a router's.
        outward: addresses of this host that other hosts reach, if there are other hosts.
    """
    own = [one for one in resolved if one in here and not is_loopback(one)]
    if own or not here:
        return [*own, *resolved, LOOPBACK][0]
    looped = [one for one in resolved if is_loopback(one)]
    return [*(outward if looped else ()), *looped, source or LOOPBACK][0]


def is_loopback(address: str) -> bool:
    """Is it an address of the loopback interface?"""
    return ip_address(address.partition("%")[0]).is_loopback


def listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens at this address and no other; ``None`` if a program does already.

    Raises:
        ConfigError: this process may not listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(
            f"rank 0 cannot listen at port {port} of {address} ({error.strerror}), so no rank can "
            "reach it. Choose another MASTER_PORT, from 1024 on, the same for all ranks."
        ) from error
