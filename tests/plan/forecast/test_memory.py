"""The memory of a real engine at every event, beside what was predicted of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage, nn

import shardwise as sw
from shardwise.comm.memory import Memory
from shardwise.comm.protocol import Comm
from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.plan.draw import draw
from shardwise.plan.forecast import holdings
from shardwise.plan.forecast.holdings import Kind
from shardwise.plan.forecast.memory import APART, FIRST_STEP, Heap, MemoryForecast, forecast
from shardwise.plan.forecast.observe import observe
from shardwise.plan.forecast.work import Span, StepWork
from shardwise.plan.schedule.events import Event
from shardwise.plan.units.units import choose_units
from shardwise.plan.units.wrap import by_class
from shardwise.torch_internals import disable_torch_function, storage_key
from tests.nets import NETS, Net, decoder, decoder_batch, loss
from tests.ranks import run_threads
from tests.steps import STRATEGIES

TIED, FROZEN, SCALAR = NETS[1], NETS[3], NETS[4]
BFLOAT = sw.Precision(param_dtype=torch.bfloat16)
PRECISIONS = {
    "bf16": BFLOAT,
    "fp16 wire": sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16),
    "int8 wire": sw.Precision(reduce_dtype=torch.int8),
    "bf16 stored": sw.Precision(
        torch.bfloat16, reduce_dtype=torch.float32, sum_dtype=torch.float32
    ),
}
HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
Point = tuple[Event, int, int]
"""An event, and bytes on the device and in host memory after it."""


class Allocated:
    """Storages that this thread's engine has allocated and that are alive."""

    def __init__(self) -> None:
        self.storages: dict[int, weakref.ref[UntypedStorage]] = {}

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage_key(tensor)] = weakref.ref(storage)

    def nbytes(self, others: Iterator[Tensor]) -> int:
        alive = {key: made() for key, made in self.storages.items()}
        every = {key: storage.nbytes() for key, storage in alive.items() if storage is not None}
        with disable_torch_function():  # a gradient from before is a ``ShardTensor``
            every |= {storage_key(t): t.untyped_storage().nbytes() for t in others}
        return sum(every.values())


_of_thread = threading.local()
_plain_new = Memory._new


def _noted_new(memory: Memory, numel: int, dtype: torch.dtype) -> Tensor:
    tensor = _plain_new(memory, numel, dtype)
    if (allocated := getattr(_of_thread, "allocated", None)) is not None:
        allocated.note(tensor)
    return tensor


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "_new", _noted_new)


def measured(
    comm: Comm, net: Net, strategy: str, modes: str, options: Any, all_here: threading.Barrier
) -> list[Point]:
    """Each event of the last of several passes: ``a`` accumulates, ``l`` reduces.

    Ranks wait for each other at each: threads read what the others send from their memory.
    """
    torch.manual_seed(0)
    allocated = _of_thread.allocated = Allocated()
    model: nn.Module = net.build()
    sharded = sw.shard(model, strategy, comm=comm, **options)
    host, points, listening = sharded.buckets[0].host, list[Point](), False

    def outside() -> Iterator[Tensor]:
        """What torch's operators have made of the engine's memory: wide means.

        Not what autograd has made: gradients that are held until their call ends.
        """
        for bucket in sharded.buckets:
            means = [bucket.gradients.mean.result]
            if not bucket.spec.in_host:
                arrived = {*map(id, bucket.gradients.arrivals)}
                means += [param.grad for param in bucket.params if id(param) not in arrived]
            yield from (mean for mean in means if mean is not None)

    def note(event: Event) -> None:
        if not listening:
            return
        all_here.wait()
        points.append((event._replace(reason=""), allocated.nbytes(outside()), host.nbytes))
        all_here.wait()

    sharded.runtime.listeners.append(note)
    sharded.rehearse(*net.batch(comm.rank, 2)[:-1])
    for number, mode in enumerate(modes):
        listening = number == len(modes) - 1
        with sharded.accumulate(last=mode != "a"):
            loss(model, net.batch(comm.rank, 2)).backward()
        if mode == "l" and not listening:
            model.zero_grad()
    return points


#: A pass teaches the runtime the order of its mode, for the next one: ``l`` ends a step, ``a`` does
#: not reduce, and ``r`` does, though the step goes on.
MODES = {"train": "ll", "accumulate": "ala", "between": "aalaa", "last": "alal"}
REDUCED = {1: "lrl", 4: "lrrrrl"}


