"""A module's forward and backward pass as one FX graph, with the units' cues in it.

The graph is torch's own: ``make_fx`` runs the module and autograd on fake tensors, which have
shapes and no memory. So no process group, no device and no memory for the model are needed, and
no operation is read by a tracer of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from threading import Lock
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.config.precision import Precision
from shardwise.errors import ScheduleError
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.forecast.reentrant import without_reentrance
from shardwise.plan.schedule.events import Order, Phase
from shardwise.runtime.kept import cast_around_kept, input_dtypes
from shardwise.runtime.pytrees import cast, cast_where_needed, tensors
from shardwise.torch_internals import FakeTensorMode, tree_leaves, tree_map
from shardwise.tracing.watch import Placed, Watch

_ONE_AT_A_TIME = Lock()
"""torch's tracer keeps its state in the process, and ranks may be threads."""


@dataclass(frozen=True, eq=False)
class Joint:
    """One forward and backward pass.

    Attributes:
        nodes: what ran, in order, after the arguments and without the final ``output``.
        backward_at: how many of them are of the forward pass.
        cues: when units began and ended, as positions in ``nodes``.
        state, inputs, tangents: nodes of the arguments: parameters and buffers by name, tensors
            that the module is given, and gradients of those that it returns.
        outputs: nodes of the tensors that the module returns, and whether each has a gradient.
        gradients: parameter → node of its whole gradient; ``None`` where the outputs do not depend
            on it. Frozen parameters are left out.
        constants: tensors that the module made of plain numbers, by their names in the graph.
    """

    nodes: tuple[fx.Node, ...]
    backward_at: int
    cues: tuple[Placed, ...]
    state: Mapping[str, fx.Node]
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[tuple[fx.Node, bool], ...]
    gradients: Mapping[str, fx.Node | None]
    constants: Mapping[str, Tensor]

    @property
    def order(self) -> Order:
        """The cues alone, of which a schedule is made."""
        cues = [placed.cue for placed in self.cues]
        return Order(*(tuple(cue for cue in cues if cue.phase is phase) for phase in Phase))


