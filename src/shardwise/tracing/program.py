"""A program: an FX graph as Python text that a person reads, and that is what runs.

Calling a program compiles the very text that ``print`` shows, so nothing can be hidden from the
reader. FX's own text has no room for shapes, bytes and reasons, and deletes each value by hand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.config.precision import dtype_name
from shardwise.torch_internals import OpOverload
from shardwise.tracing import operations

WIDEST = 72  # characters of code before comments, where a line is not longer


class Collective(NamedTuple):
    """A collective as a line of a program shows it, and as a comm counts it.

    Attributes:
        op: ``"gather"``, ``"reduce"``, ``"spread"`` (the all-gather of copies' means) or
            ``"update"`` (that of the pieces of a shard that copies have updated).
        unit: the unit's name.
        sent: bytes that one rank sends.
    """

    op: str
    unit: str
    sent: int


@dataclass(frozen=True, eq=False)
class Program:
    """One half of a step. ``print`` it, or call it.

    Attributes:
        name: ``"forward"`` or ``"backward"``.
        title: what it is the program of.
        graph: torch's FX graph.
        constants: tensors that the text names.
    """

    name: str
    title: str
    graph: fx.Graph
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """List the collectives in the order of the lines; one rank alone has none."""
        nodes = (node.meta.get("collective") for node in self.graph.nodes)
        return tuple(shown for shown in nodes if shown is not None and shown.sent)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of what it is given."""
        return tuple(node.target for node in self.graph.find_nodes(op="placeholder"))

    @property
    def statements(self) -> tuple[str, ...]:
        """The lines of the body, without comments."""
        return tuple(_statement(node) for node in self.graph.nodes if node.op != "placeholder")

    @property
    def returned(self) -> Any:
        """Names of what it returns, in the same tuples."""
        return fx.map_arg(self.graph.output_node().args[0], lambda node: node.name)

    @cached_property
    def text(self) -> str:
        """Valid Python, with the shape of every result beside it."""
        lines: list[tuple[str, str]] = [(f"# {self.title}", ""), (f"def {self.name}(", "")]
        given = self.graph.find_nodes(op="placeholder")
        lines += [(f"    {node.name},", _note(node)) for node in given]
        lines.append(("):", ""))
        for node in self.graph.nodes:
            if node.op != "placeholder":
                lines += [(f"    # {text}", "") for text in node.meta.get("above", ())]
                lines.append((f"    {_statement(node)}", _note(node)))
        column = max(len(code) for code, _ in lines if len(code) <= WIDEST)
        commented = (f"{code:<{column}}  # {note}" if note else code for code, note in lines)
        return "\n".join(commented)

    def __str__(self) -> str:
        return self.text

    def __call__(self, *args: Any) -> Any:
        """Run the text. The last stage's programs take the comm first.

        Raises:
            ScheduleError: the program has primitives, which only say what is done.
        """
        namespace = vars(operations) | {"aten": torch.ops.aten, "constants": self.constants}
        namespace |= {"device": torch.device, "inf": math.inf, "nan": math.nan}
        exec(compile(self.text, f"<{self.name}>", "exec"), namespace)  # noqa: S102 - our own text
        return namespace[self.name](*args)


def _shape(value: Any) -> str:
    """``"float32[8, 64]"``; of several tensors, one after the other."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(_shape, value)))
    return ""


def _note(node: fx.Node) -> str:
    return "  ".join(filter(None, (_shape(node.meta.get("val")), node.meta.get("note", ""))))


def _statement(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "get_attr":
        return f"{node.name} = constants[{node.target!r}]"
    if node.target is operator.getitem:
        return f"{node.name} = {node.args[0]}[{node.args[1]}]"
    # A node's repr is its name, and that of dtypes, devices, slices, inf and None is Python.
    arguments = [*map(repr, node.args), *(f"{name}={arg!r}" for name, arg in node.kwargs.items())]
    call = f"{_function_name(node.target)}({', '.join(arguments)})"
    return call if node.meta.get("val") is None else f"{node.name} = {call}"


def _function_name(target: Any) -> str:
    if isinstance(target, OpOverload):  # such as aten.add.Tensor
        name = str(target).removesuffix(".default")
        return name if name.startswith("aten.") else f"torch.ops.{name}"
    return str(target.__name__)
