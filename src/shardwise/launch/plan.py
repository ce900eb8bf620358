"""A launch as a value: which ranks run where, and what each node has to know of it.

Decided first; the lines and files of each launcher are written from it.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardwise.errors import ConfigError

RUN_TOKEN = "SHARDWISE_RUN_TOKEN"  # noqa: S105 - the name of the variable
# The variables with which launchers tell a process its rank; one that a shell has set misleads.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NODE_RANKS = ("NODE_RANK", "SLURM_NODEID", "SKYPILOT_NODE_RANK", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class LaunchPlan:
    """One run on several nodes.

    Attributes:
        arguments: of ``shardwise train``: the recipe, and overrides.
        name: of the job and of the files.
        nodes, nproc: how many nodes, and ranks on each of them.
        device: a device type, such as ``"cuda"``.
        address, port: where rank 0 is reached; the address is ``""`` where the launcher finds it.
        hosts: the nodes' names or addresses in the order of their ranks; none if unknown.
        restarts: how often all ranks are started again after one of them died.
        token: what every rank has to know, and nobody else.
        variables: for every node, such as ``NCCL_SOCKET_IFNAME``.
    """

    arguments: tuple[str, ...]
    name: str
    nodes: int
    nproc: int
    device: str = "cpu"
    address: str = ""
    port: int = 29500
    hosts: tuple[str, ...] = ()
    restarts: int = 0
    token: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hosts and len(self.hosts) != self.nodes:
            raise ConfigError(
                f"{self.nodes} hosts are needed and {len(self.hosts)} named "
                f"({', '.join(self.hosts)}): name one host for each node, or leave --nodes out."
            )
        for host in self.hosts:
            if (times := self.hosts.count(host)) > 1:
                raise ConfigError(
                    f"host {host} is named {times} times, and a host is one node. Name it once; "
                    "--nproc says how many ranks it starts."
                )

    @property
    def ranks(self) -> int:
        return self.nodes * self.nproc

    @property
    def train(self) -> tuple[str, ...]:
        """The module and its arguments that every rank runs."""
        return "-m", "shardwise.cli", "train", *self.arguments


def shell(*words: str, **variables: str) -> str:
    """A command as a line for a shell, with variables before it."""
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(words)])


def node_rank(plan: LaunchPlan, addresses: Collection[str], environ: Mapping[str, str]) -> int:
    """Find which node this host is: as a launcher's variable says, or by its own addresses.

    Args:
        addresses: of this host, and its name.

    Raises:
        ConfigError: neither says it.
    """
    if plan.nodes == 1:
        return 0
    for name in NODE_RANKS:
        if name in environ:
            return checked_rank(environ[name], name, plan.nodes)
    own = [rank for rank, host in enumerate(plan.hosts) if host in addresses]
    if len(own) == 1:
        return own[0]
    if not plan.hosts and plan.address in addresses:
        return 0
    if not plan.hosts and plan.nodes == 2 and plan.address:
        return 1  # the other one
    known = ", ".join(sorted(addresses))
    raise ConfigError(
        f"which of the {plan.nodes} nodes this host is ({known}) is not known. Pass "
        f"--node-rank 0 to {plan.nodes - 1}, or name all nodes on each: --hosts HOST,HOST,…"
    )


def checked_rank(value: str | int, name: str, nodes: int) -> int:
    """A node's rank that ``name`` gives; ``ConfigError`` if it is not below ``nodes``."""
    if not str(value).isdecimal() or int(value) >= nodes:
        raise ConfigError(
            f"{name} is {value!r}, and the {nodes} nodes are numbered from 0 to {nodes - 1}."
        )
    return int(value)


def resolved(hosts: Collection[str], addresses: Collection[str]) -> set[str]:
    """``addresses``, and the names among ``hosts`` that resolve to one of them."""
    own = set(addresses)
    for host in hosts:
        try:
            resolved_to = {str(place[4][0]) for place in socket.getaddrinfo(host, None)}
        except OSError:
            continue
        own |= {host} if resolved_to & own else set()
    return own


def preset(environ: Mapping[str, str]) -> str:
    """Say which variables of a rank the shell has set, and what to do; ``""`` if none is."""
    names = [name for name in OF_A_RANK if name in environ]
    if not names:
        return ""
    pairs = ", ".join(f"{name}={environ[name]}" for name in names)
    return (
        f"this shell has set {pairs}, which launchers set for each rank: unset {' '.join(names)}. "
        "The number of a machine is NODE_RANK."
    )


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without variables of a rank, which would make each process the same one."""
    return {name: value for name, value in environ.items() if name not in OF_A_RANK}
