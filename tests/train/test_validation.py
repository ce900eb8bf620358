from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.comm.transports.local import LocalComm
from shardwise.train.batches import Rows, evenly_spaced
from shardwise.train.records import Evaluated
from shardwise.train.validation import Validation, unigram_entropy

VOCABULARY = 11


class Counting(nn.Module):
    """Looks ids up in a fixed table of logits, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        self.passes = 0
        self.trained: list[bool] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        self.passes += 1
        self.trained.append(self.training)
        assert not torch.is_grad_enabled()
        assert not use_cache
        return CausalLMOutput(logits=self.table[input_ids])


def rows(count: int = 23) -> Rows:
    draw = np.random.default_rng(3)
    return Rows(draw.integers(0, VOCABULARY, count * 4 + 1).astype(np.int32), context=4)


def measured(world: int, count: int = 7, micro: int = 2) -> list[tuple[Evaluated, int]]:
    def rank(comm: Comm) -> tuple[Evaluated, int]:
        model = Counting()
        return Validation(rows(), count, micro).evaluate(model, comm, step=9), model.passes

    return threads.run(world, rank)


def test_the_loss_is_that_of_all_tokens_at_once() -> None:
    batch = rows().take(evenly_spaced(23, 7))
    logits = Counting().table[batch.ids].flatten(0, 1)
    expected = F.cross_entropy(logits, batch.targets.flatten()).item()
    right = (logits.argmax(-1) == batch.targets.flatten()).double().mean().item()
    (evaluated, _) = measured(1)[0]
    assert evaluated.loss == pytest.approx(expected, rel=1e-6)
    assert evaluated.accuracy == right
    assert evaluated.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
    assert (evaluated.step, evaluated.tokens) == (9, 28)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 7, 8])
def test_uneven_rows_change_nothing_and_no_rank_makes_a_pass_less(world: int, count: int) -> None:
    alone, _ = measured(1, count)[0]
    results = measured(world, count)
    assert len({passes for _, passes in results}) == 1
    assert len({evaluated.loss for evaluated, _ in results}) == 1
    assert results[0][0].loss == pytest.approx(alone.loss, rel=1e-12)
    assert results[0][0].accuracy == alone.accuracy
    assert results[0][0].tokens == alone.tokens == count * 4


def test_all_rows_are_used_if_there_are_fewer() -> None:
    assert measured(2, count=99)[0][0].tokens == 23 * 4


def test_the_model_is_evaluated_and_then_as_before() -> None:
    model = Counting()
    Validation(rows(), 4, 2).evaluate(model, LocalComm(), 0)
    assert model.trained == [False, False]
    assert model.training
    Validation(rows(), 4, 2).evaluate(model.eval(), LocalComm(), 0)
    assert not model.training


def test_the_entropy_of_equally_likely_tokens_is_the_logarithm_of_their_number() -> None:
    assert unigram_entropy(np.arange(50, dtype=np.int32)) == pytest.approx(math.log(50))


def test_the_entropy_of_one_token_is_zero() -> None:
    assert unigram_entropy(np.zeros(9, np.int32)) == 0.0


def test_the_entropy_is_the_best_loss_without_context() -> None:
    tokens = np.array([0, 0, 0, 1, 2, 2], np.int32)
    best = torch.tensor([3 / 6, 1 / 6, 2 / 6]).log()
    loss = F.cross_entropy(best.expand(6, 3), torch.from_numpy(tokens).long()).item()
    assert unigram_entropy(tokens) == pytest.approx(loss, rel=1e-6)


def test_the_entropy_is_over_exactly_the_tokens_that_are_predicted() -> None:
    source = rows()
    targets = source.take(evenly_spaced(23, 7)).targets.numpy()
    assert measured(3)[0][0].unigram_entropy == unigram_entropy(targets)
