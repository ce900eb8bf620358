"""The reference has everything that a program calls, and nothing that does not exist."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import ModuleType

import yaml

import shardwise as sw

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text("utf-8")
NOT_FOR_PROGRAMS = {"admitted"}  # what the methods of other files call


def listed() -> dict[str, list[str]]:
    """Entry → its members, as the page lists them."""
    entries = re.findall(r"^::: (\S+)\n(    options:\n(?:      .*\n)+)", PAGE, re.MULTILINE)
    options = {name: yaml.safe_load(text)["options"]["members"] for name, text in entries}
    return {name: members or [] for name, members in options.items()}


def resolved(path: str) -> object:
    module, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError:
        return getattr(import_module(module), name)


def test_what_is_listed_exists() -> None:
    missing = [
        f"{path}.{member}"
        for path, members in listed().items()
        for member in members
        if not hasattr(resolved(path), member)
    ]
    assert missing == []


def test_every_public_name_is_listed() -> None:
    names = {path.rpartition(".")[2] for path in listed()}
    names |= {member for members in listed().values() for member in members}
    values = {name: getattr(sw, name) for name in sw.__all__}
    public = {n for n, value in values.items() if callable(value) or type(value) is not ModuleType}
    for module in (sw.optim, sw.nn):
        public |= set(module.__all__)
    assert sorted(public - names) == []


def test_every_method_of_the_handle_is_listed() -> None:
    methods = {
        name
        for name, value in vars(sw.Sharded).items()
        if not name.startswith("_") and (isfunction(value) or isinstance(value, property))
    }
    names = {*listed()["shardwise.api.sharded.Sharded"], *listed()["shardwise.checkpoint.api"]}
    assert methods - NOT_FOR_PROGRAMS - names == set()
