"""A program: an FX graph as Python text that a person reads, and that is what runs.

Calling a program compiles the very text that ``print`` shows, so nothing can be hidden from the
reader. FX's own text has no room for shapes, bytes and reasons, and deletes each value by hand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.errors import ScheduleError
from shardwise.torch_internals import OpOverload
from shardwise.tracing import operations

__all__ = ["Collective", "Program", "shape_of"]

WIDEST = 72  # characters of code before comments, where a line is not longer


class Collective(NamedTuple):
    """A collective as a line of a program shows it, and as a comm counts it.

    Attributes:
        op: ``"gather"``, ``"reduce"`` or ``"spread"`` (the all-gather of ``no_shard``'s mean).
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
        """In the order of the lines; one rank alone has none."""
        nodes = (node.meta.get("collective") for node in self.graph.nodes)
        return tuple(found for found in nodes if found is not None and found.sent)

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
        return self._function(*args)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
        namespace |= {name: getattr(operations, name) for name in operations.__all__}
        namespace |= {f.__name__: f for f in operations.IMPLEMENTATIONS.values()}
        namespace |= {"constants": self.constants, "inf": math.inf, "nan": math.nan}
        exec(compile(self.text, f"<{self.name}>", "exec"), namespace)  # noqa: S102 - our own text
        function: Callable[..., Any] = namespace[self.name]
        return function


def shape_of(value: Any) -> str:
    """``"float32[8, 64]"``; of several tensors, one after the other."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, map(shape_of, value)))
    return ""


def _note(node: fx.Node) -> str:
    words = (node.meta.get("shape") or shape_of(node.meta.get("val")), node.meta.get("note", ""))
    return "  ".join(filter(None, words))


def _statement(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_literal(node.args[0])}"
    if node.op == "get_attr":
        return f"{node.name} = constants[{node.target!r}]"
    if node.target is operator.getitem:
        return f"{node.name} = {_literal(node.args[0])}[{_literal(node.args[1])}]"
    call = f"{_function_name(node.target)}({', '.join(_arguments(node))})"
    return f"{node.name} = {call}" if node.meta.get("result", True) else call


def _arguments(node: fx.Node) -> Iterator[str]:
    yield from map(_literal, node.args)
    for name, value in node.kwargs.items():
        yield f"{name}={_literal(value)}"


def _function_name(target: Any) -> str:
    if isinstance(target, OpOverload):  # such as aten.add.Tensor
        name = str(target).removesuffix(".default")
        return name if name.startswith("aten.") else f"torch.ops.{name}"
    return str(target.__name__)


def _literal(value: Any) -> str:
    """Python text that evaluates to ``value``.

    Raises:
        ScheduleError: there is none.
    """
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        items = ", ".join(map(_literal, value))
        comma = "," if len(value) == 1 else ""
        return f"({items}{comma})" if isinstance(value, tuple) else f"[{items}]"
    if isinstance(value, slice):
        return f"slice({_literal(value.start)}, {_literal(value.stop)}, {_literal(value.step)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    plain = (int, float, complex, str, type(None))
    if isinstance(value, (*plain, torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    raise ScheduleError(
        f"the graph has an argument of class {type(value).__name__}, which cannot be written as "
        "Python text, so there is no program to show. Trace the part of the model without it."
    )
