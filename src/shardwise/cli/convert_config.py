"""``shardwise convert-config FILE``: what each key of another library means here, and a recipe.

A file may be a configuration, a program, or a command line; or the command follows after ``--``.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click
import yaml
from pydantic import ValidationError

from shardwise.cli.format_names import escape
from shardwise.cli.tables import table, terminal_width
from shardwise.dialects import DIALECTS, Policy, Report, is_of_trainer, read, write
from shardwise.dialects.settings import Setting, of_command, of_program
from shardwise.errors import ConfigError, nearest
from shardwise.recipe.errors import ValueOrigins, error_messages
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import check_suffix

JSON = ("deepspeed", "fsdp_config")  # dialects whose readers take nothing else


def run_convert_config(
    words: Sequence[str],
    *,
    source: str | None,
    to: str,
    output: Path | None,
    strict: bool,
    overwrite: bool,
) -> None:
    """Print the report, and write the configuration in the other dialect.

    Args:
        words: a file, or a command.
        source, to: dialects; ``None``: the one that knows most of the keys.

    Raises:
        ConfigError: keys contradict each other, or with ``strict`` one is not used; then nothing
            is written.
    """
    path = Path(words[0] if len(words) == 1 else "command")
    text = read_text(path) if len(words) == 1 else shlex.join(words)
    for name in filter(None, (source, to)):
        if name not in DIALECTS:
            near = nearest(name, DIALECTS)[0]
            raise ConfigError(f"there is no dialect {name!r}; nearest is {near!r}.")
    suffix = ".json" if to in JSON else {"environment": ".env"}.get(to, ".yaml")
    output = output or Path(f"{path.stem}.{to}{suffix}")
    if to == "recipe":
        check_suffix(output)
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists; name another --output, or pass --overwrite.")
    tree, known = _load(path, text, len(words) > 1)
    report = read(tree, source or known)
    click.echo(f"{escape(path)}: {report.dialect.title}")
    click.echo("\n".join(_lines(report, terminal_width())))
    report.check(strict)
    if not report.flat:
        raise ConfigError(f"{path} sets nothing that a recipe has, so nothing is written.{_KNOWN}")
    if report.dialect.name == "script" and not is_of_trainer(report.dialect, tree):
        click.echo(f"note      {_LOOP}")
    if to == "recipe":
        _check_values(report)
        text = "".join(_recipe(report, path, output))
    else:
        written = write(report.policy, to)
        text = _dump(written.tree, to)
        for name, (value, other) in written.lost.items():
            click.echo(f"lost      {name}: {value}; {to} would read {other}")
    output.write_text(text, "utf-8")
    click.echo(f"wrote     {escape(output)}")


_KNOWN = (
    " Known are FSDP(…), fully_shard(…), TrainingArguments, LoraConfig, BitsAndBytesConfig, "
    "Accelerator and its plug-in, and the scripts that pass Trainer's options on."
)
_LOOP = "the program's own loop is not converted: write its optimizer, batches and length yourself"


def _lines(report: Report, width: int) -> Iterator[str]:
    """A line for each key; where one is wider, what became of a key is in lines below it."""
    rows = [(e.status, e.key, json.dumps(e.value, default=str), e.text) for e in report.entries]
    lines = table(rows, left=4)
    if max(map(len, lines), default=0) <= width:
        yield from lines
        return
    for status, key, value, text in rows:
        yield from wrap(f"{key} {value}", width, initial_indent=f"{status:<15}", **_INDENT)
        yield from wrap(text, width, initial_indent=f"{'':<15}", **_INDENT)


_INDENT: dict[str, Any] = {"subsequent_indent": f"{'':<17}", "break_on_hyphens": False}


def _dump(tree: dict[str, Any], dialect: str) -> str:
    if dialect in JSON:
        return json.dumps(tree, indent=2) + "\n"
    if dialect == "environment":
        return "".join(f"{name}={value}\n" for name, value in tree.items())
    return yaml.safe_dump(tree, sort_keys=False)


def _load(path: Path, text: str, is_typed: bool) -> tuple[dict[str, Any], str | None]:
    """Return the settings and their dialect, if that is known before the keys are.

    Raises:
        ConfigError: a program cannot be parsed, or of a command nothing is known.
    """
    if path.suffix == ".py":
        try:
            return _by_key(of_program(ast.parse(text, str(path)))), "script"
        except SyntaxError as error:
            raise ConfigError(
                f"{path}:{error.lineno} is not Python, so nothing is converted: {error.msg}. "
                "If it was copied from a page, its indentation may be lost."
            ) from None
    if path.suffix in (".json", ".yaml", ".yml"):
        return tree_of(path, text), None
    options = _by_key(of_command(text))
    if not options and not is_typed:
        return tree_of(path, text), None
    _check_command(path, text, options)
    file = path.parent / str(options.get("fsdp_config"))
    if file.is_file():
        options["fsdp_config"] = tree_of(file, read_text(file))
    return options, "command"


_SHARDING = ("launch.fsdp", "launch.mixed_precision")  # of accelerate launch, for any script


def _check_command(path: Path, text: str, options: dict[str, Any]) -> None:
    """Raise if it asks questions, or if a script is started of which nothing is known."""
    if re.match(r"accelerate config\b", text):
        raise ConfigError(
            "`accelerate config` asks questions and writes a file. Answer them, and convert the "
            "file: shardwise convert-config ~/.cache/huggingface/accelerate/default_config.yaml; "
            "or write a recipe: shardwise train --help lists its keys."
        )
    script, dialect = options.get("launch.script"), DIALECTS["command"]
    is_sharding = any(key.startswith(_SHARDING) for key in options)
    if is_of_trainer(dialect, options) or is_sharding or (options and script is None):
        return
    own = [f"--{key}" for key in options if not key.startswith(("launch.", "env."))]
    named = script or next((word for word in shlex.split(text) if word.endswith(".py")), None)
    raise ConfigError(
        f"{path}: of {named or text!r} "
        + (f"most options are unknown ({', '.join(own)})" if own else "no option is shown")
        + ", so what it trains is not known, and nothing is written. Pass the program itself: "
        f"shardwise convert-config {named or 'PROGRAM.py'}."
    )


def _by_key(settings: Iterator[Setting]) -> dict[str, Any]:
    """Group by key, as the last line says; units are sharded in one way.

    Raises:
        ConfigError: two calls of FSDP say different things.
    """
    by_key: dict[str, Setting] = {}
    for one in settings:
        other = by_key.setdefault(one.key, one)
        is_unit = one.key.startswith(("FullyShardedDataParallel.", "fully_shard."))
        if is_unit and one.name != "module" and one.value != other.value:
            raise ConfigError(
                f"{one.key} is {other.value} at line {other.line} and {one.value} at line "
                f"{one.line}, and a recipe shards all units in one way; keep one of them."
            )
        by_key[one.key] = one
    return {key: setting.value for key, setting in by_key.items()}


def read_text(path: Path) -> str:
    """The file's text. Raises ``ConfigError`` if it is none."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}.") from None


