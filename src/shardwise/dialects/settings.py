"""The settings of a file, key by key, with lines: a configuration, a command, or a program.

A program is parsed and never run. A name that is assigned a constant has that value, and an option
of argparse its default. What is no constant is its own text, an ``Expression`` such as
``torch.bfloat16``, and so is a word of a command with a shell's variable. Arguments of a call that
is passed on, such as ``FSDP(model, mixed_precision=MixedPrecision(…))``, follow after a dot.
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

from shardwise.recipe.data_config import COLUMNS


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
    """Read JSON or YAML; keys of inner mappings follow after a dot.

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
    r"""Read each command with options in a shell script; a line that ends in ``\`` goes on.

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
    """``--a 1 2 --b`` as a list and a switch; ``.py`` words are programs, and no values.

    A launcher's options may have one hyphen before them, and either sign between their words.
    """
    hyphens = "-" if prefix else "--"
    starts = [place for place, (word, _) in enumerate(words) if word.startswith(hyphens)]
    for start, end in pairwise([*starts, len(words)]):
        word, line = words[start]
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_") if prefix else name
        others = [other for other, _ in words[start + 1 : end] if not other.endswith(".py")]
        values = [value] if equals else others[:1] if prefix else others
        option = values[0] if len(values) == 1 else values or True
        is_computed = any(_OF_SHELL.search(value) for value in values)
        yield Setting(prefix + name, Expression(" ".join(values)) if is_computed else option, line)


_OF_SHELL = re.compile(r"\$[\w({@*]|`")

# --- programs --------------------------------------------------------------------------------


def of_program(tree: ast.Module) -> Iterator[Setting]:
    """Arguments of calls, calls themselves, and assigned attributes, by line."""
    yield from sorted(_Program(tree).settings(), key=lambda setting: setting.line)
    subscripts = (node for node in ast.walk(tree) if isinstance(node, ast.Subscript))
    lines = {getattr(node.slice, "value", None): node.lineno for node in subscripts}
    if columns := [name for name in _COLUMNS if name in lines]:
        yield Setting("columns", columns, lines[columns[0]])


POSITIONAL = {  # the names of arguments that may be passed by their place
    "FullyShardedDataParallel": (
        *("module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy"),
        *("backward_prefetch", "mixed_precision"),
    ),
    "fully_shard": ("module",),
}
_PASSED = {  # the same of what is passed to them
    "CPUOffload": ("offload_params",),
    "CPUOffloadPolicy": ("pin_memory",),
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "ModuleWrapPolicy": ("module_classes",),
    "partial": ("",),
}
POSITIONAL |= _PASSED
_KNOWN = ast.Constant | ast.UnaryOp | ast.List | ast.Set | ast.Attribute  # -1, [1], torch.bfloat16
_COLUMNS = ("text", *(names[0] for names in COLUMNS.values()))


class _Program:
    """Names of a program and their values: constants and imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = list(ast.walk(tree))
        assigned = [n for n in self.nodes if isinstance(n, ast.Assign)]
        self.constants = {
            node.targets[0].id: node.value
            for node in assigned
            if isinstance(node.targets[0], ast.Name)
        } | _defaults_of_options(self.nodes)
        # A dictionary that is changed later has other keys, too.
        for node in self.nodes:
            if isinstance(node, ast.Attribute) or isinstance(getattr(node, "ctx", 0), ast.Store):
                changed = dotted(node.value) if isinstance(node, _PARTS) else ""
                if isinstance(self.constants.get(changed), ast.Dict):
                    del self.constants[changed]
        imports = [n for n in self.nodes if isinstance(n, ast.ImportFrom)]
        aliases = {a.asname: a.name for node in imports for a in node.names if a.asname}
        self.names = _SHORT_NAMES | aliases

    def settings(self) -> Iterator[Setting]:
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                value = _value(self.resolved(node.value))
                yield Setting(dotted(node.targets[0]), value, node.lineno)
            elif isinstance(node, ast.Call):
                name = self.called(node)
                yield Setting(f"{name}()", True, node.lineno)
                yield from self.arguments(name, node) if name != "partial" else ()

    def arguments(self, key: str, call: ast.Call) -> Iterator[Setting]:
        """Return a call's arguments, by name or place; ``kwargs`` for unwritten ``**options``."""
        for name, node in self._by_name(call):
            place = f"{key}.{name}" if name else key  # of partial() the policy itself
            value = self.resolved(node)
            passed = self.called(value)
            inner = []
            if isinstance(value, ast.Call) and passed in _PASSED:
                inner = [*self.arguments(place, value)]
            if passed == "ModuleWrapPolicy":
                yield Setting(place, Expression(passed), node.lineno)
            elif not inner:
                yield Setting(place, _value(value), node.lineno)
            yield from inner

    def _by_name(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        known = POSITIONAL.get(self.called(call), ())
        for place, node in enumerate(call.args):
            yield (known[place] if place < len(known) else str(place)), node
        for keyword in call.keywords:
            options = self.constants.get(dotted(keyword.value), keyword.value)
            if keyword.arg is None and isinstance(options, ast.Dict):
                for name, value in zip(options.keys, options.values, strict=True):
                    yield (str(_value(name)) if name else "kwargs"), value
            else:
                yield keyword.arg or "kwargs", keyword.value

    def resolved(self, node: ast.expr) -> ast.expr:
        """Return the value of a name, where that is written down."""
        for _ in range(2):  # a name of an option
            known = self.constants.get(dotted(node))
            if known and (isinstance(known, _KNOWN) or self.called(known) in _PASSED):
                node = known
        return node

    def called(self, node: ast.expr) -> str:
        """The function that a call calls, by its library's name for it; else nothing."""
        if not isinstance(node, ast.Call):
            return ""
        first, dot, last = dotted(node.func).partition(".")
        return _MODEL.sub(
            "AutoModelForCausalLM.", _short(self.names.get(first, first) + dot + last)
        )


_SHORT_NAMES = {"FSDP": "FullyShardedDataParallel", "DDP": "DistributedDataParallel"}
_PARTS = ast.Attribute | ast.Subscript
_MODEL = re.compile(r"^(?!Auto)\w+(ForCausalLM|LMHeadModel)\.(?=from_pretrained$)")


def _defaults_of_options(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """``args.lr`` → the default of ``--lr``, where argparse has one that is a value."""
    return {
        f"args.{str(name.value).removeprefix('--').replace('-', '_')}": keyword.value
        for node in nodes
        if isinstance(node, ast.Call) and dotted(node.func).endswith("add_argument")
        for keyword in node.keywords
        if keyword.arg == "default" and ast.unparse(keyword.value) != "None"
        for name in node.args
        if isinstance(name, ast.Constant) and str(name.value).startswith("--")
    }


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        inner = node.elts if isinstance(node, ast.Set | ast.List | ast.Tuple) else []
        classes = [dotted(item).rpartition(".")[2] for item in inner]
        if classes and all(name[:1].isupper() for name in classes):
            return classes
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
