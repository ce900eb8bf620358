"""What every Comm promises, as functions of one rank's comm: they assert, and return what came out.

Values differ by rank and are spread over many magnitudes, so that a wrong piece, a wrong order of
summation and a wrong rounding each change bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from shardwise.comm.protocol import Comm, Label, Pending
from shardwise.comm.reduction import PendingReduction, Reduction
from shardwise.errors import ConfigError, RanksDisagree

N = 7  # elements of a piece; odd on purpose

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What rank ``rank`` brings: any rank can work out every other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    mantissa = torch.randn(numel, generator=generator)
    exponent = torch.randint(-6, 7, (numel,), generator=generator)
    return (mantissa * 2.0**exponent).to(dtype)


def summed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Left to right, each sum rounded to ``dtype``: the definition, spelt out."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def own_piece(comm: Comm, n: int) -> slice:
    return slice(comm.rank * n, (comm.rank + 1) * n)


def gather(comm: Comm, dtype: torch.dtype, n: int, unit: str) -> tuple[Tensor, Pending]:
    full = torch.zeros(comm.size * n, dtype=dtype)
    full[own_piece(comm, n)] = values(comm.rank, n, dtype)
    return full, comm.all_gather(full, Label("gather", unit))


def gathers_concatenate_the_pieces(comm: Comm) -> list[Tensor]:
    gathered = []
    for dtype in DTYPES:
        full, pending = gather(comm, dtype, N, str(dtype))
        pending.wait()
        pieces = [values(rank, N, dtype) for rank in range(comm.size)]
        assert same_bits(full, torch.cat(pieces)), dtype
        gathered.append(full)
    return gathered


def reductions_sum_in_rank_order(comm: Comm) -> list[Tensor]:
    results = []
    for wire, wide in SUMS:
        for by in DIVISORS:
            out, expected = reduce(comm, wire, wide, by)
            assert same_bits(out, expected), (wire, wide, by)
            results.append(out)
    return results


DIVISORS: tuple[float | Literal["mean"], ...] = (1.0, 3.0, "mean")
SUMS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]


def reduce(
    comm: Comm, wire: torch.dtype, wide: torch.dtype, by: float | Literal["mean"]
) -> tuple[Tensor, Tensor]:
    """What came out, and what should have, of a sum that is divided ``by`` a number or the size."""
    full = values(comm.rank, comm.size * N, wire)
    before = full.clone()
    sent, out, pending = start_sum(comm, full, wide, by)
    pending.wait()
    assert comm.size == 1 or same_bits(sent, before)
    mine = own_piece(comm, N)
    parts = [values(rank, comm.size * N, wire)[mine] for rank in range(comm.size)]
    expected = summed(parts, wide)
    return out, expected / (comm.size if by == "mean" else by)


def start_sum(
    comm: Comm,
    full: Tensor,
    wide: torch.dtype = torch.float32,
    by: float | Literal["mean"] = 1.0,
    unit: str = "",
) -> PendingReduction:
    """Issue the sum of what the ranks hold, formed in ``wide`` and divided ``by`` that."""
    how, after = ("avg", 1.0) if by == "mean" else ("postdivide", by)
    reduction = Reduction(full.dtype, wide, how, after=after)
    return reduction.start(full, comm, Label("reduce", unit or f"{full.dtype}→{wide}"))


def sum_of(comm: Comm, full: Tensor, **options: Any) -> Tensor:
    """This rank's piece of the same, once it is there."""
    _, out, pending = start_sum(comm, full, **options)
    pending.wait()
    return out


def reductions_are_close(comm: Comm) -> list[Tensor]:
    """The promise of a backend that sums in an order of its own."""
    for wire, wide in SUMS:
        for by in DIVISORS:
            out, expected = reduce(comm, wire, wide, by)
            if wire == wide:
                torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-1)
            else:
                assert same_bits(out, expected), (wire, wide, by)
    return []


def a_message_may_be_the_same_for_every_rank(comm: Comm) -> list[Tensor]:
    """All of what a rank has goes to each of the others, from the same memory."""
    if comm.memory.shared or comm.has_reduce_scatter or comm.size == 1:
        return []
    comm.counters.reset()
    dtype, received = torch.float32, list[Tensor]()
    rows = values(comm.rank, N, dtype).expand(comm.size, -1)
    out = comm.memory.gradient(N, dtype)
    comm.exchange(rows, received.extend, Label("reduce", "all"), out).wait()
    assert comm.counters.bytes_sent == {"reduce": (comm.size - 1) * N * 4}
    for rank, piece in enumerate(received):
        assert same_bits(piece, values(rank, N, dtype))
    return []  # memory that is shared by processes has none


