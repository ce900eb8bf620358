"""Which optimizers may step on shards, checked where they step.

An elementwise update (Adam, SGD) is the same on a shard as on the whole parameter. One that
looks across elements (a factored moment, an orthogonalised matrix, a line search) silently
computes something else on a shard. The user makes the optimizer, before or after ``shard()``,
so the check sits in torch's hook before ``step``; there too, state that an optimizer gathered
before sharding is cut to the shard, and parameters show their plain class to fused kernels.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwise.buffers import Bucket
from shardwise.comm.protocol import Comm
from shardwise.errors import OptimizerError
from shardwise.guard import ShardedParameter
from shardwise.optim.shown import Shown
from shardwise.shard_tensor import ShardTensor
from shardwise.sharding import Sharding, sharding_of
from shardwise.torch_internals import hooks_behind, skip_in_dynamo

__all__ = ["Gate"]

log = logging.getLogger("shardwise")

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
_REASONS = {
    "LBFGS": "its line search needs inner products over whole parameters, on every rank alike",
    "Adafactor": "its factored second moment averages over whole rows and columns",
    "Muon": "it orthogonalises whole matrices",
}
_said_plain: weakref.WeakSet[Optimizer] = weakref.WeakSet()
BOOKKEEPING = frozenset({"step", "eta", "mu", "mu_product"})
"""0-dim state that is no element's: how far the optimizer is."""


@dataclass(frozen=True)
class _Params:
    """The parameters of one model in an optimizer."""

    facts: list[tuple[int, int]]  # which lists they were sought in, and how long those were
    mine: list[nn.Parameter]
    plain: list[tuple[str, nn.Parameter]]  # those that no sharded model has, by name or shape


class Gate:
    """Watches the optimizers that step on one sharded model.

    torch keeps the hooks for ever, so nothing here keeps the model alive.

    Args:
        params: the model's parameters.
        before_step: a method that is called before each step of an optimizer that holds any of
            them; held weakly.
        comm: the ranks.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], before_step: Callable[[], None], comm: Comm
    ) -> None:
        self._ranks, self._speaks = comm.size, comm.size > 1 and comm.rank == 0
        self._mine = {id(param) for param in params}
        self._before_step = weakref.WeakMethod(before_step)
        #: In order of their first step.
        self._known: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()
        self._admitted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._params: weakref.WeakKeyDictionary[Optimizer, _Params] = weakref.WeakKeyDictionary()
        self._handles = [register_optimizer_step_pre_hook(self._before)]
        self._sweep()

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def _sweep(self) -> None:
        """Take away the hooks of models that are gone.

        Not when a model goes: that may be while torch iterates over these hooks.
        """
        for handle in self._handles:
            hooks = hooks_behind(handle)
            # Copied at once, as a dict: ranks that are threads come and go meanwhile.
            for key, hook in dict.copy(hooks).items():
                gate = getattr(hook, "__self__", None)
                if isinstance(gate, Gate) and gate._before_step() is None:
                    hooks.pop(key, None)

    def uncut(self, buckets: Iterable[Bucket]) -> None:
        """Give the optimizers that stepped here their state whole. A collective."""
        for optimizer, bucket in product(tuple(self._known), buckets):
            _uncut_state(optimizer, bucket)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        before_step = self._before_step()
        if before_step is None or not (params := self._params_of(optimizer)):
            return None
        before_step()
        self.admit(optimizer)
        self._say_plain(optimizer)
        shown = kwargs if isinstance(kwargs, Shown) else Shown(kwargs)  # of another model's gate
        shown.show(params)
        return args, shown

    def _params_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The model's parameters in an optimizer: sought again when its lists are others."""
        lists = [group["params"] for group in optimizer.param_groups]
        facts = [(id(params), len(params)) for params in lists]
        known = self._params.get(optimizer)
        if known is None or known.facts != facts:
            mine = [param for params in lists for param in params if id(param) in self._mine]
            known = self._params[optimizer] = _Params(facts, mine, _plain(optimizer))
        return known.mine

    def _say_plain(self, optimizer: Optimizer) -> None:
        """Say once that it also updates parameters whose gradients nobody averages."""
        plain = self._params[optimizer].plain if self._speaks else ()
        if all(param.grad is None for _, param in plain) or optimizer in _said_plain:
            return
        _said_plain.add(optimizer)
        some = ", ".join([name for name, _ in plain[:3]] + ["…"] * (len(plain) > 3))
        log.warning(
            "%s also holds %d parameters that are in no sharded model (%s): each of the %d ranks "
            "updates its own copy by its own gradients, so the copies will differ. Shard the "
            "module that holds them, too, or average their gradients before each step.",
            type(optimizer).__name__,
            len(plain),
            some,
            self._ranks,
        )

    def admit(self, optimizer: Optimizer) -> None:
        """Make sure that it may step on shards, and cut whole state, once and after each load."""
        params = self._params_of(optimizer)
        if not params or optimizer in self._admitted:
            return
        _check_elementwise(optimizer, params)
        for param in params:
            _make_plain(optimizer.state.get(param, {}))
            _cut_state(optimizer, param)
        self._admitted.add(optimizer)
        if optimizer not in self._known:
            self._known[optimizer] = loaded = optimizer.register_load_state_dict_post_hook(
                self._admitted.discard
            )
            self._handles.append(loaded)


