"""Libraries that an extra installs, imported where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardwise.errors import ConfigError


def library(name: str, user: str, extra: str) -> Any:
    """Import ``name``. Raises ``ConfigError`` that names the ``extra`` where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(
            f"{user} needs the {name} library: pip install 'shardwise[{extra}]'."
        ) from None
