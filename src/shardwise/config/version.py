"""The version that is installed; ``0+source`` of a source tree that is not."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("shardwise")
except PackageNotFoundError:
    __version__ = "0+source"
