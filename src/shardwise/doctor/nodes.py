"""An examination of all nodes before they train together: `shardwise doctor --nodes`.

1. each node on its own      interfaces, names, ports      findings_before
2. meet                      as a run does                 missing and duplicate ranks
3. each node's facts         through the store             findings_after
4. each link                 by connections of our own
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

from shardwise.comm.machine.endpoint import problem
from shardwise.comm.machine.environment import LOOPBACK, Launch
from shardwise.comm.machine.meeting import Meeting
from shardwise.comm.machine.run_token import derived, run_token
from shardwise.comm.watchdog.desync import format_ranks
from shardwise.doctor.links import Answers, Measured, measure, rounds
from shardwise.doctor.node_facts import Meets, NodeFacts, meets, node_facts
from shardwise.doctor.node_findings import Finding, findings_after, findings_before, unreached
from shardwise.errors import RanksDisagree, ShardwiseError

POLL_INTERVAL = 0.02  # seconds
PATIENCE = 60.0  # seconds that a node has for one step of the examination
FAREWELL = 5.0  # seconds for which rank 0 waits until all have read what was found


class Board(Protocol):
    """A store of torch, as far as it is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Report(NamedTuple):
    """Facts and findings, on every rank the same."""

    nodes: list[NodeFacts]
    links: list[Measured]
    findings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        """``links`` is what `shardwise plan --machines` reads: the slowest link of each kind."""
        ways = [link for link in self.links if not link.problem]
        slowest = {
            "bandwidth": min((link.bandwidth for link in ways), default=0.0),
            "latency": max((link.latency for link in ways), default=0.0),
            "source": "measured by shardwise doctor --nodes, over one TCP connection",
        }
        return {
            "format": "shardwise nodes 1",
            "links": {"measured": slowest} if ways else {},
            "nodes": [asdict(node) for node in self.nodes],
            "measured": [link._asdict() for link in self.links],
            "findings": [finding._asdict() for finding in self.findings],
        }


NO_RECIPE: Mapping[str, str] = {}
OnFindings = Callable[[Sequence[Finding]], None]


def examine(
    launch: Launch,
    timeout: float,
    folder: Path,
    on_findings: OnFindings,
    recipe: Mapping[str, str] = NO_RECIPE,
) -> Report:
    """Examine all nodes. Every rank of the launch calls it; one of each host measures.

    Args:
        launch: with an address.
        timeout: seconds that the ranks have to meet.
        folder: in which runs lie.
        on_findings: called with what is found before the nodes have met.
        recipe: its keys and their values here, which are compared.

    Raises:
        ConfigError: two processes are the same rank, or this one has another token than rank 0.
        RanksDisagree: a rank did not come, or ended.
    """
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seen = meets(launch, serves, os.environ)
    on_findings(findings_before(seen))
    if not serves and (why := _unreached(launch)):
        on_findings([unreached(seen, why)])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    meeting = Meeting(launch, serves, timeout, attempt)  # rank 0's store ends with it
    try:
        board = meeting.store()
        with ExitStack() as stack:
            return _Examination(launch, seen, board, folder, stack).run(recipe)
    except ShardwiseError as error:
        meeting.fail(error)
        raise
    except RuntimeError as error:  # of torch's store
        raise RanksDisagree(
            f"the store of rank 0 does not answer any more ({error}); read the output of rank 0."
        ) from error


def _unreached(launch: Launch) -> str:
    """Say why rank 0 cannot be reached; it may be started a moment later."""
    until = monotonic() + 3.0
    while (why := problem(launch.address, launch.port)) and monotonic() < until:
        if "resolve" in why:  # which is told already
            return ""
        sleep(0.2)
    return why


