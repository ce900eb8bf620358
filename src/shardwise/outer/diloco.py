"""DiLoCo: workers train apart, and their parameters are averaged every H steps.

A worker is a sharded model on ranks that are close to each other. Inside it nothing changes; its
links to other workers may be slow, and may break. After H local steps each worker sends how far its
parameters have moved from where they started (the pseudo-gradient), in fp16 or int8; an outer SGD
with Nesterov momentum applies the mean to the common start, from which everybody goes on.

    start ──▶ H local steps ──▶ start − parameters ─┐
                                                    ├─ mean ─▶ SGD(0.7, 0.9) ─▶ next start
    start ──▶ H local steps ──▶ start − parameters ─┘

The bytes between workers are those of one exchange, divided by H. Units are sent one by one, spread
over the round (see ``schedule``). Rank 0 of a worker has the link (see ``link``).

Sources: DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1), OpenDiLoCo (Jaghouar et al.
2024, arXiv 2407.07852).
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.api.sharded import Sharded
from shardwise.checkpoint.collectives import run_on_rank_0
from shardwise.comm.machine.peer_connection import Address, Message
from shardwise.comm.machine.run_token import RUN_TOKEN, run_token
from shardwise.errors import ConfigError, ScheduleError
from shardwise.errors.arguments import checked
from shardwise.outer import wire as wires
from shardwise.outer.common_start import MOMENTUM, START, CommonStart
from shardwise.outer.link import Link
from shardwise.outer.peer import Joining
from shardwise.outer.place import Place
from shardwise.outer.schedule import OuterSchedule
from shardwise.outer.tally import Key
from shardwise.torch_internals import disable_torch_function

log = logging.getLogger("shardwise")


class DiLoCo:
    """Train with other workers over slow links.

        sharded = sw.shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        outer = sw.DiLoCo(sharded, optimizer, workers=["host0:29600", "host1:29600"], worker=0)
        for batch in data:  # of this worker's own
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    Made on every rank, after a checkpoint was loaded: it waits for the other workers. A worker that
    is lost stops nobody; one that is started again takes the others' state. The common start and
    its momentum, two values for each parameter, lie in the optimizer's state, so checkpoints hold
    them. A save while units are in flight loses nothing; after ``finish()`` it continues exactly.

    Args:
        sharded, optimizer: of this worker.
        workers: the address of rank 0 of each, as ``host:port``, the same on all.
        worker: the number of this one.
        every: local steps between two exchanges of a unit (H).
        outer_lr, outer_momentum: of the outer Nesterov SGD. 1 and 0 average parameters.
        wire: dtype of pseudo-gradients between workers: ``"float16"``, ``"int8"``, ``"float32"``.
        delay: steps from sending a unit to applying its mean; ``None``: ``every // 8``.
        token: a secret of the run; ``None``: the environment's ``SHARDWISE_RUN_TOKEN``.
        patience: seconds of silence after which a worker is lost.
        timeout: seconds for which a worker waits for the others when it starts.
        stops: asked on rank 0 while it waits for others, whether this worker is to leave them; what
            it then trains is its own.

    Attributes:
        has_left: it did so.

    Raises:
        ConfigError: an option is wrong, or there is no token and an address is not loopback.
        RanksDisagree: the leading worker has other options, or another model.
    """

    @checked
    def __init__(
        self,
        sharded: Sharded,
        optimizer: torch.optim.Optimizer,
        *,
        workers: Sequence[str],
        worker: int,
        every: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        wire: str = "float16",
        delay: int | None = None,
        token: str | None = None,
        patience: float = 10.0,
        timeout: float = 600.0,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sharded, self._comm, self._optimizer = sharded, sharded.comm, optimizer
        self._lr, self._momentum, self._wire = outer_lr, outer_momentum, wires.check_wire(wire)
        self._rest()  # what was loaded may be state of whole parameters
        self._start = CommonStart(sharded.buckets, optimizer, sharded.comm)
        nbytes = {unit: wires.nbytes(numel, wire) for unit, numel in self._start.numels.items()}
        self.schedule = OuterSchedule.spread(nbytes, every, delay)
        self._start.updates = self.schedule.rounds(self.steps)
        self._in_flight: dict[str, list[Tensor]] = {}  # unit → parameters when it was sent
        place = replace(
            place_of(workers, worker, token),
            patience=patience,
            timeout=timeout,
            stops=stops,
            updates=lambda: sum(self._start.updates.values()),
        )
        self.has_left, self._number = False, len(workers)
        self._link: Link | None = None
        run_on_rank_0(self._comm, "the link to other workers", lambda: self._open(place))
        try:
            self._meet(first=True)
        except BaseException:
            self.close()
            raise

    @property
    def steps(self) -> int:
        """Local steps taken."""
        return self._start.step

    @property
    def updates(self) -> Mapping[str, int]:
        """Unit → how often its start was updated."""
        return dict(self._start.updates)

    @property
    def workers(self) -> list[int]:
        """The workers that take part: all of them, if this one leads. A collective."""
        return run_on_rank_0(self._comm, "workers that take part", lambda: self._on_rank_0.present)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that this worker has ``sent`` to others and ``received``. A collective."""
        return run_on_rank_0(self._comm, "bytes of the link", lambda: self._on_rank_0.nbytes)

    @torch.no_grad()
    def step(self) -> None:
        """Exchange what is due; call it after each ``optimizer.step()``. A collective."""
        self._start.keep()
        if self.schedule.is_due(self.steps + 1):
            self._rest()
            self._answer_others()
        self._start.step += 1
        rounds = self.schedule.rounds(self.steps - 1)
        for unit in self.schedule.sent(self.steps):
            if unit in self._in_flight:  # after a catch-up; its mean comes first
                self._receive(unit)
            if self._start.updates[unit] <= rounds[unit]:  # else its mean came before this worker
                self._send(unit)
        for unit in self.schedule.received(self.steps):
            self._receive(unit)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means that are on their way, and apply them. A collective."""
        self._rest()
        for unit in list(self._in_flight):
            self._receive(unit)

    def close(self) -> None:
        """Take part no more: the others go on."""
        if self._link is not None:
            self._link.close()

    # ---- exchange ------------------------------------------------------------------------------

    def _send(self, unit: str) -> None:
        params = self._start.params(unit)
        with disable_torch_function():
            moved = [self._start.state(p)[START] - p.detach().float() for p in params]
            sent = [p.detach().clone() for p in params]
        whole, key = self._start.whole(unit, moved), self._key(unit)

        def send() -> None:
            if not whole.isfinite().all():
                raise ScheduleError(
                    f"the parameters of {key} are not finite after step {self.steps}. They were "
                    "not sent, since no worker's would be finite then; the others go on without "
                    "this one. Start it again, so that it takes their state; if this comes back, "
                    "lower the learning rate, or clip gradients."
                )
            self._on_rank_0.send(key, wires.encode(whole, self._wire))

        run_on_rank_0(self._comm, f"sending {key}", send)
        self._in_flight[unit] = sent

    def _send_overdue(self) -> None:
        """Send what was due before this worker came: where it leads next, others wait for it."""
        for unit, times in self.schedule.rounds(self.steps).items():
            if self._start.updates[unit] < times and unit not in self._in_flight:
                self._send(unit)

    def _receive(self, unit: str) -> None:
        """Wait for the mean of a unit that was sent, and apply it."""
        while unit in self._in_flight:
            if (mean := self._mean(unit)) is not None:
                self._apply(unit, mean)
                return
            self._meet(first=False)

    def _mean(self, unit: str) -> Tensor | None:
        """The mean of a unit's pseudo-gradients, ``[numel]``, on every rank."""
        came: list[bytes] = []

        def receive() -> bool:
            mean = self._on_rank_0.receive(self._key(unit))
            came.extend([mean] if mean is not None else [])
            return bool(came)

        if not run_on_rank_0(self._comm, f"the mean of {self._key(unit)}", receive):
            return None
        numel = self._start.numels[unit]
        return self._start.shared(wires.decode(came[0], numel, self._wire) if came else None, numel)

    def _apply(self, unit: str, mean: Tensor) -> None:
        """One step of the outer SGD for a unit; what was trained since it was sent stays."""
        sent = self._in_flight.pop(unit, None)
        for number, (param, gradient) in enumerate(self._start.parts(unit, mean)):
            state = self._start.state(param)
            step = gradient
            if self._momentum:
                buffer = state.setdefault(MOMENTUM, torch.zeros_like(state[START]))
                buffer.mul_(self._momentum).add_(gradient)
                step = gradient + self._momentum * buffer
            before = state[START].clone() if sent is None else sent[number]
            with disable_torch_function():
                since = param.detach().float() - before
            state[START].sub_(step, alpha=self._lr)
            param.copy_((state[START] + since).to(param.dtype))
        self._start.updates[unit] += 1

    # ---- meet ------------------------------------------------------------------------------------

    def _open(self, place: Place) -> None:
        numels, schedule = self._start.numels, self.schedule
        facts = {
            "units": f"{len(numels)} with {sum(numels.values()):,} trained parameters",
            "a list of units and sizes": f"{zlib.crc32(repr(numels).encode()):08x}",
            "a number of workers": str(len(place.addresses)),
            "every": str(schedule.every),
            "wire": self._wire,
            "outer_lr and outer_momentum": f"{self._lr} and {self._momentum}",
        }

        def form(key: Key, parts: Sequence[bytes]) -> bytes:
            return wires.mean(parts, numels[key.unit], self._wire)

        nbytes = {unit: wires.nbytes(numel, self._wire) for unit, numel in numels.items()}
        self._link = Link(place, facts, nbytes, form)

    @property
    def _on_rank_0(self) -> Link:
        assert self._link is not None  # on rank 0
        return self._link

    def _meet(self, first: bool) -> None:
        """Take part: as the leader, or with the leader's state; or no more."""
        while True:
            digest = self._start.digest()
            role = run_on_rank_0(
                self._comm,
                "other workers",
                lambda digest=digest: self._on_rank_0.find(digest, first),  # type: ignore[misc]
            )
            if role == "leave":
                self.has_left = True
                self._in_flight.clear()
                return
            if role == "lead":
                self._send_overdue()
                self._admit(expected=True)
                if first and len(present := self.workers) < self._number and self._comm.rank == 0:
                    log.warning("workers %s of %d are there and begin", present, self._number)
                return
            if self._join():
                return

    def _join(self) -> bool:
        """Follow the leader; ``False``: it was lost meanwhile."""
        while True:
            came: list[Message] = []

            def ask(came: list[Message] = came) -> tuple[str, dict[str, Any]]:
                came.append(self._on_rank_0.next_message())
                return came[0].kind, came[0].fields

            kind, fields = run_on_rank_0(self._comm, "the leader's word", ask)
            if kind == "state":
                self._in_flight.pop(
                    self._start.load(fields, came[0].payload if came else b""), None
                )
            elif kind == "welcome" and self._link is not None:
                self._link.ready()
            elif kind == "go":
                self._start.step = max(self.steps, fields["step"])  # one that is ahead waits
                return True
            elif kind == "lost":
                return False

    def _answer_others(self) -> None:
        """Meet again if the leader is lost, take means, admit who joins: before an exchange."""

        def look() -> tuple[bool, list[str]]:
            return self._on_rank_0.connected, self._on_rank_0.unclaimed(self._start.updates)

        connected, unclaimed = run_on_rank_0(self._comm, "other workers", look)
        if not connected:
            self._meet(first=False)
            return
        for unit in unclaimed:
            if (mean := self._mean(unit)) is not None:
                self._apply(unit, mean)
        self._admit(expected=False)

    def _admit(self, expected: bool) -> None:
        """Admit each worker that joins; one whose state is another gets this worker's."""
        while True:
            came: list[Joining] = []

            def next_digest(came: list[Joining] = came) -> str | None:
                if self._link is not None and (joining := self._link.joining(self.steps, expected)):
                    came.append(joining)
                return came[0].digest if came else None

            digest = run_on_rank_0(self._comm, "workers that join", next_digest)
            if digest is None:
                return
            state = [] if digest == self._start.digest() else self._start.messages()
            if came:
                self._on_rank_0.admit(came[0], state)

    def _rest(self) -> None:
        self._sharded.admitted("workers exchange", self._optimizer, awaits_readers=True)

    def _key(self, unit: str) -> Key:
        return Key(unit, self._start.updates[unit])


def place_of(workers: Sequence[str], worker: int, token: str | None = None) -> Place:
    """The addresses of all workers, and which is this one. Raises ``ConfigError``."""
    addresses = [_address(text) for text in workers]
    if not 0 <= worker < len(addresses):
        raise ConfigError(
            f"worker is {worker}, and workers names {len(addresses)} addresses, so it must be from "
            f"0 to {len(addresses) - 1}."
        )
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"workers are {', '.join(workers)}; each needs an address of its own.")
    secret = run_token() if token is None else token
    if not secret and any(not host.startswith("127.") for host, _ in addresses):
        raise ConfigError(
            "the workers have no run token, so any program that reaches their ports could send "
            "them parameters. Set the same secret on all: "
            f"export {RUN_TOKEN}=$(openssl rand -hex 16)"
        )
    return Place(addresses, worker, secret.encode())


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"the address {text!r} is not HOST:PORT, such as 10.0.0.1:29600.")
    return host.strip("[]"), int(port)
