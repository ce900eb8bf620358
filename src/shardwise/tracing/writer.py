"""Writes a schedule's events into the forward and the backward graph.

    schedule                         program
    gather blocks.0                  flying = all_gather(shard)          goes on in the background
    enter  blocks.0                  full = wait(flying); weight = part(full, …) where it is used
    free   blocks.0                  free(full)
    reduce blocks.0                  grads = gradient_bucket(…); sums = reduce_scatter(grads)
    settle blocks.0                  mean = wait(sums) / W

Over two axes there are further lines: an update joins the pieces of the copies before a gather, and
a settle sums over the copies what a reduce has summed over the shards.

What autograd would keep for the backward pass is what the forward program returns beside its
outputs. Views of parameters are not kept: the backward program forms them anew from the bucket
that is whole by then, be it the one kept since the forward pass or one that was gathered again.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.comm.protocol import Comm
from shardwise.layout.layout import Slot
from shardwise.memory.spec import BucketSpec
from shardwise.printed import size
from shardwise.schedule.cursor import Step
from shardwise.schedule.events import Cue, Event, Op, Phase
from shardwise.torch_internals import OpOverload
from shardwise.tracing.blueprint import Blueprint, of_shape
from shardwise.tracing.joint import Joint
from shardwise.tracing.operations import (
    all_gather,
    free,
    gradient_bucket,
    part,
    reduce_scatter,
    wait,
)
from shardwise.tracing.program import Collective

__all__ = ["Half", "identifier", "write"]

DETACH = torch.ops.aten.detach.default  # autograd has run already, so there is nothing to hide


def identifier(prefix: str, name: str) -> str:
    """``("shard", "blocks.0") → "shard_blocks_0"``."""
    return f"{prefix}_{re.sub(r'[^0-9A-Za-z]+', '_', name or 'root').strip('_')}"


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
        self.joined: dict[BucketSpec, fx.Node] = {}  # this rank's shards, of the copies' pieces
        self.saved: list[fx.Node] = []  # nodes of the forward half, as this one is given them
        self._arguments: dict[str, fx.Node] = {}
        self._cues: list[str] = []  # comments above the next line
        self._slots = {
            joint.state[slot.name]: (spec, slot)
            for spec in blueprint.buckets
            for slot in spec.slots
        }
        self._origins = _origins(joint, {node: spec for node, (spec, _) in self._slots.items()})

    # ---- lines -----------------------------------------------------------------------------

    def argument(self, name: str, value: Any, note: str = "") -> fx.Node:
        """A further argument of the program, or the one of that name."""
        if name not in self._arguments:
            last = next(reversed(self._arguments.values()), None)  # None: above all lines
            with self.graph.inserting_after(last):
                self._arguments[name] = node = self.graph.placeholder(name)
            node.meta |= {"val": value, "note": note}
        return self._arguments[name]

    def line(
        self, name: str, value: Tensor | None, function: Callable[..., Any], *args: Any, **meta: Any
    ) -> fx.Node:
        """A call of ``function``; ``value`` has the shape and dtype of the result."""
        node = self.graph.create_node("call_function", function, args, name=name)
        node.meta |= meta | {"val": value}
        return self._comment(node)

    def _comment(self, node: fx.Node) -> fx.Node:
        node.meta["above"], self._cues = self._cues, []
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
        value, note = node.meta.get("val"), node.meta.get("note", "")
        if node.target is DETACH:
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            return self.value(source)
        if node in self._slots:
            return self._parameter(*self._slots[node])
        if node in self._origins:
            return self.graph.node_copy(node, self.value)
        if node in self.joint.tangents:
            number = self.joint.tangents.index(node)
            return self.argument(f"grad_output_{number}", value, "gradient of an output")
        if self.before is not None:
            return self._kept(self.before.value(node))
        if node in self.joint.inputs:
            return self.argument(f"input_{self.joint.inputs.index(node)}", value, note)
        named = {argument: name for name, argument in self.joint.state.items()}
        return self.argument(identifier("buffer", named[node]), value, "a buffer")

    def _kept(self, node: fx.Node, note: str = "kept since the forward pass") -> fx.Node:
        if node not in self.saved:
            self.saved.append(node)
        return self.argument(node.name, node.meta["val"], note)

    def copy(self, node: fx.Node) -> None:
        """The line of the joint graph that ``node`` is, unless it is formed where it is used."""
        if node.target is not DETACH and node not in self._origins:
            self.values[node] = self._comment(self.graph.node_copy(node, self.value))

    def _parameter(self, spec: BucketSpec, slot: Slot) -> fx.Node:
        name, value = identifier("p", slot.name), of_shape(spec.dtypes.compute, *slot.shape)
        full = self.whole(spec)
        return self.line(name, value, part, full, slot.start, slot.shape, note=slot.name)

    # ---- events ----------------------------------------------------------------------------

    def carry_out(self, event: Event, at_once: bool) -> None:
        """An event as lines; with ``at_once`` everything that begins is awaited at once."""
        for spec in self.blueprint.specs[event.unit]:
            if event.op is Op.UPDATE and spec.splits_copies:
                self._shard(spec, event.reason)
            elif event.op is Op.GATHER:
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
        name = "" if cue.op is Op.END else cue.unit or "(root)"
        self._cues.append(f"-- {cue.op} {name}".rstrip())
        for spec in self.blueprint.specs[cue.unit] if cue.op is Op.ENTER else ():
            self.whole(spec)

    def _named(self, prefix: str, spec: BucketSpec) -> str:
        return identifier(prefix, self.blueprint.name_of(spec))

    def shard(self, spec: BucketSpec) -> fx.Node:
        """The argument that holds what this rank has of a bucket at rest."""
        value = of_shape(spec.dtypes.stored, spec.layout.shard_numel)
        return self.argument(self._named("shard", spec), value, _holds(spec))

    def _gather(self, spec: BucketSpec, reason: str) -> None:
        if spec in self.full or (self.before is not None and spec in self.before.full):
            return  # since it was read beside its unit's call
        own = self._shard(spec, reason)
        if spec.placement.splits:
            self.flying[spec] = self._all_gather(spec, "gather", own, reason)
        else:
            self.full[spec] = own

    def _shard(self, spec: BucketSpec, reason: str) -> fx.Node:
        """What this rank sends in a gather; once a step its copies' pieces are joined."""
        if self.before is not None and spec in self.before.joined:
            return self._kept(self.before.joined[spec], "joined in the forward pass")
        if spec not in self.joined:
            note, name = "the own piece is cast", self._named("cast", spec)
            own = self._cast(self.shard(spec), spec.dtypes.compute, name, note)
            if not spec.splits_copies:
                return own
            joining = self._all_gather(spec, "update", own, reason)
            self.joined[spec] = self._wait("joined", spec, joining)
        return self.joined[spec]

    def _cast(self, node: fx.Node, dtype: torch.dtype, name: str, note: str = "") -> fx.Node:
        value = node.meta["val"]
        if value.dtype is dtype:
            return node
        return self.line(name, value.to(dtype), torch.ops.aten.to.dtype, node, dtype, note=note)

    def _all_gather(self, spec: BucketSpec, verb: str, own: fx.Node, reason: str) -> fx.Node:
        comm = spec.shard if verb == "gather" else spec.replicate
        value = of_shape(own.meta["val"].dtype, own.meta["val"].numel() * comm.size)
        sent = value.nbytes - own.meta["val"].nbytes
        return self.line(
            self._named({"gather": "gathering", "update": "joining"}.get(verb, "spreading"), spec),
            value,
            all_gather,
            *((own, spec.unit) if verb == "gather" else (own, spec.unit, verb)),
            note=f"{self._over(spec, comm)}{size(value.nbytes)}, sends {size(sent)}: {reason}",
            collective=Collective(verb, spec.unit, sent),
            axis=self._axis(spec, comm),
        )

    def _axis(self, spec: BucketSpec, comm: Comm) -> str:
        """The axis of a grid; ``""`` where there is one."""
        name = "shard" if comm is spec.shard else "replicate"
        return name if self.blueprint.shape is not None else ""

    def _over(self, spec: BucketSpec, comm: Comm) -> str:
        axis = self._axis(spec, comm)
        return axis and f"over {axis}: "

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
        if flying := self.flying.pop(spec, None):  # else only cast
            self.full[spec] = self._wait("full", spec, flying, "whole on every rank")
        return self.full[spec]

    def _wait(self, prefix: str, spec: BucketSpec, begun: fx.Node, note: str = "") -> fx.Node:
        return self.line(self._named(prefix, spec), begun.meta["val"], wait, begun, note=note)

    def _free(self, spec: BucketSpec, reason: str) -> None:
        full, name = self.whole(spec), self._named("free", spec)
        note = f"gives back {size(full.meta['val'].nbytes)}: {reason}"
        axis = self._axis(spec, spec.shard)
        self.line(name, None, free, full, note=note, axis=axis)
        del self.full[spec]
        for node in [node for node in self.values if self._origins.get(node) is spec]:
            del self.values[node]

    def _reduce(self, spec: BucketSpec, reason: str) -> None:
        dtypes, numel = spec.dtypes, spec.layout.numel
        grads = tuple(
            (slot.start, self.value(gradient))
            for slot in spec.slots
            if (gradient := self.joint.gradients[slot.name]) is not None
        )
        value, name = of_shape(dtypes.wire, numel), self._named("grads", spec)
        comm, how = spec.averages[0]
        axis = self._axis(spec, comm)
        full = self.line(name, value, gradient_bucket, numel, dtypes.wire, grads, axis=axis)
        note = "before the sum, which a narrow dtype could not hold"
        full = self._divided(full, how.before, self._named("scaled", spec), note)
        self.sums[spec] = self._reduce_scatter("reducing", spec, full, comm, reason)

    def _reduce_scatter(
        self, prefix: str, spec: BucketSpec, full: fx.Node, comm: Comm, reason: str
    ) -> fx.Node:
        nbytes, numel = full.meta["val"].nbytes, full.meta["val"].numel()
        sent = nbytes - nbytes // comm.size
        return self.line(
            self._named(prefix, spec),
            of_shape(spec.dtypes.sum, numel // comm.size),  # what one rank sums
            reduce_scatter,
            *(full, spec.unit, spec.dtypes.sum),
            note=f"{self._over(spec, comm)}sums {size(nbytes)}, sends {size(sent)}: {reason}",
            collective=Collective("reduce", spec.unit, sent),
            axis=self._axis(spec, comm),
        )

    def _divided(self, node: fx.Node, divisor: float, name: str, note: str) -> fx.Node:
        if divisor == 1:
            return node
        divide = torch.ops.aten.div_.Scalar
        return self.line(name, node.meta["val"], divide, node, divisor, note=note)

    def _settle(self, spec: BucketSpec, reason: str) -> None:
        mean = self._averaged("mean", spec, self._wait("summed", spec, self.sums.pop(spec), reason))
        for _ in spec.averages[1:]:
            wire = self._cast(mean, spec.dtypes.wire, self._named("narrowed", spec))
            reason = "the copies' sums, too"
            begun = self._reduce_scatter("reducing_copies", spec, wire, spec.replicate, reason)
            mean = self._averaged("mean_of_copies", spec, self._wait("summed_copies", spec, begun))
        mean = self._cast(mean, spec.dtypes.stored, self._named("stored", spec))
        if spec.copies > 1:
            spreading = self._all_gather(spec, "spread", mean, "every rank needs the whole mean")
            mean = self._wait("spread", spec, spreading)
        self.means[spec] = mean

    def _averaged(self, name: str, spec: BucketSpec, total: fx.Node) -> fx.Node:
        """A sum over an axis, divided by what its ranks or all ranks are."""
        comm, how = spec.averages[-1 if name == "mean_of_copies" else 0]
        ranks = comm.size if how.how == "avg" else self.blueprint.world
        after = float(ranks) if how.how == "avg" else how.after
        note = f"after the sum over {ranks} ranks: their mean"
        return self._divided(total, after, self._named(name, spec), note)

    def local_gradients(self) -> tuple[fx.Node | None, ...]:
        """This rank's part of each parameter's mean gradient, in the order of parameters."""
        places = {slot.name: (spec, slot) for spec, slot in self._slots.values()}
        return tuple(
            None if gradient is None else self._local(*places[name])
            for name, gradient in self.joint.gradients.items()
        )

    def _local(self, spec: BucketSpec, slot: Slot) -> fx.Node:
        start = spec.layout.local_range(slot, spec.position)[0]
        value = self.blueprint.parameters[slot.name]
        name, note = identifier("grad", slot.name), f"gradient of {slot.name}"
        return self.line(name, value, part, self.means[spec], start, tuple(value.shape), note=note)


def _holds(spec: BucketSpec) -> str:
    """``"0.weight[0:2048], 0.bias"``: what a rank's shard holds."""
    parts = []
    for slot in spec.slots:
        start, stop = spec.layout.owned(slot, spec.position)
        if start < stop:
            whole = stop - start == slot.numel
            parts.append(slot.name if whole else f"{slot.name}[{start}:{stop}]")
    return ", ".join(parts) or "padding"


def _origins(joint: Joint, origins: dict[fx.Node, BucketSpec]) -> dict[fx.Node, BucketSpec]:
    """Parameters, and now their views too, with the bucket in whose memory they lie."""
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
