"""The handle of a sharded model: what ``shard(model)`` returns.

FSDP1 wraps the model in another module and FSDP2 replaces its parameters, which breaks names,
optimizers and hooks that exist already. Here the model, its names and its ``Parameter`` objects
stay; only the memory of the parameters changes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint import api
from shardwise.checkpoint.background import Background
from shardwise.checkpoint.optimizer_state import Given, Optimizers, as_optimizers
from shardwise.comm.grid import Shape, shape_of
from shardwise.comm.machine.environment import local_size
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Comm, Label
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.errors import ConfigError
from shardwise.memory.parameters import Bucket
from shardwise.optim.norm import chosen, clip_gradients, places_of
from shardwise.optim.optimizer_hooks import OptimizerHooks
from shardwise.plan import order
from shardwise.plan.blueprint import draw_on, units_of
from shardwise.plan.forecast.memory import MemoryForecast, forecast
from shardwise.plan.printed import Layouts, Schedule
from shardwise.plan.residency import joined_trained
from shardwise.plan.schedule.events import MODES, Mode, Order
from shardwise.plan.units.units import Units
from shardwise.plan.units.wrap import Wrap
from shardwise.runtime.buffers import sync_buffers
from shardwise.runtime.forward import Hooks
from shardwise.runtime.forward_methods import ForwardMethods
from shardwise.runtime.full_params import full_params
from shardwise.runtime.other_engines import trained_by_others
from shardwise.runtime.runtime import Runtime
from shardwise.runtime.unit import UnitState
from shardwise.setup.build import cut, facts, uncut, warn_of_one_unit
from shardwise.setup.forwards import Forwards
from shardwise.setup.unsharded import unsharded
from shardwise.setup.whole_values import StateHooks, whole_copy
from shardwise.torch_internals import disable_torch_function

log = logging.getLogger("shardwise")


@dataclass(eq=False, repr=False)
class Sharded:
    """The handle of a sharded model, returned by ``shard``."""

    model: nn.Module
    placement: Placement
    wrap: Wrap | None
    comm: Comm
    options: Options
    units: Units = field(init=False)
    buckets: tuple[Bucket, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._background = Background()
        self._methods = ForwardMethods(self.model)
        self.shape = self._shape()
        self._mesh = Mesh.of(self.comm, self.placement.splits, self.shape)
        self._build()
        if self.wrap is None and self.comm.rank == 0 and self.comm.size > 1:
            warn_of_one_unit(self.model, self._blueprint)

    def _build(self) -> None:
        grid = self._mesh.grid
        joined = joined_trained(self.model, self.placement, grid, self.options)
        units = units_of(self.model, self.wrap, self.options, joined)
        given = (self.comm.device, units, self.placement, self.options)
        self._blueprint = draw_on(grid, *given)
        specs = self._blueprint.specs
        self._forwards = Forwards(self.model, units, self.options, self.comm.device)
        if self.options.compile:
            self._say("the first step compiles %d units, which may take minutes", len(units))
        self.comm.agree(facts(self.model, self.placement, self.options, specs))
        states = cut(self.model, units, specs, self.options, self.comm, self._mesh)
        self.buckets = tuple(bucket for state in states.values() for bucket in state.buckets)
        self._places = places_of(self.buckets)
        self.units = replace(
            units,
            padding=self.layout.padding(),
            placements=dict.fromkeys(specs, self.placement.words + self.options.offload_words),
            forwards=self._forwards.words,
        )
        self._start(states)

    def _shape(self) -> Shape | None:
        """The grid of a hybrid strategy, the same on every rank."""
        name, hybrid = self.placement.name, self.placement.hybrid
        shape = shape_of(name, hybrid, self.comm.size, self.options.mesh, local_size(os.environ))
        if shape is not None:
            self.comm.agree({"mesh": str(shape)})
            if self.options.mesh is None and shape.replicate == 1 < shape.shard:
                alike = "full_shard" if self.placement.frees else "shard_grad_op"
                text = "%d ranks on one host: %s keeps one copy of the model, as %s does"
                self._say(text, shape.shard, self.placement.name, alike)
        return shape

    def _say(self, text: str, *values: object) -> None:
        if self.comm.rank == 0:
            log.warning(text, *values)

    def _start(self, states: dict[str, UnitState]) -> None:
        unit_names, precision = self.units.unit_names, self.options.precision
        first = order.guess(self.model, unit_names)
        self.runtime = Runtime(states, self.comm, self._blueprint.policy, precision, first)
        self.runtime.at_step_end = partial(sync_buffers, self.model, self.options.buffers)
        is_one_graph = bool(self.options.compile) and len(self.units) == 1
        self._hooks = Hooks(self.model, unit_names, self.runtime, precision, is_one_graph)
        self.runtime.before_update += [
            self._hooks.registered.check,
            partial(self._hooks.check_idle, "an optimizer stepped"),
            self._background.before_update,
        ]
        own = frozenset(self._places), self.runtime.expect_update, self._idle, self.comm
        self._optimizer_hooks = OptimizerHooks(*own, trained_by_others)
        self._state = StateHooks(self._hooks.registered, self.buckets, self._state_asked)
        self._attach()

    # ---- training ----------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, last: bool = True) -> Iterator[None]:
        """Accumulate gradients on this rank in backward passes inside the block.

        Args:
            last: reduce the accumulated gradients at the end of this backward pass. Losses are
                not rescaled: divide each by the number of micro-batches yourself.
        """
        facts = self.runtime.facts
        previous, facts.reduces = facts.reduces, last
        try:
            yield
        finally:
            facts.reduces = previous

    def no_sync(self) -> AbstractContextManager[None]:
        """``accumulate(last=False)``, by DDP's name."""
        return self.accumulate(last=False)

    def any(self, flag: bool | Tensor) -> bool:
        """Is ``flag`` true on any rank? One small collective."""
        return bool(self._votes(flag).any())

    def all(self, flag: bool | Tensor) -> bool:
        """Is ``flag`` true on every rank? One small collective."""
        return bool(self._votes(flag).all())

    def _votes(self, flag: bool | Tensor) -> Tensor:
        vote = torch.tensor([bool(flag)], device=self.comm.device)
        return self.comm.gather_rows(vote, Label("vote"))

    def register_forward_method(self, module: nn.Module, method: str) -> None:
        """Make a method other than ``forward`` gather its module's unit, as ``forward`` does.

        For methods that are called from outside: ``model.encode(x)``, a VAE's ``loss(x)``. Methods
        that only call modules, such as ``generate()``, need no registration. The registration
        lasts while the model is sharded, also over ``relayout()``. Call it on every rank.

        Args:
            module: the model, or a module in it.
            method: its name, such as ``"encode"``.

        Raises:
            ConfigError: ``module`` is not in the model, or has no such method.
        """
        self._check_idle("register_forward_method() was called")
        self._methods.add(module, method)
        self._methods.remove()
        self._methods.install(self._hooks)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip the global gradient norm, over all ranks. One collective.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm; ``inf`` for the largest magnitude.
            parameters: the parameters whose gradients are clipped; ``None`` = all.

        Raises:
            ConfigError: ``max_norm`` or ``norm_type`` is none, or a parameter is not of this model.

        Returns:
            The norm before clipping: 0-dim, fp32 (fp64 if a parameter is), the same on every rank.
        """
        self.runtime.expect_update(f"clip_grad_norm_({max_norm:.6g})")
        places = self._places.values() if parameters is None else chosen(self._places, parameters)
        return clip_gradients(places, self.comm, float(max_norm), float(norm_type))

    def rehearse(self, *args: Any, **kwargs: Any) -> Schedule:
        """Record the order of units in a forward pass on the meta device, before any real step."""
        self._check_idle("rehearse() was called")
        with self._detached():  # nothing is gathered, compiled or recomputed
            rehearsed = order.rehearse(self.model, self.units, args, kwargs)
        for mode in MODES:
            self.runtime.schedules.set_order(mode, rehearsed)
        self.runtime.schedules.set_order("forward", Order(rehearsed.forward))
        return self.schedule

    # ---- full values ---------------------------------------------------------------------------

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[None]:
        """Gather all parameters, in their stored dtypes, and gradients. A collective.

        Args:
            writeback: keep values written to parameters and gradients (the same on all ranks).

        Raises:
            ShardUseError: a parameter or a gradient was written without ``writeback``.
        """
        self._check_idle("full_params() was called")
        self.runtime.await_readers()
        self._hooks.backward.suspended = True
        try:
            with full_params(self.buckets, self.comm, writeback):
                yield
        finally:
            self._hooks.backward.suspended = False

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's shards by parameter name; no communication, no copies."""
        members = [m for bucket in self._idle("shards were asked for") for m in bucket.members]
        with disable_torch_function():
            return {alias: m.param.detach() for m in members for alias in m.aliases}

    # ---- checkpoints ---------------------------------------------------------------------------

    state_dict = api.state_dict
    load_state_dict = api.load_state_dict
    optimizer_state_dict = api.optimizer_state_dict
    load_optimizer_state_dict = api.load_optimizer_state_dict
    save_file = api.save_file
    save = api.save
    save_async = api.save_async
    load = api.load
    resume = api.resume

    def admitted(
        self, operation: str, optimizer: Given = None, *, awaits_readers: bool = False
    ) -> Optimizers:
        """The optimizers, checked to be of this model; called between steps only.

        Args:
            operation: the call, for errors.
            awaits_readers: wait until no rank of this host reads shared parameters.
        """
        self._hooks.registered.compare()
        self._check_idle(operation)
        optimizers = as_optimizers(optimizer)
        for instance in optimizers:
            self._optimizer_hooks.admit(instance)
        if awaits_readers:
            self.runtime.await_readers()
        return optimizers

    def unshard(self) -> nn.Module:
        """Undo ``shard()``: every rank gets the plain, full model. A collective."""
        self._at_rest("unshard() was called")  # even if the model was changed
        self._optimizer_hooks.uncut(self.buckets)
        uncut(self.buckets)
        self._optimizer_hooks.close()
        self._detach()
        self.__class__ = unsharded(Sharded)
        return self.model

    def _attach(self) -> None:
        """Attach hooks and methods to the model's modules."""
        self._forwards.install()
        self._hooks.install()
        self._methods.install(self._hooks)
        self._state.install()
        self.model.__dict__["__deepcopy__"] = self._deepcopy

    def _detach(self) -> None:
        del self.model.__dict__["__deepcopy__"]
        self._state.remove()
        self._methods.remove()
        self._hooks.remove()
        self._forwards.remove()

    @contextmanager
    def _detached(self) -> Iterator[None]:
        self._detach()
        try:
            yield
        finally:
            self._attach()

    def relayout(self) -> None:
        """Shard the model again, after it was changed. Gradients are dropped. A collective."""
        self.unshard()
        self.__class__ = Sharded
        self._build()

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """A plain, unsharded copy. A collective."""
        self._check_idle("a deep copy was asked for")
        with self._detached():
            return whole_copy(self.model, self.buckets, memo)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigError(
            "a Sharded handle cannot be copied; copy.deepcopy(model) returns a plain, unsharded "
            "copy of the model."
        )

    # ---- inspection ----------------------------------------------------------------------------

    @property
    def layout(self) -> Layouts:
        """The layout of all parameters; ``print`` it."""
        return Layouts(tuple(bucket.spec for bucket in self.buckets))

    @property
    def schedule(self) -> Schedule:
        """One training step, event by event; ``print`` it."""
        return self.schedule_of("train")

    @property
    def plan(self) -> MemoryForecast:
        """The engine's memory at each event of a training step; ``print`` it."""
        return forecast(self._blueprint, self.runtime.schedules.orders["train"])

    def schedule_of(self, mode: Mode) -> Schedule:
        """The schedule of one of ``plan.schedule.events.MODES``, or of ``"forward"``."""
        schedules = self.runtime.schedules
        if mode not in schedules.orders:
            raise ConfigError(f"mode is {mode!r}, and a step is one of {[*schedules.orders]}.")
        return self._blueprint.schedule(schedules.orders[mode], mode, schedules.nbytes())

    def numel(self, *, trainable_only: bool = False) -> int:
        """Elements of the full parameters, each counted once."""
        members = (member for bucket in self.buckets for member in bucket.members)
        return sum(m.numel for m in members if m.param.requires_grad or not trainable_only)

    def __repr__(self) -> str:
        return (
            f"Sharded({type(self.model).__name__}, {self.placement.name}, "
            f"rank {self.comm.rank} of {self.comm.size}, {len(self.units)} "
            f"unit{'s' * (len(self.units) != 1)}, {self.numel():,} parameters)"
        )

    def _check_idle(self, operation: str) -> None:
        self._hooks.registered.check()
        self._at_rest(operation)

    def _at_rest(self, operation: str) -> None:
        self._hooks.check_idle(operation)
        self._background.finish_copy()
        self.runtime.end_step()

    def _idle(self, operation: str) -> tuple[Bucket, ...]:
        self._check_idle(operation)
        return self.buckets

    def _state_asked(self) -> bool:
        if not self._hooks.backward.suspended:  # inside full_params() a state dict is a plain one
            self._check_idle("a state dict was asked for")
            self.runtime.await_readers()
        return not self._hooks.backward.suspended

    def drop_gradients(self) -> None:
        """Forget gradients that were accumulated and not reduced."""
        self._hooks.backward.abandon("drop_gradients() was called", drops=True)
