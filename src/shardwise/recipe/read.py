"""Reading a recipe: YAML or TOML, then overrides, then validation of the whole.

PyYAML reads `lr: 1e-4` as the text "1e-4" and keeps the last of two equal keys; here the config
classes coerce values, and duplicate keys are refused. Every error message names the file, the
line and the nearest key that exists.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shardwise.errors import ConfigError
from shardwise.recipe.errors import ValueOrigins, did_you_mean, error_messages, known_keys
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import path_of, shipped

KeyPath = tuple[str, ...]
Tree = dict[str, Any]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as ``{"optimizer.lr": 1e-3, …}``."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), options: Sequence[str] = ()
) -> Recipe:
    """The recipe in ``path`` with ``overrides`` applied, validated.

    Args:
        path: a ``.yaml``, ``.yml`` or ``.toml`` file, or the name of a shipped recipe.
        overrides: ``--a.b value``, ``--a.b=value`` or ``a.b=value``, as split by a shell.
        options: of the command, such as ``--nproc``, to suggest for a misspelt override.

    Raises:
        ConfigError: with the file, the line if known, and the nearest key.
    """
    path = path_of(path)
    tree, lines = parse(path)
    values = dict(_split(overrides, options))
    for name, text in values.items():
        _check_override(name, options)
        set_key(tree, name, _value(text))
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        origins = ValueOrigins(str(path), lines, values)
        raise ConfigError("\n".join(error_messages(error, origins))) from None


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, defaults included; reading it back gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# --- files -----------------------------------------------------------------------------------


def parse(path: Path) -> tuple[Tree, dict[KeyPath, int]]:
    """The values in a recipe's file as they are, and the line of each key (YAML only).

    Raises:
        ConfigError: there is no such file, or it is neither YAML nor TOML.
    """
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        names = ", ".join(shipped())
        raise ConfigError(
            f"recipe {path}: expected a .yaml, .yml or .toml file, or the name of a shipped one: "
            f"{names}."
        )
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        neighbours = (
            sorted(p.name for p in path.parent.glob("*.[yt]*ml")) if path.parent.is_dir() else []
        )
        hint = f" There are: {', '.join(neighbours)}." if neighbours else ""
        raise ConfigError(f"recipe {path} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}.") from None
    return _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)


def _parse_toml(path: Path, text: str) -> tuple[Tree, dict[KeyPath, int]]:
    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"at line (\d+), column (\d+)", str(error))
        line, column = (int(match[1]), int(match[2])) if match else (len(text.splitlines()) + 1, 1)
        raise ConfigError(_syntax_error("TOML", path, text, line, column)) from None


def _parse_yaml(path: Path, text: str) -> tuple[Tree, dict[KeyPath, int]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
        places = list(_key_lines(root)) if isinstance(root, yaml.MappingNode) else []
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise ConfigError(_syntax_error("YAML", path, text, line, column)) from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(
            f"recipe {path} is not valid YAML: it holds control characters, or is nested too "
            "deeply. Check that it is a recipe."
        ) from None
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode) or not isinstance(tree, dict):
        raise ConfigError(f"recipe {path} must be a table of sections (model:, data:, …).")
    lines: dict[KeyPath, int] = {}
    for key_path, line in places:
        if key_path in lines:
            raise ConfigError(
                f"{path}:{line}: {'.'.join(key_path)} is written twice, first in line "
                f"{lines[key_path]}; remove one of them."
            )
        lines[key_path] = line
    return tree, lines


def _syntax_error(syntax: str, path: Path, text: str, line: int, column: int) -> str:
    """An error message with the line at which parsing stopped."""
    lines = text.splitlines() or [""]
    line_text = lines[min(line, len(lines)) - 1]
    if syntax == "YAML" and "\t" in line_text[: len(line_text) - len(line_text.lstrip())]:
        problem = "the line is indented with a tab; use spaces"
    elif line > len(lines) or column > len(line_text.rstrip()):
        problem = f"after {line_text.strip()!r:.100} a value, a bracket or a quote is missing"
    else:
        problem = f"{line_text.strip()!r:.100} cannot be read at column {column}"
    return f"{path}:{line}: this is not valid {syntax}: {problem}."


def _key_lines(node: yaml.MappingNode, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    for key, value in node.value:
        key_path = (*prefix, str(key.value))
        yield key_path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _key_lines(value, key_path)


# --- overrides -------------------------------------------------------------------------------


def _split(arguments: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--a.b value``, ``--a.b=value`` and ``a.b=value`` as pairs."""
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        dashes = len(word) - len(word.lstrip("-"))
        name, equals, text = word[dashes:].partition("=")
        if dashes == 1 or (not name and dashes):
            raise ConfigError(f"there is no option {word}{did_you_mean(name, options)}")
        if not dashes and not equals:
            raise ConfigError(
                f"{word!r} is an unexpected argument: a recipe is followed by overrides, such as "
                "--run.steps 50 or run.steps=50."
            )
        if not equals and not (remaining and not remaining[0].startswith("--")):
            if name not in known_keys():
                hint = did_you_mean(name, [*known_keys(), *options])
                raise ConfigError(f"there is no key or option {word}{hint}")
            raise ConfigError(
                f"override {word!r} has no value; write --{name} VALUE or {name}=VALUE."
            )
        yield name, text if equals else remaining.pop(0)


def _check_override(name: str, options: Sequence[str]) -> None:
    if name not in known_keys():
        problem = "key or option" if options else "key"
        hint = did_you_mean(name, [*known_keys(), *options])
        raise ConfigError(f"override --{name}: there is no such {problem}{hint}")


def _value(text: str) -> object:
    """Lists, tables and null are parsed as YAML; other text is coerced by the config classes."""
    if text[:1] in {"[", "{"}:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override value {text!r} is not valid YAML: {error}") from None
    return None if text in {"null", "~"} else text


def set_key(tree: Tree, name: str, value: object) -> None:
    """Set ``name``, such as ``optimizer.lr``, in a nested mapping.

    Raises:
        ConfigError: the recipe has a value where the name has a section.
    """
    *sections, last = name.split(".")
    for key in sections:
        section = tree.setdefault(key, {})
        if not isinstance(section, dict):  # `precision: bf16`, then --precision.reduce_dtype
            raise ConfigError(
                f"override --{name}: the recipe gives {key} as {section!r}; write it there as a "
                "table, or override it as a whole."
            )
        tree = section
    tree[last] = value
