"""Other libraries: how they are imported, and what they say at every run, which is left out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from importlib import import_module
from typing import Any

from shardwise.comm.garbage import uncollected
from shardwise.recipe.recipe import Recipe

WARNINGS = (
    # Of torch, about a module hook that a peer's death interrupts; our error says more.
    "module forward hook with ``always_call=True``",
    # Of transformers: peft asks for a name that it has changed.
    "`is_gradient_checkpointing` is deprecated",
    # Of peft: patterns that it writes itself for experts, whose weights are in no module.
    "The following rank_pattern keys did not match any targeted module",
    "The following alpha_pattern keys did not match any targeted module",
)
LOGGED = {
    # It is a faster kernel for inference, of a package on the hub; training does not use it.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # Our error names the line; this one says less.
    "datasets.packaged_modules.json.json": "Failed to load JSON from file",
}


def import_for(recipe: Recipe) -> None:
    """Import what the recipe's model is made with; where it is absent, whoever needs it says so."""
    with uncollected(), compiling_when_called(), without_their_noise(), suppress(ImportError):
        if recipe.model.source is not None:
            import_module("transformers.modeling_utils")
        if recipe.adapter.rank is not None:
            import_module("peft")


@contextmanager
def compiling_when_called() -> Iterator[None]:
    """Delay ``torch.compile`` of a function in the block until that is called.

    bitsandbytes asks for three as it is imported, and so for all of ``torch._inductor``: 0.9 s and
    41 MiB of each rank, though no recipe calls them.
    """
    import torch

    compile_now: Any = torch.compile

    def compile_later(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(compile_later, **options)
        compiled = cache(partial(compile_now, function, **options))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


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
