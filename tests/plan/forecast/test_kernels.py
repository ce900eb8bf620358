"""Single calls of operators: what they compute, and what they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.plan.forecast.kernels import is_kernel, moved, products
from shardwise.plan.forecast.work import Product
from shardwise.torch_internals import flash_attention, grouped_mm

aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_product_is_known_by_its_shapes() -> None:
    left, right = empty(3, 4), empty(4, 5)
    plain = [Product(3, 5, 4, 1, 4, aligned=4)]
    assert products(aten.mm.default, (left, right), [empty(3, 5)]) == plain
    biased = products(aten.addmm.default, (empty(5), left, right), [empty(3, 5)])
    assert biased == plain
    half = torch.bfloat16
    stacked = (empty(7, 3, 4, dtype=half), empty(7, 4, 5, dtype=half))
    assert products(aten.bmm.default, stacked, [empty(7, 3, 5)]) == [
        Product(3, 5, 4, 7, 2, aligned=2)
    ]
    assert products(aten.add.Tensor, (left, left), [left]) == []


def test_a_product_is_as_aligned_as_what_lies_together_in_each_matrix() -> None:
    half = torch.bfloat16

    def aligned(left: Tensor, right: Tensor) -> int:
        (product,) = products(aten.mm.default, (left, right), [left @ right])
        return product.aligned

    x, head = empty(33, 768, dtype=half), empty(50_257, 768, dtype=half)
    logits = empty(33, 50_257, dtype=half)
    assert aligned(x, head.t()) == aligned(logits, head) == aligned(logits.t(), x) == 2
    assert aligned(x, empty(50_304, 768, dtype=half).t()) == 16  # an odd number of tokens is none
    assert aligned(x, empty(772, 768, dtype=half).t()) == 8


def test_the_rows_of_groups_are_divided_evenly() -> None:
    rows, ends = empty(8, 4), empty(3)
    listed = products(grouped_mm.default, (rows, empty(3, 4, 5), ends), [empty(8, 5)])
    assert listed == [Product(3, 5, 4, 2, 4), Product(2, 5, 4, 1, 4)]
    of_weights = products(grouped_mm.default, (rows.t(), empty(8, 5), ends), [empty(3, 4, 5)])
    assert of_weights == [Product(4, 5, 3, 2, 4), Product(4, 5, 2, 1, 4)]
    few = products(grouped_mm.default, (empty(3, 5, 4), empty(4, 2), ends), [empty(5, 2)])
    assert few == [Product(5, 1, 4, 2, 4)]


def test_a_convolution_is_a_product_over_places() -> None:
    # [2, 6, 9] with filters [8, 3, 3] in two groups
    args: list[Any] = [empty(2, 6, 9), empty(8, 3, 3), None, [1], [0], [1], False, [0], 2]
    listed = products(aten.convolution.default, args, [empty(2, 8, 7)])
    assert listed == [Product(2 * 7, 4, 9, 2, 4, "conv")]
    assert listed[0].flops == 2 * (2 * 8 * 7) * 9


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_scores_and_a_mixture(causal: bool) -> None:
    query, seen = empty(2, 3, 5, 8), empty(2, 3, 7, 8)
    args = (query, seen, seen, 0.0, causal)
    assert products(flash_attention.default, args, [query]) == [
        Product(5, 7, 8, 6, 4, "attention", causal),
        Product(5, 8, 7, 6, 4, "attention", causal),
    ]


def test_views_and_memory_without_values_run_nothing() -> None:
    x = empty(4, 6)
    assert not is_kernel(aten.view.default, [x], [x.view(24)])
    assert not is_kernel(aten.empty_like.default, [x], [empty(4, 6)])
    assert is_kernel(aten.relu.default, [x], [empty(4, 6)])
    assert is_kernel(aten.add_.Tensor, [x, x], [x])


def test_bytes_are_those_read_and_written_and_only_rows_of_a_table() -> None:
    x = empty(4, 6)
    assert moved(aten.relu.default, [x], [empty(4, 6)]) == 2 * 96
    assert moved(aten.mul.Tensor, [x, empty(6).expand(4, 6)], [empty(4, 6)]) == 96 + 24 + 96
    table, ids = empty(1000, 6), empty(4, dtype=torch.int64)
    assert moved(aten.embedding.default, [table, ids], [x]) == 96 + 32 + 96


def test_a_product_with_4_bit_codes_is_one_of_the_weights_shape() -> None:
    gemm = pytest.importorskip("bitsandbytes") and torch.ops.bitsandbytes.gemm_4bit.default
    x, codes = empty(2, 3, 8, dtype=torch.bfloat16), empty(20, 1, dtype=torch.uint8)
    output = empty(2, 3, 5, dtype=torch.bfloat16)
    assert products(gemm, (x, codes, (5, 8)), [output]) == [Product(6, 5, 8, 1, 2)]
