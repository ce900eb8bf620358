"""Time of kernels: large products reach the rate of the table, and small ones less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.plan.forecast.machine import Constants, known
from shardwise.plan.forecast.rates import CAST, FLASH1, Kernels, Rates
from shardwise.plan.forecast.work import Pass, Product

CONSTANTS = Constants(bandwidth=0.8, small=50, contention=0, short=100, narrow=10)
H100 = replace(
    known().accelerator("H100"), products=0.6, attention=0.5, flash2=0.5, kernel=1e-5, best=0.8
)
PLAIN = Rates(H100, Kernels(), CONSTANTS)
LARGE = Product(1000, 1000, 1000, 1, 2)
SCORES = Product(1000, 1000, 100, 8, 2, "attention")


def of(product: Product, times: int = 1) -> Pass:
    return Pass(((product, times),))


def test_a_product_takes_longer_by_a_share_that_grows_as_it_is_small() -> None:
    full = LARGE.flops / (989e12 * 0.6)
    assert PLAIN.seconds(of(LARGE)).products == pytest.approx(full * 1.15)
    narrow = replace(LARGE, m=10)
    assert PLAIN.seconds(of(narrow)).products == pytest.approx(full / 100 * 6.1)
    assert PLAIN.seconds(of(LARGE, times=3)).total == pytest.approx(3 * full * 1.15)


@pytest.mark.parametrize(
    ("name", "aligned", "rate"), [("A100", 2, 93e12), ("A100", 8, 150e12), ("H100", 2, 148e12)]
)
def test_rows_that_begin_anywhere_are_loaded_in_pieces(
    name: str, aligned: int, rate: float
) -> None:
    """4,096 squared on an A100: thonking.ai, What Shapes Do Matrix Multiplications Like?"""
    rates = replace(PLAIN, accelerator=known().accelerator(name))
    even = Product(4096, 4096, 4096, 1, 2)
    odd = replace(even, aligned=aligned)
    seconds = rates.seconds(of(odd)).products
    assert odd.flops / seconds == pytest.approx(rate, rel=0.01)
    compiled = replace(rates, kernels=Kernels(compiled=True))  # rows are padded
    assert rates.seconds(of(even)).products < compiled.seconds(of(odd)).products < seconds


@pytest.mark.parametrize("name", ["RTX 3090", "TPU v5e", "MI300X"])
def test_rows_may_begin_anywhere_where_loads_are_as_fast_as_products(name: str) -> None:
    rates = replace(PLAIN, accelerator=known().accelerator(name))
    assert rates.seconds(of(replace(LARGE, aligned=2))) == rates.seconds(of(LARGE))


def test_attention_has_its_own_rate_by_kernel_and_half_of_it_where_it_is_causal() -> None:
    full = SCORES.flops / (989e12 * 0.5) * 1.1 * 1.1
    first = replace(PLAIN, kernels=Kernels(attention="flash1"))
    fastest = replace(PLAIN, kernels=Kernels(attention="fastest"))
    assert fastest.seconds(of(SCORES)).attention == pytest.approx(full)
    assert PLAIN.seconds(of(SCORES)).attention == pytest.approx(2 * full)
    assert first.seconds(of(SCORES)).attention == pytest.approx(2 * full / FLASH1)
    assert PLAIN.seconds(of(replace(SCORES, causal=True))).attention == pytest.approx(full)


def test_other_kernels_take_their_bytes() -> None:
    assert PLAIN.seconds(Pass(moved=int(3.35e12 * 0.8))).moved == pytest.approx(1.0)


def test_products_of_some_units_may_be_narrow_and_their_inputs_are_cast() -> None:
    narrow = replace(PLAIN, kernels=Kernels(precision="fp8", narrow=frozenset({"blocks.0"})))
    wide, eight = narrow.seconds(of(LARGE), "head"), narrow.seconds(of(LARGE), "blocks.0")
    assert eight.products == pytest.approx(wide.products * 989 / 1979)
    assert eight.moved == pytest.approx(CAST * 1e6 / (3.35e12 * 0.8))


def test_the_host_bounds_small_kernels_and_on_a_cpu_its_time_adds() -> None:
    work = Pass(((LARGE, 1),), kernels=1000)
    assert PLAIN.seconds(work).total == PLAIN.seconds(work).host == pytest.approx(0.01)
    assert PLAIN.seconds(work).bound == "host"
    cpu = replace(PLAIN, accelerator=replace(H100, waits=True))
    seconds = cpu.seconds(work)
    assert seconds.total == seconds.device + seconds.host
    assert (seconds / 2 + seconds / 2).total == pytest.approx(seconds.total)


def test_python_takes_longer_to_start_a_kernel_than_a_graph_or_autograd() -> None:
    """32 blocks of 40 kernels took 39 ms: pytorch.org/blog/accelerating-generative-ai-2."""
    work, plain = Pass(kernels=32 * 40), replace(PLAIN, accelerator=known().accelerator("A100"))
    eager = plain.seconds(work, written=work.kernels)
    assert eager.host == pytest.approx(0.039, rel=0.25)
    assert plain.seconds(work).host < eager.host / 4
    compiled = replace(plain, kernels=Kernels(compiled=True))
    assert compiled.seconds(work, written=work.kernels) == plain.seconds(work)
    cpu = replace(plain, accelerator=replace(plain.accelerator, waits=True))
    assert cpu.seconds(work, written=work.kernels) == cpu.seconds(work)


def test_a_measured_machine_has_edges_and_an_engine_of_its_own() -> None:
    here = replace(H100, short=300.0, narrow=0.0, parameter=2e-5, unit=3e-4, waits=True)
    rates = replace(PLAIN, accelerator=here)
    by_constants = PLAIN.seconds(of(SCORES)).attention
    assert rates.seconds(of(SCORES)).attention == pytest.approx(by_constants / 1.21 * 1.3)
    assert rates.seconds(Pass(gradients=5)).host == pytest.approx(1e-4)
    assert rates.call.total == pytest.approx(1.5e-4)  # of a unit's two passes, each
    assert PLAIN.call.total == PLAIN.seconds(Pass(gradients=5)).total == 0
