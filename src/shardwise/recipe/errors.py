"""Error messages for a recipe: file and line or override, key, and the value to write instead.

pydantic's messages name classes and no lines. They are translated here, one sentence per value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from shardwise.recipe.key_suggestions import suggestions
from shardwise.recipe.recipe import Recipe, keys

KeyPath = tuple[str, ...]

_RULES = {
    "int_parsing": "be a whole number",
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "float_parsing": "be a number",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "bool_parsing": "be true or false",
    "bool_type": "be true or false",
    "string_type": "be text; put it in quotes",
    "string_too_short": "not be empty",
    "string_pattern_mismatch": "be the name or address of a host, without port or brackets",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
}


class ValueOrigins(NamedTuple):
    """The origin of each value.

    Attributes:
        path: the file.
        lines: the line of each key, if known.
        overrides: key → text, as given on the command line.
    """

    path: str
    lines: Mapping[KeyPath, int]
    overrides: Mapping[str, str]

    def __call__(self, key_path: KeyPath, sentence: str = "") -> str:
        """The origin of the value at ``key_path``; ``sentence`` may name the keys involved."""
        name = ".".join(key_path)
        if overrides := list(self._overrides_of(name, sentence)):
            return f"override{'s' * (len(overrides) > 1)} {' '.join(overrides)}"
        for length in range(len(key_path), 0, -1):  # a missing key has its section's line
            if key_path[:length] in self.lines:
                return f"{self.path}:{self.lines[key_path[:length]]}: {name}"
        return f"{self.path}: {name}" if name else self.path

    def _overrides_of(self, name: str, sentence: str) -> Iterator[str]:
        """Overrides of this key or section; for the whole recipe those that ``sentence`` names."""
        for key, text in self.overrides.items():
            if key == name:
                yield f"--{key}"
            elif name.startswith(f"{key}."):  # in a table that is given as a whole
                yield f"--{key}: {name}"
            elif key.startswith(f"{name}.") or (not name and key in sentence):
                yield f"--{key} {text}"


def error_messages(error: ValidationError, origins: ValueOrigins) -> Iterator[str]:
    """One sentence for each invalid value."""
    by_key: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for problem in error.errors():
        by_key.setdefault(_key_path(problem["loc"]), []).append(problem)
    for key_path, problems in by_key.items():
        yield _message(key_path, problems, origins)


def known_keys() -> list[str]:
    """The names of all keys and sections."""
    names = [key.name for key in keys()]
    return list(dict.fromkeys([*names, *(name.rpartition(".")[0] for name in names)]))


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The end of a sentence that reports an unknown ``name``."""
    if suggested := suggestions(name, names):
        return f"; did you mean {' or '.join(suggested)}?"
    return ". `shardwise train --help` lists all."


def _message(
    key_path: KeyPath, problems: Sequence[Mapping[str, Any]], origins: ValueOrigins
) -> str:
    problem = problems[0]
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        hint = did_you_mean(".".join(key_path), known_keys())
        return f"{origins(key_path)}: there is no such key{hint}"
    if problem["type"] == "value_error":  # raised by a validator of ours
        sentence = str(problem["ctx"]["error"])
        return f"{origins(key_path, sentence)}: {sentence}"
    rule = _RULES.get(problem["type"], "") if len({p["type"] for p in problems}) == 1 else ""
    limits = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in problem.get("ctx", {}).items()
    }
    advice = f"it must {rule.format(**limits)}" if rule else _expected(key_path)
    value = "empty" if problem["input"] is None else f"{problem['input']!r:.80}"
    return f"{origins(key_path)} is {value}; {advice}."


def _expected(key_path: KeyPath) -> str:
    """The value that belongs at ``key_path``, if no rule says it: a table, a list, or other."""
    name = ".".join(key_path)
    inner = [key.name for key in keys() if key.name.startswith(f"{name}.")]
    if inner:
        first = ", ".join(key.removeprefix(f"{name}.") for key in inner[:3])
        return f"it must be a table of keys, such as {first}"
    key = next((key for key in keys() if key.name == name), None)
    if key is not None and isinstance(key.default, tuple):
        if key.values:
            return f"it must be a list of {', '.join(key.values)}, such as [{key.values[0]}]"
        return f"it must be a list like {json.dumps(key.default)}"
    return f"expected {key.sentence if key else 'another value'}"


def _key_path(loc: Iterable[str | int]) -> KeyPath:
    """Pydantic's location without the parts that are not keys of the recipe."""
    key_path: list[str] = []
    model: type[BaseModel] | None = Recipe
    for part in map(str, loc):
        if model is None:
            break
        key_path.append(part)
        field = model.model_fields.get(part)
        kind = None if field is None else field.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return tuple(key_path)
