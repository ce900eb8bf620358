"""Reading a recipe: YAML or TOML, then overrides, then one check of everything.

Two traps of the ordinary way are closed here. PyYAML reads `lr: 1e-4` as the text "1e-4"
and keeps the last of two equal keys; values are therefore coerced by the typed tree, and equal
keys are refused. And a message from a schema library names a path but not a line; here
every message names the file, the line, and the nearest key that exists.
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
from shardwise.train.complaints import Where, complaints, did_you_mean, known
from shardwise.train.config import Key, Recipe, keys

__all__ = ["Key", "flat", "keys", "read_recipe", "resolved"]

Path_ = tuple[str, ...]
Tree = dict[str, Any]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as ``{"optimizer.lr": 1e-3, …}``; what is no section is a value."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), options: Sequence[str] = ()
) -> Recipe:
    """The recipe in ``path`` with ``overrides`` applied, checked as a whole.

    Args:
        path: a ``.yaml``, ``.yml`` or ``.toml`` file.
        overrides: ``--a.b value``, ``--a.b=value`` or ``a.b=value``, as split by a shell.
        options: of the command, such as ``--nproc``, which somebody may have meant.

    Raises:
        ConfigError: naming the file, the line where there is one, and the nearest key.
    """
    path = Path(path)
    tree, lines = _parse(path)
    changes = dict(_split(overrides, options))
    for name, text in changes.items():
        _check_override(name, options)
        _put(tree, name.split("."), _value(text), name)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        where = Where(str(path), lines, changes)
        raise ConfigError("\n".join(complaints(error, where))) from None


def resolved(recipe: Recipe) -> str:
    """The whole tree as YAML, defaults included; reading it back gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


# --- files -----------------------------------------------------------------------------------


def _parse(path: Path) -> tuple[Tree, dict[Path_, int]]:
    """The file's tree, and the line of each key (YAML only)."""
    if path.suffix not in {".yaml", ".yml", ".toml"}:
        raise ConfigError(f"recipe {path}: expected a .yaml, .yml or .toml file.")
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        beside = (
            sorted(p.name for p in path.parent.glob("*.[yt]*ml")) if path.parent.is_dir() else []
        )
        there = f" There are: {', '.join(beside)}." if beside else ""
        raise ConfigError(f"recipe {path} does not exist.{there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}.") from None
    return _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)


def _parse_toml(path: Path, text: str) -> tuple[Tree, dict[Path_, int]]:
    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+), column (\d+)", str(error))
        line, column = (int(place[1]), int(place[2])) if place else (len(text.splitlines()) + 1, 1)
        raise ConfigError(_not_valid("TOML", path, text, line, column)) from None


def _parse_yaml(path: Path, text: str) -> tuple[Tree, dict[Path_, int]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
        places = list(_lines(root)) if isinstance(root, yaml.MappingNode) else []
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise ConfigError(_not_valid("YAML", path, text, line, column)) from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(
            f"recipe {path} is not valid YAML: it holds characters that are not text, or is nested "
            "without end. Look whether it is a recipe."
        ) from None
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode) or not isinstance(tree, dict):
        raise ConfigError(f"recipe {path} must be a table of sections (model:, data:, …).")
    lines: dict[Path_, int] = {}
    for place, line in places:
        if place in lines:
            raise ConfigError(
                f"{path}:{line}: {'.'.join(place)} is written twice, first in line {lines[place]}; "
                "remove one of them."
            )
        lines[place] = line
    return tree, lines


def _not_valid(form: str, path: Path, text: str, line: int, column: int) -> str:
    """Where reading stopped, in that line itself; parsers name what they expected there."""
    lines = text.splitlines() or [""]
    shown = lines[min(line, len(lines)) - 1]
    if form == "YAML" and "\t" in shown[: len(shown) - len(shown.lstrip())]:
        what = "the line is indented with a tab; use spaces"
    elif line > len(lines) or column > len(shown.rstrip()):
        what = f"after {shown.strip()!r:.100} a value, a bracket or a quote is missing"
    else:
        what = f"{shown.strip()!r:.100} cannot be read at column {column}"
    return f"{path}:{line}: this is not valid {form}: {what}."


def _lines(node: yaml.MappingNode, prefix: Path_ = ()) -> Iterator[tuple[Path_, int]]:
    for key, value in node.value:
        place = (*prefix, str(key.value))
        yield place, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, place)


# --- overrides -------------------------------------------------------------------------------


def _split(arguments: Sequence[str], options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--a.b value``, ``--a.b=value`` and ``a.b=value`` as pairs."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        dashes = len(word) - len(word.lstrip("-"))
        name, equals, text = word[dashes:].partition("=")
        if dashes == 1 or (not name and dashes):
            raise ConfigError(f"there is no option {word}{did_you_mean(name, options)}")
        if not dashes and not equals:
            raise ConfigError(
                f"{word!r} is one argument too many: a recipe is followed by overrides, such as "
                "--run.steps 50 or run.steps=50."
            )
        if not equals and not (left and not left[0].startswith("--")):
            if name not in known():
                hint = did_you_mean(name, [*known(), *options])
                raise ConfigError(f"there is no key or option {word}{hint}")
            raise ConfigError(
                f"override {word!r} has no value; write --{name} VALUE or {name}=VALUE."
            )
        yield name, text if equals else left.pop(0)


def _check_override(name: str, options: Sequence[str]) -> None:
    if name not in known():
        what = "key or option" if options else "key"
        hint = did_you_mean(name, [*known(), *options])
        raise ConfigError(f"override --{name}: there is no such {what}{hint}")


def _value(text: str) -> object:
    """Text as it is, for the typed tree to coerce; lists, tables and null are read as YAML."""
    if text[:1] in {"[", "{"}:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override value {text!r} is not valid YAML: {error}") from None
    return None if text in {"null", "~"} else text


def _put(tree: Tree, place: Sequence[str], value: object, name: str) -> None:
    for part in place[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):  # such as `precision: bf16`, then --precision.wire
            raise ConfigError(
                f"override --{name}: the recipe gives {part} as {branch!r}; write it there as a "
                "table, or override it as a whole."
            )
        tree = branch
    tree[place[-1]] = value
