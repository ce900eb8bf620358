"""Nested configurations as flat keys with dots, and back.

``MixedPrecision(param_dtype=…)`` passed as ``mixed_precision`` is ``mixed_precision.param_dtype``;
of ``partial(policy, a=1)`` the function is the key itself, and ``a`` is below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from shardwise.dialects.settings import Expression


def flatten(value: Any, words: str = "", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its value, in order.

    Args:
        words: a key whose value is a list of words, each of which becomes a key that is ``True``.
    """
    parts = _parts(value, is_words=bool(words) and prefix == words)
    if prefix and not parts:
        yield prefix, value
    for name, part in parts.items():
        yield from flatten(part, words, ".".join(filter(None, (prefix, name))))


def _parts(value: Any, is_words: bool) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, partial):
        return {"": value.func.__name__, **value.keywords}
    if type(value).__name__ == "ModuleWrapPolicy":
        return {"": "ModuleWrapPolicy", "module_classes": next(iter(vars(value).values()))}
    is_words = is_words and not isinstance(value, Expression)
    if is_words and isinstance(value, str | list) and value not in ("true", "false"):
        words = value.replace(",", " ").split() if isinstance(value, str) else value
        return {str(getattr(word, "value", word)): True for word in words}
    if is_dataclass(value) and not isinstance(value, type):
        public = (item.name for item in fields(value) if not item.name.startswith("_"))
        return {name: getattr(value, name) for name in public}
    return {}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of these keys; a key that is also a section has its value under ``""``."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            if not isinstance(inner.get(section, {}), dict):
                inner[section] = {"": inner[section]}
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree
