"""Checks of what a caller wrote: the names of options, and the types of their values.

Public functions and frozen dataclasses have their options in their signatures, where ``help()``,
an editor and a type checker find them. ``@checked`` answers a wrong one. Python's own TypeError
says neither what is meant nor what there is, and a value of a wrong type fails far from its line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from shardwise.errors import ConfigError, nearest
from shardwise.errors.synonyms import OTHER_NAMES, option_hint, option_key

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

_CALLS = {"Options": "shard strategy wrap comm", "SaveOptions": "save", "LoadOptions": "load"}
"""The entry points whose options are the fields of a dataclass, and what else they take."""

_NUMBERS: dict[object, type] = {int: Integral, float: Real}
_WORDS = {"int": "whole number", "float": "number", "str": "string", "dtype": "torch.dtype"}
_EXAMPLES = {
    "dtype": ("torch.bfloat16", "torch.float16", "torch.float32", "torch.int8"),
    "Module": ("the model in sw.shard(model), and not its parameters",),
    "Comm": ("sw.connect()",),
    "Wrap": ("sw.wrap.by_class('Block')",),
    "Precision": ("sw.Precision(param_dtype=torch.bfloat16)",),
    "Prefetch": ("sw.Prefetch(backward=0)",),
    "ActivationCheckpointing": ("sw.ActivationCheckpointing(every=2)",),
    "Sharded": ("sharded = sw.shard(model)",),
    "Placement": ('"full_shard"', '"shard_grad_op"', '"no_shard"'),
}


def checked(callee: C) -> C:
    """A function or frozen dataclass that answers wrong names and types by a ``ConfigError``."""
    return _decorated(callee, None)


def named(callee: C) -> C:
    """A method or frozen dataclass that answers wrong names alone.

    A value may be wrong on one rank only, and must then raise on all: a collective method hands it
    to a dataclass where all ranks meet.
    """
    return _decorated(callee, {})


def taken(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass from those of ``given``, such as a caller's ``locals()``, that are its fields."""
    return kind(**{item.name: given[item.name] for item in fields(kind)})  # type: ignore[arg-type]


def _decorated(callee: C, types: dict[str, Any] | None) -> C:
    if not isinstance(callee, type):
        return cast("C", _answering(callee, types))
    callee.__init__ = _answering(callee.__init__, types)  # type: ignore[misc]
    return callee


def _answering(function: Callable[..., Any], types: dict[str, Any] | None) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    owner = function.__qualname__.removesuffix(".__init__")
    call, *others = _CALLS.get(owner, owner.removesuffix("Policy")).split()
    known = sorted({*parameters, *others} - {"self"})
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", owner).lower()
    prefix = "" if call != owner or owner.islower() else f"{words}."  # such as "precision."

    @wraps(function)
    def answering(*args: Any, **given: Any) -> Any:
        for name in given.keys() - parameters.keys():
            raise ConfigError(f"{call}() has no option {name!r}; {_meant(name, known)}")
        for name, value in (dict(zip(parameters, args, strict=False)) | given).items():
            kind = (_types(function) if types is None else types).get(name, Any)
            if not _is_a(value, kind):
                hint = "" if option_key(name) else f" {option_hint(name)}.".replace(" .", "")
                raise ConfigError(f"{prefix}{name} is {_answer(value, kind)}{hint}")
        return function(*args, **given)

    return answering


_types = cache(get_type_hints)


def _meant(name: str, known: list[str]) -> str:
    """Return what an unknown option may mean, and which options exist."""
    renamed = f"that is {new}= here" if (new := OTHER_NAMES.get(name)) in known else ""
    hint = renamed or option_hint(name) or f"nearest is {nearest(name, known)[0]!r}"
    return f"{hint}. Options are {', '.join(known)}."


def _parts(kind: Any) -> list[Any]:
    """``A | B | None`` → A and B."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [part for part in parts if part is not NoneType]


def _is_a(value: object, kind: Any) -> bool:
    """Is ``value`` of the annotated type? Types inside of containers are not looked at."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is_a(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    kind = get_origin(kind) or kind
    if kind is Any or isinstance(kind, TypeVar) or getattr(kind, "_is_protocol", False):
        return True
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return isinstance(value, (tuple, list) if kind is tuple else kind)


def _answer(value: object, kind: Any) -> str:
    parts = _parts(kind)
    is_plain = isinstance(value, str | int | float | None)
    text = repr(value) if is_plain else f"a {type(value).__name__}"  # of a tensor it may be long
    choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if choices:
        return f"{text}; choose one of {', '.join(map(repr, choices))}."
    names = [(get_origin(part) or part).__name__ for part in parts]
    example = nearest(str(value), [e for name in names for e in _EXAMPLES.get(name, ())], 1)
    words = " or ".join(_WORDS.get(name, name) for name in names)
    return f"{text}, and not a {words}.{''.join(f' Pass one, for example {e}.' for e in example)}"
