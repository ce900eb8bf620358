"""Which functions are right on shards, by their names, and which of them write."""

from __future__ import annotations

import pytest

from shardwise.memory.shard_tensor.elementwise import (
    COPIES,
    ELEMENTWISE,
    METADATA,
    bare_name,
    writes,
)

NAMES = {  # bare name, and whether the first operand is written
    "add": ("add", False),
    "add_": ("add", True),
    "__add__": ("add", False),
    "__iadd__": ("add", True),
    "__radd__": ("add", False),
    "__invert__": ("invert", False),
    "__rsub__": ("sub", False),
    "__ror__": ("or", False),
    "__isub__": ("sub", True),
    "_foreach_add_": ("add", True),
    "_foreach_norm": ("norm", False),
    "_fused_adam_": ("adam", True),
    "__repr__": ("repr", False),
    "__float__": ("__float__", False),
    "requires_grad_": ("requires_grad", True),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_one_function_have_one_bare_name(name: str) -> None:
    assert (bare_name(name), writes(name)) == NAMES[name]


def test_no_function_is_of_two_kinds() -> None:
    assert not ELEMENTWISE & COPIES
    assert not (ELEMENTWISE | COPIES) & METADATA
