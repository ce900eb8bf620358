"""Optimizers of a sharded model, checked where they step.

The user makes the optimizer, before or after ``shard()``, so the check sits in torch's hook before
``step``; there too, state that an optimizer gathered before sharding is cut to the shard, and
parameters show their plain class to fused kernels.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise.comm.protocol import Comm
from shardwise.errors import OptimizerError
from shardwise.memory.parameters import Bucket
from shardwise.memory.sharding import sharding_of
from shardwise.optim.cut_state import OF_RANK, cut_state, whole_state
from shardwise.optim.elementwise import ELEMENTWISE, check_elementwise
from shardwise.optim.plain_class import PlainClassDuringStep, hook_around
from shardwise.torch_internals import skip_in_dynamo

log = logging.getLogger("shardwise")

# Optimizers for which the warning about parameters in no sharded model was given.
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@dataclass
class _Params:
    """The parameters of one model in an optimizer."""

    facts: list[tuple[int, int]]  # id and length of each group's list
    own: dict[Any, int]  # parameter → number of its group
    #: In no sharded model, with their names or shapes; ``None``: not looked up.
    plain: list[tuple[str, nn.Parameter]] | None = None


class OptimizerHooks:
    """Watches the optimizers that step on one sharded model.

    An optimizer keeps its hooks, so nothing here keeps the model alive, or the comm.

    torch has one hook for all models: it iterates over its hooks while other threads shard theirs.

    Args:
        own_ids: of the model's parameters.
        before_update: a method, held weakly, called with ``_update_of`` an optimizer that steps.
        between_steps: a method, held weakly, that gives the model's buckets, or raises while a
            step is under way.
        trained_by_others: gives the ids of those parameters that another engine trains.
    """

    _of_models: ClassVar[list[weakref.ref[OptimizerHooks]]] = []

    def __init__(
        self,
        own_ids: Container[int],
        before_update: Callable[[str], None],
        between_steps: Callable[[str], Sequence[Bucket]],
        comm: Comm,
        trained_by_others: Callable[[Iterable[nn.Parameter]], set[int]],
    ) -> None:
        self._between_steps = weakref.WeakMethod(between_steps)
        self._trained_by_others = trained_by_others
        self._comm, self._warns = weakref.proxy(comm), comm.size > 1 and comm.rank == 0
        self._own_ids, self._before_update = own_ids, weakref.WeakMethod(before_update)
        #: In order of their first step.
        self._handles = weakref.WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]]()
        self._admitted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._params: weakref.WeakKeyDictionary[Optimizer, _Params] = weakref.WeakKeyDictionary()
        self._of_models.append(weakref.ref(self, self._of_models.remove))

    def close(self) -> None:
        self._of_models.remove(weakref.ref(self))
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()

    @staticmethod
    def _before_any(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        for reference in tuple(OptimizerHooks._of_models):
            if hooks := reference():
                args, kwargs = hooks._before(optimizer, args, kwargs) or (args, kwargs)
        return args, kwargs

    @staticmethod
    def end_steps(optimizer: Optimizer, operation: str) -> None:
        """End the step of each model that it trains, so that parameters show their shards."""
        for hooks in [reference() for reference in OptimizerHooks._of_models]:
            if hooks and hooks._params_of(optimizer) and (between_steps := hooks._between_steps()):
                between_steps(operation)

    def uncut(self, buckets: Iterable[Bucket]) -> None:
        """Make the state of the optimizers that stepped here whole. A collective."""
        admitted = [optimizer for optimizer in self._handles if optimizer in self._admitted]
        for optimizer in admitted:
            self._cut(optimizer, is_known=False)
        for optimizer, bucket in product(admitted, buckets):
            wholes = whole_state(optimizer, bucket, Tensor.clone)
            for param, whole in zip(bucket.params, wholes, strict=True):
                if whole:
                    optimizer.state[param].update(whole)

    def _make_whole(self, optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        """Make ``optimizer.state_dict()`` whole tensors on CPU, as the model's are.

        Rank 0 may then save it for all, and each rank that loads it keeps its part. A collective.
        """
        if not (between_steps := self._between_steps()) or optimizer not in self._admitted:
            return None  # it is whole
        # First: after a forward pass alone parameters show more than their shards.
        buckets = between_steps(f"{type(optimizer).__name__}.state_dict() was called")
        pairs = zip(optimizer.param_groups, given["param_groups"], strict=True)
        each = [zip(map(id, g["params"]), packed["params"], strict=True) for g, packed in pairs]
        numbers = dict(chain.from_iterable(each))
        state = dict(given["state"])
        self._cut(optimizer, is_known=False)
        for bucket in buckets:
            if any(id(param) in numbers for param in bucket.params):
                wholes = whole_state(optimizer, bucket, lambda whole: whole.to("cpu", copy=True))
                for param, whole in zip(bucket.params, wholes, strict=True):
                    if whole:
                        state[numbers[id(param)]] = whole
        return {**given, "state": state}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not (before_update := self._before_update()):
            return None
        if params := self._params_of(optimizer):
            before_update(_update_of(optimizer))
            self.admit(optimizer)
        if self._warns and self._handles:  # the model is trained
            self._warn_of_plain(optimizer)
        if not params:
            return None
        # Another model's hook may have made it.
        shown = kwargs if isinstance(kwargs, PlainClassDuringStep) else PlainClassDuringStep(kwargs)
        shown.params = [*shown.params, *params]
        hook_around(optimizer)
        return args, shown

    def _params_of(self, optimizer: Optimizer) -> dict[Any, int]:
        """The model's parameters in an optimizer's groups, cached while its lists are the same."""
        lists = [group["params"] for group in optimizer.param_groups]
        facts = [(id(params), len(params)) for params in lists]
        known = self._params.get(optimizer)
        if known is None or known.facts != facts:
            self._admitted.discard(optimizer)
            own = {p: n for n, params in enumerate(lists) for p in params if id(p) in self._own_ids}
            known = self._params[optimizer] = _Params(facts, own)
        return known.own

    def _warn_of_plain(self, optimizer: Optimizer) -> None:
        """Warn once if it updates parameters whose gradients are not averaged."""
        if optimizer in _warned:
            return
        params = self._params[optimizer]
        plain = params.plain = _plain(optimizer) if params.plain is None else params.plain
        if _has_no_gradients(plain):
            return
        other_ids = self._trained_by_others([param for _, param in plain])
        plain[:] = [pair for pair in plain if id(pair[1]) not in other_ids]
        if _has_no_gradients(plain):
            return
        _warned.add(optimizer)
        some = ", ".join([name for name, _ in plain[:3]] + ["…"] * (len(plain) > 3))
        log.warning(
            "%s holds %d parameters that are in no sharded model (%s), beside one that is trained: "
            "each of the %d ranks updates its own copy by its own gradients, so the copies will "
            "differ. Shard the module that holds them, too, or average their gradients before each "
            "step, as DistributedDataParallel does.",
            type(optimizer).__name__,
            len(plain),
            some,
            self._comm.size,
        )

    def admit(self, optimizer: Optimizer) -> None:
        """Check that it may step on shards, and cut whole state: once, and after each change."""
        params = self._params_of(optimizer)
        if not params or optimizer in self._admitted:
            return
        check_elementwise(optimizer, [*params])
        self._cut(optimizer, is_known=isinstance(optimizer, ELEMENTWISE))
        self._admitted.add(optimizer)
        if optimizer not in self._handles:
            # A wrapper of another optimizer may not have called torch's ``__init__``.
            if "_optimizer_state_dict_post_hooks" not in vars(optimizer):
                Optimizer.__setstate__(optimizer, {})
            self._handles[optimizer] = (
                optimizer.register_load_state_dict_post_hook(self._admitted.discard),
                optimizer.register_state_dict_post_hook(self._make_whole),
            )

    def _cut(self, optimizer: Optimizer, *, is_known: bool) -> None:
        """Cut whole state; raise on all ranks where it cannot be cut on one. A collective."""
        params, name = self._params_of(optimizer), type(optimizer).__name__
        misfits = [text for p in params if (text := cut_state(optimizer, p, is_known))]
        # Groups may be chosen by the shapes of one rank's shards, and state may fit on some only.
        facts = {f"{name} group of {p.sharding.name}": str(n) for p, n in params.items()}
        for n in {*params.values()}:
            numbers = _numbers_of(optimizer.param_groups[n]).items()
            facts |= {f"{name} {key} of group {n}": str(value) for key, value in numbers}
        self._comm.agree(facts | {f"state of {name}": "".join(misfits[:1]).partition(OF_RANK)[0]})
        if misfits:
            raise OptimizerError(misfits[0])


def _plain(optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    plain = []
    for group in optimizer.param_groups:
        params = group["params"]
        pairs = zip(group.get("param_names") or [""] * len(params), params, strict=True)
        plain += [pair for pair in pairs if pair[1].requires_grad and sharding_of(pair[1]) is None]
    return [(name or f"one of shape {tuple(param.shape)}", param) for name, param in plain]


def _update_of(optimizer: Optimizer) -> str:
    """The class and learning rates of a step, which are to be alike on all ranks."""
    # Of one schedule, hosts with other mathematical libraries may differ in the last digits.
    rates = [group.get("lr") for group in optimizer.param_groups]
    known = [r for r in rates if isinstance(r, int | float) or (isinstance(r, Tensor) and r.is_cpu)]
    texts = dict.fromkeys(f"{float(rate):.6g}" for rate in known)
    return f"{type(optimizer).__name__}.step() with lr {', '.join(texts)}"


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group but for its rates, which ``_update_of`` has for each step."""
    return {k: v for k, v in group.items() if isinstance(v, float | int | tuple) and "lr" not in k}


def _has_no_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> bool:
    return all(param.grad is None for _, param in named)


skip_in_dynamo(OptimizerHooks._before_any)
register_optimizer_step_pre_hook(OptimizerHooks._before_any)
