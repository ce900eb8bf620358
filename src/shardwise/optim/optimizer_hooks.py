"""Optimizers that may step on shards, checked where they step.

An elementwise update (Adam, SGD) is the same on a shard as on the whole parameter. One that
looks across elements (a factored moment, an orthogonalised matrix, a line search) silently
computes something else on a shard. The user makes the optimizer, before or after ``shard()``,
so the check sits in torch's hook before ``step``; there too, state that an optimizer gathered
before sharding is cut to the shard, and parameters show their plain class to fused kernels.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwise.comm.protocol import Comm
from shardwise.errors import OptimizerError
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.adapter_order import check_optimizer
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.optim.blockwise import check_blocks, is_blockwise, make_state
from shardwise.optim.cut_state import OF_RANK, cut_state, whole_state
from shardwise.torch_internals import hooks_behind, skip_in_dynamo

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
_OF_SHARDS: dict[type[Tensor], type[Tensor]] = {nn.Parameter: ShardedParameter, Tensor: ShardTensor}
_INSTEAD = {"Muon": "sw.optim.Muon(sharded), which is exact on shards"}
# Optimizers for which the warning about parameters in no sharded model was given.
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class PlainClassDuringStep(dict[str, Any]):
    """Shows parameters as plain ``nn.Parameter`` while ``optimizer.step`` runs.

    torch reads attributes of a plain tensor fast, and fused kernels take it. It travels in the
    step's keyword arguments because torch calls no hook when a step raises.
    """

    params: Sequence[nn.Parameter] = ()
    tensors: Sequence[Tensor] = ()

    def show(self, params: Iterable[nn.Parameter]) -> None:
        """Give them, and gradients that the user has read, their plain class."""
        guarded: list[nn.Parameter] = [param for param in params if type(param) is ShardedParameter]
        for param in guarded:
            param.__class__ = nn.Parameter
        # Only gradients that the user has read have this class.
        marked = [grad for param in guarded if type(grad := param.grad) is ShardTensor]
        for gradient in marked:
            gradient.__class__ = Tensor  # type: ignore[assignment]
        self.tensors = [*self.tensors, *guarded, *marked]

    def hide(self) -> None:
        """Give them back the class of shards."""
        for tensor in self.tensors:  # which may be gathered by now
            tensor.__class__ = _OF_SHARDS.get(type(tensor), type(tensor))
        self.tensors = ()

    __del__ = hide

    def hiding(self, closure: Any) -> Any:
        """The ``closure`` of the step, in which they are shards."""

        def hidden() -> Any:
            self.hide()
            try:
                return closure()
            finally:
                self.show(self.params)

        return hidden if callable(closure) else closure


def _show(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Show plain parameters after the user's last hook: the optimizer's code runs next."""
    if not isinstance(kwargs, PlainClassDuringStep):
        return None
    kwargs.show(kwargs.params)
    if is_blockwise(optimizer):
        make_state(optimizer, kwargs.params)
    if "closure" in kwargs:
        kwargs["closure"] = kwargs.hiding(kwargs["closure"])
    return (*args[:1], *map(kwargs.hiding, args[1:])), kwargs


def _hide(_optimizer: Optimizer, _args: Any, kwargs: dict[str, Any]) -> None:
    """Show shards again before the user's first hook after the step."""
    if isinstance(kwargs, PlainClassDuringStep):
        kwargs.hide()


