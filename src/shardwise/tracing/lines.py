"""Lines of a program: each operation with the shape of its result, its bytes and its reason.

``writer`` decides what is done and when; here is how each of it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.comm.codec import codec_of, wire_nbytes
from shardwise.comm.grid import Axis
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.draw import name_of, of_shape
from shardwise.plan.printed import size
from shardwise.plan.spec import BucketSpec
from shardwise.tracing.operations import all_gather, all_reduce, load, reduce_scatter, store, wait
from shardwise.tracing.program import Collective


def identifier(prefix: str, name: str) -> str:
    """``("shard", "blocks.0") → "shard_blocks_0"``."""
    return f"{prefix}_{re.sub(r'[^0-9A-Za-z]+', '_', name or 'root').strip('_')}"


class Lines:
    """A graph that grows: arguments above, and calls one below the other."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint, self.graph = blueprint, fx.Graph()
        self._arguments: dict[str, fx.Node] = {}
        self._cues: list[str] = []  # comments above the next line

    def argument(self, name: str, value: Any, note: str = "") -> fx.Node:
        """A further argument of the program, or the one of that name."""
        if name not in self._arguments:
            last = next(reversed(self._arguments.values()), None)  # None: above all lines
            with self.graph.inserting_after(last):
                self._arguments[name] = node = self.graph.placeholder(name)
            node.meta |= {"val": value, "note": note}
        return self._arguments[name]

    def call(
        self, name: str, value: Tensor | None, function: Callable[..., Any], *args: Any, **meta: Any
    ) -> fx.Node:
        """A call of ``function``; ``value`` has the shape and dtype of the result."""
        node = self.graph.create_node("call_function", function, args, name=name)
        node.meta |= meta | {"val": value}
        return self._below_cues(node)

    def copy(self, node: fx.Node, value: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """The line of another graph, with ``value`` of each of its arguments."""
        return self._below_cues(self.graph.node_copy(node, value))

    def comment(self, text: str) -> None:
        """A line of its own above the next call."""
        self._cues.append(text)

    def _below_cues(self, node: fx.Node) -> fx.Node:
        node.meta["above"], self._cues = self._cues, []
        return node

    def finish(self, result: Any) -> fx.Graph:
        """Return ``result``."""
        self._below_cues(self.graph.output(result))
        self.graph.lint()
        return self.graph

    def named(self, prefix: str, spec: BucketSpec) -> str:
        """``("shard", …) → "shard_blocks_0"``."""
        return identifier(prefix, name_of(self.blueprint, spec))

    # ---- on one rank -----------------------------------------------------------------------

    def cast(self, node: fx.Node, dtype: torch.dtype, name: str, note: str = "") -> fx.Node:
        """The same node, if it has that dtype."""
        value = node.meta["val"]
        if value.dtype is dtype:
            return node
        return self.call(name, value.to(dtype), torch.ops.aten.to.dtype, node, dtype, note=note)

    def divided(self, node: fx.Node, divisor: float, name: str, note: str) -> fx.Node:
        """The same node, if ``divisor`` is 1."""
        if divisor == 1:
            return node
        divide = torch.ops.aten.div_.Scalar
        return self.call(name, node.meta["val"], divide, node, divisor, note=note)

    def load(self, spec: BucketSpec, shard: fx.Node, dtype: torch.dtype, reason: str) -> fx.Node:
        """A shard, copied from host memory."""
        value, note = shard.meta["val"].to(dtype), f"to the device, {size(spec.rest_nbytes)}"
        name = self.named("loaded", spec)
        return self.call(name, value, load, shard, dtype, note=f"{note}: {reason}")

    def store(self, spec: BucketSpec, mean: fx.Node, reason: str) -> fx.Node:
        """A mean gradient, copied to host memory."""
        value, note = mean.meta["val"], f"from the device, {size(mean.meta['val'].nbytes)}"
        return self.call(self.named("in_host", spec), value, store, mean, note=f"{note}: {reason}")

    # ---- over ranks ------------------------------------------------------------------------

    def all_gather(self, spec: BucketSpec, verb: str, own: fx.Node, reason: str) -> fx.Node:
        """An all-gather that begins; ``verb`` as of a ``Collective``."""
        axis = spec.shard if verb == "gather" else spec.replicate
        value = of_shape(own.meta["val"].dtype, own.meta["val"].numel() * axis.size)
        sent = value.nbytes - value.nbytes // axis.size
        prefix = {"gather": "gathering", "update": "joining"}.get(verb, "spreading")
        return self.call(
            self.named(prefix, spec),
            value,
            all_gather,
            *(own, spec.title, *([] if verb == "gather" else [verb])),
            note=f"{self._over(spec, axis)}{size(value.nbytes)}, sends {size(sent)}: {reason}",
            collective=Collective(verb, spec.title, sent),
            axis=self.axis(spec, axis),
        )

    def reduction(
        self, prefix: str, spec: BucketSpec, full: fx.Node, at: int, reason: str
    ) -> fx.Node:
        """A reduce-scatter that begins, or an all-reduce; ``at``: over which of the axes."""
        axis, how = spec.averages[at]
        wire, numel = spec.dtypes.reduce, full.meta["val"].numel()
        nbytes = wire_nbytes(wire, numel, axis.size)
        sent = nbytes if how.whole else nbytes - nbytes // axis.size
        return self.call(
            self.named(prefix, spec),
            of_shape(spec.dtypes.sum, numel // (1 if how.whole else axis.size)),  # what one sums
            all_reduce if how.whole else reduce_scatter,
            *(full, spec.title, spec.dtypes.sum, *([] if codec_of(wire) is None else [wire])),
            note=f"{self._over(spec, axis)}sums {size(nbytes)}, sends {size(sent)}: {reason}",
            collective=Collective("reduce", spec.title, sent),
            axis=self.axis(spec, axis),
        )

    def wait(self, prefix: str, spec: BucketSpec, begun: fx.Node, note: str = "") -> fx.Node:
        """Wait for what was begun."""
        return self.call(self.named(prefix, spec), begun.meta["val"], wait, begun, note=note)

    def axis(self, spec: BucketSpec, axis: Axis) -> str:
        """The axis of a grid; ``""`` where there is one."""
        name = "shard" if axis == spec.shard else "replicate"
        return name if self.blueprint.shape is not None else ""

    def _over(self, spec: BucketSpec, axis: Axis) -> str:
        name = self.axis(spec, axis)
        return name and f"over {name}: "
