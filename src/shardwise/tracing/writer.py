"""Writes a schedule's events into the forward and the backward graph.

    schedule                         program
    gather blocks.0                  flying = all_gather(shard)          goes on in the background
    enter  blocks.0                  full = wait(flying); weight = part(full, …) where it is used
    free   blocks.0                  free(full)
    reduce blocks.0                  grads = gradient_bucket(…); sums = reduce_scatter(grads)
    settle blocks.0                  mean = wait(sums) / W

What autograd would keep for the backward pass is what the forward program returns beside its
outputs. Views of parameters are not kept: the backward program forms them anew from the bucket
that is whole by then, be it the one kept since the forward pass or one that was gathered again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from shardwise.layout.layout import Slot
from shardwise.memory.spec import BucketSpec
from shardwise.precision import dtype_name
from shardwise.printed import size
from shardwise.schedule.cursor import Step
from shardwise.schedule.events import Cue, Event, Op, Phase
from shardwise.torch_internals import OpOverload
from shardwise.tracing.blueprint import Blueprint
from shardwise.tracing.joint import Joint
from shardwise.tracing.operations import (
    all_gather,
    free,
    gradient_bucket,
    part,
    reduce_scatter,
    wait,
)
from shardwise.tracing.program import Collective, shape_of

__all__ = ["Half", "identifier", "write"]

DETACH = torch.ops.aten.detach.default  # autograd has run already, so there is nothing to hide


def identifier(prefix: str, name: str) -> str:
    """``("shard", "blocks.0") → "shard_blocks_0"``."""
    return f"{prefix}_{re.sub(r'[^0-9A-Za-z]+', '_', name or 'root').strip('_')}"


def _shape(node: fx.Node) -> str:
    return node.meta.get("shape") or shape_of(node.meta.get("val"))


class Half:
    """One half of the step: a graph that grows.

    Args:
        joint: what torch traced.
        blueprint: how the model is cut.
        before: the forward half, if this is the backward one.
    """

    def __init__(self, joint: Joint, blueprint: Blueprint, before: Half | None = None) -> None:
        self.joint, self.blueprint, self.before = joint, blueprint, before
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}  # joint node → its node here
        self.full: dict[BucketSpec, fx.Node] = {}  # gathered and awaited
        self.flying: dict[BucketSpec, fx.Node] = {}
        self.sums: dict[BucketSpec, fx.Node] = {}
        self.means: dict[BucketSpec, fx.Node] = {}
        self.saved: list[fx.Node] = []  # nodes of the forward half, as this one is given them
        self._arguments: dict[str, fx.Node] = {}
        self._above: list[str] = []
        self._slots = _slots(blueprint, joint)
        self._origins = _origins(joint, self._slots)
        self._buckets = {spec: number for number, spec in enumerate(blueprint.buckets)}

    # ---- lines -----------------------------------------------------------------------------

    def argument(self, name: str, shape: str = "", note: str = "") -> fx.Node:
        """A further argument of the program, or the one of that name."""
        if name in self._arguments:
            return self._arguments[name]
        first = next(iter(self.graph.nodes), None)
        if self._arguments:
            place: Any = self.graph.inserting_after(next(reversed(self._arguments.values())))
        else:
            place = self.graph.inserting_before(first) if first else nullcontext()
        with place:
            self._arguments[name] = node = self.graph.placeholder(name)
        node.meta |= {"of": name, "shape": shape, "note": note}
        return node

    def line(
        self, function: Callable[..., Any], args: tuple[Any, ...], name: str, **meta: Any
    ) -> fx.Node:
        """A call of one of our functions."""
        node = self.graph.create_node("call_function", function, args, name=name)
        node.meta |= meta
        return self._comment(node)

    def say(self, text: str) -> None:
        """A comment on a line of its own."""
        self._above.append(text)

    def _comment(self, node: fx.Node) -> fx.Node:
        node.meta["above"], self._above = self._above, []
        return node

    def finish(self, result: Any) -> fx.Graph:
        """Return ``result``."""
        self._comment(self.graph.output(result))
        self.graph.lint()
        return self.graph

    # ---- values ----------------------------------------------------------------------------

    def value(self, node: fx.Node) -> fx.Node:
        """The node here of a node of the joint graph."""
        if node not in self.values:
            self.values[node] = self._new_value(node)
        return self.values[node]

    def _new_value(self, node: fx.Node) -> fx.Node:
        if node.target is DETACH:
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            return self.value(source)
        if node in self._slots:
            return self._parameter(node)
        if node in self._origins:
            return self.graph.node_copy(node, self.value)
        if node in self.joint.tangents:
            number = self.joint.tangents.index(node)
            return self.argument(f"grad_output_{number}", _shape(node), "gradient of an output")
        if self.before is not None:
            return self._kept(self.before.value(node))
        if node in self.joint.inputs:
            return self.argument(f"input_{self.joint.inputs.index(node)}", _shape(node))
        named = {argument: name for name, argument in self.joint.state.items()}
        return self.argument(identifier("buffer", named[node]), _shape(node), "a buffer")

    def _kept(self, node: fx.Node, note: str = "kept since the forward pass") -> fx.Node:
        if node not in self.saved:
            self.saved.append(node)
        return self.argument(node.name, _shape(node), note)

    def copy(self, node: fx.Node) -> None:
        """The line of the joint graph that ``node`` is, unless it is formed where it is used."""
        if node.target is not DETACH and node not in self._origins:
            self.values[node] = self._comment(self.graph.node_copy(node, self.value))

    def _parameter(self, node: fx.Node) -> fx.Node:
        spec, slot = self._slots[node]
        shape = f"{dtype_name(spec.dtypes.compute)}{list(slot.shape)}"
        name = identifier("p", slot.name)
        args = (self.whole(spec), slot.start, slot.shape)
        return self.line(part, args, name, shape=shape, note=slot.name)

    # ---- events ----------------------------------------------------------------------------

    def carry_out(self, event: Event, at_once: bool) -> None:
        """An event as lines; with ``at_once`` everything that begins is awaited at once."""
        for spec in self.blueprint.specs[event.unit]:
            if event.op is Op.GATHER:
                self._gather(spec, event.reason)
                if at_once:
                    self.whole(spec)
            elif event.op is Op.FREE:
                self._free(spec, event.reason)
            elif event.op is Op.REDUCE and spec.trainable:
                self._reduce(spec, event.reason)
                if at_once:
                    self._settle(spec, "waits at once")
            elif event.op is Op.SETTLE and spec in self.sums:
                self._settle(spec, event.reason)

    def cue(self, cue: Cue) -> None:
        """A unit begins or ends; where it begins it must be whole."""
        self.say(f"-- {cue.op} {cue.unit or ('(root)' if cue.op is not Op.END else '')}".rstrip())
        for spec in self.blueprint.specs[cue.unit] if cue.op is Op.ENTER else ():
            self.whole(spec)

    def _named(self, prefix: str, spec: BucketSpec) -> str:
        return identifier(prefix, self.blueprint.name_of(spec))

    def shard(self, spec: BucketSpec) -> fx.Node:
        """The argument that holds what this rank has of a bucket at rest."""
        shape = f"{dtype_name(spec.dtypes.stored)}[{spec.layout.shard_numel}]"
        return self.argument(self._named("shard", spec), shape, _holds(spec))

    def _gather(self, spec: BucketSpec, reason: str) -> None:
        if spec in self.full or (self.before is not None and spec in self.before.full):
            return  # since it was read beside its unit's call
        own, stored, compute = self.shard(spec), spec.dtypes.stored, spec.dtypes.compute
        numel = spec.layout.numel
        if stored is not compute:
            shape = f"{dtype_name(compute)}[{own.meta['shape'].partition('[')[2]}"
            to, name = torch.ops.aten.to.dtype, self._named("cast", spec)
            own = self.line(to, (own, compute), name, shape=shape, note="the own piece is cast")
        if not spec.placement.splits:
            self.full[spec] = own
            return
        sent = (numel - spec.layout.shard_numel) * compute.itemsize
        note = f"{size(numel * compute.itemsize)}, sends {size(sent)}: {reason}"
        self.flying[spec] = self.line(
            all_gather,
            (own, spec.unit),
            self._named("gathering", spec),
            shape=f"{dtype_name(compute)}[{numel}]",
            note=note,
            collective=Collective("gather", spec.unit, sent),
        )

    def whole(self, spec: BucketSpec) -> fx.Node:
        """The full bucket, awaited; gathered on demand where no event did it."""
        if spec in self.full:
            return self.full[spec]
        if self.before is not None and spec in self.before.full:
            self.full[spec] = self._kept(self.before.full.pop(spec), "whole since the forward pass")
            return self.full[spec]
        if not self.blueprint.policy.gathers(spec.unit):
            return self.shard(spec)
        if spec not in self.flying:
            self._gather(spec, "on demand")
        if spec in self.full:  # only cast
            return self.full[spec]
        flying = self.flying.pop(spec)
        shape, name = flying.meta["shape"], self._named("full", spec)
        self.full[spec] = self.line(wait, (flying,), name, shape=shape, note="whole on every rank")
        return self.full[spec]

    def _free(self, spec: BucketSpec, reason: str) -> None:
        note = f"gives back {size(spec.layout.numel * spec.dtypes.compute.itemsize)}: {reason}"
        name = self._named("free", spec)
        self.line(free, (self.whole(spec),), name, result=False, note=note)
        del self.full[spec]
        for node in [node for node in self.values if self._origins.get(node) is spec]:
            del self.values[node]

    def _reduce(self, spec: BucketSpec, reason: str) -> None:
        wire, numel = spec.dtypes.wire, spec.layout.numel
        grads = [
            (slot.start, self.value(gradient))
            for slot in spec.slots
            if (gradient := self.joint.gradients[slot.name]) is not None
        ]
        shape = f"{dtype_name(wire)}[{numel}]"
        name = self._named("grads", spec)
        full = self.line(gradient_bucket, (numel, wire, tuple(grads)), name, shape=shape)
        note = "before the sum, which a narrow dtype could not hold"
        full = self._divided(full, spec.reduction.before, self._named("scaled", spec), note)
        piece = numel // self.blueprint.world  # what one rank sums
        sent = (numel - piece) * wire.itemsize
        self.sums[spec] = self.line(
            reduce_scatter,
            (full, spec.unit, spec.dtypes.sum),
            self._named("reducing", spec),
            shape=f"{dtype_name(spec.dtypes.sum)}[{piece}]",
            note=f"sums {size(numel * wire.itemsize)}, sends {size(sent)}: {reason}",
            collective=Collective("reduce", spec.unit, sent),
        )

    def _divided(self, node: fx.Node, divisor: float, name: str, note: str) -> fx.Node:
        if divisor == 1:
            return node
        divide = torch.ops.aten.div_.Scalar
        return self.line(divide, (node, divisor), name, shape=_shape(node), note=note)

    def _settle(self, spec: BucketSpec, reason: str) -> None:
        reducing = self.sums.pop(spec)
        shape, name = reducing.meta["shape"], self._named("summed", spec)
        mean = self.line(wait, (reducing,), name, shape=shape, note=reason)
        average = spec.reduction.how == "avg"
        after = float(self.blueprint.world) if average else spec.reduction.after
        note = f"after the sum over {self.blueprint.world} ranks: their mean"
        mean = self._divided(mean, after, self._named("mean", spec), note)
        if spec.dtypes.stored is not spec.dtypes.sum:
            shape = f"{dtype_name(spec.dtypes.stored)}[{spec.piece_numel}]"
            to = torch.ops.aten.to.dtype
            mean = self.line(
                to, (mean, spec.dtypes.stored), self._named("stored", spec), shape=shape
            )
        self.means[spec] = mean if spec.placement.splits else self._spread(spec, mean)

    def _spread(self, spec: BucketSpec, mean: fx.Node) -> fx.Node:
        sent = (spec.layout.numel - spec.piece_numel) * spec.dtypes.stored.itemsize
        shape = f"{dtype_name(spec.dtypes.stored)}[{spec.layout.numel}]"
        spreading = self.line(
            all_gather,
            (mean, spec.unit, "spread"),
            self._named("spreading", spec),
            shape=shape,
            note=f"sends {size(sent)}: every rank needs the whole mean",
            collective=Collective("spread", spec.unit, sent),
        )
        return self.line(wait, (spreading,), self._named("spread", spec), shape=shape)

    def local_gradients(self) -> tuple[fx.Node | None, ...]:
        """This rank's part of each parameter's mean gradient, in the order of parameters."""
        places = {slot.name: (spec, slot) for spec, slot in self._slots.values()}
        return tuple(
            None if gradient is None else self._local(*places[name])
            for name, gradient in self.joint.gradients.items()
        )

    def _local(self, spec: BucketSpec, slot: Slot) -> fx.Node:
        start = spec.layout.local_range(slot, spec.shard.rank)[0]
        shape = spec.layout.shard_shape(slot, spec.shard.rank)
        text = f"{dtype_name(spec.dtypes.stored)}{list(shape)}"
        name = identifier("grad", slot.name)
        args = (self.means[spec], start, tuple(shape))
        return self.line(part, args, name, shape=text, note=f"gradient of {slot.name}")


def _holds(spec: BucketSpec) -> str:
    """``"0.weight[0:2048], 0.bias"``: what a rank's shard holds."""
    parts = []
    for slot in spec.slots:
        start, stop = spec.layout.owned(slot, spec.shard.rank)
        if start < stop:
            whole = stop - start == slot.numel
            parts.append(slot.name if whole else f"{slot.name}[{start}:{stop}]")
    return ", ".join(parts) or "padding"


