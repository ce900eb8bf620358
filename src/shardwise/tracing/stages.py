"""The programs of a module, stage by stage.

    functional       torch's graph of the module, a function of its parameters
    synchronize      each sharded parameter is made whole before it is used
    split            synchronize becomes all_gather and wait, its backward div and reduce_scatter
    sort waits       what is sent begins early and is awaited late
    limit in flight  no more gathers at a time than allowed
    execution        primitives are replaced by what carries them out

The three in the middle are one function, given the schedule under more and more of the policy of
``shard()``; the last of them is the schedule that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from shardwise.comm.grid import Shape
from shardwise.comm.mesh import Ranks
from shardwise.comm.protocol import Comm
from shardwise.config.checkpointing import ActivationCheckpointing, NamedUnits
from shardwise.config.ignored import Ignored
from shardwise.config.options import Options, default_init
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked, taken
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.draw import draw, name_of
from shardwise.plan.printed import Schedule
from shardwise.plan.schedule.decide import steps
from shardwise.plan.spec import BucketSpec
from shardwise.plan.units.wrap import Wrap
from shardwise.tracing.joint import Joint, tensor_leaves, trace_joint
from shardwise.tracing.lines import identifier
from shardwise.tracing.operations import IMPLEMENTATIONS, axes_of, synchronize
from shardwise.tracing.program import Collective, Program
from shardwise.tracing.writer import DETACH, write

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Stage:
    """The result of one pass.

    Attributes:
        name, does: the pass, and what it did.
        forward: the forward program.
        backward: the backward program; ``None`` in the stages before there is one.
    """

    name: str
    does: str
    forward: Program
    backward: Program | None = None


@dataclass(frozen=True)
class Ran:
    """State of a rank after it ran both programs.

    Attributes:
        outputs: the tensors that the module returns.
        gradients: this rank's part of each parameter's mean gradient, in the shape of its shard;
            ``None`` where the outputs do not depend on the parameter.
    """

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True, eq=False)
class Trace:
    """One training step of a sharded module as programs. Made by ``sw.trace``.

    Attributes:
        stages: each pass, in order; the last is what runs.
        schedule: the events of the step, as ``sharded.schedule`` has them once a step was taken.
        blueprint: how the model is cut.
        joint: what torch traced.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    blueprint: Blueprint
    joint: Joint

    @property
    def forward(self) -> Program:
        """The forward program that runs; its first argument is the comm."""
        return self.stages[-1].forward

    @property
    def backward(self) -> Program:
        """The backward program that runs; its first argument is the comm."""
        program = self.stages[-1].backward
        assert program is not None
        return program

    @property
    def last_traces(self) -> tuple[Program, ...]:
        """The forward program of each stage, as ``thunder.last_traces`` gives them."""
        return tuple(stage.forward for stage in self.stages)

    @property
    def last_backward_traces(self) -> tuple[Program, ...]:
        """The backward program of each stage that has one."""
        return tuple(stage.backward for stage in self.stages if stage.backward is not None)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All that both programs show, in order."""
        return self.forward.collectives + self.backward.collectives

    def __str__(self) -> str:
        return f"{self.forward}\n\n{self.backward}"

    def run(
        self,
        comm: Comm,
        state: Mapping[str, Tensor],
        inputs: Inputs,
        grad_outputs: Sequence[Tensor] | None = None,
    ) -> Ran:
        """Run both programs on this rank. A collective.

        Args:
            comm: the ranks; as many as were traced for.
            state: whole parameters and buffers by name, such as ``model.state_dict()``.
            inputs: as given to ``trace``, in the same shapes.
            grad_outputs: the gradient of each output that has one; ``None`` = ones.
        """
        values: dict[str, Any] = {"comm": comm}
        values |= {identifier("buffer", name): tensor for name, tensor in state.items()}
        given = enumerate(tensor_leaves(_given(inputs)))
        values |= {f"input_{index}": tensor for index, tensor in given}
        for spec in self.blueprint.buckets:
            name = name_of(self.blueprint, spec)
            values[identifier("shard", name)] = _at_rest(spec, state)
            if spec.kept:
                values[identifier("full", name)] = _whole(spec, state)
        with torch.no_grad():
            outputs, kept = self.forward(*(values[name] for name in self.forward.arguments))
            if grad_outputs is None:
                pairs = zip(outputs, self.joint.outputs, strict=True)
                grad_outputs = [torch.ones_like(out) for out, (_, has) in pairs if has]
            values |= {f"grad_output_{i}": grad for i, grad in enumerate(grad_outputs)}
            values |= dict(zip(self.forward.returned[1], kept, strict=True))
            grads = self.backward(*(values[name] for name in self.backward.arguments))
        return Ran(outputs, dict(zip(self.joint.gradients, grads, strict=True)))


@checked
def trace(
    model: nn.Module,
    inputs: Inputs,
    strategy: str = "full_shard",
    ranks: tuple[int, int] = (0, 2),
    wrap: Wrap | None = None,
    *,
    precision: Precision = Precision(),
    prefetch: Prefetch = Prefetch(),
    offload: Literal["none", "optimizer", "everything"] = "none",
    bucketing: Literal["block", "layer", "none"] = "block",
    uneven: Literal["pad", "error"] = "pad",
    blocksize: int = 0,
    unsharded: int | NamedUnits | None = None,
    sync_module_states: bool = True,
    ignored: Ignored = (),
    buffers: Literal["local", "broadcast", "average"] = "local",
    activation_checkpointing: bool | ActivationCheckpointing = False,
    compile: bool | str = False,  # noqa: A002
    mesh: Ranks | tuple[int, int] | None = None,
) -> Trace:
    """The programs of one training step, without ranks, devices or memory for the model.

    Args:
        model: any module whose operations do not depend on values; it stays as it is, and may be on
            the meta device.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments. Shapes and dtypes
            are read, values are not.
        strategy, wrap, precision, …, mesh: as for ``shard()``.
        ranks: which rank the programs are for, and of how many: ``(7, 1024)``.

    Returns:
        The programs of each stage. ``print`` it; ``run`` it on as many ranks.

    Raises:
        ConfigError: an argument that cannot work.
        ScheduleError: the model looks at values, which a trace does not have, or cannot be called
            with these inputs.
    """
    options = taken(Options, {**locals(), "init": default_init, "load_later": frozenset()})
    if ignored:
        raise ConfigError(
            "ignored= leaves parameters in no unit, and a traced program has those of units only. "
            "Trace the model without it."
        )
    shared = (*model.parameters(), *model.buffers())
    model = deepcopy(model, {id(tensor): tensor for tensor in shared})  # forward() may write to it
    blueprint = draw(model, strategy, wrap, ranks, **vars(options))
    joint = trace_joint(model, _state(model, blueprint), _given(inputs), blueprint)
    schedule = blueprint.schedule(joint.order)
    title = f"of {type(model).__name__}, {schedule.strategy}, rank {ranks[0]} of {ranks[1]}"
    return Trace(tuple(_stages(joint, blueprint, title)), schedule, blueprint, joint)


def _given(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _state(model: nn.Module, blueprint: Blueprint) -> dict[str, Tensor]:
    """Parameters as they are computed in, and buffers, on the meta device."""
    dtypes = {slot.name: spec.dtypes.param for spec in blueprint.buckets for slot in spec.slots}
    cast = blueprint.options.precision.buffer_dtype
    state = {
        name: torch.empty_like(param, dtype=dtypes[name], device="meta").requires_grad_(
            param.requires_grad
        )
        for name, param in model.named_parameters()
    }
    for name, buffer in model.named_buffers():
        dtype = cast if buffer.is_floating_point() else None
        state[name] = torch.empty_like(buffer, dtype=dtype, device="meta")
    return state


def _at_rest(spec: BucketSpec, state: Mapping[str, Tensor]) -> Tensor:
    flat = torch.zeros(spec.layout.shard_numel, dtype=spec.dtypes.stored)
    for slot, part in zip(spec.slots, spec.rest_views(flat), strict=True):
        start, stop = spec.layout.owned(slot, spec.position)
        part.copy_(state[slot.name].detach().reshape(-1)[start:stop].view(part.shape))
    return flat


def _whole(spec: BucketSpec, state: Mapping[str, Tensor]) -> Tensor:
    """A bucket as a gather leaves it."""
    full = torch.zeros(spec.layout.numel, dtype=spec.dtypes.stored)
    for slot, view in zip(spec.slots, spec.full_views(full), strict=True):
        view.copy_(state[slot.name])
    return full.to(spec.dtypes.param)


# --- the passes ------------------------------------------------------------------------------


def _stages(joint: Joint, blueprint: Blueprint, title: str) -> Iterator[Stage]:
    def stage(name: str, does: str, *graphs: fx.Graph) -> Stage:
        halves = zip(("forward", "backward"), graphs, strict=False)
        programs = (
            Program(half, f"{half} {title}; stage: {name}", graph, joint.constants)
            for half, graph in halves
        )
        return Stage(name, does, *programs)

    yield stage(
        "functional",
        f"torch traced the module: {joint.backward_at} operations, parameters are arguments.",
        _functional(joint, {}),
    )
    yield stage(
        "synchronize",
        f"Each of {len(blueprint.parameters)} parameters is synchronized before the forward pass; "
        "the result has the whole parameter's shape.",
        _functional(joint, blueprint.parameters),
    )
    prefetch = blueprint.policy.prefetch
    passes = (
        ("split", Prefetch(0, 0, prefetch.when)),
        ("sort waits", replace(prefetch, limit=None)),
        ("limit in flight", prefetch),
    )
    for name, policy in passes:
        ahead = replace(blueprint.policy, prefetch=policy)
        script = steps(joint.order, ahead, blueprint.nbytes)
        graphs = write(joint, blueprint, script, at_once=name == "split")
        yield stage(name, _did(name, graphs, len(joint.gradients), policy), *graphs)
    does = "Each primitive is replaced by its implementation, which is given the comm."
    yield stage("execution", does, *(_for_execution(graph, blueprint.shape) for graph in graphs))


def _did(name: str, graphs: tuple[fx.Graph, fx.Graph], trained: int, policy: Prefetch) -> str:
    shown = [node.meta.get("collective", ("",))[0] for graph in graphs for node in graph.nodes]
    gathers, reduces = shown.count("gather"), shown.count("reduce")
    if name == "split":
        return (
            f"Autograd's backward pass for {trained} gradients is added. synchronize became "
            f"{gathers} × all_gather and wait, one for each bucket of each unit and use; its "
            f"backward {reduces} × div, reduce_scatter and wait."
        )
    if name == "sort waits":
        return "Gathers begin ahead of their use, and each is awaited where its unit begins."
    limit = "no limit was asked for" if policy.limit is None else f"at most {policy.limit}"
    return f"Gathers that have begun and were not used yet: {limit}."


def _functional(joint: Joint, shards: Mapping[str, Tensor]) -> fx.Graph:
    """The forward pass alone; parameters that are in ``shards`` are synchronized first."""
    graph, values = fx.Graph(), dict[Any, fx.Node]()
    for index, node in enumerate(joint.inputs):
        values[node] = graph.placeholder(f"input_{index}")
        values[node].meta = dict(node.meta)
    for name, node in joint.state.items():
        values[node] = graph.placeholder(identifier("shard" if name in shards else "p", name))
        values[node].meta = {"val": node.meta["val"], "note": name}
    for name, shard in shards.items():
        node = joint.state[name]
        values[node].meta = {"val": shard, "note": f"this rank's part of {name}"}
        args, whole = (values[node], name), identifier("p", name)
        values[node] = graph.create_node("call_function", synchronize, args, name=whole)
        values[node].meta["val"] = node.meta["val"]
    for node in joint.nodes[: joint.backward_at]:
        is_copy = node.target is not DETACH
        values[node] = (
            graph.node_copy(node, values.__getitem__) if is_copy else values[node.args[0]]
        )
    graph.output(tuple(values[node] for node, _ in joint.outputs))
    graph.lint()
    return graph


def _for_execution(graph: fx.Graph, shape: Shape | None) -> fx.Graph:
    """A copy whose primitives are implementations, each given the comm or its axis."""
    executed = fx.Graph()
    comm = executed.placeholder("comm")
    comm.meta["note"] = "the ranks"
    executed.output(executed.graph_copy(graph, {}))
    executed.output_node().meta = dict(graph.output_node().meta)
    ranks = {"": comm} | _axes(executed, comm, shape)
    for node in executed.nodes:
        if node.op == "call_function" and node.target in IMPLEMENTATIONS:
            node.target = IMPLEMENTATIONS[node.target]
            node.args = (ranks[node.meta.get("axis", "")], *node.args)
    executed.lint()
    return executed


def _axes(graph: fx.Graph, comm: fx.Node, shape: Shape | None) -> dict[str, fx.Node]:
    """Lines that take both axes of a grid from the comm, by the name of each."""
    if shape is None:
        return {}
    last = list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        pair = graph.create_node("call_function", axes_of, (comm, *shape), name="axes")
    with graph.inserting_after(pair):
        shard = graph.create_node("call_function", getitem, (pair, 1), name="shard")
        replicate = graph.create_node("call_function", getitem, (pair, 0), name="replicate")
    for node in (pair, replicate, shard):
        node.meta["val"] = ()  # it has a name, and no shape
    return {"replicate": replicate, "shard": shard}
