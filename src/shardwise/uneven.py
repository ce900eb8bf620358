"""The methods of ``Sharded`` for ranks that do not all have the same to do."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwise.checkpoint.optimizer_state import Given, Optimizers
from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError, RanksDisagree, ScheduleError
from shardwise.memory.gradients import Share
from shardwise.memory.sharding import sharding_of
from shardwise.runtime.join import Join, Kind, Message
from shardwise.runtime.runtime import Runtime
from shardwise.torch_internals import disable_torch_function, get_grad, set_grad, unscale_


class Sharded(Protocol):
    """What the methods of this file need of a sharded model's handle."""

    comm: Comm
    runtime: Runtime

    def admitted(self, operation: str, optimizer: Given = None) -> Optimizers: ...
    def clip_grad_norm_(self, max_norm: float, norm_type: float, parameters: Any) -> Tensor: ...


@contextmanager
def join(
    self: Sharded,
    optimizer: Given = None,
    samples: Callable[..., float] | None = None,
    scaler: GradScaler | None = None,
) -> Iterator[Join]:
    """Let ranks run out of data at different times. A collective, and so is each step inside.

    A rank that leaves the block takes part until all have left: it carries out the others' gathers
    and reduces, contributes no gradient, clips, and steps the optimizers with their options. Other
    calls that all ranks have to make, such as ``save``, raise until then.

    Args:
        optimizer: those that step in the block, one or several.
        samples: called with what the model is called with, returns how many samples the loss is a
            mean over: ``len``, or a count of tokens. ``None``: all batches are of one size.
        scaler: has on every rank after the block what it has on those that had data longest.

    Yields:
        ``joined.missed_steps``: after the block, steps that this rank took without data.

    Raises:
        ConfigError: another optimizer steps in the block, or ranks may call different units.
        RanksDisagree: ranks that have data do not do the same, or with other learning rates or
            scales.
        ScheduleError: what ranks without data could not do as well.
    """
    optimizers = self.admitted("join() was called", optimizer)
    runtime = self.runtime
    if runtime.join is not None:
        raise ScheduleError("join() was called inside join(). One block is for all optimizers.")
    if runtime.policy.participates:
        raise ConfigError(
            "join() was called with divergence='participate': a rank that runs out of data follows "
            "the others, and they may call different units. Give every rank equally many batches, "
            "or let all ranks call the same units (divergence='error')."
        )
    runtime.join = joined = Join(self.comm, list(runtime.units), samples)
    joined.optimizers = optimizers
    try:
        yield joined
        joined.has_left = True
        _Follower(self, joined).follow(scaler)
    finally:
        runtime.join = None
        runtime.set_share(Share())


def any_rank(self: Sharded, flag: bool | Tensor) -> bool:
    """Is ``flag`` true on any rank (inside ``join()``: that has data)? One small collective."""
    return any(_votes(self, flag))


def all_ranks(self: Sharded, flag: bool | Tensor) -> bool:
    """Is ``flag`` true on every rank (inside ``join()``: that has data)? One small collective."""
    return all(_votes(self, flag))


def _votes(self: Sharded, flag: bool | Tensor) -> list[bool]:
    rows = (self.runtime.join or Join(self.comm, [])).send(Kind.VOTE, 0, 0, int(flag))
    return [bool(row[3]) for row in rows if row[0] != Kind.LEFT]


# ---- what is sent --------------------------------------------------------------------------------


def send_clip(
    self: Sharded, max_norm: float, norm_type: float, parameters: Iterable[Tensor] | None
) -> None:
    """Gradients are clipped next."""
    if (joined := self.runtime.join) is None:
        return
    trained = self.runtime.trained
    ids = set(map(id, trained.params if parameters is None else parameters))
    clipped = [id(param) in ids for param in trained.params]
    joined.send(Kind.CLIP, numbers=lambda: [*trained.has_gradient(), *clipped, max_norm, norm_type])


def send_step(self: Sharded, optimizer: Optimizer, closure: object) -> None:
    """An optimizer steps next."""
    if (joined := self.runtime.join) is None:
        return
    at = next((i for i, one in enumerate(joined.optimizers) if one is optimizer), None)
    scaled = "found_inf" in vars(optimizer)  # for a fused kernel, by a GradScaler
    if at is None or closure is not None or scaled:
        how = "with a GradScaler and fused=True" if scaled else "with a closure"
        what = how if at is not None else "and join() was not given it"
        raise ConfigError(
            f"{type(optimizer).__name__} steps inside join(), {what}, so ranks that run out of "
            "data could not do so as well. Write `with sharded.join(optimizer):`, call backward() "
            "and then optimizer.step()."
        )
    self.runtime.used_up |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = self.runtime.trained
    joined.send(
        Kind.STEP,
        at,
        numbers=lambda: [
            *trained.has_gradient(),
            *_options(optimizer),
            *(_replicated_norms(trained.params) if joined.left else ()),
        ],
    )


def _replicated_norms(params: Iterable[Parameter]) -> list[float]:
    """Norms of the gradients that every rank has whole: torch changes those without our knowing."""
    with disable_torch_function(), torch.no_grad():
        gradients = [
            get_grad(param)
            for param in params
            if (sharding := sharding_of(param)) and sharding.placement == "replicated"
        ]
        return [float(grad.double().norm()) for grad in gradients if grad is not None]


