"""Optimizer state back into optimizers, found by parameter name; fresh or already stepped.

State tensors that exist in the right shape are filled where they are, so loading needs no second
copy, and views of them stay views. How groups are cut is the script's business: every parameter
brings its own options, and a group whose parameters disagree is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint import plain
from shardwise.checkpoint.dtypes import dtype_of
from shardwise.checkpoint.holdings import Home
from shardwise.checkpoint.optimizers import AS_BUILT, Named, Optimizers, params_of
from shardwise.checkpoint.reader import Want, wanted
from shardwise.checkpoint.source import Place
from shardwise.comm.malloc import in_huge_pages
from shardwise.errors import CheckpointError
from shardwise.shard_tensor import ShardTensor

__all__ = ["Restored", "restored"]


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint says of one parameter."""

    kind: str  # the optimizer's class
    options: Mapping[str, Any]
    values: Mapping[str, Any]
    tensors: Mapping[str, Place]


@dataclass(frozen=True, eq=False)
class _Target:
    optimizer: Optimizer
    group: dict[str, Any]
    param: Tensor
    home: Home
    saved: _Saved | None


class Restored:
    """State on its way into optimizers.

    Attributes:
        problems: one line for each thing that does not fit.
        left_out: names of parameters whose state is not loaded, in the model or in the files.
    """

    def __init__(
        self, targets: Sequence[_Target], saved: Mapping[str, _Saved], loose: Sequence[str] = ()
    ) -> None:
        """``loose``: names of parameters with state, but in no group."""
        self._targets = targets
        used = {id(target.saved) for target in targets}
        absent = [target.home.member.name for target in targets if target.saved is None]
        extra = [name for name, found in saved.items() if id(found) not in used]
        self.problems = [f"{name}: its optimizer state is not stored" for name in absent]
        self.problems += [f"{name}: stored, and no optimizer has this parameter" for name in extra]
        self.problems += [f"{name}: it has state, and is in no stored group" for name in loose]
        self.problems += [line for target in targets for line in _misfits(target)]
        self.problems += _conflicts(targets)
        self.left_out = (*absent, *extra, *loose)
        self._states: list[tuple[_Target, dict[str, Any]]] = []

    def wants(self) -> list[Want]:
        """What is to be read, into state that exists or is made here."""
        found = []
        for target in self._targets:
            state: dict[str, Any] = {}
            for key, place in _fitting(target):
                state[key], start = _memory(target, key, place)
                found.append(wanted(place, start, state[key]))
            self._states.append((target, state))
        return found

    def apply(self) -> None:
        """Give the optimizers what was read, and the options of their groups."""
        for target, state in self._states:
            if target.saved is None:
                continue
            state |= {key: plain.decode(value) for key, value in target.saved.values.items()}
            held = target.optimizer.state[target.param]
            held.clear()
            held.update(state)
            if not state:
                del target.optimizer.state[target.param]
            for key, value in target.saved.options.items():
                _set_option(target.group, key, plain.decode(value))


def restored(
    optimizers: Optimizers,
    named: Named,
    records: Sequence[Mapping[str, Any]],
    places: Mapping[str, Place],
    aliases: Mapping[str, str],
) -> Restored:
    """Find the saved state of every parameter that the optimizers hold.

    Args:
        records: what the training state says of optimizers.
        places: the stored tensors, ``STATE/PARAMETER``.
        aliases: further names of tied parameters → the name in the records.
    """
    saved = _saved(records, places)
    targets = []
    for optimizer in optimizers:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for param in params_of(optimizer):
            home = named.home(param, optimizer)
            names = [n for alias in home.member.aliases for n in (alias, aliases.get(alias, alias))]
            found = next((saved[name] for name in names if name in saved), None)
            targets.append(_Target(optimizer, groups[id(param)], param, home, found))
    return Restored(targets, saved, _loose(records, places, saved))


def _loose(
    records: Sequence[Mapping[str, Any]], places: Mapping[str, Place], saved: Mapping[str, _Saved]
) -> list[str]:
    held = [name.partition("/")[2] for name in places]
    with _well_formed():
        held += [name for record in records for name, one in record["values"].items() if one]
    return [name for name in dict.fromkeys(held) if name not in saved]


def _saved(records: Sequence[Mapping[str, Any]], places: Mapping[str, Place]) -> dict[str, _Saved]:
    tensors: dict[str, dict[str, Place]] = {}
    for name, place in places.items():
        key, _, param = name.partition("/")
        tensors.setdefault(param, {})[key] = place
    with _well_formed():
        return {
            name: _Saved(
                record["class"],
                group["options"],
                record["values"].get(name, {}),
                tensors.get(name, {}),
            )
            for record in records
            for group in record["groups"]
            for name in group["params"]
        }


@contextmanager
def _well_formed() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the training state's record of optimizers is malformed ({error!r}). Load another "
            "checkpoint, or load without the optimizer."
        ) from None


def _fitting(target: _Target) -> Iterator[tuple[str, Place]]:
    for key, place in (target.saved.tensors if target.saved else {}).items():
        if place.stored.shape in ((), tuple(target.home.member.shape)):
            yield key, place


def _misfits(target: _Target) -> Iterator[str]:
    if target.saved is None:
        return
    name, kind = target.home.member.name, type(target.optimizer).__qualname__
    if target.saved.kind != kind:
        yield f"{name}: its state is of {target.saved.kind}, and {kind} holds it now"
    fits = {key for key, _ in _fitting(target)}
    for key, place in target.saved.tensors.items():
        if key not in fits:
            shape = tuple(target.home.member.shape)
            yield f"{key} of {name}: stored as {place.stored.shape}, the parameter has {shape}"


def _conflicts(targets: Iterable[_Target]) -> Iterator[str]:
    """Groups whose parameters were saved with unlike options."""
    first: dict[int, _Target] = {}
    for target in targets:
        if target.saved is None:
            continue
        other = first.setdefault(id(target.group), target)
        assert other.saved is not None
        for key, value in target.saved.options.items():
            if other.saved.options.get(key) != value:
                yield (
                    f"{target.home.member.name}: saved with {key}={value}, and "
                    f"{other.home.member.name}, now in the same group, with "
                    f"{key}={other.saved.options.get(key)}"
                )


def _memory(target: _Target, key: str, place: Place) -> tuple[Tensor, int]:
    """Where one state of one parameter goes, and which of its elements is the first here."""
    dtype = dtype_of(place.stored.dtype)
    one = place.stored.shape == () and not _is_element(target, key)
    shape = torch.Size([]) if one else target.home.value.shape
    there = target.optimizer.state.get(target.param, {}).get(key)
    there = there.to_local() if isinstance(there, ShardTensor) else there
    if (
        isinstance(there, Tensor)
        and (there.shape, there.dtype) == (shape, dtype)
        and there.is_contiguous()
    ):
        return there, 0 if one else target.home.start
    moved = bool(target.group.get("capturable") or target.group.get("fused"))
    device = target.home.value.device if moved or not one else torch.device("cpu")
    memory = in_huge_pages(torch.empty(shape, dtype=dtype, device=device))
    return memory, 0 if one else target.home.start


def _is_element(target: _Target, key: str) -> bool:
    """Of a 0-dim parameter: is this its one element's state, and not the parameter's?"""
    from shardwise.checkpoint.optimizers import is_scalar

    shape = target.home.member.shape
    return not is_scalar(key, torch.empty(()), shape)


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    if key in AS_BUILT:
        return
    there = group.get(key)
    if isinstance(there, Tensor):  # a learning rate that a compiled or captured step reads
        there.fill_(float(value))
    else:
        group[key] = value
