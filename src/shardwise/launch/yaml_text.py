"""YAML as people write it: texts of several lines are blocks."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(*documents: dict[str, Any]) -> str:
    """The documents, with their keys in the order that they have."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