def _plain(optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    found = []
    for group in optimizer.param_groups:
        params = group["params"]
        names = group.get("param_names") or [f"one of shape {tuple(p.shape)}" for p in params]
        pairs = zip(names, params, strict=True)
        found += [pair for pair in pairs if pair[1].requires_grad and sharding_of(pair[1]) is None]
    return found


def _check_elementwise(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    split = [s for p in params if (s := _split(p)) is not None]
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            "SparseAdam cannot step on a sharded model: it needs sparse gradients, and those that "
            "are averaged over the ranks are dense. Use torch.optim.AdamW for these parameters."
        )
    if not split or isinstance(optimizer, _ELEMENTWISE) or getattr(kind, "elementwise", False):
        return
    example = split[0]
    reason = _REASONS.get(kind.__name__)
    if reason is None:
        advice = (
            "it is not known to update each element by itself. If it does, and takes no norm or "
            f"other sum over a parameter, say so: `{kind.__name__}.elementwise = True`"
        )
    else:
        advice = f"{reason}, so on shards it would be silently wrong"
    raise OptimizerError(
        f"{kind.__name__} cannot step on shards ({len(split)} of {len(params)} parameters are "
        f"split; {example.name!r} is held here as {example.stop - example.start:,} of "
        f"{example.shape.numel():,} elements): {advice}. Use an elementwise optimizer such as "
        'torch.optim.AdamW, or strategy="no_shard".'
    )


def _split(param: nn.Parameter) -> Sharding | None:
    """The sharding of a parameter that the ranks share, whether or not this one holds all of it."""
    sharding = sharding_of(param)
    whole = sharding is None or sharding.shape == param.shape
    return None if whole and not isinstance(param, ShardedParameter) else sharding


def _make_plain(state: dict[str, Any]) -> None:
    """State that an optimizer made before its first step has the class of a shard."""
    for name, value in state.items():
        if isinstance(value, ShardTensor):
            state[name] = value.to_local()


def _cut_state(optimizer: Optimizer, param: nn.Parameter) -> None:
    """State from before ``shard()`` has the whole parameter's shape: keep this rank's part."""
    sharding = sharding_of(param)
    state = optimizer.state.get(param)
    if sharding is None or not state or sharding.shape == param.shape:
        return
    whole = _elements(state, sharding.shape)
    for name, value in state.items():
        if name in whole:
            state[name] = sharding.cut(value, param.shape).clone()
        elif isinstance(optimizer, _ELEMENTWISE) and name not in BOOKKEEPING:
            _check_cut(name, value, param, sharding)


def _check_cut(name: str, value: object, param: nn.Parameter, sharding: Sharding) -> None:
    if isinstance(value, Tensor) and value.shape != param.shape:
        raise OptimizerError(
            f"state {name!r} of parameter {sharding.name!r} has shape {tuple(value.shape)}; the "
            f"shard here is {tuple(param.shape)} of {tuple(sharding.shape)}. It is another rank's "
            "state, or that of other ranks. Load whole state, as an unsharded optimizer has it, or "
            "use sharded.load_optimizer_state_dict() or sharded.load()."
        )


def _uncut_state(optimizer: Optimizer, bucket: Bucket) -> None:
    """The other way round, for the parameters of one bucket. A collective."""
    states = [optimizer.state.get(param, {}) for param in bucket.params]
    cut = [_elements(s, p.shape) for s, p in zip(states, bucket.params, strict=True)]
    for name in sorted({name for mine in cut for name in mine}):
        dtype = next(mine[name].dtype for mine in cut if name in mine)
        flat = torch.zeros_like(bucket.shard, dtype=dtype)
        for view, mine in zip(bucket.spec.rest_views(flat), cut, strict=True):
            if name in mine:
                view.copy_(mine[name])
        for whole, state, mine in zip(bucket.whole_of(flat), states, cut, strict=True):
            if name in mine:
                state[name] = whole.clone()


def _elements(state: Mapping[str, Any], shape: torch.Size) -> dict[str, Tensor]:
    """The state that has one value for each element of a parameter of this shape."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor)
        and value.shape == shape
        and (value.ndim > 0 or name not in BOOKKEEPING)
    }


skip_in_dynamo(Gate._before)