def tree_of(path: Path, text: str) -> dict[str, Any]:
    """Parse JSON, YAML, or lines ``NAME=value``."""
    try:
        tree = yaml.safe_load(text)  # JSON, too
    except (yaml.YAMLError, RecursionError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f"{path}:{mark.line + 1}" if mark else f"{path}"
        why = error.problem if isinstance(error, yaml.MarkedYAMLError) else ""
        raise ConfigError(
            f"{place} is neither JSON nor YAML, or is nested too deeply{f': {why}' if why else ''}."
        ) from None
    if isinstance(tree, dict):
        return tree
    lines = (line.strip().removeprefix("export ") for line in text.splitlines())
    pairs = [line.partition("=") for line in lines if line and line[0] != "#"]
    if not pairs or not all(equals for _, equals, _ in pairs):
        raise ConfigError(f"{path} has no keys; pass JSON, YAML, or lines NAME=value.")
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


def _recipe(report: Report, source: Path, output: Path) -> Iterator[str]:
    """The recipe, and as comments what a recipe has no key for."""
    tree, elsewhere = recipe_of(report)
    yield f"# From {source.name}. Keys that are not here have their default.\n"
    for entry in report.entries:
        if entry.status == "fill in":
            yield f"# FILL-IN: {entry.text} ({entry.key} is {entry.value})\n"
    for place, value in elsewhere.items():
        if not place.startswith("launch."):
            yield f"# Not of a recipe: {place}: {value}\n"
    if report.policy.processes:
        yield f"# Start: {_launch(report.policy, output)}\n"
    yield yaml.safe_dump(tree, sort_keys=False)


def _check_values(report: Report) -> None:
    """Raises ``ConfigError`` for values that a recipe refuses; one to be filled in is refused."""
    if any(entry.status == "fill in" for entry in report.entries):
        return
    try:
        Recipe.model_validate(recipe_of(report)[0])
    except ValidationError as error:
        wrong = error_messages(error, ValueOrigins("the recipe", {}, {}))
        raise ConfigError("\n".join([*wrong, "Nothing is written."])) from None


def recipe_of(report: Report) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a recipe has, with the ranks of one machine, and the rest by place."""
    tree, elsewhere = report.places()
    if ranks := report.policy.processes:
        tree.setdefault("launch", {})["nproc"] = ranks // (report.policy.machines or 1)
    return tree, elsewhere


def _launch(policy: Policy, recipe: Path) -> str:
    """The command that starts as many ranks on as many machines."""
    command = "train" if (policy.machines or 1) == 1 else "launch"
    return shlex.join(["shardwise", command, str(recipe)])