def _slots(blueprint: Blueprint, joint: Joint) -> dict[fx.Node, tuple[BucketSpec, Slot]]:
    return {
        joint.state[slot.name]: (spec, slot) for spec in blueprint.buckets for slot in spec.slots
    }


def _origins(
    joint: Joint, slots: Mapping[fx.Node, tuple[BucketSpec, Slot]]
) -> dict[fx.Node, BucketSpec]:
    """The parameters and their views, with the bucket in whose memory they lie."""
    origins = {node: spec for node, (spec, _) in slots.items()}
    for node in joint.nodes:
        source = node.args[0] if node.args else None
        is_view = isinstance(node.target, OpOverload) and node.target.is_view
        is_view = is_view or node.target is operator.getitem  # of a split
        if is_view and isinstance(source, fx.Node) and source in origins:
            origins[node] = origins[source]
    return origins


def write(
    joint: Joint, blueprint: Blueprint, script: Sequence[Step], at_once: bool
) -> tuple[fx.Graph, fx.Graph]:
    """The forward and the backward graph.

    Args:
        script: the schedule, cut at its cues; these are ``joint``'s, and the end.
        at_once: everything that begins is awaited at once.
    """
    forward = half = Half(joint, blueprint)
    for node in joint.inputs:
        forward.value(node)
    at = 0
    for index in range(len(joint.nodes) + 1):
        while at < len(joint.cues) and joint.cues[at].at == index:
            if script[at].cue.phase is Phase.BACKWARD and half is forward:
                half = Half(joint, blueprint, forward)
            _step(half, script[at], at_once)
            at += 1
        if index == joint.backward_at and half is forward:
            half = Half(joint, blueprint, forward)
        if index < len(joint.nodes):
            half.copy(joint.nodes[index])
    _step(half, script[-1], at_once)
    grads = half.local_gradients() if half is not forward else ()
    outputs = tuple(forward.value(node) for node, _ in joint.outputs)
    return forward.finish((outputs, tuple(half.saved))), half.finish(grads)


def _step(half: Half, step: Step, at_once: bool) -> None:
    for event in step.before:
        half.carry_out(event, at_once)
    half.cue(step.cue)
    for event in step.after:
        half.carry_out(event, at_once)
