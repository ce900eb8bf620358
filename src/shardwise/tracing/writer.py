"""Writes a schedule's events into the forward and the backward graph.

    schedule                         program
    gather blocks.0                  flying = all_gather(shard)          goes on in the background
    enter  blocks.0                  full = wait(flying); weight = part(full, …) where it is used
    free   blocks.0                  free(full)
    reduce blocks.0                  grads = gradient_bucket(…); sums = reduce_scatter(grads)
    settle blocks.0                  mean = wait(sums) / W

Over two axes there are further lines: an update joins the pieces of the copies before a gather, and
an average, between a reduce and its settle, sums over the copies what was summed over the shards.
With offload a load copies a shard to the device before it is gathered, and a store a mean gradient
to host memory.

What autograd would keep for the backward pass is what the forward program returns beside its
outputs. Views of parameters are not kept: the backward program forms them anew from the bucket
that is whole by then, be it the one kept since the forward pass or one that was gathered again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from shardwise.comm.codec import codec_of
from shardwise.errors import ScheduleError
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.draw import of_shape
from shardwise.plan.layout.layout import Slot
from shardwise.plan.printed import size
from shardwise.plan.schedule.decide import Step
from shardwise.plan.schedule.events import Cue, Event, Op, Phase
from shardwise.plan.spec import BucketSpec
from shardwise.torch_internals import OpOverload
from shardwise.tracing.joint import Joint
from shardwise.tracing.lines import Lines, identifier
from shardwise.tracing.operations import free, gradient_bucket, part

DETACH = torch.ops.aten.detach.default  # autograd has run already, so there is nothing to hide


class Half:
    """One half of the step: its lines, and what is whole, in flight and summed at their end.

    Args:
        joint: what torch traced.
        blueprint: how the model is cut.
        before: the forward half, if this is the backward one.
    """

    def __init__(self, joint: Joint, blueprint: Blueprint, before: Half | None = None) -> None:
        self.joint, self.blueprint, self.before = joint, blueprint, before
        self.lines = Lines(blueprint)
        self.values: dict[fx.Node, fx.Node] = {}  # joint node → its node here
        self.full: dict[BucketSpec, fx.Node] = {}  # gathered and awaited
        self.flying: dict[BucketSpec, fx.Node] = {}
        self.sums: dict[BucketSpec, fx.Node] = {}
        self.means: dict[BucketSpec, fx.Node] = {}
        self.loaded: dict[BucketSpec, fx.Node] = {}  # what rests in host memory, on the device
        self.joined: dict[BucketSpec, fx.Node] = {}  # this rank's shards, of the copies' pieces
        self.saved: list[fx.Node] = []  # nodes of the forward half, as this one is given them
        self._slots = {
            joint.state[slot.name]: (spec, slot)
            for spec in blueprint.buckets
            for slot in spec.slots
        }
        self._origins = _origins(joint, {node: spec for node, (spec, _) in self._slots.items()})

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
            return self.lines.graph.node_copy(node, self.value)
        if node in self.joint.tangents:
            number = self.joint.tangents.index(node)
            return self.lines.argument(f"grad_output_{number}", value, "gradient of an output")
        if self.before is not None:
            return self._kept(self.before.value(node))
        if node in self.joint.inputs:
            return self.lines.argument(f"input_{self.joint.inputs.index(node)}", value, note)
        named = {argument: name for name, argument in self.joint.state.items()}
        return self.lines.argument(identifier("buffer", named[node]), value, "a buffer")

    def _kept(self, node: fx.Node, note: str = "kept since the forward pass") -> fx.Node:
        if node not in self.saved:
            self.saved.append(node)
        return self.lines.argument(node.name, node.meta["val"], note)

    def copy(self, node: fx.Node) -> None:
        """The line of the joint graph that ``node`` is, unless it is formed where it is used."""
        if node.target is not DETACH and node not in self._origins:
            self.values[node] = self.lines.copy(node, self.value)

    def _parameter(self, spec: BucketSpec, slot: Slot) -> fx.Node:
        name, value = identifier("p", slot.name), of_shape(spec.dtypes.param, *slot.shape)
        full = self.whole(spec)
        return self.lines.call(name, value, part, full, slot.start, slot.shape, note=slot.name)

    # ---- events ----------------------------------------------------------------------------

    def carry_out(self, event: Event, at_once: bool) -> None:
        """An event as lines; with ``at_once`` everything that begins is awaited at once."""
        for spec in self.blueprint.specs[event.unit]:
            if _is_whole(spec):
                continue
            ACTS[event.op](self, spec, event.reason)
            if at_once and event.op is Op.GATHER:
                self.whole(spec)
            elif at_once and event.op is Op.REDUCE:
                if spec.averages[1:]:
                    self._average(spec, "waits at once")
                self._settle(spec, "waits at once")

    def cue(self, cue: Cue) -> None:
        """A unit begins or ends; where it begins it must be whole."""
        name = "" if cue.op is Op.END else cue.unit or "(root)"
        self.lines.comment(f"-- {cue.op} {name}".rstrip())
        for spec in self.blueprint.specs[cue.unit] if cue.op is Op.ENTER else ():
            self.whole(spec)

    def shard(self, spec: BucketSpec) -> fx.Node:
        """The argument that holds what this rank has of a bucket at rest."""
        value = of_shape(spec.dtypes.stored, spec.layout.shard_numel)
        note = _holds(spec) + ("; in host memory" if spec.in_host else "")
        return self.lines.argument(self.lines.named("shard", spec), value, note)

    def _load(self, spec: BucketSpec, reason: str) -> None:
        if spec.in_host:
            self._own(spec, reason)

    def _update(self, spec: BucketSpec, reason: str) -> None:
        if spec.splits_copies:
            self._sent(spec, reason)

    def _gather(self, spec: BucketSpec, reason: str) -> None:
        if spec in self.full or (self.before is not None and spec in self.before.full):
            return  # since it was read beside its unit's call
        sent = self._sent(spec, reason)
        if spec.placement.splits:
            self.flying[spec] = self.lines.all_gather(spec, "gather", sent, reason)
        else:
            self.full[spec] = sent

    def _sent(self, spec: BucketSpec, reason: str) -> fx.Node:
        """Bytes that this rank sends in a gather; once a step its copies' pieces are joined."""
        if not spec.splits_copies:
            return self._own(spec, reason)
        if self.before is not None and spec in self.before.joined:
            return self._kept(self.before.joined[spec], "joined in the forward pass")
        if spec not in self.joined:
            own = self._own(spec, reason)
            joining = self.lines.all_gather(spec, "update", own, reason)
            self.joined[spec] = self.lines.wait("joined", spec, joining)
        return self.joined[spec]

    def _own(self, spec: BucketSpec, reason: str) -> fx.Node:
        """Bytes that this rank holds while sharded, on the device, in the compute dtype."""
        dtype = spec.dtypes.param
        if not spec.in_host:
            note, name = "the own piece is cast", self.lines.named("cast", spec)
            return self.lines.cast(self.shard(spec), dtype, name, note)
        if self.before is not None and spec in self.before.loaded:
            return self._kept(self.before.loaded[spec], "loaded in the forward pass")
        if spec not in self.loaded:
            self.loaded[spec] = self.lines.load(spec, self.shard(spec), dtype, reason)
        return self.loaded[spec]

    def whole(self, spec: BucketSpec) -> fx.Node:
        """The full bucket, awaited; gathered on demand where no event did it."""
        if not self.blueprint.policy.gathers(spec.unit):
            return self.shard(spec)
        if _is_whole(spec):
            value = of_shape(spec.dtypes.param, spec.layout.numel)
            name, note = self.lines.named("full", spec), "frozen, gathered in the first step"
            return self.lines.argument(name, value, note)
        if spec in self.full:
            return self.full[spec]
        if self.before is not None and spec in self.before.full:
            self.full[spec] = self._kept(self.before.full.pop(spec), "gathered in the forward pass")
            return self.full[spec]
        if spec not in self.flying:
            self._gather(spec, "on demand")
        if flying := self.flying.pop(spec, None):  # else only cast
            self.full[spec] = self.lines.wait("full", spec, flying, "whole on every rank")
        return self.full[spec]

    def _free(self, spec: BucketSpec, reason: str) -> None:
        full, name = self.whole(spec), self.lines.named("free", spec)
        note = f"gives back {size(full.meta['val'].nbytes)}: {reason}"
        axis = self.lines.axis(spec, spec.shard)
        self.lines.call(name, None, free, full, note=note, axis=axis)
        del self.full[spec]
        if spec.allocation.reloaded:
            self.loaded.pop(spec, None)
            self.joined.pop(spec, None)
        for node in [node for node in self.values if self._origins.get(node) is spec]:
            del self.values[node]

    def _reduce(self, spec: BucketSpec, reason: str) -> None:
        if not spec.trainable:
            return
        dtype, numel = spec.dtypes.collected, spec.layout.numel
        grads = tuple(
            (slot.start, self.value(gradient))
            for slot in spec.slots
            if (gradient := self.joint.gradients[slot.name]) is not None
        )
        value, name = of_shape(dtype, numel), self.lines.named("grads", spec)
        axis, how = spec.averages[0]
        full = self.lines.call(
            *(name, value, gradient_bucket, numel, dtype, grads), axis=self.lines.axis(spec, axis)
        )
        note = "before the sum, which a narrow dtype could not hold"
        full = self.lines.divided(full, how.before, self.lines.named("scaled", spec), note)
        self.sums[spec] = self.lines.reduction("reducing", spec, full, 0, reason)

    def _average(self, spec: BucketSpec, reason: str) -> None:
        if spec not in self.sums:
            return
        total = self.lines.wait("summed", spec, self.sums[spec], reason)
        wire = self._averaged("mean", spec, total)
        if codec_of(spec.dtypes.reduce) is None:
            wire = self.lines.cast(wire, spec.dtypes.reduce, self.lines.named("narrowed", spec))
        reason = "the copies' sums, too"
        self.sums[spec] = self.lines.reduction("reducing_copies", spec, wire, 1, reason)

    def _settle(self, spec: BucketSpec, reason: str) -> None:
        if spec not in self.sums:
            return
        copies = "_copies" if spec.averages[1:] else ""
        total = self.lines.wait(f"summed{copies}", spec, self.sums.pop(spec), reason)
        mean = self._averaged(f"mean{copies and '_of_copies'}", spec, total)
        mean = self.lines.cast(mean, spec.dtypes.stored, self.lines.named("stored", spec))
        if spec.spreads:
            reason = "every rank needs the full mean"
            spreading = self.lines.all_gather(spec, "spread", mean, reason)
            mean = self.lines.wait("spread", spec, spreading)
        self.means[spec] = mean

    def _store(self, spec: BucketSpec, reason: str) -> None:
        if spec.trainable:
            self.means[spec] = self.lines.store(spec, self.means[spec], reason)

    def _averaged(self, name: str, spec: BucketSpec, total: fx.Node) -> fx.Node:
        """A sum over an axis, divided by what its ranks or all ranks are."""
        axis, how = spec.averages[-1 if name == "mean_of_copies" else 0]
        ranks = axis.size if how.how == "avg" else self.blueprint.grid.size
        after = float(ranks) if how.how == "avg" else how.after
        note = f"after the sum over {ranks} ranks: their mean"
        return self.lines.divided(total, after, self.lines.named(name, spec), note)

    def local_gradients(self) -> tuple[fx.Node | None, ...]:
        """This rank's part of each parameter's mean gradient, in the order of parameters."""
        places = {slot.name: (spec, slot) for spec, slot in self._slots.values()}
        return tuple(
            None if gradient is None else self._local(*places[name])
            for name, gradient in self.joint.gradients.items()
        )

    def _local(self, spec: BucketSpec, slot: Slot) -> fx.Node:
        if spec not in self.means:
            raise ScheduleError(
                f"{slot.name} is used, and its unit {spec.title} is never called, so no line of a "
                "trace reduces its gradient. Choose units with wrap= in which the module that uses "
                "it is of its unit."
            )
        start = spec.layout.local_range(slot, spec.position)[0]
        value = self.blueprint.parameters[slot.name]
        name, note = identifier("grad", slot.name), f"gradient of {slot.name}"
        args = (self.means[spec], start, tuple(value.shape))
        return self.lines.call(name, value, part, *args, note=note)


ACTS = {
    Op.LOAD: Half._load,
    Op.UPDATE: Half._update,
    Op.GATHER: Half._gather,
    Op.FREE: Half._free,
    Op.REDUCE: Half._reduce,
    Op.AVERAGE: Half._average,
    Op.SETTLE: Half._settle,
    Op.STORE: Half._store,
}


def _is_whole(spec: BucketSpec) -> bool:
    """Was it gathered in the first step, for good?"""
    return spec.kept and not spec.trainable


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
        script: the schedule, step by step; its cues are ``joint``'s, and the end.
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
    return forward.lines.finish((outputs, tuple(half.saved))), half.lines.finish(grads)


def _step(half: Half, step: Step, at_once: bool) -> None:
    for event in step.in_order():
        if event[:3] == step.cue:
            half.cue(step.cue)
        else:
            half.carry_out(event, at_once)
