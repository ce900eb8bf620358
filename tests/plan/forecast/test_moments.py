"""One walk through a step serves micro-batches of other rows."""

from __future__ import annotations

import pytest

from shardwise.plan.draw import draw
from shardwise.plan.forecast.memory import forecast
from shardwise.plan.forecast.moments import EngineMoments, activations
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.work import StepWork
from tests.plan.forecast.test_repeated import decoder
from tests.plan.forecast.test_search import inputs


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_the_most_of_other_rows_is_that_of_a_walk_with_them(strategy: str) -> None:
    blueprint = draw(decoder(), strategy, ranks=(0, 4))

    def observed(rows: int) -> StepWork:
        args, kwargs = inputs(rows)
        return observe(decoder(), blueprint.units, args, kwargs)

    few, many = observed(1), observed(8)
    engine = EngineMoments.of(forecast(blueprint, few.order, few), few)
    for work in (few, many):
        whole = forecast(blueprint, work.order, work)
        assert engine.most(work) == (whole.peak, whole.in_host)


def test_activations_are_known_before_each_span_and_after_the_last() -> None:
    blueprint = draw(decoder(), "full_shard", ranks=(0, 4))
    args, kwargs = inputs(2)
    work = observe(decoder(), blueprint.units, args, kwargs)
    spans = len(work.forward) + len(work.backward)
    assert [len(each) for each in activations(work)] == [spans + 1] * 3
