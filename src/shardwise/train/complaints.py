"""What does not fit in a recipe, in its own words: file, line or override, key, and what to write.

A schema library speaks of its classes and names no line. Its verdicts are translated here, one
sentence for each value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from shardwise.train.config import Recipe, keys
from shardwise.train.synonyms import meant

__all__ = ["Where", "complaints", "did_you_mean", "known"]

Place = tuple[str, ...]

_MUST = {
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
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
}


class Where(NamedTuple):
    """Where values came from.

    Attributes:
        path: the file.
        lines: the line of each key, where that is known.
        overrides: key → text, as given on the command line.
    """

    path: str
    lines: Mapping[Place, int]
    overrides: Mapping[str, str]

    def __call__(self, place: Place, sentence: str = "") -> str:
        """What is to blame for what is wrong at ``place``, which ``sentence`` may tell more of."""
        name = ".".join(place)
        if blamed := list(self._blamed(name, sentence)):
            return f"override{'s' * (len(blamed) > 1)} {' '.join(blamed)}"
        for length in range(len(place), 0, -1):  # a missing key has its section's line
            if place[:length] in self.lines:
                return f"{self.path}:{self.lines[place[:length]]}: {name}"
        return f"{self.path}: {name}" if name else self.path

    def _blamed(self, name: str, sentence: str) -> Iterator[str]:
        """Overrides of this key, or in this section; of the whole recipe, those that it names."""
        for key, text in self.overrides.items():
            if key == name:
                yield f"--{key}"
            elif key.startswith(f"{name}.") or (not name and key in sentence):
                yield f"--{key} {text}"


def complaints(error: ValidationError, where: Where) -> Iterator[str]:
    """One sentence for each value that does not fit."""
    problems: dict[Place, list[Mapping[str, Any]]] = {}
    for problem in error.errors():
        problems.setdefault(_place(problem["loc"]), []).append(problem)
    for place, some in problems.items():
        yield _complaint(place, some, where)


def known() -> list[str]:
    """The names of all keys, and of sections, which can be given as a whole."""
    names = [key.name for key in keys()]
    return list(dict.fromkeys([*names, *(name.rpartition(".")[0] for name in names)]))


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The end of a sentence that says that there is no ``name``."""
    if near := meant(name, names):
        return f"; did you mean {' or '.join(near)}?"
    return ". `shardwise train --help` lists all."


def _complaint(place: Place, problems: Sequence[Mapping[str, Any]], where: Where) -> str:
    problem = problems[0]
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return f"{where(place)}: there is no such key{did_you_mean('.'.join(place), known())}"
    if problem["type"] == "value_error":  # our own sentence, raised inside the tree
        sentence = str(problem["ctx"]["error"])
        return f"{where(place, sentence)}: {sentence}"
    must = _MUST.get(problem["type"], "") if len(problems) == 1 else ""
    limits = {name: _plain(value) for name, value in problem.get("ctx", {}).items()}
    then = f"it must {must.format(**limits)}" if must else _wanted(place)
    value = "empty" if problem["input"] is None else f"{problem['input']!r:.80}"
    return f"{where(place)} is {value}; {then}."


def _plain(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else value


def _wanted(place: Place) -> str:
    """What belongs at ``place``, where no rule of one value says it: a table, or a list."""
    name = ".".join(place)
    inner = [key.name for key in keys() if key.name.startswith(f"{name}.")]
    if inner:
        first = ", ".join(key.removeprefix(f"{name}.") for key in inner[:3])
        return f"it must be a table of keys, such as {first}"
    key = next((key for key in keys() if key.name == name), None)
    if key is not None and isinstance(key.default, tuple):
        return f"it must be a list like {json.dumps(key.default)}"
    return f"expected {key.sentence if key else 'another value'}"


def _place(loc: Iterable[str | int]) -> Place:
    """The library's location, cut where it leaves the keys of the tree."""
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
