"""An example imports what any program may, or says in its first lines what else, and why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardwise as sw
from tests.examples.run import EXAMPLES
from tests.test_surface import Source

PUBLIC = {*sw.__all__, "integrations"}


def private_rooms(program: Path) -> set[str]:
    """``shardwise.train`` of ``from shardwise.train.data import prepare``."""
    imported = Source(program.stem, program.read_text("utf-8")).imports
    parts = [name.split(".") for name in imported if name.startswith("shardwise.")]
    return {f"shardwise.{room}" for _, room, *_ in parts if room not in PUBLIC}


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_names_what_it_imports_that_is_not_public(program: Path) -> None:
    text = ast.get_docstring(ast.parse(program.read_text("utf-8"))) or ""
    named = {room for room in private_rooms(program) if room in text}
    assert named == private_rooms(program)
    assert not named or "no public names" in text


def test_the_examples_that_finetune_import_public_names_alone() -> None:
    for name in ("trace_zero2", "hf_trainer", "trl_sft"):
        assert private_rooms(EXAMPLES / f"{name}.py") == set()
