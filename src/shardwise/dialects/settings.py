"""What a file sets, key by key, with its line: a configuration, a command line, or a program.

A program is parsed and never run. A name that is assigned a constant has that value, and an option
of argparse its default. What is no constant is its own text, an ``Expression`` such as
``torch.bfloat16``, and so is a word of a command with a shell's variable.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.train.data_config import COLUMNS

__all__ = ["Expression", "Setting", "dotted", "of_command", "of_configuration", "of_program"]


class Expression(str):
    """The text of a value that the program or the shell computes."""

    __slots__ = ()


class Setting(NamedTuple):
    """One key, such as ``--bf16`` of a command or ``bf16=`` of a call.

    Attributes:
        key: in a program with its call before it: ``TrainingArguments.bf16``; of a command's
            launcher ``launch.world_size``, of its environment ``env.PT_HPU_LAZY_MODE``; its script
            is ``launch.script``, and the columns that a program reads are ``columns``.
        line: from 1.
    """

    key: str
    value: Any
    line: int

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def of_configuration(text: str) -> Iterator[Setting]:
    """Of JSON or YAML; keys of inner mappings follow after a dot.

    Raises:
        yaml.YAMLError: it is neither.
    """
    yield from _of_node(yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text), "")


def _of_node(node: Any, value: Any, prefix: str) -> Iterator[Setting]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, inner in node.value:
        part = value.get(key.value)
        if isinstance(part, dict) and part:
            yield from _of_node(inner, part, f"{prefix}{key.value}.")
        else:
            yield Setting(prefix + key.value, part, key.start_mark.line + 1)


def of_command(text: str) -> Iterator[Setting]:
    r"""Of each command with options in a shell script; a line that ends in ``\`` goes on.

    The last word that ends in ``.py`` is the script; options before it are the launcher's.
    """
    words: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words += [(word, number) for word in shlex.split(line.removesuffix("\\"), True)]
        except ValueError:  # a quote without its end: prose
            words = []
        if not line.endswith("\\"):
            if any(word.startswith("--") for word, _ in words):
                yield from _of_words(words)
            words = []


def _of_words(words: list[tuple[str, int]]) -> Iterator[Setting]:
    scripts = [place for place, (word, _) in enumerate(words) if word.endswith(".py")]
    script = scripts[-1] if scripts else len(words)
    program = next((i for i, (word, _) in enumerate(words) if "=" not in word), 0)
    for word, line in words[:program]:
        name, _, value = word.partition("=")
        yield Setting(f"env.{name}", value, line)
    for word, line in words[script : script + 1]:
        yield Setting("launch.script", Path(word).name, line)
    yield from _options(words[program:script], "launch.")
    yield from _options(words[script + 1 :], "")


def _options(words: list[tuple[str, int]], prefix: str) -> Iterator[Setting]:
    """``--a 1 2 --b`` as a list and a switch; ``.py`` words are programs, and no values."""
    starts = [place for place, (word, _) in enumerate(words) if word.startswith("--")]
    for start, end in pairwise([*starts, len(words)]):
        word, line = words[start]
        name, equals, value = word.removeprefix("--").partition("=")
        values = [value] * bool(equals)
        values += [other for other, _ in words[start + 1 : end] if not other.endswith(".py")]
        option = values[0] if len(values) == 1 else values or True
        is_computed = any(_OF_SHELL.search(value) for value in values)
        yield Setting(prefix + name, Expression(" ".join(values)) if is_computed else option, line)


_OF_SHELL = re.compile(r"\$[\w({@*]|`")

# --- programs --------------------------------------------------------------------------------


def of_program(tree: ast.Module) -> Iterator[Setting]:
    """Keywords and first arguments of calls, calls themselves, and assigned attributes, by line."""
    yield from sorted(_of_calls(tree), key=lambda setting: setting.line)
    subscripts = (node for node in ast.walk(tree) if isinstance(node, ast.Subscript))
    lines = {getattr(node.slice, "value", None): node.lineno for node in subscripts}
    if columns := [name for name in _COLUMNS if name in lines]:
        yield Setting("columns", columns, lines[columns[0]])


_KNOWN = ast.Constant | ast.UnaryOp | ast.List | ast.Attribute  # -1, [1], torch.bfloat16
_COLUMNS = ("text", *(names[0] for names in COLUMNS.values()))


def _of_calls(tree: ast.Module) -> Iterator[Setting]:
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    } | _defaults_of_options(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield Setting(dotted(node.targets[0]), _value(node.value, constants), node.lineno)
        elif isinstance(node, ast.Call):
            name = _short(dotted(node.func))
            yield Setting(f"{name}()", True, node.lineno)
            for place, argument in enumerate(node.args[:1]):
                yield Setting(f"{name}.{place}", _value(argument, constants), argument.lineno)
            for keyword in node.keywords:
                if keyword.arg:
                    value = _value(keyword.value, constants)
                    yield Setting(f"{name}.{keyword.arg}", value, keyword.lineno)


def _defaults_of_options(tree: ast.Module) -> dict[str, ast.expr]:
    """``args.lr`` → the default of ``--lr``, where argparse has one that is a value."""
    return {
        f"args.{str(name.value).removeprefix('--').replace('-', '_')}": keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func).endswith("add_argument")
        for keyword in node.keywords
        if keyword.arg == "default" and ast.unparse(keyword.value) != "None"
        for name in node.args
        if isinstance(name, ast.Constant) and str(name.value).startswith("--")
    }


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    for _ in range(2):  # a name of an option
        known = constants.get(dotted(node))
        node = known if isinstance(known, _KNOWN) else node
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute; a part that is no name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".removeprefix(".")
    return node.id if isinstance(node, ast.Name) else ""


def _short(name: str) -> str:
    """``transformers.TrainingArguments`` and ``model.train`` without what is before the dot."""
    first, _, last = name.rpartition(".")
    owner = first.rpartition(".")[2]
    return f"{owner}.{last}" if owner[:1].isupper() and not last[:1].isupper() else last
