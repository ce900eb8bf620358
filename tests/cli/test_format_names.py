"""Names from files reach a terminal as text and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.format_names import escape, escape_lines, escape_name


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("model.layers.0.größe", "model.layers.0.größe"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("a\rb\nc\td\x08", "a\\x0db\\x0ac\\x09d\\x08"),
        ("\x9b31m", "\\x9b31m"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),  # right-to-left override
        ("zero\u200bwidth\U000e0001", "zero\\u200bwidth\\U000e0001"),
    ],
)
def test_nothing_that_a_terminal_obeys_or_hides_is_shown(text: str, safe: str) -> None:
    assert escape(text) == safe


@given(st.text())
def test_what_is_shown_is_printable(text: str) -> None:
    assert escape(text).isprintable()
    assert escape_lines(text).count("\n") == text.count("\n")


def test_an_empty_name_is_seen() -> None:
    assert (escape_name(""), escape_name("a\x1b")) == ('""', "a\\x1b")