def _options(optimizer: Optimizer, others: Iterator[float] | None = None) -> list[float]:
    """The numbers among an optimizer's options, such as learning rates; ``others`` replace them."""
    numbers = list[float]()

    def replaced(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(replaced, value))
        if not isinstance(value, (int, float, Tensor)):
            return value
        numbers.append(float(value))
        if others is None:
            return value
        new = next(others)
        return value.fill_(new) if isinstance(value, Tensor) else type(value)(new)

    for group in optimizer.param_groups:
        for name in sorted(group.keys() - {"params", "param_names"}):
            group[name] = replaced(group[name])
    return numbers


# ---- what is done by who has left ----------------------------------------------------------------


class _Follower:
    """A rank that has run out of data: it does what it receives until all have left."""

    def __init__(self, sharded: Sharded, joined: Join) -> None:
        self._sharded, self._runtime, self._joined = sharded, sharded.runtime, joined
        self._params = sharded.runtime.trained.params
        self._resume: Any = None  # what a forward pass without gradients interrupts

    def follow(self, scaler: GradScaler | None) -> None:
        reduces = self._runtime.facts.reduces
        try:
            used_up: Container[int] = ()  # this rank's own last gradients stay
            while (message := self._joined.receive()) is not None:
                self._carry_out(message)
                used_up = self._runtime.used_up
            state = {} if scaler is None else scaler.state_dict()
            numbers = [*self._runtime.trained.has_gradient(), *state.values()]
            agreed = self._agree_gradients(self._joined.of_last(numbers), used_up)
            if scaler is not None and state:
                kinds = zip(state.items(), agreed, strict=True)
                scaler.load_state_dict({name: type(old)(new) for (name, old), new in kinds})
        finally:
            self._runtime.facts.reduces = reduces

    def _carry_out(self, message: Message) -> None:
        runtime, kind = self._runtime, message.kind
        between = {
            Kind.CLIP: self._clip,
            Kind.UNSCALE: self._unscale,
            Kind.STEP: self._step,
            Kind.REQUIRES_GRAD: self._require_gradients,
        }
        if kind is Kind.EVENT:
            runtime.follow(self._joined.event(message))
        elif kind in (Kind.FORWARD, Kind.TRAIN):
            with torch.set_grad_enabled(kind is Kind.TRAIN):
                self._resume = runtime.begin_forward(None)
        elif kind is Kind.END_FORWARD:
            runtime.end_forward(self._resume)
        elif kind is Kind.BACKWARD:
            self._agree_gradients(message.numbers, runtime.used_up)
            runtime.facts.reduces = bool(message.values[0])
            runtime.begin_backward(recorded=False)
        elif kind is Kind.END_BACKWARD:
            runtime.end_backward(kept=False)
        elif kind in between:
            between[kind](message)

    def _require_gradients(self, message: Message) -> None:
        for param, is_trained in zip(self._params, message.numbers, strict=True):
            param.requires_grad_(bool(is_trained))
        self._runtime.update_trained()

    def _clip(self, message: Message) -> None:
        *clipped, max_norm, norm_type = self._agree_gradients(message.numbers)
        self._sharded.clip_grad_norm_(max_norm, norm_type, list(compress(self._params, clipped)))

    def _unscale(self, message: Message) -> None:
        *unscaled, factor = self._agree_gradients(message.numbers)
        gradients = [p.grad for p in compress(self._params, unscaled) if p.grad is not None]
        found_inf = torch.zeros(1, device=gradients[0].device)
        unscale_(gradients, found_inf, torch.full_like(found_inf, factor))

    def _step(self, message: Message) -> None:
        optimizer = self._joined.optimizers[message.values[0]]
        numbers = iter(self._agree_gradients(message.numbers))
        _options(optimizer, numbers)
        if message.numbers[: len(self._params)] != self._runtime.trained.has_gradient():
            raise RanksDisagree(
                f"rank {self._sharded.comm.rank} dropped gradients, left join(), and cannot step "
                "with the others. Drop them after the same steps on all ranks."
            )
        if list(map(str, numbers)) != list(map(str, _replicated_norms(self._params))):
            raise RanksDisagree(
                f"inside join() gradients were changed after backward() on the ranks that have "
                f"data, and not on rank {self._sharded.comm.rank}, which has none: by a GradScaler "
                f"or torch's clip_grad_norm_, which ranks with whole parameters do unseen. Clip by "
                "sharded.clip_grad_norm_(); with a GradScaler choose strategy='zero1'."
            )
        optimizer.step()
        self._joined.missed_steps += 1

    def _agree_gradients(self, numbers: list[float], used_up: Container[int] = ()) -> list[float]:
        """Drop the gradients that ranks with data have dropped; returns the other numbers.

        Those may be zeros there instead (``set_to_none=False``), so what was used up is zero here.
        """
        count = len(self._params)
        with disable_torch_function(), torch.no_grad():
            for param, has_gradient in zip(self._params, numbers[:count], strict=True):
                if not has_gradient:
                    set_grad(param, None)
                elif id(param) in used_up and (grad := get_grad(param)) is not None:
                    grad.zero_()
        return numbers[count:]
