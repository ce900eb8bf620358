"""A file to check, as lines: what it sets, and its statements or its own lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.dialects.settings import Setting, of_command, of_configuration, of_program
from shardwise.errors import ConfigError


class Hit(NamedTuple):
    """A defect by its name in ``defects.toml``, its line, and what its sentences name."""

    defect: str
    line: int
    names: tuple[object, ...] = ()


@dataclass(frozen=True)
class Source:
    """The contents of a file; nothing of it is run.

    Attributes:
        settings: keys with their values.
        lines: settings as ``key = value``, then a program's statements or the file's own lines.
        tree: of a program; empty for any other file.
    """

    settings: tuple[Setting, ...]
    lines: tuple[tuple[int, str], ...]
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Source:
        """A program (``.py``), a configuration (``.json``, ``.yaml``), or commands and prose.

        Raises:
            ConfigError: it is not what its suffix says, or no text.
        """
        tree = ast.Module([], [])
        try:
            text = path.read_text("utf-8")
            lines = list(enumerate(text.splitlines(), 1))
            if path.suffix == ".py":
                tree = ast.parse(text)
                settings, lines = of_program(tree), [*_statements(tree)]
            elif path.suffix in (".json", ".yaml", ".yml"):
                settings = of_configuration(text)
            else:
                settings = of_command(text)
            keys = tuple(settings)
        except (SyntaxError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{path}{_where_and_why(error)}, so it is not checked.") from None
        as_lines = ((setting.line, f"{setting.key} = {_words(setting)}") for setting in keys)
        return cls(keys, (*as_lines, *lines), tree)

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(text for _, text in self.lines)

    def value(self, *names: str) -> Any:
        """The first value of these names, in whatever call or section; ``None`` without one."""
        return next((setting.value for setting in self.settings if setting.name in names), None)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """The program's nodes of these kinds."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


def _where_and_why(error: Exception) -> str:
    """``":3 cannot be read as its suffix says: …"``, in one line."""
    line, why = None, str(error)
    if isinstance(error, SyntaxError):
        line, why = error.lineno, error.msg
    elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        line, why = error.problem_mark.line + 1, str(error.problem)
    elif isinstance(error, RecursionError):
        why = "it is nested too deeply"
    return f"{f':{line}' if line else ''} cannot be read as its suffix says: {why}"


def _statements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each statement in Python's own spelling; of one with a body its first line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            yield node.lineno, ast.unparse(node).partition("\n")[0]


def _words(setting: Setting) -> str:
    value = setting.value
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
