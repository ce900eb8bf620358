from __future__ import annotations

import math

from shardwise.train.records import Evaluated


def evaluated(loss: float) -> Evaluated:
    return Evaluated(3, loss, 0.5, 6.0, 100, 1.0)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert evaluated(2.0).perplexity == math.exp(2.0)


def test_a_perplexity_that_overflows_is_infinite() -> None:
    assert evaluated(709.0).perplexity == math.exp(709.0)
    assert evaluated(710.0).perplexity == math.inf
    assert math.isnan(evaluated(math.nan).perplexity)