def predicted(
    ranks: tuple[int, int], net: Net, strategy: str, mode: str, reduced: int, options: Any
) -> list[Point]:
    """The same on paper, of a rank without peers."""
    model = net.build()
    blueprint = draw(model, strategy, ranks=ranks, **options)
    batch = net.batch(0, 2)[:-1]
    work = observe(model, blueprint.units, batch, {}, precision=blueprint.options.precision)
    memory = forecast(blueprint, work.order, without_activations(work), "sgd", mode, reduced)
    return [
        (moment.event._replace(reason=""), moment.alive, moment.in_host)
        for moment in memory.moments
        if moment.event is not None
    ]


def without_activations(work: StepWork) -> StepWork:
    def empty(spans: tuple[Span, ...]) -> tuple[Span, ...]:
        return tuple(Span(span.unit, 0, 0) for span in spans)

    return replace(
        work, forward=empty(work.forward), backward=empty(work.backward), inputs=0, buffers=0
    )


def assert_predicted(
    net: Net, strategy: str, mode: str = "train", reduced: int = 0, **options: Any
) -> None:
    if strategy in HYBRIDS:
        options["mesh"] = (2, 2)
    world = 4 if strategy in HYBRIDS else 3
    together = threading.Barrier(world, timeout=20)
    passes = REDUCED.get(reduced, MODES[mode])
    ranks = run_threads(world, measured, net, strategy, passes, options, together)
    for rank, points in enumerate(ranks):
        on_paper = predicted((rank, world), net, strategy, mode, min(reduced, 2), options)
        listed = {event for event, *_ in points}
        listed_on_paper = [point for point in on_paper if point[0] in listed]
        assert points == listed_on_paper


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *HYBRIDS])
def test_the_engines_bytes_at_every_event(strategy: str, mode: str) -> None:
    assert_predicted(TIED, strategy, mode)


@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *HYBRIDS])
def test_in_a_step_of_which_each_micro_batch_is_reduced(strategy: str, reduced: int) -> None:
    assert_predicted(TIED, strategy, reduced=reduced)


@pytest.mark.parametrize("offload", ["optimizer", "everything"])
def test_in_such_a_step_with_offload(offload: str) -> None:
    assert_predicted(TIED, "full_shard", reduced=4, offload=offload)


@pytest.mark.parametrize("strategy", ["zero1", "full_shard", "hybrid_full"])
@pytest.mark.parametrize("net", [FROZEN, SCALAR], ids=str)
def test_of_other_models(net: Net, strategy: str) -> None:
    assert_predicted(net, strategy)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "full_shard"])
def test_each_bucket_of_a_unit_is_there_from_its_own_first_gradient_on(
    strategy: str, mode: str
) -> None:
    assert_predicted(TIED, strategy, mode, bucketing="none")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard", "hybrid_full"])
def test_with_other_dtypes(strategy: str, precision: str) -> None:
    assert_predicted(TIED, strategy, precision=PRECISIONS[precision])


@pytest.mark.parametrize("offload", ["optimizer", "everything"])
@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard", *HYBRIDS])
def test_with_host_memory(strategy: str, offload: str) -> None:
    assert_predicted(FROZEN, strategy, offload=offload, precision=BFLOAT)


@pytest.mark.parametrize("unsharded", ["blocks.1", 3000])
def test_with_units_that_stay(unsharded: Any) -> None:
    assert_predicted(FROZEN, "full_shard", unsharded=unsharded)


# ---- with what the model keeps -----------------------------------------------------------------


def of_decoder(
    checkpointing: ActivationCheckpointing | None = None, **options: Any
) -> tuple[MemoryForecast, StepWork]:
    model = decoder()
    blueprint = draw(model, ranks=(0, 2), **options)
    work = observe(model, blueprint.units, decoder_batch(0, 64)[:1], {}, checkpointing)
    return forecast(blueprint, work.order, work), work


def test_the_peak_says_its_moment_and_what_is_alive_then() -> None:
    memory, _ = of_decoder()
    assert memory.peak == max(moment.peak for moment in memory.moments)
    assert sum(memory.by_kind.values()) == sum(memory.by_unit.values()) == memory.peak
    assert next(iter(memory.by_kind)) == "activations"
    first, *lines = memory.why()
    assert first.startswith("peak ")
    assert first.endswith(f"while {memory.at_peak}")
    assert any("activations" in line for line in lines)


