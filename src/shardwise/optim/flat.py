"""Common base of the flat fused optimizers: a step over runs instead of over parameters.

A run is a stretch of a flat shard, and the runs are decided before the step (see ``update``), so
all that a step does for each parameter is to read its gradient's address.

To its user it is a ``torch.optim.Optimizer``: groups, schedulers, hooks, ``state`` by parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError, OptimizerError
from shardwise.errors.arguments import taken
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.optim.flat_state import FlatState
from shardwise.optim.groups import Policy, check_loaded, defaults, resolved
from shardwise.optim.norm import dtype_of, norm_of
from shardwise.optim.plain_class import PlainClassDuringStep
from shardwise.optim.sharded_model import ShardedModel
from shardwise.optim.update import Key, Update, decide
from shardwise.torch_internals import disable_torch_function, skip_in_dynamo


class FlatOptimizer(Optimizer, ABC):
    """An optimizer of a sharded model that updates runs by a fused kernel.

    Args:
        sharded: what ``sw.shard(model)`` returned.
        groups: as for torch: parameters, or dicts with ``"params"`` and options of their own,
            where ``"params"`` may also be regular expressions that match whole names; ``None`` =
            every trainable parameter.
        options: for all groups, among other names.

    Raises:
        ConfigError: an option that does not exist or cannot work, a pattern that finds nothing.
        OptimizerError: a parameter that is not of this model.

    Attributes:
        max_norm: the largest global norm of the gradients that it updates with; ``None`` = any.
        norm: what that norm was before clipping in the last step: 0-dim, fp32, or fp64 if a
            parameter is, the same on every rank; ``None`` while there is no ``max_norm``.
    """

    policy_type: type[Policy]

    def __init__(
        self, sharded: ShardedModel, groups: Iterable[Any] | None, options: Mapping[str, Any]
    ) -> None:
        kind = type(self).__name__
        if not isinstance(sharded, ShardedModel):
            raise ConfigError(
                f"sw.optim.{kind} was given a {type(sharded).__name__}, and it needs the flat "
                "shards of a sharded model. Pass the handle that sw.shard() returned: "
                f"sw.optim.{kind}(sharded)."
            )
        self._sharded, self._policy = sharded, taken(self.policy_type, options)
        self.max_norm = self._policy.max_norm
        self.norm: Tensor | None = None
        self._mark: tuple[object, Sharding | None] = ((), None)
        self._check_sharded()
        self._states: list[FlatState] = []
        self._facts: tuple[object, ...] = ()  # none: memory is taken when it is needed
        self._decided: tuple[Update, list[list[bool]]] | None = None
        if groups is None:
            own = filter(sharding_of, sharded.model.parameters())
            groups = [param for param in own if param.requires_grad]
        super().__init__(groups, defaults(self._policy))

    # ---- the rule ----------------------------------------------------------------------------

    @abstractmethod
    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the state that the parameters of a group have."""

    @abstractmethod
    def _carry_out(self, update: Update, gradients: list[Tensor], scale: Tensor | None) -> None:
        """Call the kernels.

        Args:
            gradients: of all runs.
            scale: 0-dim; what gradients are divided by, in place.
        """

    # ---- what torch asks of an optimizer -----------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Same as torch's; ``"params"`` may hold regular expressions that match whole names."""
        taken = {id(param) for group in self.param_groups for param in group["params"]}
        group = resolved(param_group, self._sharded.buckets, taken, self._policy)
        unwrap(Optimizer.add_param_group)(self, group)  # whose wrapper imports the compiler

    def zero_grad(self, set_to_none: bool = True) -> None:
        shown = PlainClassDuringStep()
        shown.show([param for group in self.param_groups for param in group["params"]])
        unwrap(Optimizer.zero_grad)(self, set_to_none)  # as above

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict()`` of this optimizer, or of torch's of the same name.

        State is that of whole parameters, of which each rank keeps its part.

        Raises:
            ConfigError: it is another optimizer's, or of other shapes.
        """
        self._check_sharded()
        for group in state_dict["param_groups"]:
            check_loaded(group, self._policy)
        super().load_state_dict(state_dict)
        self._sharded.admitted(f"{type(self).__name__}.load_state_dict() was called", self)
        self._hold()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; clip before, if there is a ``max_norm``.

        Clipping is one collective and is done by the kernel that updates: what it had to clip is
        clipped in ``.grad`` afterwards. Without it there is no collective.

        Args:
            closure: computes the loss anew, and is called first; its loss is returned.

        Raises:
            OptimizerError: the model was unsharded since.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad(), disable_torch_function():
            self._step()
        return loss

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            names = sorted(group.keys() - {"params", "param_names"})
            options = ", ".join(f"{name}={group[name]}" for name in names)
            lines += [f"    {len(group['params'])} parameters: {options}"]
        return "\n".join([f"sw.optim.{type(self).__name__}(", *lines, ")"])

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError(
            f"a sw.optim.{type(self).__name__} works on the memory of one rank's shards, so it can "
            "be neither copied nor pickled. Save its state_dict(), and load that into a new one."
        )

    # ---- the step ----------------------------------------------------------------------------

    def _step(self) -> None:
        self._check_sharded()
        if not self._is_current():
            self._hold()
        given = [[param.grad for param in state.params] for state in self._states]
        update = self._update([[gradient is not None for gradient in some] for some in given])
        flats, gradients = [], list[Tensor]()
        for state, of_slots, views in zip(self._states, given, update.views, strict=True):
            if views is not None:
                flats.append(state.flat_gradient(of_slots))
                gradients += views(flats[-1].flat)
        scale = self._scale(update.ranks, gradients)
        for state, more in zip(self._states, update.counted, strict=True):
            if more is not None:
                state.count(more)
        self._carry_out(update, gradients, scale)
        for flat in flats if scale is not None else ():
            flat.copy_back()
        # The kernels wrote past the parameters: bump their versions, so autograd finds stale ones.
        torch.autograd.graph.increment_version(update.params)

    def _scale(self, ranks: Sequence[int], gradients: Sequence[Tensor]) -> Tensor | None:
        """Return what gradients must be divided by; ``None`` where that is known to be 1."""
        if self.max_norm is None:
            return None
        parts, buckets = zip(ranks, gradients, strict=True), self._sharded.buckets
        whole = all(bucket.allocation.whole for bucket in buckets)
        self.norm = norm_of(parts, self._sharded.comm, whole, dtype=dtype_of(buckets))
        scale = ((self.norm + 1e-6) / self.max_norm).clamp(min=1.0)
        scale = scale.to(self._states[0].shard.device)
        on_host = scale.is_cpu  # asking another device would wait for it
        return None if on_host and scale.item() == 1 else scale

    # ---- decided beforehand --------------------------------------------------------------------

    def _is_current(self) -> bool:
        """Is flat memory still that of the parameters and their state?"""
        return self._facts == self._facts_now() and all(
            state.adopt() and state.is_shown_by(self.state) for state in self._states
        )

    def _update(self, present: list[list[bool]]) -> Update:
        """The step; the last one again, as long as nothing that it depends on changed.

        ``present`` says of each bucket's slots whether they have a gradient.
        """
        if (
            self._decided is None
            or self._decided[1] != present
            or not self._decided[0].lasts
            or any(state.is_recounted for state in self._states)
        ):
            names = [self._names(group) for group in self.param_groups]
            keys = [self._keys(*pair, names) for pair in zip(self._states, present, strict=True)]
            self._decided = decide(self._states, keys, names), present
            self._facts = self._facts_now()  # there is more state than before
        return self._decided[0]

    def _keys(
        self, state: FlatState, present: Sequence[bool], names: Sequence[Sequence[str]]
    ) -> list[Key | None]:
        """The key of each slot, ``None`` without a gradient. Missing state is made."""
        ages, keys = state.steps.tolist(), list[Key | None]()
        for at, (group, has_gradient) in enumerate(zip(state.groups, present, strict=True)):
            is_first = has_gradient and state.add_missing(self.state, at, names[group])
            keys.append(Key(group, is_first, ages[at]) if has_gradient else None)
        return keys

    def _facts_now(self) -> tuple[object, ...]:
        """Return what changes whenever parameters or state are replaced, added or removed."""
        groups = [(len(group["params"]), self._names(group)) for group in self.param_groups]
        return self._sharded.buckets, groups, id(self.state), len(self.state)

    def _hold(self) -> None:
        """Move the present state into flat memory, and replace it by views of that."""
        groups = {
            id(param): number
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        for bucket in self._sharded.buckets:
            bucket.adopt()
        names = [self._names(group) for group in self.param_groups]
        states = [FlatState(bucket, groups) for bucket in self._sharded.buckets]
        self._states = [state for state in states if state.params]
        for state in self._states:
            state.take(self.state, names)
        self._decided, self._facts = None, self._facts_now()

    def _check_sharded(self) -> None:
        """Raises ``OptimizerError`` where the handle's buckets are not the parameters' memory."""
        buckets, kind = self._sharded.buckets, type(self).__name__
        sharding = sharding_of(buckets[0].params[0]) if buckets else None
        if self._mark[0] is not buckets:  # new ones: the optimizer is, or relayout() was called
            self._mark = buckets, sharding
        if buckets and (sharding is None or sharding is not self._mark[1]):
            raise OptimizerError(
                f"this {kind} updates the {len(buckets)} buckets of a model that has been "
                "unsharded since, so they are no longer its parameters' memory. Its state is "
                f"unsharded, too: continue with torch.optim.{kind} or a new sw.optim.{kind}, and "
                "load this one's state_dict() into it."
            )


skip_in_dynamo(FlatOptimizer.add_param_group, FlatOptimizer.step, FlatOptimizer.zero_grad)