@dataclass
class _Step:
    """The function that torch traces."""

    model: nn.Module
    given: Any  # (args, kwargs)
    precision: Precision
    watch: Watch
    trained: Sequence[str]
    input_dtypes: Mapping[nn.Module, torch.dtype]
    has_gradient: Sequence[bool] = ()

    def forward(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the module returns."""
        leaves = iter(inputs)
        args, kwargs = tree_map(
            lambda leaf: next(leaves) if isinstance(leaf, Tensor) else leaf, self.given
        )
        with ExitStack() as casts:
            for module, dtype in self.input_dtypes.items():
                hook = partial(_cast_inputs, dtype)
                casts.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            for handle in cast_around_kept(self.model, self.precision):
                casts.enter_context(handle)
            returned = torch.func.functional_call(self.model, dict(state), args, kwargs)
        if self.precision.output_dtype is not None:
            returned = cast(returned, self.precision.output_dtype)
        outputs = tensors(returned)
        self.has_gradient = [output.requires_grad for output in outputs]
        return outputs

    def __call__(
        self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        outputs = self.forward(state, inputs)
        self.watch.begin_backward(outputs)
        grads: Sequence[Tensor | None] = [None] * len(self.trained)
        if tangents and self.trained:
            trained = [state[name] for name in self.trained]
            grads = torch.autograd.grad(
                [output for output in outputs if output.requires_grad],
                trained,
                tangents,
                allow_unused=True,
            )
        self.watch.end()
        return outputs, list(grads)


def trace_joint(
    model: nn.Module,
    state: Mapping[str, Tensor],
    given: tuple[Sequence[Any], Mapping[str, Any]],
    blueprint: Blueprint,
) -> Joint:
    """Trace ``model(*args, **kwargs)`` and its backward pass. The model stays as it is.

    Args:
        state: parameters and buffers to compute with; on the meta device is enough.
        given: args and kwargs; only shapes and dtypes of tensors matter.
        blueprint: the model's units, the dtypes of inputs and outputs, and the device.

    Raises:
        ScheduleError: the model looks at values, which fake tensors do not have, or cannot be
            called in this way.
    """
    watch = Watch(blueprint.units.unit_names)
    trained = [name for name, tensor in state.items() if tensor.requires_grad]
    precision, called = blueprint.options.precision, {model, *blueprint.units.unit_names}
    dtypes = input_dtypes(model, called, precision)
    step = _Step(model, given, precision, watch, trained, dtypes)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with (
            _ONE_AT_A_TIME,
            _unlogged(),
            without_reentrance(),
            mode,
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(mode=False),
        ):
            fakes = {name: _fake(tensor, blueprint.device) for name, tensor in state.items()}
            inputs = [_fake(leaf, leaf.device) for leaf in tensor_leaves(given)]
            outputs = step.forward(fakes, inputs)
            tangents = [torch.empty_like(out) for out in outputs if out.requires_grad]
            with watch.installed():
                traced = make_fx(step)(fakes, inputs, tangents)
    except Exception as error:
        raise ScheduleError(
            f"torch could not trace {type(model).__name__}: {str(error).rstrip('.')}"
            f"{_place_of(error)}. The inputs must be those with which the model is called: a "
            "tensor, a tuple of arguments or a mapping of keyword arguments. A trace knows their "
            "shapes and no values, so it cannot follow .item(), .tolist(), or branches and sizes "
            "that depend on values. Training needs no trace: print(sharded.schedule) shows the "
            "step of any model."
        ) from error
    return _joint(traced, step, list(state), len(inputs))


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_where_needed((args, kwargs), dtype)


def _place_of(error: Exception) -> str:
    """``", at net.py:12 (return self.head(x[x > 0]))"``: the last line that is not torch's."""
    ours = (f"{torch.__path__[0]}/", f"{Path(__file__).parents[1]}/")
    frames = [at for at in extract_tb(error.__traceback__) if not at.filename.startswith(ours)]
    return f", at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


@contextmanager
def _unlogged() -> Iterator[None]:
    """An operation that fails on fake tensors raises; torch logs the whole traceback, too."""
    logger = getLogger(FakeTensorMode.__module__)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors of what a module is given, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _fake(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(like, device=device).requires_grad_(like.requires_grad)


def _joint(traced: fx.GraphModule, step: _Step, names: Sequence[str], inputs: int) -> Joint:
    every = list(traced.graph.nodes)
    arguments = [node for node in every if node.op == "placeholder"]
    nodes = tuple(every[len(arguments) : -1])
    keywords = [name for name, value in step.given[1].items() for _ in tensor_leaves(value)]
    given = arguments[len(names) : len(names) + inputs]
    for node, name in zip(given[len(given) - len(keywords) :], keywords, strict=True):
        node.meta["note"] = name
    left = {node.name for node in nodes}
    before = [0]  # nodes that are left of the first k that were traced
    for name in step.watch.names:
        before.append(before[-1] + (name in left))
    returned = list(every[-1].args[0])
    outputs = returned[: len(returned) - len(step.trained)]
    return Joint(
        nodes=nodes,
        backward_at=before[step.watch.backward_at],
        cues=tuple(Placed(cue, before[at]) for cue, at in step.watch.cues),
        state=dict(zip(names, arguments, strict=False)),
        inputs=tuple(given),
        tangents=tuple(arguments[len(names) + inputs :]),
        outputs=tuple(zip(outputs, step.has_gradient, strict=True)),
        gradients=dict(zip(step.trained, returned[len(outputs) :], strict=True)),
        constants={
            str(node.target): _value(getattr(traced, str(node.target)))
            for node in nodes
            if node.op == "get_attr"
        },
    )


def _value(constant: Any) -> Tensor:
    """A tensor made of numbers while torch traced is fake, and holds the real one."""
    value: Tensor | None = getattr(constant, "constant", None)
    fallback: Tensor = constant
    return fallback if value is None else value
