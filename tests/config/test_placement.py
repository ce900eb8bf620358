"""What follows from the axes over which parameters, gradients and optimizer state are split."""

from __future__ import annotations

import pytest

from shardwise.config.placement import Placement
from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError

FOLLOWS = {  # splits, splits copies, resident, frees, hybrid, words
    "no_shard": (False, False, True, False, False, "replicated"),
    "zero1": (True, False, True, False, False, "sharded"),
    "shard_grad_op": (True, False, False, False, False, "sharded"),
    "full_shard": (True, False, False, True, False, "sharded"),
    "hybrid_shard_zero2": (True, False, False, False, True, "sharded"),
    "hybrid_shard": (True, False, False, True, True, "sharded"),
    "hybrid_full": (True, True, False, True, True, "sharded"),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_where_things_live_says_what_is_kept_and_what_is_freed(name: str) -> None:
    one = placement_of(name)
    facts = (one.splits, one.splits_copies, one.resident, one.frees, one.hybrid, one.words)
    assert facts == FOLLOWS[name]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (((), (), ("rows",)), "'mine' has no axis 'rows': parameters=(), gradients=(), opt"),
        (
            (("shard",), (), ("shard",)),
            "'mine' shards gradients or the optimizer over too few axes: parameters=",
        ),
        (((), ("shard",), ()), "'mine' shards gradients or the optimizer over too few axes"),
        (((), ("replicate",), ("replicate",)), "'mine' shards gradients over \"replicate\""),
        (((), (), ("replicate",)), "'mine' shards optimizer over \"replicate\""),
    ],
)
def test_what_no_optimizer_could_step_on_is_refused(
    axes: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Placement("mine", *axes)
    assert text in str(error.value)


def test_any_order_of_the_axes_will_do() -> None:
    assert Placement("mine", (), ("shard",), ("replicate", "shard"), hybrid=True).splits_copies
