"""Whole values in and out of a sharded model, outside the step.

``model.state_dict()`` of a sharded model means what it means for a plain one: whole tensors
under the usual names. Every rank takes part, one bucket at a time, so no rank ever needs
room for the whole model on its device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.memory.parameters import Bucket
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.memory.whole import gather_whole
from shardwise.plan.units.structure import holds_parameters
from shardwise.runtime.structure_check import StructureCheck
from shardwise.torch_internals import ASSIGN, disable_torch_function, get_version, parameters_of


class StateHooks:
    """Makes ``state_dict()`` and ``load_state_dict()`` of a sharded model use whole tensors.

    ``idle`` raises while a step is under way; it is false where parameters are whole already.
    """

    def __init__(
        self, check: StructureCheck, buckets: Sequence[Bucket], idle: Callable[[], bool]
    ) -> None:
        self._check, self._buckets, self._idle = check, tuple(buckets), idle
        self._names = {module: name for name, module in check.model.named_modules()}
        self._handles: list[Any] = []

    def install(self) -> None:
        for module in filter(holds_parameters, self._names):
            # A partial, because torch marks the hook with an attribute, which a method refuses.
            self._handles.append(module.register_state_dict_post_hook(partial(self._make_whole)))
            self._handles.append(module.register_load_state_dict_pre_hook(self._take_parts))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._check.__reduce_ex__(protocol)

    def _make_whole(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Replace shards by whole CPU tensors; for a child, only if it was asked itself."""
        if (module is not self._check.model and prefix) or not self._idle():
            return
        start = f"{self._names[module]}." if self._names[module] else ""
        for bucket in self._buckets:
            if any(alias.startswith(start) for m in bucket.members for alias in m.aliases):
                self._put(state, bucket, prefix, start)

    def _put(self, state: dict[str, Any], bucket: Bucket, prefix: str, start: str) -> None:
        for member, whole in zip(bucket.members, gather_whole(bucket), strict=True):
            keys = [prefix + a.removeprefix(start) for a in member.aliases if a.startswith(start)]
            if present := [key for key in keys if key in state]:
                with torch.inference_mode(False):
                    value = self._check.copies.detach()  # which shares its count of writes
                    # A clone: a view would make torch.save write the whole bucket for each name.
                    value.data = whole.detach().cpu().clone()
                state.update(dict.fromkeys(present, value))

    def _take_parts(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Make ``load_state_dict`` accept whole tensors: each rank keeps its own part."""
        self._check.writes = get_version(self._check.copies)  # what was written is not lost
        if not self._idle():
            return
        if metadata.get(ASSIGN, False):
            raise ConfigError(
                "load_state_dict(assign=True) would put new parameters in place of those that are "
                "sharded, and the ranks would train the old ones. Leave assign out."
            )
        for name, param in parameters_of(module).items():
            sharding, value = param is not None and sharding_of(param), state.get(prefix + name)
            if param is not None and sharding and isinstance(value, Tensor):
                other = sharding_of(value)
                with disable_torch_function():
                    if other is not None and not other.cuts_like(sharding):
                        value = other.whole(value)
                    state[prefix + name] = _part(value.detach(), param, sharding)


def _part(value: Tensor, param: nn.Parameter, sharding: Sharding) -> Tensor:
    if value.shape == sharding.shape:
        return sharding.cut(value, param.shape)
    if value.shape == param.shape:
        return value
    raise ConfigError(
        f"parameter {sharding.name!r} has shape {tuple(value.shape)} in the state dict and "
        f"{tuple(sharding.shape)} in the model (this rank's shard: {tuple(param.shape)}), so it "
        "cannot be loaded. Load full tensors of this model, as model.state_dict() gives them, or "
        "this rank's own shards, as sharded.local_state_dict() does."
    )


def whole_copy(model: nn.Module, buckets: Sequence[Bucket], memo: dict[int, Any]) -> nn.Module:
    """A plain deep copy with whole parameters of ``model``, which is without our hooks now."""
    for bucket in buckets:
        for param, whole in zip(bucket.params, gather_whole(bucket), strict=True):
            memo[id(param)] = nn.Parameter(whole.clone(), requires_grad=param.requires_grad)
    with torch.no_grad():
        return copy.deepcopy(model, memo)
