"""Sums over ranks: their order, their dtype, and where the division happens."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardwise.comm.codec import Codec
from shardwise.comm.protocol import Comm, Label, Pending
from shardwise.comm.reduction import Reduction, _sum_decoded, sum_in_rank_order
from shardwise.comm.transports.local import LocalComm
from tests.comm.laws import values
from tests.comm.transports.test_backend import Named
from tests.fake import FakeComm
from tests.ranks import run_threads

FP32, BF16 = torch.float32, torch.bfloat16


def test_sums_go_from_rank_to_rank_and_are_wide() -> None:
    tiny = 2.0**-10
    pieces = [torch.tensor([1.0]), torch.tensor([tiny]), torch.tensor([-1.0])]
    narrow = [piece.bfloat16() for piece in pieces]
    wide, rounded = torch.empty(1), torch.empty(1, dtype=BF16)
    sum_in_rank_order(wide, narrow)
    sum_in_rank_order(rounded, narrow)
    assert wide.item() == tiny  # each addend was widened first
    assert rounded.item() == 0.0  # 1 + 2^-10 is 1 in bfloat16
    sum_in_rank_order(wide, narrow, float(len(narrow)))
    assert wide.item() == pytest.approx(tiny / 3)
    sum_in_rank_order(wide, torch.stack(narrow), 2.0)
    assert wide.item() == tiny / 2


def test_a_sum_leaves_its_pieces_alone_and_needs_no_graph() -> None:
    pieces = [torch.ones(3, requires_grad=True), torch.ones(3)]
    out = torch.empty(3)
    sum_in_rank_order(out, pieces)
    assert not out.requires_grad
    assert torch.equal(pieces[1], torch.ones(3))


def test_on_cpu_a_sum_is_formed_in_chunks_that_stay_in_the_cache() -> None:
    n = 3 * 131_072 + 1
    out, full = torch.empty(n), torch.ones(4, n)
    with Named() as mode:
        sum_in_rank_order(out, [full[0], full[1]], 3.0)
    assert mode.names == ["aten::add.out", "aten::div_.Tensor"] * 4
    with Named() as mode:
        sum_in_rank_order(out, full, 3.0)
    assert mode.names == ["aten::sum.IntList_out"] * 13 + ["aten::div_.Tensor"]
    elsewhere = torch.empty(4, n, device="meta")
    with Named() as mode:
        sum_in_rank_order(elsewhere[0], elsewhere)
        sum_in_rank_order(elsewhere[0], [elsewhere[1], elsewhere[2]])
    assert mode.names == ["aten::sum.IntList_out", "aten::add.out"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("place", [0, 1, None])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
def test_the_last_addend_is_added_and_divided_in_one_pass_with_the_bits_of_two(
    ranks: int, place: int | None, dtype: torch.dtype
) -> None:
    pieces = [values(rank, 131_073, dtype) for rank in range(ranks)]
    pieces[0][:3] = torch.tensor([torch.inf, torch.nan, 3e38])
    expected = pieces[0]
    for piece in pieces[1:]:
        expected = expected + piece
    out = torch.empty_like(expected) if place is None else pieces[place]
    with Named() as mode:
        sum_in_rank_order(out, pieces, 4.0)
    assert mode.names.count("aten::addr.out") == (1 if ranks == 2 else 2)  # no chunks of two
    assert torch.equal(out.nan_to_num(7), (expected / 4).nan_to_num(7))


def test_a_sum_that_fp16_cannot_hold_is_infinite_though_its_mean_is_not() -> None:
    """A scaler looks for it, and so it is where a vendor's library sums."""
    pieces, out = [torch.tensor([40_000.0]).half() for _ in range(2)], torch.empty(1).half()
    sum_in_rank_order(out, pieces, 2.0)
    assert out.item() == torch.inf


def test_a_sum_of_encoded_pieces_does_not_depend_on_what_was_in_its_place() -> None:
    codec, out = Codec(torch.int8), torch.full((8,), torch.nan)
    row = codec.encode(torch.ones(8), 1, torch.empty(codec.nbytes(8), dtype=torch.uint8))
    _sum_decoded(out, codec, 2.0, [row] * 4)
    assert out.tolist() == [2.0] * 8


WIRES = [(FP32, FP32), (BF16, FP32), (torch.int8, FP32), (torch.float8_e4m3fn, FP32)]


