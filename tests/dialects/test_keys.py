"""Nested configurations and flat keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from shardwise.dialects.keys import flatten, nest


@dataclass
class Dtypes:
    param: str | None = None
    _private: int = 0


def wrap_policy(module: object, size: int) -> None: ...


def test_mappings_dataclasses_and_partial_calls_are_read_part_by_part() -> None:
    tree = {"a": 1, "dtypes": Dtypes("bf16"), "wrap": partial(wrap_policy, size=3), "b": {}}
    flat = {"a": 1, "dtypes.param": "bf16", "wrap": "wrap_policy", "wrap.size": 3, "b": {}}
    assert dict(flatten(tree)) == flat


def test_a_list_of_words_is_a_key_for_each() -> None:
    assert dict(flatten({"fsdp": "full_shard, offload"}, words="fsdp")) == {
        "fsdp.full_shard": True,
        "fsdp.offload": True,
    }
    assert dict(flatten({"fsdp": "true"}, words="fsdp")) == {"fsdp": "true"}
    assert dict(flatten({"fsdp": True}, words="fsdp")) == {"fsdp": True}


def test_flat_keys_become_a_tree_that_reads_the_same() -> None:
    flat = {"wrap": "by_size", "wrap.size": 3, "a.b.c": 1, "a.b.d": 2}
    tree = nest(flat)
    assert tree == {"wrap": {"": "by_size", "size": 3}, "a": {"b": {"c": 1, "d": 2}}}
    assert dict(flatten(tree)) == flat