def rows_come_in_rank_order(comm: Comm) -> list[Tensor]:
    rows = comm.gather_rows(values(comm.rank, N, torch.float32), Label("gather", "rows"))
    assert same_bits(rows, torch.stack([values(r, N, torch.float32) for r in range(comm.size)]))
    return [rows]


def collectives_may_be_waited_for_in_any_order(comm: Comm) -> list[Tensor]:
    started = [gather(comm, torch.float32, n, f"unit {n}") for n in (1, 5000, 3, 70_000, 2)]
    sums = [
        start_sum(comm, values(comm.rank, comm.size * n, torch.float32), unit=str(n))
        for n in (4, 6000)
    ]
    # Each rank in an order of its own.
    pendings = [pending for _, pending in started] + [each.pending for each in sums]
    turn = comm.rank % len(pendings)
    for pending in reversed(pendings[turn:] + pendings[:turn]):
        pending.wait()
    for full, _ in started:
        n = full.numel() // comm.size
        assert torch.equal(full, torch.cat([values(r, n, torch.float32) for r in range(comm.size)]))
    for _, out, _ in sums:
        mine = own_piece(comm, out.numel())
        total = comm.size * out.numel()
        parts = [values(r, total, torch.float32)[mine] for r in range(comm.size)]
        torch.testing.assert_close(out, summed(parts, torch.float32))
    return [full for full, _ in started]


def waiting_twice_is_free(comm: Comm) -> list[Tensor]:
    full, pending = gather(comm, torch.float32, N, "twice")
    pending.wait()
    full.zero_()
    pending.wait()
    assert not full.any()
    return []


def what_nobody_waits_for_hurts_nobody(comm: Comm) -> list[Tensor]:
    """A step may end by an error between issuing and waiting."""
    for _ in range(3):
        gather(comm, torch.float32, 100_000, "dropped")
    full, pending = gather(comm, torch.float32, N, "kept")
    pending.wait()
    assert torch.equal(full, torch.cat([values(r, N, torch.float32) for r in range(comm.size)]))
    return [full]


