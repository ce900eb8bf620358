"""The front door: ``shard(model)`` in place, and the handle that it returns.

FSDP1 wraps the model in another module, FSDP2 replaces its parameters; both break what was
made before them (names, optimizers, hooks). Here the model, its names and its ``Parameter``
objects stay; what changes is where the parameters' bytes are.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import accelerators, layout, order
from shardwise.buffers import Bucket
from shardwise.comm.connect import connect, over
from shardwise.comm.protocol import Comm, Label
from shardwise.errors import ConfigError, ScheduleError, nearest
from shardwise.guard import sharding_of
from shardwise.hooks import Hooks
from shardwise.layout import Layout
from shardwise.listing import Layouts, Schedule
from shardwise.materialise import Init, checksums, default_init, give_values, sync
from shardwise.optim.gate import Gate
from shardwise.optim.norm import clip_gradients
from shardwise.precision import Dtypes, Precision
from shardwise.recompute import checkpoint_units
from shardwise.runtime import Mode, Runtime, UnitState
from shardwise.schedule import Order, Placement, Policy, Prefetch
from shardwise.state import StateHooks, full_params, local_state, whole_copy
from shardwise.units import Member, Unit, Units, choose_units
from shardwise.wrap import Wrap

__all__ = ["Options", "Sharded", "shard"]

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Options:
    """How to shard, beyond strategy and units.

    Attributes:
        precision: stored, compute, wire, sum, buffer and output dtypes.
        prefetch: how far ahead units are gathered.
        bucketing: ``"block"``: one collective per unit; ``"layer"``: per module that owns
            parameters; ``"none"``: per parameter, cut along dim 0 like ``torch.chunk``.
        uneven: with ``bucketing="none"``: ``"pad"`` a dim 0 that the world size does not divide,
            or ``"error"``.
        sync_module_states: start from rank 0's parameters and buffers. When off, ranks whose
            values differ are an error.
        init: gives a module that was built on the meta device its values.
        divergence: what a rank does when others enter a unit that it skips: ``"error"``, or
            ``"participate"`` (units must then run in the order they are registered).
        activation_checkpointing: recompute repeated units in the backward pass.
        mesh: a 1-D ``DeviceMesh`` or process group to shard over, instead of ``comm``.
    """

    precision: Precision = field(default_factory=Precision)
    prefetch: Prefetch = field(default_factory=Prefetch)
    bucketing: str = "block"
    uneven: str = "pad"
    sync_module_states: bool = True
    init: Init = default_init
    divergence: str = "error"
    activation_checkpointing: bool = False
    mesh: Any = None

    def __post_init__(self) -> None:
        _one_of("bucketing", self.bucketing, ("block", "layer", "none"))
        _one_of("uneven", self.uneven, ("pad", "error"))
        _one_of("divergence", self.divergence, ("error", "participate"))
        if self.uneven == "error" and self.bucketing != "none":
            raise ConfigError(
                f'uneven="error" asks for dim-0 shards, and bucketing={self.bucketing!r} cuts '
                'buckets, not parameters. Add bucketing="none", or leave uneven out.'
            )


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, known))}.")


def shard(
    model: nn.Module,
    strategy: str = "full_shard",
    wrap: Wrap | None = None,
    comm: Comm | None = None,
    **options: Any,
) -> Sharded:
    """Shard ``model`` in place over the ranks of ``comm``. A collective.

    Args:
        model: any module; parameters may be frozen, tied, scalar, of several dtypes, or on the
            meta device.
        strategy: ``"full_shard"`` (ZeRO-3), ``"shard_grad_op"`` (ZeRO-2), ``"zero1"`` or
            ``"no_shard"`` (DDP).
        wrap: how units are chosen; ``None`` = the model's repeated blocks.
        comm: the ranks; ``None`` = from the launcher's environment, or one rank alone.
        options: the fields of ``Options``.

    Returns:
        A handle: ``accumulate``, ``clip_grad_norm_``, ``full_params``, ``units``, ``schedule`` …

    Raises:
        ConfigError: an argument that cannot work, or a model that is sharded already.
        RanksDisagree: the ranks were given different models or arguments.
    """
    known = {item.name for item in fields(Options)}
    for name in set(options) - known:
        raise ConfigError(
            f"shard() has no option {name!r}; nearest is {nearest(name, known)[0]!r}. "
            f"Options are {', '.join(sorted(known))}."
        )
    chosen = Options(**options)
    _check_unsharded(model)
    if comm is None:
        comm = connect() if chosen.mesh is None else over(chosen.mesh)
    return Sharded(model, Placement.named(strategy), wrap, comm, chosen)


def _check_unsharded(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if sharding_of(param) is not None:
            raise ConfigError(
                f"parameter {name!r} is sharded already, so sharding this model again would cut "
                "shards of shards. Call shard() once, on the outermost model; to shard anew, "
                "call sharded.unshard() first."
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet (a lazy module), so it cannot be laid out. "
                "Run one batch through the model before shard()."
            )


@dataclass(eq=False, repr=False)
class Sharded:
    """A sharded model's handle. Made by ``shard``."""

    model: nn.Module
    placement: Placement
    wrap: Wrap | None
    comm: Comm
    options: Options
    units: Units = field(init=False)
    buckets: tuple[Bucket, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._build()

    def _build(self) -> None:
        model, comm = self.model, self.comm
        self.units = choose_units(model, self.wrap)
        plans = {unit.name: self._buckets_of(unit) for unit in self.units}
        comm.agree(self._facts(plans))
        states: dict[str, UnitState] = {}
        moved = 0

        def finished(unit: Unit) -> None:
            nonlocal moved
            if self.options.sync_module_states and comm.size > 1:
                moved += sync(unit.members, comm)
            states[unit.name] = self._take(unit, plans[unit.name])

        give_values(model, self.units, comm.device, self.options.init, finished)
        states = {unit.name: states[unit.name] for unit in self.units}
        self.buckets = tuple(bucket for state in states.values() for bucket in state.buckets)
        self.units = replace(
            self.units,
            padding=self.layout.padding(),
            placement="sharded" if self.placement.splits else "replicated",
        )
        moved += self._place_buffers()
        if moved:
            log.info("states synchronised from rank 0 (%d bytes)", moved)
        self._start(states)

    def _buckets_of(self, unit: Unit) -> list[tuple[Dtypes, list[Member], Layout]]:
        """Members by (dtypes, trainability[, layer or parameter]), each group with its layout."""
        groups: dict[Any, list[Member]] = {}
        for member in unit.members:
            param = member.param
            dtypes = self.options.precision.of(param.dtype, param.requires_grad)
            part = {
                "block": None,
                "layer": member.name.rpartition(".")[0],
                "none": member.name,
            }[self.options.bucketing]
            groups.setdefault((dtypes, param.requires_grad, part), []).append(member)
        return [(key[0], members, self._solve(members, key[0])) for key, members in groups.items()]

    def _solve(self, members: Sequence[Member], dtypes: Dtypes) -> Layout:
        specs = [layout.Spec(m.name, tuple(m.param.shape)) for m in members]
        if self.options.bucketing == "none":
            return layout.chunk_rows(specs[0], self.comm.size, self.options.uneven)
        narrowest = min(d.itemsize for d in (dtypes.stored, dtypes.compute, dtypes.wire))
        row = accelerators.row(self.comm.device.type)
        return layout.solve(specs, self.comm.size, max(1, row.alignment // narrowest))

    def _facts(self, plans: dict[str, Any]) -> dict[str, str]:
        """What every rank must have alike, as short texts."""
        from shardwise import __version__

        facts = {
            "versions": f"shardwise {__version__}, torch {torch.__version__}",
            "strategy": self.placement.name,
            "world": str(self.comm.size),
            "options": _digest(
                {k: v for k, v in vars(self.options).items() if k not in ("init", "mesh")}
            ),
        }
        for name, plan in plans.items():
            numel = sum(spec.used for _, _, spec in plan)
            facts[f"unit {name or '(root)'}"] = f"{numel:,} elements, layout {_digest(plan)}"
        if not self.options.sync_module_states:
            facts |= checksums((n, t) for n, t in self.model.named_parameters() if not t.is_meta)
        return facts

    def _take(self, unit: Unit, plan: list[tuple[Dtypes, list[Member], Layout]]) -> UnitState:
        """Cut a unit's whole parameters into this rank's shards, and let them go."""
        buckets = []
        for dtypes, members, place in plan:
            bucket = Bucket(unit.name, members, place, dtypes, self.comm, self.placement)
            for index, member in enumerate(members):
                bucket.take(index, member.param)
                gradient, member.param.grad = member.param.grad, None
                sharding = bucket.sharding(index)
                bucket.rest_one(index)
                member.param.sharding = sharding  # type: ignore[attr-defined]
                if gradient is not None:
                    local = sharding.cut(gradient, member.param.shape).to(dtypes.stored)
                    member.param.grad = local.clone()
            buckets.append(bucket)
        return UnitState(unit.name, tuple(buckets))

    def _place_buffers(self) -> int:
        """Buffers stay whole on each rank: moved, cast, and sent by rank 0 once."""
        moved, dtype = 0, self.options.precision.buffers
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                placed = buffer.to(self.comm.device, cast)
                if self.options.sync_module_states and self.comm.size > 1 and placed.numel():
                    placed = placed.contiguous()
                    self.comm.broadcast(placed, 0, Label("broadcast", name)).wait()
                    moved += placed.numel() * placed.element_size()
                module._buffers[name] = placed
        return moved

    def _start(self, states: dict[str, UnitState]) -> None:
        brackets = {module: unit.name for unit in self.units for module in unit.modules}
        precision = self.options.precision
        casts = any(b.dtypes.stored is not b.dtypes.compute for b in self.buckets)
        policy = Policy(self.placement, self.options.prefetch, casts=casts)
        first = order.guess(self.model, brackets)
        participates = self.options.divergence == "participate"
        self._brackets = brackets
        self.runtime = Runtime(states, self.comm, policy, precision, first, participates)
        self._hooks = Hooks(
            self.model, brackets, self.runtime, (precision.compute, precision.output)
        )
        self._state = StateHooks(self.model, self.buckets, self._idle)
        self._gate = Gate([p for b in self.buckets for p in b.params], self._before_step)
        weakref.finalize(self.model, self._gate.close)
        self._dress()

    # ---- training ----------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, last: bool = True) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank until the last one.

        Args:
            last: reduce at the end of this backward pass what has been collected so far. Losses
                are not rescaled: divide each by the number of micro-batches yourself.
        """
        before, self.runtime.reduces = self.runtime.reduces, last
        try:
            yield
        finally:
            self.runtime.reduces = before

    def no_sync(self) -> AbstractContextManager[None]:
        """``accumulate(last=False)``, by the name that DDP gave it."""
        return self.accumulate(last=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global gradient norm, over all ranks. One collective.

        Returns:
            The norm before clipping: 0-dim, fp32, the same on every rank.
        """
        self._before_step()
        trainable = [bucket for bucket in self.buckets if bucket.trainable]
        return clip_gradients(trainable, self.comm, float(max_norm), float(norm_type))

    def rehearse(self, *args: Any, **kwargs: Any) -> Schedule:
        """Learn the order of units by a run on the meta device, before any real step."""
        rehearsed = order.rehearse(self.model, self._brackets, args, kwargs)
        for mode in ("train", "accumulate", "last"):
            self.runtime.set_order(mode, rehearsed)
        self.runtime.set_order("forward", Order(rehearsed.forward))
        return self.schedule

    # ---- whole values --------------------------------------------------------------------------

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[None]:
        """Inside, every parameter is whole, in its stored dtype. A collective.

        Args:
            writeback: keep what is written to parameters inside (by every rank alike).

        Raises:
            ShardUseError: parameters were written without ``writeback``.
        """
        self._idle()
        self._hooks.suspended = True
        try:
            with full_params(self.buckets, writeback):
                yield
        finally:
            self._hooks.suspended = False

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's shards by parameter name; no communication, no copies."""
        return local_state(self.buckets)

    def unshard(self) -> nn.Module:
        """Undo ``shard()``: the model is plain and whole again on every rank. A collective."""
        self._idle()
        for bucket in self.buckets:
            for member, whole in zip(bucket.members, bucket.whole(), strict=True):
                param = member.param
                param.grad = None
                param.__class__ = nn.Parameter
                param.data = whole.clone()
                del param.sharding  # type: ignore[attr-defined]
        self._gate.close()
        self._undress()
        return self.model

    def _dress(self) -> None:
        """Everything of ours that is attached to the model's modules."""
        self._checkpointed = (
            checkpoint_units(self.model, self.units)
            if self.options.activation_checkpointing
            else []
        )
        self._hooks.install()
        self._state.install()
        self.model.__dict__["__deepcopy__"] = self._deepcopy

    def _undress(self) -> None:
        del self.model.__dict__["__deepcopy__"]
        self._state.remove()
        self._hooks.remove()
        for module in self._checkpointed:
            del module.forward

    @contextmanager
    def _undressed(self) -> Iterator[None]:
        self._undress()
        try:
            yield
        finally:
            self._dress()

    def relayout(self) -> None:
        """Shard anew after ``requires_grad`` changed. Gradients are dropped. A collective."""
        self.unshard()
        self._build()

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """A plain, whole, unsharded copy. A collective."""
        self._idle()
        members = [member for bucket in self.buckets for member in bucket.members]
        wholes = {
            member.name: whole
            for bucket in self.buckets
            for member, whole in zip(bucket.members, bucket.whole(), strict=True)
        }
        with self._undressed():
            copied: nn.Module = whole_copy(self.model, members, wholes)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigError(
            "a Sharded handle belongs to its ranks and cannot be copied; copy.deepcopy(model) "
            "gives a plain, whole copy of the model."
        )

    # ---- looking -------------------------------------------------------------------------------

    @property
    def layout(self) -> Layouts:
        """Where each parameter lies; ``print`` it."""
        return Layouts(self.units, {b: b.layout for b in self.buckets})

    @property
    def schedule(self) -> Schedule:
        """One training step, event by event; ``print`` it."""
        return self.schedule_of("train")

    def schedule_of(self, mode: Mode) -> Schedule:
        """The schedule of ``"train"``, ``"accumulate"``, ``"last"`` or ``"forward"``."""
        runtime = self.runtime
        listed = runtime.events(mode)
        return Schedule(listed, runtime.weights(), self.placement.name, mode, self.comm.size)

    def __repr__(self) -> str:
        params = sum(bucket.layout.used for bucket in self.buckets)
        return (
            f"Sharded({type(self.model).__name__}, {self.placement.name}, "
            f"rank {self.comm.rank} of {self.comm.size}, {len(self.units)} units, "
            f"{params:,} parameters)"
        )

    def _idle(self) -> None:
        self._hooks.check_idle()

    def _before_step(self) -> None:
        for state in self.runtime.units.values():
            if state.collected:
                raise ScheduleError(
                    f"unit {state.name or '(root)'!r} holds gradients that were accumulated and "
                    "never reduced, so this update would miss them. Run the last micro-batch "
                    "under sharded.accumulate(last=True), or call sharded.drop_gradients()."
                )

    def drop_gradients(self) -> None:
        """Forget gradients that were accumulated and not reduced."""
        self.runtime.abandon("drop_gradients() was called")


def _digest(value: Any) -> str:
    return hashlib.sha256(_stable(value).encode()).hexdigest()[:12]


def _stable(value: Any) -> str:
    if isinstance(value, Member):
        return f"{value.aliases}{tuple(value.param.shape)}{value.param.dtype}"
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return f"[{','.join(map(_stable, value))}]"
    return repr(value)
