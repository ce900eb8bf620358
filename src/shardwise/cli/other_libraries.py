"""Messages of other libraries that come with every run and ask for nothing: left out, by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

WARNINGS = (
    # Of torch, about a module hook that a peer's death interrupts; our error says more.
    "module forward hook with ``always_call=True``",
    # Of transformers: peft asks for a name that it has changed.
    "`is_gradient_checkpointing` is deprecated",
)
LOGGED = {
    # It is a faster kernel for inference, of a package on the hub; training does not use it.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # Our error names the line; this one says less.
    "datasets.packaged_modules.json.json": "Failed to load JSON from file",
}


@contextmanager
def without_their_noise() -> Iterator[None]:
    """Silence exactly these messages inside the block."""
    filters = {logging.getLogger(name): _Without(text) for name, text in LOGGED.items()}
    for logger, without in filters.items():
        logger.addFilter(without)
    try:
        with warnings.catch_warnings():
            for message in WARNINGS:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, without in filters.items():
            logger.removeFilter(without)


class _Without(logging.Filter):
    """Drops records that begin with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._text)