def test_activations_come_and_go_between_cues() -> None:
    memory, work = of_decoder()
    alone = forecast(draw(decoder(), ranks=(0, 2)), work.order, without_activations(work)).moments
    with_spans = [moment for moment in memory.moments if moment.event is not None]
    engine = [moment for moment in alone if moment.event is not None]
    above = [both.alive - one.alive for both, one in zip(with_spans, engine, strict=True)]
    assert work.saved < max(above) < 2 * work.saved
    assert above[0] == above[-1] == work.inputs


def test_recomputation_and_host_memory_lower_the_peak() -> None:
    plain, recomputed, copied = (
        of_decoder(policy)[0]
        for policy in (None, ActivationCheckpointing(), ActivationCheckpointing(offload=True))
    )
    assert plain.peak > recomputed.peak
    assert copied.in_host > recomputed.in_host == 0
    offloaded, _ = of_decoder(offload="everything")
    assert offloaded.peak < plain.peak
    assert offloaded.in_host > 0


def test_a_process_keeps_what_each_pool_has_had_at_most() -> None:
    memory, _ = of_decoder()
    transient = ("gathered", "gradient buckets", "gradients", "communication")
    highest = [memory.most.get(Kind(kind), 0) for kind in transient]
    assert max(highest) < memory.pooled <= sum(highest)
    heap = memory.heap
    assert (heap.blocks, heap.mapped) == (memory.most[Kind.ACTIVATIONS], 0)
    assert heap.freed == 0
    lasting = sum(n for kind, n in memory.most.items() if kind not in transient)
    least = lasting + memory.pooled + int(APART * heap.holes) + FIRST_STEP
    assert memory.process(kept=0.0) == memory.process(kept=0.5) == least > memory.peak
    recomputed, work = of_decoder(ActivationCheckpointing())
    assert recomputed.process(0.5) - recomputed.process(0.0) == recomputed.heap.freed // 2 > 0
    blocks = [span for span in work.forward if (span.unit or "").startswith("blocks")]
    assert recomputed.heap.freed == sum(span.freed + span.holes for span in blocks)


class Waves(nn.Module):
    """A module whose temporaries are as large as its rows, and whose output is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 16]`` → ``[rows]``."""
        mean: Tensor = self.linear(x).sin().cos().mean(-1)
        return mean


def test_what_recomputation_frees_at_once_passes() -> None:
    model, x = nn.Sequential(Waves()), torch.ones(8, 16)
    for policy, freed in ((None, 1), (ActivationCheckpointing("Waves"), 3)):  # or some are saved
        work = observe(model, choose_units(model, by_class(Waves)), (x,), {}, policy)
        assert max(span.freed for span in work.forward) == freed * x.nbytes


class Widens(Waves):
    """And then widens them to ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 16]`` → ``[rows, width]``."""
        return super().forward(x)[:, None].repeat(1, self.width)


@pytest.mark.parametrize(("width", "left"), [(4, 13), (16, 17), (20, 17)])
def test_a_hole_takes_smaller_blocks_and_none_of_its_own_size(width: int, left: int) -> None:
    model, x = nn.Sequential(Widens(width)), torch.ones(8, 16)
    work = observe(model, choose_units(model, by_class(Widens)), (x,), {})
    (span,) = (span for span in work.forward if span.unit == "0" and span.freed)
    assert span.holes == left * 8 * x.itemsize  # the mean, of one column, is freed, too


def test_holes_are_a_part_of_what_is_freed() -> None:
    heap = Heap(blocks=100, mapped=7, holes=20, freed=200)
    assert heap.held(kept=0.25) == 107 + 16 + 50
    assert heap._replace(engine=65).held(kept=0.25) == 107 + 66  # it fills them
    assert heap._replace(engine=67).held(kept=0.25) == 107 + 67
    assert Heap(blocks=100, holes=-20).held(kept=0.25) == 100  # of others' some are filled


def test_the_engines_small_tensors_lie_in_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = of_decoder()
    assert 0 < memory.heap.engine <= memory.most[Kind.GRADIENTS] + memory.most[Kind.COMMUNICATION]
    monkeypatch.setattr(holdings, "LARGE", 1)
    large, _ = of_decoder()
    assert large.heap.engine == 0
    assert memory.pooled < large.pooled <= memory.pooled + memory.heap.engine


def test_blocks_that_a_layer_maps_leave_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = of_decoder()
    monkeypatch.setattr(nn.Linear, "maps_from", 1, raising=False)
    large, _ = of_decoder()
    assert large.heap == (0, small.heap.blocks, 0, 0, small.heap.engine, False)
    assert large.process(0.5) < small.process(0.0)
