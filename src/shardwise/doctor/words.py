"""The words and their texts. They are data, in ``words.toml``: no sentence is written in code."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from shardwise.errors import ConfigError, nearest


class Word(NamedTuple):
    """A word of the field.

    Attributes:
        name: as it is listed.
        also: other names of it.
        text: what it is, in paragraphs of plain text.
        links: where to read on.
        demo: a function of ``demos``, or ``""``.
    """

    name: str
    also: tuple[str, ...]
    text: str
    links: tuple[str, ...]
    demo: str


@cache
def words() -> dict[str, Word]:
    """All words by name, in the order in which they are best read."""
    read = tomllib.loads(files("shardwise.doctor").joinpath("words.toml").read_text("utf-8"))
    return {
        name: Word(name, tuple(w["also"]), w["text"].strip(), tuple(w["links"]), w.get("demo", ""))
        for name, w in read.items()
    }


def find(name: str) -> Word:
    """The word of that name, in any spelling: ``ZeRO-2``, ``all gather``, ``shard_grad_op``.

    Raises:
        ConfigError: there is none; the message lists the nearest.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    by_name = {other: word for word in words().values() for other in (word.name, *word.also)}
    if key not in by_name:
        raise ConfigError(
            f"there is no text about {name!r}; nearest are {', '.join(nearest(key, by_name))}. "
            "`shardwise explain` alone lists all words."
        )
    return by_name[key]
