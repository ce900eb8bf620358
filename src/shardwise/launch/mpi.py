"""Open MPI's ``mpirun``: a command that binds each rank to cores of its own."""

from __future__ import annotations

import re
from typing import NamedTuple

from shardwise.launch.plan import RUN_TOKEN, LaunchPlan


class Topology(NamedTuple):
    """Cores of one machine."""

    sockets: int
    cores: int  # of each socket

    @classmethod
    def parse(cls, text: str) -> Topology | None:
        """Read what ``lscpu`` prints in English; ``None`` if it does not say how many there are."""
        names = ("Socket(s)", "Core(s) per socket")
        matches = [
            re.search(rf"^{re.escape(name)}:\s*(\d+)$", text, re.MULTILINE) for name in names
        ]
        counts = [int(match[1]) for match in matches if match]
        return cls(*counts) if len(counts) == 2 and all(counts) else None


def binding(topology: Topology | None, nproc: int) -> list[str]:
    """Options that give each of ``nproc`` ranks of a machine the same number of cores. Pure.

    A virtual machine may show each core as a socket; a rank then takes cores of several. Without a
    core for each rank none is bound.
    """
    cores = topology.sockets * topology.cores if topology else 0
    if topology is None or cores < nproc:
        return ["--bind-to", "none", "--oversubscribe"]
    cores_of_rank = cores // nproc
    by = "slot" if topology.cores < cores_of_rank else "socket"
    return ["--bind-to", "core", "--map-by", f"{by}:PE={cores_of_rank}", "--rank-by", "slot"]


def words(
    plan: LaunchPlan, python: str, topology: Topology | None, root: bool = False
) -> list[str]:
    """The command; the values of ``environment`` are not in it, where ``ps`` would show them.

    Args:
        python: the interpreter on every host.
        root: does root start it? mpirun asks for a word on that.
    """
    exported = [word for name in environment(plan) for word in ("-x", name)]
    # Not the host file, whose slots mpirun would fill before it goes to the next host.
    hosts = ",".join(f"{host}:{plan.nproc}" for host in plan.hosts)
    return [
        *("mpirun", "-n", str(plan.ranks)),
        *(["--host", hosts] if hosts else []),
        *binding(topology, plan.nproc),
        "--report-bindings",
        *(["--allow-run-as-root"] if root else []),
        *exported,
        *(python, *plan.train),
    ]


def environment(plan: LaunchPlan) -> dict[str, str]:
    """Variables that every rank gets."""
    place = {"MASTER_ADDR": plan.address, "MASTER_PORT": str(plan.port)} if plan.address else {}
    return {RUN_TOKEN: plan.token, **place, **plan.variables}
