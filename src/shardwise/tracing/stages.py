"""From a module to the programs that run, stage by stage.

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
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.comm.protocol import Comm
from shardwise.memory.spec import BucketSpec
from shardwise.printed import Schedule
from shardwise.schedule.cursor import steps
from shardwise.schedule.events import Prefetch
from shardwise.torch_internals import tree_leaves
from shardwise.tracing.blueprint import Blueprint, draw
from shardwise.tracing.joint import Joint, trace_joint
from shardwise.tracing.operations import IMPLEMENTATIONS, synchronize
from shardwise.tracing.program import Collective, Program
from shardwise.tracing.writer import DETACH, identifier, write
from shardwise.units.wrap import Wrap

__all__ = ["Ran", "Stage", "Trace", "trace"]

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Stage:
    """What one pass made.

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
    """What a rank has after it ran both programs.

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
        buffers = {name: tensor for name, tensor in state.items() if name in self.joint.state}
        leaves = [leaf for leaf in tree_leaves(_given(inputs)) if isinstance(leaf, Tensor)]
        values: dict[str, Any] = {"comm": comm}
        values |= {identifier("buffer", name): tensor for name, tensor in buffers.items()}
        values |= {f"input_{i}": leaf for i, leaf in enumerate(leaves)}
        values |= self.shards(state)
        with torch.no_grad():
            outputs, kept = self.forward(*(values[name] for name in _keys(self.forward)))
            if grad_outputs is None:
                pairs = zip(outputs, self.joint.outputs, strict=True)
                grad_outputs = [torch.ones_like(out) for out, (_, has) in pairs if has]
            values |= {f"grad_output_{i}": grad for i, grad in enumerate(grad_outputs)}
            values |= dict(zip(self.forward.returned[1], kept, strict=True))
            grads = self.backward(*(values[name] for name in _keys(self.backward)))
        return Ran(outputs, dict(zip(self.joint.gradients, grads, strict=True)))

    def shards(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's buckets at rest, cut from whole parameters, by the programs' names."""
        return {
            identifier("shard", self.blueprint.name_of(spec)): _at_rest(spec, state)
            for spec in self.blueprint.buckets
        }


def trace(
    model: nn.Module,
    inputs: Inputs,
    strategy: str = "full_shard",
    ranks: tuple[int, int] = (0, 2),
    wrap: Wrap | None = None,
    **options: Any,
) -> Trace:
    """The programs of one training step, without ranks, devices or memory for the model.

    Args:
        model: any module whose operations do not depend on values; it stays as it is, and may be on
            the meta device.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments. Shapes and dtypes
            are read, values are not.
        strategy, wrap, options: as for ``shard()``.
        ranks: which rank the programs are for, and of how many: ``(7, 1024)``.

    Returns:
        The programs of each stage. ``print`` it; ``run`` it on as many ranks.

    Raises:
        ConfigError: an argument that cannot work.
        ScheduleError: the model looks at values, which a trace does not have.
    """
    tensors = (*model.parameters(), *model.buffers())
    model = deepcopy(model, {id(tensor): tensor for tensor in tensors})  # forward() may write to it
    blueprint = draw(model, strategy, wrap, ranks, **options)
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
    dtypes = {slot.name: spec.dtypes.compute for spec in blueprint.buckets for slot in spec.slots}
    cast = blueprint.options.precision.buffers
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
    for index, (slot, part) in enumerate(zip(spec.slots, spec.rest_views(flat), strict=True)):
        part.copy_(spec.sharding(index).cut(state[slot.name].detach(), part.shape))
    return flat


def _keys(program: Program) -> list[str]:
    nodes = program.graph.find_nodes(op="placeholder")
    return [node.meta["of"] for node in nodes]


# --- the passes ------------------------------------------------------------------------------


def _stages(joint: Joint, blueprint: Blueprint, title: str) -> Iterator[Stage]:
    yield Stage(
        "functional",
        f"torch traced the module: {joint.backward_at} operations, parameters are arguments.",
        _program("forward", "functional", title, _functional(joint, {}), joint),
    )
    trained = len(joint.gradients)
    yield Stage(
        "synchronize",
        f"Each of {len(blueprint.parameters)} parameters is synchronized before the forward pass; "
        "the result has the whole parameter's shape.",
        _program("forward", "synchronize", title, _functional(joint, blueprint.parameters), joint),
    )
    prefetch = blueprint.policy.prefetch
    passes = (
        ("split", Prefetch(0, 0, prefetch.when)),
        ("sort waits", replace(prefetch, limit=None)),
        ("limit in flight", prefetch),
    )
    for name, policy in passes:
        script = steps(blueprint.events(joint.order, policy))
        forward, backward = write(joint, blueprint, script, at_once=name == "split")
        does = _did(name, (forward, backward), trained, policy)
        yield _pair(name, does, (forward, backward), title, joint)
    executed = (_for_execution(forward), _for_execution(backward))
    does = "Each primitive is replaced by its implementation, which is given the comm."
    yield _pair("execution", does, executed, title, joint)


def _program(half: str, stage: str, title: str, graph: fx.Graph, joint: Joint) -> Program:
    return Program(half, f"{half} {title}; stage: {stage}", graph, joint.constants)


def _pair(
    stage: str, does: str, graphs: tuple[fx.Graph, fx.Graph], title: str, joint: Joint
) -> Stage:
    forward, backward = graphs
    return Stage(
        stage,
        does,
        _program("forward", stage, title, forward, joint),
        _program("backward", stage, title, backward, joint),
    )


def _did(name: str, graphs: tuple[fx.Graph, fx.Graph], trained: int, policy: Prefetch) -> str:
    found = [
        node.meta["collective"].op
        for graph in graphs
        for node in graph.nodes
        if "collective" in node.meta
    ]
    gathers, reduces = found.count("gather"), found.count("reduce")
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


def _functional(joint: Joint, sharded: Mapping[str, str]) -> fx.Graph:
    """The forward pass alone; parameters of which ``sharded`` has the local shape are synchronized.

    Those arguments come first, and then the lines that make them whole.
    """
    graph, values = fx.Graph(), dict[Any, fx.Node]()
    for index, node in enumerate(joint.inputs):
        values[node] = graph.placeholder(f"input_{index}")
        values[node].meta["val"] = node.meta["val"]
    for name, node in joint.state.items():
        values[node] = graph.placeholder(identifier("shard" if name in sharded else "p", name))
        values[node].meta = {"val": node.meta["val"], "note": name}
    for name, shape in sharded.items():
        node = joint.state[name]
        shard = values[node]
        shard.meta = {"shape": shape, "note": f"this rank's part of {name}"}
        whole = identifier("p", name)
        values[node] = graph.create_node("call_function", synchronize, (shard, name), name=whole)
        values[node].meta["val"] = node.meta["val"]
    for node in joint.nodes[: joint.backward_at]:
        if node.target is DETACH:
            values[node] = values[node.args[0]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node, _ in joint.outputs))
    graph.lint()
    return graph


def _for_execution(graph: fx.Graph) -> fx.Graph:
    """A copy whose primitives are implementations."""
    executed, output = fx.Graph(), graph.output_node()
    comm = executed.placeholder("comm")
    comm.meta = {"of": "comm", "note": "the ranks"}
    result = executed.graph_copy(graph, {})
    executed.output(result)
    executed.output_node().meta = dict(output.meta)
    for node in executed.nodes:
        if node.op == "call_function" and node.target in IMPLEMENTATIONS:
            node.target = IMPLEMENTATIONS[node.target]
            node.args = (comm, *node.args)
    executed.lint()
    return executed
