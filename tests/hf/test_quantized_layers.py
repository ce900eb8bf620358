"""4-bit weights are made whole in one memory in turn; products have bitsandbytes' bits."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from shardwise.hf import quantized_layers
from shardwise.hf.quantized_layers import KERNELS, Linear4bit, Linear8bit
from shardwise.plan.forecast.observe import observe
from shardwise.plan.units.units import choose_units
from shardwise.plan.units.wrap import by_class
from tests.nets import numbers

DTYPES = (torch.float32, torch.bfloat16)


def layer(form: str, double: bool, values: torch.dtype, compute: torch.dtype, sizes: Any) -> Any:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=form,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute,
    )
    like = nn.Linear(*sizes).to(values)
    quantised: Any = Linear4bit(like, config, torch.device("cpu"))
    codes, absmax = quantised.codes(like.weight.detach().reshape(-1))
    quantised.weight.data, quantised.scales.data = (
        codes.view(quantised.weight.shape),
        quantised.packed(absmax),
    )
    return quantised


def gradients(one: Any, x: Tensor, product: Any) -> list[Tensor]:
    x, one.bias.grad = x.clone().requires_grad_(), None
    out = product(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, one.bias.grad]


@pytest.mark.parametrize("sizes", [(64, 96), (192, 5), (32, 48)])
@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize(("form", "double"), [("nf4", True), ("fp4", False)])
def test_a_product_and_its_gradients_have_the_bits_of_bitsandbytes(
    form: str, double: bool, compute: Any, values: Any, sizes: Any
) -> None:
    one = layer(form, double, values, compute, sizes)
    x = numbers(0, (2, 5, sizes[0])).to(compute)

    def reference(x: Tensor) -> Tensor:
        bias = one.bias.to(compute)
        out: Tensor = bnb.matmul_4bit(x, one.weight, one.quantisation(), bias=bias)
        return out

    assert all(map(torch.equal, gradients(one, x, one), gradients(one, x, reference)))


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_an_8_bit_product_takes_its_input_in_any_shape(threshold: float) -> None:
    """DeepSeek's projection of keys has four dimensions, which bitsandbytes takes for two."""
    like = nn.Linear(8, 5)
    one = Linear8bit(like, BitsAndBytesConfig(llm_int8_threshold=threshold), torch.device("cpu"))
    codes, absmax = one.codes(like.weight.detach().reshape(-1))
    one.weight.data, one.scales.data = codes.view(5, 8), one.packed(absmax)
    x = numbers(0, (2, 3, 4, 8))
    for trains in (True, False):  # bitsandbytes has two ways
        one.train(trains)
        torch.testing.assert_close(one(x), one(x.view(-1, 8)).view(2, 3, 4, 5), rtol=0, atol=0)
        assert one(x[:0]).shape == (0, 3, 4, 5)  # an expert to which no token goes


def test_a_weight_is_written_where_it_stays_or_made_by_bitsandbytes_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its library has a function for each kind; one without them has the same bits."""
    forms = ("nf4", "fp4")
    assert all(quantized_layers._kernel(form, dtype) for form in forms for dtype in KERNELS)
    assert quantized_layers._kernel("nf4", torch.float64) is None
    one, x = layer("nf4", False, *DTYPES[:1] * 2, (64, 96)), numbers(0, (3, 64))
    in_place = gradients(one, x, one)
    quantized_layers._thread.memory.clear()
    monkeypatch.setattr(quantized_layers, "_kernel", lambda form, dtype: None)
    assert all(map(torch.equal, gradients(one, x, one), in_place))
    assert not quantized_layers._thread.memory


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_parts_are_quantised_to_the_codes_and_scales_of_the_whole(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, values = layer(form, False, *DTYPES[:1] * 2, (30, 33)), numbers(0, (990,))
    codes, state = bnb.functional.quantize_4bit(values, blocksize=64, quant_type=form)
    monkeypatch.setattr(quantized_layers, "PART", 256)
    assert all(map(torch.equal, one.codes(values), (codes.view(-1), state.absmax)))


def test_the_whole_weight_of_a_layer_is_where_that_of_the_one_before_was() -> None:
    memory = quantized_layers._thread.memory
    memory.clear()
    layers = [layer("nf4", False, torch.float32, torch.float32, s) for s in ((64, 96), (96, 64))]
    model = nn.Sequential(*layers)
    model(numbers(0, (3, 64)).requires_grad_()).sum().backward()
    assert [whole.numel() for whole in memory.values()] == [64 * 96]


def test_a_forecast_maps_the_blocks_that_the_layer_maps() -> None:
    model = nn.Sequential(layer("nf4", False, *DTYPES[:1] * 2, (64, 96)))
    rows = Linear4bit.maps_from // (4 * 96)
    for is_mapped, x in ((False, torch.ones(rows - 1, 64)), (True, torch.ones(rows, 64))):
        work = observe(model, choose_units(model, by_class(Linear4bit)), (x,), {})
        levels = [span.mapped if is_mapped else span.blocks for span in work.forward]
        assert max(level.peak for level in levels) >= 4 * 96 * len(x)


def test_a_derivative_of_a_derivative_keeps_its_weights() -> None:
    model = nn.Sequential(*[layer("nf4", False, *DTYPES[:1] * 2, (64, 64)) for _ in range(2)])
    x = numbers(0, (3, 64)).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert x.grad is not None
