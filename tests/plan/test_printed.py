"""What a person reads is what is sent: the listings, letter by letter and byte by byte."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.plan.printed import size
from shardwise.plan.schedule.events import Op
from tests.fake import FakeComm
from tests.nets import NETS, Net, decoder, mostly_frozen
from tests.ranks import run_threads
from tests.steps import STRATEGIES, train


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class Model(nn.Module):
    """A root with a parameter of its own around two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x * self.scale[:16])
        return out


def printed(strategy: str, world: int = 2, mode: str = "train") -> str:
    sharded = sw.shard(Model(), strategy, comm=FakeComm(0, world))
    return str(sharded.schedule if mode == "train" else sharded.schedule_of(mode))


def text(block: str) -> str:
    return dedent(block).strip()


# ---- letter by letter ----------------------------------------------------------------------------


def test_full_shard_as_it_is_printed() -> None:
    assert printed("full_shard") == text("""
        # one step (train) of full_shard on 2 ranks: 4 gathers, 3 reduces, a rank sends 2.9 KiB
        forward:
            gather  (root)    # all-gather, 128 B, sends 64 B: first use
            gather  layers.0  # all-gather, 1.1 KiB, sends 576 B: ahead, while (root) computes
            enter   (root)
              gather  layers.1  # all-gather, 1.1 KiB, sends 576 B: ahead, while layers.0 computes
              enter   layers.0
              exit    layers.0
              free    layers.0  # not needed soon
              enter   layers.1
              exit    layers.1
            exit    (root)
        backward:
            gather  layers.0  # all-gather, 1.1 KiB, sends 576 B: ahead, while (root) computes
            enter   (root)
              enter   layers.1
              exit    layers.1
              free    layers.1  # last use
              reduce  layers.1  # reduce-scatter, 1.1 KiB, sends 576 B: its gradients are complete
              enter   layers.0
              exit    layers.0
              free    layers.0  # last use
              reduce  layers.0  # reduce-scatter, 1.1 KiB, sends 576 B: its gradients are complete
              settle  layers.1  # one reduce stays in flight
            exit    (root)
            free    (root)    # last use
            reduce  (root)    # reduce-scatter, 128 B, sends 64 B: its gradients are complete
            settle  layers.0  # one reduce stays in flight
            end
            settle  (root)    # the optimizer may run next
    """)


def test_shard_grad_op_as_it_is_printed() -> None:
    """As ``full_shard``, but that a unit stays gathered between the two passes."""
    title, *lines = printed("full_shard").splitlines()
    lines = [line for line in lines if "not needed soon" not in line]
    del lines[lines.index("backward:") + 1]  # gather layers.0
    title = title.replace("full_shard", "shard_grad_op").replace("4 gathers", "3 gathers")
    assert printed("shard_grad_op").splitlines() == [title.replace("2.9 KiB", "2.4 KiB"), *lines]


def test_no_shard_reduces_and_spreads_and_gathers_nothing() -> None:
    halves = "reduce-scatter + all-gather, 1.1 KiB, sends 1.5 KiB"
    for world, how in ((2, "all-reduce, 1.1 KiB, sends 1.1 KiB"), (3, halves)):
        listing = printed("no_shard", world)
        assert "gather  " not in listing
        assert f"reduce  layers.1  # {how}: its gradients are complete" in listing


def test_layouts_show_dtypes_and_how_the_mean_is_formed() -> None:
    precision = sw.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    model = mostly_frozen()
    sharded = sw.shard(model, comm=FakeComm(0, 2), precision=precision)
    titles = [line for line in str(sharded.layout).splitlines() if line.startswith("blocks.{")]
    assert titles == [
        "blocks.{0…2}  (stored float32, computed in bfloat16, frozen; 3 alike, here the first)",
        (
            "blocks.{0…2}  (stored float32, computed in bfloat16, gradients sent in float16, "
            "summed in float32, mean by sqrt; 3 alike, here the first)"
        ),
    ]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (7 * 2**40, "7.0 TiB"),
        (9000 * 2**40, "9000.0 TiB"),
    ],
)
def test_sizes_are_read_in_the_largest_fitting_unit(nbytes: int, words: str) -> None:
    assert size(nbytes) == words


# ---- byte by byte --------------------------------------------------------------------------------


def listed_and_sent(
    comm: Comm, model: nn.Module, net: Net, strategy: str
) -> dict[str, tuple[int, int]]:
    """For gathers and reduces: bytes as listed, and bytes as counted on the wire."""
    sharded = sw.shard(model, strategy, comm=comm)
    train(model, net.batch(comm.rank, 2))
    schedule = sharded.schedule
    comm.counters.reset()
    train(model, net.batch(comm.rank, 2))
    sent = comm.counters.bytes_sent
    counted = {
        Op.GATHER: sent.get("gather", 0),
        Op.REDUCE: sent.get("reduce", 0) + sent.get("spread", 0),
    }
    by_op = {}
    for op, nbytes in counted.items():
        listed = sum(schedule.sent(event) for event in schedule.events if event.op is op)
        by_op[str(op)] = (listed, nbytes)
    return by_op


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_the_bytes_that_are_listed_are_the_bytes_that_are_sent(
    net: Net, strategy: str, world: int
) -> None:
    models = [net.build() for _ in range(world)]
    for by_op in run_threads(
        world, lambda comm: listed_and_sent(comm, models[comm.rank], net, strategy)
    ):
        for listed, sent in by_op.values():
            assert listed == sent
        assert (by_op["gather"][0] > 0) == (strategy != "no_shard")
        assert by_op["reduce"][0] > 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", ["zero1", "shard_grad_op", "full_shard"])
def test_each_collective_sends_the_lower_bound(strategy: str, world: int) -> None:
    """A rank must send its part to W - 1 others, and W - 1 parts of what it adds to sums."""
    sharded = sw.shard(decoder(), strategy, comm=FakeComm(0, world))
    weights = {
        name: sum(bucket.layout.numel for bucket in sharded.buckets if bucket.unit == name) * 4
        for name in sharded.runtime.units
    }
    for event in sharded.schedule.events:
        bound = weights.get(event.unit, 0) * (world - 1) / world
        assert sharded.schedule.sent(event) == (bound if event.op in (Op.GATHER, Op.REDUCE) else 0)


def test_padding_is_listed_unit_by_unit() -> None:
    sharded = sw.shard(decoder(), comm=LocalComm())
    for name, nbytes in sharded.layout.padding().items():
        [bucket] = [bucket for bucket in sharded.buckets if bucket.unit == name]
        used = sum(param.numel() for param in bucket.params)
        assert nbytes == (bucket.layout.numel - used) * 4


def test_what_is_asked_for_by_name_alone_reads_as_what_is_printed() -> None:
    sharded = sw.shard(decoder(), comm=LocalComm())
    assert repr(sharded.units) == str(sharded.units)
    assert repr(sharded.layout) == str(sharded.layout)
    assert repr(sharded.schedule) == str(sharded.schedule)


def test_layouts_of_units_that_are_alike_are_printed_once() -> None:
    sharded = sw.shard(decoder(), comm=FakeComm(0, 2))
    titles = [
        line.partition("  (")[0] for line in str(sharded.layout).splitlines() if "(st" in line
    ]
    assert titles == ["embed", "blocks.{0…2}", "norm+lm_head"]
    assert "blocks.1.norm1" not in str(sharded.layout)