class _Examination:
    """One rank's part in it, once all have met. Final."""

    def __init__(
        self, launch: Launch, seen: Meets, board: Board, folder: Path, stack: ExitStack
    ) -> None:
        self._launch, self._seen, self._board, self._folder = launch, seen, board, folder
        self._stack = stack
        self._ranks = list(range(launch.size))
        self._mark = ""  # of a file that rank 0 leaves in its folder

    def run(self, recipe: Mapping[str, str]) -> Report:
        launch = self._launch
        if launch.rank == 0:  # a run's own token is not written to torch's store, even as here
            self._write("secrets", [secrets.token_hex(16) for _ in range(2)])
        other, self._mark = self._read("secrets")
        token = (derived(run_token(), "doctor") if run_token() else other).encode()
        facts = self._facts(token) if launch.local_rank == 0 else None
        written = asdict(replace(facts, recipe=dict(recipe))) if facts else None
        self._write(f"facts/{launch.rank}", written)
        nodes = [NodeFacts(**each) for each in self._read_all("facts") if each]
        links = self._measure(nodes, token) if facts else []
        self._write(f"links/{launch.rank}", [links, self._shares(nodes[0])])
        each = self._read_all("links")
        report = self._report(nodes, each)
        self._write(f"done/{launch.rank}", True)
        if launch.rank == 0:
            with suppress(RanksDisagree):
                self._wait("done", FAREWELL)
        return report

    def _facts(self, token: bytes) -> NodeFacts:
        address = self._seen.here.get(self._seen.interface, LOOPBACK)
        answers = Answers(address, token)
        self._stack.callback(answers.close)
        facts = node_facts(self._seen, self._folder, address, answers.port)
        if self._launch.rank == 0:
            self._leave_mark()
        return facts

    def _measure(self, nodes: Sequence[NodeFacts], token: bytes) -> list[Measured]:
        """The links from this node, each in its round."""
        places = {node.rank: (node.address, node.port) for node in nodes}
        own, links = self._launch.rank, []
        for number, pairs in enumerate(rounds(list(places))):
            links += [measure(own, to, places[to], token) for of, to in pairs if of == own]
            self._write(f"round/{number}/{own}", True)
            self._wait(f"round/{number}", PATIENCE, list(places))
        return links

    def _report(self, nodes: list[NodeFacts], each: list[Any]) -> Report:
        links = [Measured(*link) for measured, _ in each for link in measured]
        sharing = [rank for rank, (_, shares) in enumerate(each) if shares]
        return Report(nodes, links, findings_after(nodes, links, sharing))

    # ---- a file of rank 0 in the folder ------------------------------------------------------

    def _path(self) -> Path:
        return self._folder.resolve() / f".shardwise-doctor-{self._mark}"

    def _leave_mark(self) -> None:
        with suppress(OSError):
            self._path().touch()
            self._stack.callback(self._path().unlink, missing_ok=True)

    def _shares(self, first: NodeFacts) -> bool:
        return self._path().exists() or not first.write

    # ---- the store ---------------------------------------------------------------------------

    def _write(self, key: str, value: object) -> None:
        self._board.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        until = monotonic() + PATIENCE
        while not self._board.check([key]) and monotonic() < until:
            sleep(POLL_INTERVAL)
        if not self._board.check([key]):
            raise RanksDisagree("rank 0 has ended; read its own output.")
        return json.loads(self._board.get(key))

    def _read_all(self, key: str) -> list[Any]:
        self._wait(key, PATIENCE * self._launch.size)
        return [json.loads(self._board.get(f"{key}/{rank}")) for rank in self._ranks]

    def _wait(self, key: str, patience: float, ranks: Sequence[int] | None = None) -> None:
        """Wait until each of these ranks has written its part."""
        missing, until = list(ranks or self._ranks), monotonic() + patience
        while missing := [r for r in missing if not self._board.check([f"{key}/{r}"])]:
            if monotonic() > until:
                raise RanksDisagree(
                    f"{format_ranks(missing)} did not come to {key} of the examination within "
                    f"{patience:,.0f} s; read the output there."
                )
            sleep(POLL_INTERVAL)
