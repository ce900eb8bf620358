"""Messages of other libraries: those that are named are not shown, all others are."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable

import pytest
import torch

from shardwise.cli import other_libraries
from shardwise.cli.other_libraries import (
    LOGGED,
    WARNINGS,
    compiling_when_called,
    import_for,
    without_their_noise,
)
from shardwise.recipe.recipe import Recipe


def test_exactly_the_named_messages_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with without_their_noise():
        for message in WARNINGS:
            warnings.warn(message, FutureWarning, stacklevel=1)  # else an error in these tests
        with pytest.warns(FutureWarning, match="something else"):
            warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
        for name, text in LOGGED.items():
            for message in (f"{text} and more", f"not {text}"):
                logging.getLogger(name).warning(message)
    for name, text in LOGGED.items():
        logging.getLogger(name).warning(text)
    texts = list(LOGGED.values())
    assert [record.message for record in caplog.records] == [*(f"not {t}" for t in texts), *texts]


def test_what_a_model_is_made_with_is_imported_and_no_garbage_collected_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = list[tuple[str, bool]]()
    monkeypatch.setattr(
        other_libraries, "import_module", lambda name: imported.append((name, gc.isenabled()))
    )
    import_for(Recipe())
    assert imported == []
    import_for(Recipe.model_validate({"model": {"from": "folder"}, "adapter": {"rank": 8}}))
    assert imported == [("transformers.modeling_utils", False), ("peft", False)]
    assert gc.isenabled()


def test_what_is_decorated_while_libraries_are_imported_is_compiled_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[tuple[object, bool]] = []

    def compile_now(function: Callable[..., object], *, dynamic: bool) -> Callable[..., object]:
        compiled.append((function, dynamic))
        return function

    def double(number: int) -> int:
        return 2 * number

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiling_when_called():
        later = torch.compile(dynamic=False)(double)
    assert torch.compile is compile_now
    assert (later.__name__, compiled) == ("double", [])
    assert (later(1), later(2), compiled) == (2, 4, [(double, False)])
