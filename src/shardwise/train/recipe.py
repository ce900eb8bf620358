"""Reading a recipe: YAML or TOML, then overrides, then one check of everything.

Two traps of the ordinary way are closed here. PyYAML reads `lr: 1e-4` as the text "1e-4"
and keeps the last of two equal keys; values are therefore coerced by the typed tree, and equal
keys are refused. And a message from a schema library names a path but not a line; here
every message names the file, the line, and the nearest key that exists.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from shardwise.errors import ConfigError, nearest
from shardwise.train.config import Recipe

__all__ = ["Key", "flat", "keys", "read_recipe", "resolved"]

Path_ = tuple[str, ...]
Tree = dict[str, Any]


class Key(NamedTuple):
    """One leaf of the tree: ``optimizer.lr``, its default, and its sentence."""

    name: str
    default: object
    sentence: str


def keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Key]:
    """Every key that a recipe may hold, in reading order."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield Key(prefix + name, field.default, field.description or "")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as ``{"optimizer.lr": 1e-3, …}``; what is no section is a value."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``path`` with ``overrides`` applied, checked as a whole.

    Args:
        path: a ``.yaml``, ``.yml`` or ``.toml`` file.
        overrides: ``--a.b value``, ``--a.b=value`` or ``a.b=value``, as split by a shell.

    Raises:
        ConfigError: naming the file, the line where there is one, and the nearest key.
    """
    path = Path(path)
    tree, lines = _parse(path)
    changes = dict(_split(overrides))
    known = [key.name for key in keys()]
    for name, text in changes.items():
        _check_override(name, known)
        _put(tree, name.split("."), _value(text), name)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        where = _Where(path, lines, frozenset(changes))
        raise ConfigError("\n".join(_explain(error, where))) from None


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
        raise ConfigError(f"recipe {path} is not valid TOML: {error}.") from None


def _parse_yaml(path: Path, text: str) -> tuple[Tree, dict[Path_, int]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not valid YAML: {error}") from None
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode) or not isinstance(tree, dict):
        raise ConfigError(f"recipe {path} must be a table of sections (model:, data:, …).")
    lines: dict[Path_, int] = {}
    for place, line in _lines(root):
        if place in lines:
            raise ConfigError(
                f"{path}:{line}: {'.'.join(place)} is written twice, first in line {lines[place]}; "
                "remove one of them."
            )
        lines[place] = line
    return tree, lines


def _lines(node: yaml.MappingNode, prefix: Path_ = ()) -> Iterator[tuple[Path_, int]]:
    for key, value in node.value:
        place = (*prefix, str(key.value))
        yield place, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, place)


# --- overrides -------------------------------------------------------------------------------


def _split(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--a.b value``, ``--a.b=value`` and ``a.b=value`` as pairs."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals and not (word.startswith("--") and left and not left[0].startswith("--")):
            raise ConfigError(
                f"override {word!r} has no value; write --{name} VALUE or {name}=VALUE."
            )
        yield name, text if equals else left.pop(0)


def _check_override(name: str, known: Sequence[str]) -> None:
    sections = {key.rsplit(".", 1)[0] for key in known}
    if name not in known and name not in sections:
        raise ConfigError(
            f"override --{name}: there is no such key; nearest {_either(nearest(name, known))}."
        )


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


# --- messages --------------------------------------------------------------------------------


class _Where(NamedTuple):
    """What is needed to say where a value came from."""

    path: Path
    lines: Mapping[Path_, int]
    overridden: frozenset[str]

    def __call__(self, place: Path_) -> str:
        name = ".".join(place)
        if name in self.overridden:
            return f"override --{name}"
        for length in range(len(place), 0, -1):  # a missing key has its section's line
            if place[:length] in self.lines:
                return f"{self.path}:{self.lines[place[:length]]}: {name}"
        return f"{self.path}: {name}" if name else str(self.path)


def _explain(error: ValidationError, where: _Where) -> Iterator[str]:
    """One sentence per value that does not fit."""
    seen: set[str] = set()
    for problem in error.errors():
        place = _place(problem["loc"])
        line = f"{where(place)}{_complaint(problem, place)}"
        if where(place) not in seen:  # unions complain once per alternative
            yield line
        seen.add(where(place))


def _complaint(problem: Mapping[str, Any], place: Path_) -> str:
    if problem["type"] == "extra_forbidden":
        return f": there is no such key; nearest {_either(_siblings(place))}."
    if problem["type"] == "value_error":  # our own sentence, raised inside the tree
        return f": {problem['ctx']['error']}"
    sentence = problem["msg"][0].lower() + problem["msg"][1:]
    return f" is {problem['input']!r}: {sentence}."


def _place(loc: Iterable[str | int]) -> Path_:
    """Pydantic's location, cut where it leaves the keys of the tree."""
    place: list[str] = []
    model: type[BaseModel] | None = Recipe
    for part in map(str, loc):
        if model is None:
            break
        place.append(part)
        field = model.model_fields.get(part)
        kind = None if field is None else field.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return tuple(place)


def _siblings(place: Path_) -> list[str]:
    """The nearest keys: beside this one, or anywhere if its name exists elsewhere."""
    name = place[-1]
    elsewhere = [key.name for key in keys() if key.name.rsplit(".", 1)[-1] == name]
    if elsewhere:
        return elsewhere
    model: type[BaseModel] = Recipe
    for part in place[:-1]:
        kind = model.model_fields[part].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            model = kind
    prefix = "".join(f"{part}." for part in place[:-1])
    return [prefix + near for near in nearest(name, model.model_fields)]


def _either(names: Sequence[str]) -> str:
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names)}"