@pytest.mark.parametrize(("wire", "wide"), WIRES)
def test_all_of_a_sum_is_the_pieces_of_it_bit_for_bit(wire: torch.dtype, wide: torch.dtype) -> None:
    """One collective, and as many bytes as two of halves."""
    how = Reduction(wire, wide, "sqrt", before=2.0, after=3.0)

    def rank(comm: Comm) -> None:
        def start(how: Reduction) -> Tensor:
            comm.counters.reset()
            full = comm.memory.gradient(2 * 300, FP32).copy_(values(comm.rank, 2 * 300, FP32))
            sent, out, pending = how.start(full, comm, Label("reduce"))
            before = sent.clone()
            pending.wait()
            assert torch.equal(sent, before)
            return out

        piece = start(how)
        halves = dict(comm.counters.bytes_sent)
        whole = start(replace(how, whole=True))
        assert comm.counters.calls == {"reduce": 1}
        assert comm.counters.bytes_sent == {"reduce": 2 * halves["reduce"]}
        pieces = comm.gather_rows(piece, Label("spread"))
        assert torch.equal(whole, pieces.view(-1))

    run_threads(2, rank)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 4.0])
def test_a_sum_in_place_leaves_the_other_pieces_alone(world: int, divisor: float) -> None:
    """Of ranks from the third on it must not be written before their own addend was read."""
    how, n = Reduction(FP32, FP32, after=divisor), 131_073  # more than a chunk

    def rank(comm: Comm) -> None:
        full = values(comm.rank, world * n, FP32)
        _, expected, pending = how.start(full.clone(), comm, Label("reduce"))
        pending.wait()
        in_place = replace(how, in_place=True)
        sent, out, pending = in_place.start(full.clone(), comm, Label("reduce"))
        pending.wait()
        assert out.data_ptr() == sent.view(world, n)[comm.rank].data_ptr()
        full.view(world, n)[comm.rank] = expected
        assert torch.equal(sent, full)

    run_threads(world, rank)


@pytest.mark.parametrize("divisor", [8.0, 3.0])
def test_a_quotient_is_the_nearest_number(divisor: float) -> None:
    values, out = torch.randn(1000), torch.empty(1000)
    sum_in_rank_order(out, [values], divisor)
    assert torch.equal(out, values / divisor)


def test_addends_are_narrowed_and_divided_before_they_travel() -> None:
    sent, out, pending = Reduction(BF16, FP32, "sqrt", before=2.0, after=2.0).start(
        torch.full((4,), 1.0 + 2.0**-12), FakeComm(0, 4), Label("reduce")
    )
    pending.wait()
    assert (sent.dtype, sent.tolist()) == (BF16, [0.5] * 4)
    assert out.tolist() == [1.0]


def test_one_rank_alone_is_divided_in_place() -> None:
    full = torch.tensor([6.0])
    sent, out, _ = Reduction(FP32, FP32, "predivide", before=2.0, after=3.0).start(
        full, LocalComm(), Label("reduce")
    )
    assert sent.data_ptr() == out.data_ptr() == full.data_ptr()
    assert out.tolist() == [1.0]


class Late(NamedTuple):
    """A sum that is there once it was waited for."""

    out: Tensor
    sums: list[Tensor]

    def wait(self) -> None:
        while self.sums:
            self.out.copy_(self.sums.pop())


class Backend(FakeComm):
    """Has a sum of its own: twice this rank's piece, for two ranks that hold the same."""

    has_reduce_scatter = True

    def __init__(self, has_average: bool) -> None:
        super().__init__(0, 2)
        self.has_average = has_average
        self.averages: list[bool] = []

    def reduce_scatter(self, out: Tensor, full: Tensor, average: bool, label: Label) -> Pending:
        self.averages.append(average)
        return Late(out, [full[: out.numel()] * (1 if average else 2)])


@pytest.mark.parametrize(
    ("has_average", "reduction", "averages"),
    [
        (True, Reduction(FP32, FP32, "avg"), [True]),
        (False, Reduction(FP32, FP32, "avg"), [False]),
        (True, Reduction(FP32, FP32, "postdivide", after=2.0), [False]),
        (True, Reduction(BF16, FP32, "avg"), []),  # one dtype travels, another is summed in
    ],
)
def test_a_backend_sums_where_one_dtype_travels_and_averages_where_it_can(
    has_average: bool, reduction: Reduction, averages: list[bool]
) -> None:
    comm = Backend(has_average)
    _, out, pending = reduction.start(torch.full((4,), 3.0), comm, Label("reduce"))
    for _ in range(2):  # the second time is free
        pending.wait()
    assert out.tolist() == [3.0, 3.0]
    assert comm.averages == averages