# Of each optimizer that stepped on shards, the handle of the first of these two hooks.
_shown: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def _hook_around(optimizer: Optimizer) -> None:
    """Call ``_show`` as the last hook before the step, and ``_hide`` as the first one after it."""
    if optimizer not in _shown:
        _shown[optimizer] = optimizer.register_step_pre_hook(_show)
        after = optimizer.register_step_post_hook(_hide)
        hooks_behind(after).move_to_end(after.id, last=False)
    before = _shown[optimizer]
    hooks_behind(before).move_to_end(before.id)


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
        params: the model's parameters.
        before_update: a method, held weakly, called with ``_update_of`` an optimizer that steps.
        between_steps: a method, held weakly, that gives the model's buckets, or raises while a
            step is under way.
        comm: the ranks.
        trained_by_others: gives the ids of those parameters that another engine trains.
    """

    _of_models: ClassVar[list[weakref.ref[OptimizerHooks]]] = []

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        before_update: Callable[[str], None],
        between_steps: Callable[[str], Sequence[Bucket]],
        comm: Comm,
        trained_by_others: Callable[[Iterable[nn.Parameter]], set[int]],
    ) -> None:
        self._between_steps = weakref.WeakMethod(between_steps)
        self._trained_by_others = trained_by_others
        self._comm, self._warns = weakref.proxy(comm), comm.size > 1 and comm.rank == 0
        self._own_ids = {id(param) for param in params}
        self._before_update = weakref.WeakMethod(before_update)
        #: In order of their first step.
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._admitted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._params: weakref.WeakKeyDictionary[Optimizer, _Params] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._of_models.append(weakref.ref(self, self._of_models.remove))

    def close(self) -> None:
        """Remove all hooks."""
        self._of_models.remove(weakref.ref(self))
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _before_any(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        for reference in tuple(OptimizerHooks._of_models):
            if hooks := reference():
                args, kwargs = hooks._before(optimizer, args, kwargs) or (args, kwargs)
        return args, kwargs

    def uncut(self, buckets: Iterable[Bucket]) -> None:
        """Make the state of the optimizers that stepped here whole. A collective."""
        admitted = [optimizer for optimizer in self._known if optimizer in self._admitted]
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
        between_steps = self._between_steps()
        if between_steps is None or optimizer not in self._admitted:  # it is whole
            return None
        numbers = {
            id(param): number
            for group, packed in zip(optimizer.param_groups, given["param_groups"], strict=True)
            for param, number in zip(group["params"], packed["params"], strict=True)
        }
        state = dict(given["state"])
        self._cut(optimizer, is_known=False)
        for bucket in between_steps(f"{type(optimizer).__name__}.state_dict() was called"):
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
        if self._warns and self._known:  # the model is trained
            self._warn_of_plain(optimizer)
        if not params:
            return None
        # Another model's hook may have made it.
        shown = kwargs if isinstance(kwargs, PlainClassDuringStep) else PlainClassDuringStep(kwargs)
        shown.params = [*shown.params, *params]
        _hook_around(optimizer)
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
        theirs = self._trained_by_others([param for _, param in plain])
        plain[:] = [pair for pair in plain if id(pair[1]) not in theirs]
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
        _check_elementwise(optimizer, [*params])
        self._cut(optimizer, is_known=isinstance(optimizer, _ELEMENTWISE))
        self._admitted.add(optimizer)
        if optimizer not in self._known:
            self._known[optimizer] = True
            # A wrapper of another optimizer may not have called torch's ``__init__``.
            if "_optimizer_state_dict_post_hooks" not in vars(optimizer):
                Optimizer.__setstate__(optimizer, {})
            self._handles += [
                optimizer.register_load_state_dict_post_hook(self._admitted.discard),
                optimizer.register_state_dict_post_hook(self._make_whole),
            ]

    def _cut(self, optimizer: Optimizer, *, is_known: bool) -> None:
        """Cut whole state; raise on all ranks where it cannot be cut on one. A collective."""
        params, name = self._params_of(optimizer), type(optimizer).__name__
        misfits = [text for p in params if (text := cut_state(optimizer, p, is_known))]
        # Groups may be chosen by the shapes of one rank's shards, and state may fit on some only.
        facts = {f"{name} group of {p.sharding.name}": str(n) for p, n in params.items()}
        self._comm.agree(facts | {f"state of {name}": "".join(misfits[:1]).partition(OF_RANK)[0]})
        if misfits:
            raise OptimizerError(misfits[0])


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Is the ``step`` of this class known to update each element by itself, or vouched for?

    A subclass that has a ``step`` of its own is not known, whatever it inherits: LARS is an SGD.
    Nor is one with its own helper of that ``step``, such as torch's ``_init_group``.
    """
    for base in (base for base in kind.__mro__ if issubclass(base, Optimizer)):
        if base in _ELEMENTWISE or "elementwise" in vars(base):
            return not own_steps(kind, base) and bool(vars(base).get("elementwise", True))
    return False


def own_steps(kind: type[Optimizer], base: type[Optimizer]) -> list[str]:
    """The methods of a step that ``kind`` has of its own, and not from ``base``."""
    private = (name for name in dir(base) if name[:1] == "_" != name[1:2])
    names = ["step", *(name for name in private if inspect.isfunction(getattr(base, name)))]
    # torch wraps the ``step`` of each class when the first instance is made.
    return [n for n in names if _unwrapped(kind, n) is not _unwrapped(base, n)]


def _unwrapped(kind: type[Optimizer], name: str) -> Any:
    return inspect.unwrap(getattr(kind, name))


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


def _has_no_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> bool:
    return all(param.grad is None for _, param in named)


def _check_elementwise(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    check_optimizer(type(optimizer).__name__, params)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError(
            "SparseAdam cannot step on a sharded model: it needs sparse gradients, and those that "
            "are averaged over the ranks are dense. Use torch.optim.AdamW for these parameters."
        )
    if is_blockwise(optimizer):
        check_blocks(optimizer, params)
        return
    split = [s for p in params if (s := sharding_of(p)) and s.placement == "fully_sharded"]
    own, torchs = (_unwrapped(kind, "state_dict") for kind in (type(optimizer), Optimizer))
    stores_all = own is torchs or "super" in own.__code__.co_names  # by ``_make_whole``
    if split and not (stores_all and is_elementwise(type(optimizer))):
        raise OptimizerError(_not_elementwise(type(optimizer), split, len(params)))


def _not_elementwise(kind: type[Optimizer], split: Sequence[Sharding], held: int) -> str:
    """Say why it cannot step on the parameters in ``split``, of the ``held`` ones."""
    example, name = split[0], kind.__name__
    if name in _REASONS:
        advice = f"{_REASONS[name]}, so on shards it would be silently wrong"
    elif is_elementwise(kind):
        advice = "its state_dict() calls no torch's, and would give one rank's part as the whole"
    else:
        advice = "it is not known to update each element by itself"
        base = next((base for base in kind.__mro__ if base in _ELEMENTWISE), kind)
        for own in own_steps(kind, base)[:1]:
            advice += f", since it has a {own}() of its own and not that of {base.__name__}"
        advice += (
            f". If it does, and takes no norm or sum of a parameter: `{name}.elementwise = True`"
        )
    instead = _INSTEAD.get(name, "an elementwise optimizer such as torch.optim.AdamW")
    return (
        f"{name} cannot step on shards ({len(split)} of {held} parameters are "
        f"sharded; {example.name!r} is held here as {example.stop - example.start:,} of "
        f'{example.shape.numel():,} elements): {advice}. Use {instead}, or strategy="no_shard".'
    )


skip_in_dynamo(OptimizerHooks._before_any, _show, _hide)
register_optimizer_step_pre_hook(OptimizerHooks._before_any)
