from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from shardwise.train.batches import IGNORED, MicroBatch
from shardwise.train.decoder import Decoder
from shardwise.train.packed import Examples, SampleRows, pack
from tests.copies import assert_near
from tests.train.test_decoder import SHAPE, llama

NO = IGNORED
CONTEXT = 16


def examples(*samples: tuple[str, str]) -> Examples:
    """Examples of (prompt, answer): a token for each letter."""
    text = "".join(prompt + answer for prompt, answer in samples)
    trained = [mark for p, a in samples for mark in [False] * len(p) + [True] * len(a)]
    lengths = np.array([len(prompt + answer) for prompt, answer in samples])
    return Examples(np.array([ord(c) - 97 for c in text], np.int32), np.array(trained), lengths)


SAMPLES = examples(("abcd", "efg"), ("hi", "jklmnop"), ("q", "r"), ("stu", "vwxy"))


def loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """The sum, with transformers' arguments or with ours."""
    if isinstance(model, Decoder):
        logits = model(batch.ids, batch.positions, batch.segments)
    else:
        logits = model(batch.ids, position_ids=batch.positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def everything(rows: SampleRows) -> MicroBatch:
    return rows.take(np.arange(len(rows)))


def test_a_row_as_it_is_drawn() -> None:
    batch = everything(SampleRows(examples(("ab", "cd"), ("e", "fg")), context=8))
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]
    assert batch.targets.tolist() == [[NO, 2, 3, NO, 5, 6, NO, NO]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]


def test_without_packing_a_row_is_a_sample_and_the_longest_sets_the_length() -> None:
    rows = SampleRows(SAMPLES, CONTEXT, packed=False)
    batch = rows.take(np.array([2, 0]))
    assert batch.ids.tolist() == [[16, 17, 0, 0, 0, 0, 0], list(range(7))]
    assert batch.targets.tolist() == [[17, *[NO] * 6], [NO, NO, NO, 4, 5, 6, NO]]
    assert (batch.positions, batch.segments) == (None, None)
    assert len(rows) == 4


@pytest.mark.parametrize("packed", [True, False])
def test_an_end_token_with_the_id_of_the_padding_is_trained_on(packed: bool) -> None:
    """Masks are by place: the ``a`` at the end has id 0, as the padding has."""
    batch = everything(SampleRows(examples(("bc", "da"), ("bcdef", "ga")), 12, packed))
    assert (batch.targets == 0).sum() == 2


@pytest.mark.parametrize("packed", [True, False])
def test_a_negative_index_fills_the_shape_and_counts_for_nothing(packed: bool) -> None:
    rows = SampleRows(SAMPLES, CONTEXT, packed)
    batch = rows.take(np.array([1, -1]))
    assert (batch.targets[0] != IGNORED).sum() == rows.targets(np.array([1]))
    assert batch.targets[1].tolist() == [IGNORED] * batch.ids.shape[1]


@given(st.lists(st.integers(1, 20), max_size=60))
def test_each_sample_is_packed_once_and_no_row_is_overfull(lengths: list[int]) -> None:
    rows = pack(lengths, 20)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(sum(lengths[sample] for sample in row) <= 20 for row in rows)


def test_the_longest_goes_first_into_the_least_space() -> None:
    assert [row.tolist() for row in pack([4, 9, 6, 1, 7], 10)] == [[1, 3], [4], [2, 0]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=20))
def test_no_token_is_lost(shapes: list[tuple[int, int]]) -> None:
    samples = examples(*(("b" * prompt, "c" * answer) for prompt, answer in shapes))
    rows = SampleRows(samples, context=10)
    batch = everything(rows)
    assert batch.ids.numel() - rows.dropped == len(samples.ids)
    trained = sum(answer - (prompt == 0) for prompt, answer in shapes)  # nothing predicts the first
    assert (batch.targets == 2).sum() == trained == rows.targets(np.arange(len(rows)))


@pytest.mark.parametrize("ours", [True, False])
def test_the_loss_of_packed_rows_is_that_of_each_sample_alone(ours: bool) -> None:
    """And so are the gradients; in float64, so that what is left is rounding."""
    model = Decoder(SHAPE, vocabulary=61, context=CONTEXT)
    model = (model if ours else llama(model, SHAPE)).double()  # type: ignore[assignment]
    packed, alone = SampleRows(SAMPLES, CONTEXT), SampleRows(SAMPLES, CONTEXT, packed=False)
    assert len(packed) < len(alone)
    total = loss(model, everything(packed))
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    each = [loss(model, alone.take(np.array([i]))) for i in range(len(alone))]
    sum(each).backward()  # type: ignore[union-attr]
    assert total.item() == pytest.approx(sum(each).item(), rel=1e-13)  # type: ignore[union-attr]
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert_near(gradient, parameter.grad, 1e-10)
    padded = loss(model, everything(alone))  # rows of different lengths, without packing
    assert padded.item() == pytest.approx(total.item(), rel=1e-13)


def test_a_sample_does_not_see_the_one_before_it_to_the_bit() -> None:
    model = Decoder(SHAPE, vocabulary=61, context=CONTEXT)
    batch = everything(SampleRows(examples(("ab", "cde"), ("fg", "hi")), CONTEXT))
    other = batch.ids.clone()
    other[:, :5] += 20
    before, after = (model(ids, batch.positions, batch.segments) for ids in (batch.ids, other))
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, :5], after[:, :5])
