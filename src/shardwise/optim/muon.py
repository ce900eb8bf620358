"""Muon on shards, exact: momentum stays sharded, and whole matrices exist on one rank only.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, roughly, which needs all of it.
torch's class on row shards would orthogonalise each rank's rows alone: something else, silently.

    1. momentum of each rank's part, where it is       elementwise, in the parameter's dtype
    2. parts → the matrix's owner                      one exchange for all matrices, bfloat16
    3. Newton-Schulz of the whole matrix               torch's function, which computes in bfloat16
    4. the result's parts → who holds them             one exchange, bfloat16
    5. weight decay and update of each part            elementwise

Since torch casts to bfloat16 before step 3 and returns that, nothing is lost on the way, and the
bits are those of ``torch.optim.Muon`` on whole matrices with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked, named
from shardwise.memory.sharding import sharding_of
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.fused import AdamWPolicy, adamw_names, check_numbers, update_by_adamw
from shardwise.optim.groups import defaults, matching
from shardwise.optim.matrix_rules import ADAMW, MUON, Choice, choose, table
from shardwise.optim.owners import Exchange, Matrix, owners
from shardwise.optim.sharded_model import ShardedModel
from shardwise.optim.update import Call, Update
from shardwise.torch_internals import muon_learning_rate, orthogonalize

WIRE = torch.bfloat16  # in which torch's Newton-Schulz iteration computes and returns
MOMENTUM = "momentum_buffer"
Algorithm = Literal["muon", "adamw"]
Adjusted = Literal["original", "match_rms_adamw"]


@checked
@dataclass(frozen=True)
class MuonPolicy(AdamWPolicy):
    """The options of ``torch.optim.Muon``, and those of groups that AdamW updates.

    Attributes:
        algorithm: of a group: ``"muon"`` or ``"adamw"``.
        momentum: the weight of the past in the moving average of gradients.
        nesterov: Nesterov momentum.
        ns_coefficients, ns_steps: of the Newton-Schulz iteration; ``eps`` is its smallest norm.
        adjust_lr_fn: ``"original"`` (``None``): times ``sqrt(max(1, rows / columns))``;
            ``"match_rms_adamw"``: times ``0.2 * sqrt(max(rows, columns))``.
    """

    weight_decay: float = 0.1
    eps: float = 1e-7
    algorithm: Algorithm = MUON
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    adjust_lr_fn: Adjusted | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "momentum")
        if not 1 <= self.ns_steps < 100:
            raise ConfigError(f"ns_steps is {self.ns_steps}; it must be from 1 to 99.")


class _Part(NamedTuple):
    """This rank's part of a matrix: elements ``[start, stop)`` of a bucket's shard."""

    group: int  # the position of the parameter group
    bucket: int  # the position of the bucket
    start: int
    stop: int


class _Plan(NamedTuple):
    """The exchange of each step, until another ``update`` is decided."""

    update: Update
    parts: Sequence[_Part]
    exchange: Exchange  # of the same matrices
    comm: Comm  # whose ranks exchange them


class Muon(FlatOptimizer):
    """Muon (Jordan et al. 2024) for hidden matrices, and AdamW for all else, on flat shards.

    Args:
        sharded: what ``sw.shard(model)`` returned.
        groups: as for ``sw.optim.AdamW``; each may have ``"algorithm"``, ``"muon"`` by default, or
            ``"adamw"``. ``None`` = every trainable parameter, by the rules that ``table`` shows.
        adamw: without ``groups``, the options of those that AdamW updates, as of
            ``sw.optim.AdamW``, and as ``"params"`` names or patterns of further ones.
        lr, …, adjust_lr_fn: see ``MuonPolicy``, field by field.

    Raises:
        ConfigError: as ``FlatOptimizer``, and a group of Muon's has a parameter that is no matrix.
    """

    elementwise = True  # on the shards of this model, for which its rounds are made
    policy_type = MuonPolicy

    @named
    def __init__(
        self,
        sharded: ShardedModel,
        groups: Iterable[Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        weight_decay: float = 0.1,
        amsgrad: bool = False,
        max_norm: float | None = None,
        algorithm: Algorithm = MUON,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: Adjusted | None = None,
    ) -> None:
        options = locals()
        self._choices: dict[str, Choice] = {}
        self._plan: _Plan | None = None
        if groups is None and isinstance(sharded, ShardedModel):
            groups = self._groups_by_rule(sharded, dict(adamw or {}))
        super().__init__(sharded, groups, options)

    @property
    def table(self) -> str:
        """Say which parameter is updated by which algorithm, by which rule: a line for each."""
        lines = [
            self._choices.get(name) or Choice(name, tuple(_shape(param)), algorithm, "its group")
            for name, param, algorithm in self._members(self.param_groups)
        ]
        return table(lines)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for name, param, algorithm in self._members(self.param_groups[-1:]):
            if algorithm == MUON and len(_shape(param)) != 2:
                raise ConfigError(
                    f"parameter {name!r} of shape {tuple(_shape(param))} is in a group of Muon, "
                    'which orthogonalises matrices. Put it into a group with "algorithm": '
                    '"adamw", or leave groups out: then rules choose (see table).'
                )

    @staticmethod
    def _members(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Tensor, str]]:
        for group in groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                yield name, param, group["algorithm"]

    def _groups_by_rule(self, sharded: ShardedModel, adamw: dict[str, Any]) -> list[dict[str, Any]]:
        members = [m for bucket in sharded.buckets for m in bucket.members if bucket.trainable]
        patterns = adamw.pop("params", ())
        patterns = [patterns] if isinstance(patterns, str) else patterns
        named = {member.name for each in patterns for member in matching(each, members)}
        position = {id(p): at for at, p in enumerate(sharded.model.parameters())}
        members.sort(key=lambda member: position[id(member.param)])
        self._choices = {c.name: c for c in choose(sharded.model, members, named)}
        by_adamw = {"algorithm": ADAMW, **defaults(AdamWPolicy(**adamw)), **adamw}
        groups = [
            {
                "params": [m.param for m in members if self._choices[m.name].algorithm == kind],
                **settings,
            }
            for kind, settings in ((MUON, {"algorithm": MUON}), (ADAMW, by_adamw))
        ]
        return [group for group in groups if group["params"]]

    # ---- the step ----------------------------------------------------------------------------

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return adamw_names(group) if group["algorithm"] == ADAMW else (MOMENTUM,)

    def _carry_out(self, update: Update, gradients: list[Tensor], scale: Tensor | None) -> None:
        if self._plan is None or self._plan.update is not update:
            self._plan = self._planned(update)
        plan = self._plan
        flats = {  # what Muon orthogonalises, laid out like the shards
            at: torch.empty_like(self._states[at].shard, dtype=WIRE)
            for at in {part.bucket for part in plan.parts}
        }
        for call in update.calls:
            group, of_call = self.param_groups[call.group], [gradients[k] for k in call.gradients]
            if group["algorithm"] == ADAMW:
                update_by_adamw(group, call, of_call, scale)
            else:
                _average(group, call, of_call, scale, flats)
        if not plan.parts:
            return
        averages = [flats[part.bucket][part.start : part.stop] for part in plan.parts]
        orthogonal = through_owners(averages, plan.exchange, plan.comm, self._orthogonalize)
        for at, (part, change) in enumerate(zip(plan.parts, orthogonal, strict=True)):
            self._apply(part, change, plan.exchange.matrices[at].shape)

    def _orthogonalize(self, at: int, average: Tensor) -> Tensor:
        assert self._plan is not None
        group = self.param_groups[self._plan.parts[at].group]
        return orthogonalize(average, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _apply(self, part: _Part, change: Tensor, shape: tuple[int, int]) -> None:
        group = self.param_groups[part.group]
        lr = float(group["lr"])
        values = self._states[part.bucket].shard[part.start : part.stop]
        values.mul_(1 - lr * group["weight_decay"])
        rate = muon_learning_rate(lr, group["adjust_lr_fn"], torch.Size(shape))
        values.add_(change, alpha=-rate)

    def _planned(self, update: Update) -> _Plan:
        """Owners are those of all matrices, so that they stay the same while some are unused."""
        comm, positions = _ranks(self._sharded)
        updated, parts, matrices, used = set(map(id, update.params)), [], [], []
        for at, state in enumerate(self._states):
            spec = state.bucket.spec
            for k, group in enumerate(state.groups):
                if self.param_groups[group]["algorithm"] == MUON:
                    slot = spec.slots[state.indices[k]]
                    held = tuple(spec.layout.owned(slot, position) for position in positions)
                    matrices.append(Matrix((slot.shape[0], slot.shape[1]), held))
                    parts.append(_Part(group, at, *state.ranges[k]))
                    used.append(id(state.params[k]) in updated)
        owned_by = owners(matrices, comm.size)
        chosen = list(compress(zip(parts, matrices, owned_by, strict=True), used))
        some, whole, ranks = zip(*chosen, strict=True) if chosen else ((), (), ())
        return _Plan(update, some, Exchange(whole, ranks, comm.size), comm)


def through_owners(
    held: Sequence[Tensor], exchange: Exchange, comm: Comm, compute: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """Compute with whole matrices, each on its owner. Two collectives.

    Args:
        held: this rank's part of each matrix, flat, all of one dtype.
        compute: from a matrix's position and values, ``[rows, columns]``, which it may overwrite,
            to as many values of the same dtype.

    Returns:
        This rank's part of each result, flat.
    """
    matrices, mine = exchange.matrices, exchange.owned(comm.rank)
    each = [(rank, at) for rank in range(comm.size) for at in mine]
    # 1. Every matrix to its owner.
    sent = _packed([held[at] for at in exchange.order], comm, held[0])
    received = comm.all_to_all(sent, exchange.to_owners, Label("orthogonalize", "averages"))
    wholes = {at: held[0].new_empty(matrices[at].shape) for at in mine}
    pieces = received.split([matrices[at].held(rank) for rank, at in each])
    for (rank, at), piece in zip(each, pieces, strict=True):
        wholes[at].view(-1)[slice(*matrices[at].parts[rank])] = piece
    # 2. Compute.
    results = {at: compute(at, whole).reshape(-1) for at, whole in wholes.items()}
    # 3. The results to those who hold the matrices.
    sent = _packed([results[at][slice(*matrices[at].parts[r])] for r, at in each], comm, held[0])
    received = comm.all_to_all(sent, exchange.back, Label("orthogonalize", "updates"))
    own = received.split([matrices[at].held(comm.rank) for at in exchange.order])
    by_position = dict(zip(exchange.order, own, strict=True))
    return [by_position[at] for at in range(len(matrices))]


def _packed(pieces: Sequence[Tensor], comm: Comm, like: Tensor) -> Tensor:
    """One after the other, in memory that peers can read."""
    memory = comm.memory.gradient(sum(piece.numel() for piece in pieces), like.dtype)
    return torch.cat(list(pieces), out=memory) if pieces else memory


def _average(
    group: Mapping[str, Any],
    call: Call,
    gradients: Sequence[Tensor],
    scale: Tensor | None,
    flats: Mapping[int, Tensor],
) -> None:
    """Update momentum, as torch does, and write what is to be orthogonalised to ``flats``."""
    each = zip(gradients, call.state[MOMENTUM], call.places, strict=True)
    for gradient, momentum, (at, start) in each:
        if scale is not None:
            gradient.div_(scale)
        momentum.lerp_(gradient, 1 - group["momentum"])
        average = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        flats[at][start : start + average.numel()] = average


def _ranks(sharded: ShardedModel) -> tuple[Comm, list[int]]:
    """The ranks that hold a model once between steps, and which shard of a bucket each holds.

    Ranks that hold copies of it compute the same as these do.
    """
    bucket = sharded.buckets[0]
    spec = bucket.spec
    if not spec.splits_copies:
        return bucket.mesh.shard, list(range(spec.shard.size))
    copies, shards = spec.replicate.size, spec.shard.size
    ranks = range(copies * shards)
    return sharded.comm, [rank % shards * copies + rank // shards for rank in ranks]


def _shape(param: Tensor) -> torch.Size:
    """The whole parameter's."""
    sharding = sharding_of(param)
    return param.shape if sharding is None else sharding.shape