def broadcasts_copy_the_root_s_tensor(comm: Comm) -> list[Tensor]:
    shapes = [(), (3, 5), (0,), (4,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    copies = []
    for root in range(comm.size):
        for shape, dtype in zip(shapes, dtypes, strict=True):
            tensor = torch.full(shape, comm.rank == 0 if dtype == torch.bool else comm.rank)
            tensor = tensor.to(dtype).requires_grad_(dtype.is_floating_point)
            comm.broadcast(tensor, root, Label("broadcast", f"{shape}")).wait()
            expected = torch.full(shape, root == 0 if dtype == torch.bool else root).to(dtype)
            assert torch.equal(tensor, expected)
            copies.append(tensor.detach())
    return copies


def empty_pieces_are_fine(comm: Comm) -> list[Tensor]:
    full, pending = gather(comm, torch.float32, 0, "empty")
    out = sum_of(comm, torch.empty(0))
    pending.wait()
    return [full, out]


def bytes_are_counted(comm: Comm) -> list[Tensor]:
    comm.counters.reset()
    others = comm.size - 1
    for _ in range(2):
        gather(comm, torch.bfloat16, N, "counted")[1].wait()
    sum_of(comm, torch.ones(comm.size * N))
    comm.broadcast(torch.ones(5), 0, Label("broadcast")).wait()
    if comm.size == 1:
        assert comm.counters.calls == comm.counters.bytes_sent == {}
        return []
    assert comm.counters.calls == {"gather": 2, "reduce": 1, "broadcast": 1}
    assert comm.counters.bytes_sent == {
        "gather": 2 * others * N * 2,
        "reduce": others * N * 4,
        "broadcast": others * 20 if comm.rank == 0 else 0,
    }
    assert set(comm.counters.seconds_waited) == {"gather", "reduce", "broadcast"}
    assert all(0 <= seconds < 60 for seconds in comm.counters.seconds_waited.values())
    return []


def memory_is_aligned_and_outlives_inference_mode(comm: Comm) -> list[Tensor]:
    for allocate in (comm.memory.shard, comm.memory.full, comm.memory.gradient):
        with torch.inference_mode():
            tensor = allocate(100, torch.bfloat16)
        assert (tensor.shape, tensor.dtype) == ((100,), torch.bfloat16)
        assert tensor.device == comm.device
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.is_inference()
    return []


def collectives_work_in_inference_mode(comm: Comm) -> list[Tensor]:
    with torch.inference_mode():
        full, pending = gather(comm, torch.float32, N, "inference")
        out = sum_of(comm, torch.ones(comm.size * N))
        pending.wait()
    assert torch.equal(out, torch.full((N,), float(comm.size)))
    return [full.clone()]


def a_buffer_that_does_not_split_is_refused(comm: Comm) -> list[Tensor]:
    if comm.size > 1:
        label = Label("gather", "blocks.3")
        with pytest.raises(ConfigError, match=f"gather blocks.3.*{comm.size} equal.*pad it"):
            comm.all_gather(torch.zeros(comm.size * N + 1), label)
        with pytest.raises(ConfigError, match="contiguous"):
            comm.all_gather(torch.zeros(comm.size, 2)[:, 0], label)
    return []


def equal_facts_agree(comm: Comm) -> list[Tensor]:
    for _ in range(2):
        comm.agree({"layout": "a1b2", "torch": torch.__version__})
    return []


def unlike_facts_end_the_group(comm: Comm) -> list[Tensor]:
    """The last law: nothing works after it."""
    if comm.size == 1:
        return []
    with pytest.raises(RanksDisagree) as raised:
        comm.agree({"layout": "a" if comm.rank else "b", "seed": str(comm.rank), "torch": "2"})
    text = str(raised.value)
    others = "rank 1: a" if comm.size == 2 else f"ranks {span(1, comm.size)}: a"
    assert f"layout: rank 0: b; {others}" in text
    assert "seed: rank 0: 0; rank 1: 1" in text
    assert "torch" not in text
    for _ in range(2):
        with pytest.raises(RanksDisagree, match="2 settings are not the same on all ranks"):
            comm.broadcast(torch.ones(1), 0, Label("broadcast"))
    return []


def pieces_of_any_size_reach_their_rank(comm: Comm) -> list[Tensor]:
    """Some are empty, and one rank sends nothing at all."""
    sizes = [
        [0 if source == comm.size - 1 > 0 else (source + 2 * rank) % 4 for rank in range(comm.size)]
        for source in range(comm.size)
    ]
    results = []
    for dtype in DTYPES:
        sent = [values(rank, sum(sizes[rank]), dtype) for rank in range(comm.size)]
        comm.counters.reset()
        own = comm.memory.gradient(sent[comm.rank].numel(), dtype).copy_(sent[comm.rank])
        received = comm.all_to_all(own, sizes, Label("scatter", str(dtype)))
        pieces = [part.split(row)[comm.rank] for part, row in zip(sent, sizes, strict=True)]
        assert same_bits(received, torch.cat(pieces)), dtype
        elements = sum(sizes[comm.rank]) - sizes[comm.rank][comm.rank]
        expected = {"scatter": elements * dtype.itemsize} if comm.size > 1 else {}
        assert comm.counters.bytes_sent == expected
        results.append(received)
    return results


def span(first: int, size: int) -> str:
    return f"{first} and {first + 1}" if size - first == 2 else f"{first}–{size - 1}"


Law = Callable[[Comm], list[Tensor]]

COMMON: list[Law] = [
    gathers_concatenate_the_pieces,
    rows_come_in_rank_order,
    a_message_may_be_the_same_for_every_rank,
    pieces_of_any_size_reach_their_rank,
    collectives_may_be_waited_for_in_any_order,
    waiting_twice_is_free,
    what_nobody_waits_for_hurts_nobody,
    broadcasts_copy_the_root_s_tensor,
    empty_pieces_are_fine,
    bytes_are_counted,
    memory_is_aligned_and_outlives_inference_mode,
    collectives_work_in_inference_mode,
    a_buffer_that_does_not_split_is_refused,
    equal_facts_agree,
]
LAWS: list[Law] = [reductions_sum_in_rank_order, *COMMON, unlike_facts_end_the_group]
NATIVE_LAWS: list[Law] = [reductions_are_close, *COMMON, unlike_facts_end_the_group]
