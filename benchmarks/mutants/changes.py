"""The small mistakes that can be made in a file: comparisons, operators, constants, statements.

Left out is what no test of behaviour could notice, or what no line of code depends on: types,
assertions, ``__all__``, what is logged, the words of errors, and options of functions that only
help (``zip(strict=True)``, timeouts).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
FIELDS = frozenset({"annotation", "returns", "decorator_list", "type_params"})
KEYWORDS = frozenset({"strict", "daemon", "non_blocking", "stacklevel", "timeout", "slots"})
LOGGERS = ("log.", "logger.", "logging.", "warnings.")


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # below the project's root
    line: int
    change: str  # what is replaced by what
    index: int  # in the order of ``changes``


def mutants_of(file: str, code: str) -> list[Mutant]:
    """Every mutant of a file with this ``code``."""
    numbered = enumerate(changes(ast.parse(code)))
    return [Mutant(file, line, change, index) for index, (line, change, _) in numbered]


def mutated(mutant: Mutant, code: str) -> str:
    """The file's code with the change."""
    tree = ast.parse(code)
    list(changes(tree))[mutant.index][2]()
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def changes(node: ast.AST, line: int = 0) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Every change below ``node``: its line, what it is, and what makes it in the tree."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for number, child in enumerate(children):
            if field in FIELDS or not isinstance(child, ast.AST) or _is_skipped(child):
                continue
            child_line = getattr(child, "lineno", line)
            if (new := _replacement(child)) is not None:
                put: Callable[..., None] = partial(setattr, node, field)
                if isinstance(value, list):
                    put = partial(value.__setitem__, number)
                yield child_line, f"{_text(child)} → {_text(new)}", partial(put, new)
            if not isinstance(child, ast.Raise):  # its words
                yield from changes(child, child_line)


def _is_skipped(node: ast.AST) -> bool:
    """Does nothing at run time, only says something, or only helps?"""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.AnnAssign(value=None):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return ast.unparse(function).startswith(LOGGERS)
        case ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None)):  # a type
            return True
    return isinstance(node, ast.keyword) and node.arg in KEYWORDS


def _text(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0][:60] or type(node).__name__


def _replacement(node: ast.AST) -> ast.AST | None:
    """What is put in its place, if it is of a kind that is changed."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case ast.Return(value=None | ast.Constant(value=None | bool())):
            return None  # a constant is changed by itself
        case ast.Return():
            return ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
            return None
        case ast.Expr() | ast.AugAssign() | ast.Raise():
            return ast.Pass()
        case ast.Delete(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return ast.Pass()
    return SWAPS[type(node)]() if type(node) in SWAPS else None
