"""Facts of nodes → findings: what is wrong, why it matters, and the one line to change. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise.comm.machine.endpoint import is_loopback
from shardwise.comm.machine.run_token import RUN_TOKEN
from shardwise.doctor.links import Measured
from shardwise.doctor.node_facts import Meets, NodeFacts

LEAST_FREE = 10 * 2**30  # bytes
SLOW_DISK = 50e6  # bytes per second
SKEW = 1.0  # seconds
SLOW = 3.0  # times as slow as the fastest link


class Finding(NamedTuple):
    """One thing to look at.

    Attributes:
        what: the fact.
        why: what follows from it.
        change: the one line.
        stops: no run can start, or it cannot be right.
    """

    what: str
    why: str
    change: str
    stops: bool = True


# --- before the nodes have met -----------------------------------------------------------------


def findings_before(seen: Meets) -> list[Finding]:
    """Findings of one node on its own."""
    checks = (_interface, _name, _endpoint, _holder, _token)
    return [finding for check in checks for finding in check(seen)]


def _interface(seen: Meets) -> Iterator[Finding]:
    for variable, name in seen.chosen.items():
        if name not in seen.here:
            listed = ", ".join(f"{name} ({address})" for name, address in seen.here.items())
            yield Finding(
                f"{variable} is {name}, and {seen.host} has no such interface, but {listed}",
                "collectives cannot connect",
                f"export {variable}={seen.route}" if seen.route else f"unset {variable}",
            )


def _name(seen: Meets) -> Iterator[Finding]:
    if not seen.resolved:
        yield Finding(
            f"the name {seen.name} does not resolve on {seen.host}",
            "this node cannot find rank 0",
            f"--master ADDRESS:{seen.port} (MASTER_ADDR) with rank 0's address on all nodes, or "
            f"echo 'ADDRESS {seen.name}' >> /etc/hosts",
        )


def _endpoint(seen: Meets) -> Iterator[Finding]:
    if seen.rank or not (seen.several and seen.resolved and seen.here):
        return
    addresses = [one for name, one in seen.here.items() if not is_loopback(one)]
    if set(addresses) & set(seen.resolved) or not addresses:
        return
    best = seen.here.get(seen.interface, addresses[0])
    best = addresses[0] if is_loopback(best) else best
    change = f"--master {_with_port(best, seen.port)} (MASTER_ADDR) on all nodes"
    if is_loopback(seen.resolved[0]):
        is_name = seen.name not in (*seen.resolved, "localhost")
        yield Finding(
            f"{seen.name} is {seen.resolved[0]} on node-rank 0, {seen.host}, so the endpoint is "
            "its loopback interface",
            "other nodes reach themselves at a loopback address"
            + f"; rank 0 listens at {best}" * is_name,
            change,
            stops=not is_name,
        )
    else:
        yield Finding(
            f"node-rank 0 is {', '.join(addresses)} but endpoint says {seen.resolved[0]}",
            "the others wait at an address that this host does not have; only behind a router "
            "that passes the port on can they come",
            change,
        )


def _holder(seen: Meets) -> Iterator[Finding]:
    if seen.holder:
        yield Finding(
            f"port {seen.port} of node-rank 0, {seen.host}, is taken by {seen.holder}",
            "rank 0 cannot serve the store there",
            f"--master {_with_port(seen.name, seen.port + 1)} (MASTER_PORT) on all nodes, or end "
            "that program",
        )


def _token(seen: Meets) -> Iterator[Finding]:
    if not seen.has_token and seen.is_first:
        yield Finding(
            f"{RUN_TOKEN} is not set",
            f"any process that reaches port {seen.port} can join the run as a rank",
            f"export {RUN_TOKEN}=$(openssl rand -hex 16), the same on all nodes",
            stops=False,
        )


def unreached(seen: Meets, problem: str) -> Finding:
    """This node cannot reach rank 0."""
    route = f" by {seen.interface}" if seen.interface else ""
    if problem.startswith("no program listens"):
        return Finding(
            f"{problem}; {seen.host} reaches the host{route}",
            "rank 0 is not started, or listens at another address",
            f"start node-rank 0; its own output names the address for --master (port {seen.port})",
        )
    return Finding(
        f"{seen.host} cannot reach port {seen.port} of {seen.name}{route}: {problem}",
        "no rank of this node can join: a firewall drops the packets, or a route leads elsewhere",
        f"on node-rank 0: ufw allow from {seen.here.get(seen.interface, 'THIS NODE')}; or --master "
        "with an address of a network that both have (ip route get "
        f"{[*seen.resolved, seen.name][0]})",
    )


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- once they have met ------------------------------------------------------------------------


def findings_after(
    nodes: Sequence[NodeFacts], links: Sequence[Measured], sharing: Collection[int]
) -> list[Finding]:
    """Findings from all nodes' facts together.

    Args:
        links: measured, between the nodes.
        sharing: ranks of the nodes that see a file of rank 0 in the folder.
    """
    by_rank = {node.rank: node for node in nodes}
    return [
        *_links(by_rank, links),
        *_slow(by_rank, links),
        *_clocks(by_rank, links),
        *_differences(nodes, "version of", lambda node: node.versions),
        *_differences(nodes, "value of", lambda node: node.variables),
        *_differences(nodes, "recipe's", lambda node: node.recipe),
        *_folders(nodes, sharing),
        *_disks(nodes),
        *_open(nodes),
    ]


def _links(nodes: Mapping[int, NodeFacts], links: Sequence[Measured]) -> Iterator[Finding]:
    failed: dict[int, list[Measured]] = defaultdict(list)
    for link in links:
        if link.problem:
            failed[link.target].append(link)
    for rank, cut in failed.items():
        target = nodes[rank]
        who = ", ".join(nodes[link.source].host for link in cut)
        what = (
            f"rank {rank} on {target.host} cannot be reached at {target.address} "
            f"({target.interface}) from {who}: {cut[0].problem}"
        )
        variable = next((n for n, i in target.chosen.items() if i == target.interface), "")
        if variable and target.route and target.route != target.interface:
            yield Finding(
                what,
                f"collectives use that interface, as {variable} says, and {target.route} leads to "
                "rank 0",
                f"on {target.host}: export {variable}={target.route}",
            )
            continue
        yield Finding(
            what,
            "collectives connect between these nodes, too, at ports that are chosen as they "
            "start: a firewall or a route drops the packets",
            f"on {target.host}: ufw allow from {nodes[cut[0].source].address}; and see ip route "
            f"get {target.address} on {nodes[cut[0].source].host}",
        )


def _slow(nodes: Mapping[int, NodeFacts], links: Sequence[Measured]) -> Iterator[Finding]:
    rates = [link.bandwidth for link in links if not link.problem]
    for link in links:
        if not link.problem and link.bandwidth * SLOW < max(rates):
            source, target = nodes[link.source], nodes[link.target]
            yield Finding(
                f"the link from rank {link.source} on {source.host} to rank {link.target} on "
                f"{target.host} carries {link.bandwidth / 1e6:,.1f} MB/s, and the fastest one "
                f"{max(rates) / 1e6:,.1f} MB/s",
                "every collective waits for its slowest link",
                f"on {target.host}: ethtool {target.interface}; a node with a slow link is better "
                "left out, or see docs/slow-links.md",
                stops=False,
            )


def _clocks(nodes: Mapping[int, NodeFacts], links: Sequence[Measured]) -> Iterator[Finding]:
    for link in links:
        if not link.source and not link.problem and abs(link.skew) > SKEW:
            ahead = "ahead of" if link.skew > 0 else "behind"
            host = nodes[link.target].host
            yield Finding(
                f"the clock of {host} is {abs(link.skew):,.1f} s {ahead} that of {nodes[0].host}",
                "times in logs and of files cannot be compared",
                f"on {host}: timedatectl set-ntp true",
                stops=False,
            )


def _differences(
    nodes: Sequence[NodeFacts], kind: str, values: Callable[[NodeFacts], Mapping[str, str]]
) -> Iterator[Finding]:
    for name in dict.fromkeys(name for node in nodes for name in values(node)):
        hosts: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            hosts[values(node).get(name, "nothing")].append(f"{node.host} (rank {node.rank})")
        if len(hosts) == 1:
            continue
        each = "; ".join(f"{value} on {', '.join(on)}" for value, on in hosts.items())
        first = values(nodes[0]).get(name, "")
        same = f"export {name}={first}" if first else f"unset {name}"
        install = f"pip install {name}=={first}" if first else f"pip uninstall {name}"
        changes = {"version of": install, "value of": same}
        yield Finding(
            f"the {kind} {name} differs: {each}",
            "ranks would compute or communicate in different ways",
            f"on all nodes: {changes.get(kind, f'copy the recipe of {nodes[0].host}')}",
            stops=kind == "recipe's" or (kind == "version of" and name in ("shardwise", "torch")),
        )


def _folders(nodes: Sequence[NodeFacts], sharing: Collection[int]) -> Iterator[Finding]:
    apart = [f"{node.host} (rank {node.rank})" for node in nodes if node.rank not in sharing]
    if apart:
        yield Finding(
            f"{nodes[0].folder} of {nodes[0].host} is not shared with {', '.join(apart)}",
            "all ranks write a checkpoint into one folder",
            "--run.folder FOLDER on a file system that all nodes have mounted; --folder checks it",
            stops=False,
        )


def _disks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in nodes:
        where = f"{node.folder} on {node.host}"
        if not node.write:
            yield Finding(
                f"nothing can be written to {where}",
                "no checkpoint can be saved there",
                f"on {node.host}: ls -ld {node.folder}; or --run.folder with another folder",
            )
        elif node.write < SLOW_DISK or node.free < LEAST_FREE:
            yield Finding(
                f"{where} has {node.free / 1e9:,.1f} GB free and takes {node.write / 1e6:,.0f} "
                "MB/s",
                "a checkpoint of N parameters takes some 12 N bytes there",
                "--run.folder with a folder of a larger or faster disk",
                stops=False,
            )


def _open(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    for node in nodes:
        for text in node.open:
            program, _, port = text.rpartition(":")
            yield Finding(
                f"{program} on {node.host} listens at port {port} on every interface",
                "torch's store asks for no token: who reaches that port can read it, or end the "
                "run",
                f"on {node.host}: ufw deny {port}/tcp, after ufw allow from each node's address",
                stops=False,
            )
