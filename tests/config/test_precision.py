"""Stored, computed, sent, summed: each in its own dtype, and a mean that fits into fp16."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.reduction import Reduction
from shardwise.config.precision import Dtypes, Precision
from shardwise.memory.sharding import sharding_of
from tests.copies import local
from tests.nets import decoder, decoder_batch, loss, numbers
from tests.parity.plain import mean_in_rank_order
from tests.ranks import run_threads
from tests.steps import STRATEGIES, train
from tests.watched import Watched

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# ---- the table ---------------------------------------------------------------------------------

TABLE: list[tuple[Precision, torch.dtype, bool, Dtypes]] = [
    # policy                                   model  trains   stored compute wire  sum
    (Precision(), FP32, True, Dtypes(FP32, FP32, FP32, FP32)),
    (Precision(), BF16, True, Dtypes(BF16, BF16, BF16, BF16)),
    (Precision(param_dtype=BF16), FP32, True, Dtypes(FP32, BF16, BF16, FP32)),
    (Precision(param_dtype=BF16), FP32, False, Dtypes(FP32, BF16, BF16, FP32)),
    (Precision(param_dtype=BF16, reduce_dtype=FP32), FP32, True, Dtypes(FP32, BF16, FP32, FP32)),
    (Precision(reduce_dtype=BF16), FP32, True, Dtypes(FP32, FP32, BF16, FP32)),
    (Precision(reduce_dtype=BF16, sum_dtype=BF16), FP32, True, Dtypes(FP32, FP32, BF16, BF16)),
    (Precision(stored_dtype=FP32, param_dtype=BF16), BF16, True, Dtypes(FP32, BF16, BF16, FP32)),
    (Precision(stored_dtype=FP32, param_dtype=BF16), BF16, False, Dtypes(BF16, BF16, BF16, BF16)),
    (Precision(stored_dtype=FP64), FP32, True, Dtypes(FP64, FP64, FP64, FP64)),
    (Precision(param_dtype=BF16), torch.uint8, False, Dtypes(*[torch.uint8] * 4)),
]


@pytest.mark.parametrize(("precision", "dtype", "trainable", "dtypes"), TABLE)
def test_what_is_not_said_follows_from_what_is(
    precision: Precision, dtype: torch.dtype, trainable: bool, dtypes: Dtypes
) -> None:
    assert precision.of(dtype, trainable) == dtypes


class Noting(nn.Module):
    """Notes the dtypes in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        y: Tensor = self.fc(x)
        self.dtypes = {"input": x.dtype, "ids": ids.dtype, "weight": self.fc.weight.dtype}
        self.dtypes |= {"output": y.dtype, "mean": self.buffer_of("running_mean").dtype}
        self.dtypes |= {"count": self.buffer_of("num_batches_tracked").dtype}
        return {"y": y, "ids": ids}

    def buffer_of(self, name: str) -> Tensor:
        return self.norm.get_buffer(name)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_tensor_of_a_step_has_the_dtype_that_was_asked_for(strategy: str, world: int) -> None:
    models = [Noting() for _ in range(world)]
    policy = Precision(
        param_dtype=BF16, reduce_dtype=FP16, sum_dtype=FP64, buffer_dtype=FP16, output_dtype=FP64
    )

    def rank(comm: Comm) -> None:
        model, watched = models[comm.rank], Watched(comm)
        sharded = sw.shard(model, strategy, comm=watched, precision=policy, wrap=sw.wrap.whole())
        optimizer = torch.optim.AdamW(model.parameters())
        out = model(numbers(0, (4, 6)), torch.arange(4))
        assert model.dtypes == {
            "input": BF16,
            "ids": torch.int64,
            "weight": BF16,
            "output": BF16,
            "mean": FP16,
            "count": torch.int64,
        }
        assert (out["y"].dtype, out["ids"].dtype) == (FP64, torch.int64)
        watched.allocated.clear()
        out["y"].sum().backward()
        dtypes = {memory.dtype for memory in watched.allocated}
        assert dtypes >= ({FP16} if world == 1 else {FP16, FP64})
        optimizer.step()
        [bucket] = sharded.buckets
        assert (bucket.shard.dtype, bucket.full.dtype) == (FP32, BF16)
        for name, param in model.fc.named_parameters():
            assert (name, param.dtype) == (name, FP32)
            assert param.grad is not None
            assert param.grad.dtype is FP32
            assert optimizer.state[param]["exp_avg"].dtype is FP32

    run_threads(world, rank)


def test_bf16_compute_on_fp32_shards_stays_close_to_fp32_and_trains_the_fp32_masters() -> None:
    models = [decoder() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    plain = models[2]

    def rank(comm: Comm) -> list[float]:
        model = models[comm.rank]
        sw.shard(model, comm=comm, precision=Precision(param_dtype=BF16, output_dtype=FP32))
        return losses(model)

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for _ in range(5):
            value = loss(model, decoder_batch(0, 4))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.item())
        return values

    narrow = run_threads(2, rank)[0]
    wide = losses(plain)
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.02)


# ---- the mean ----------------------------------------------------------------------------------


SIZE = 640  # each of up to five ranks holds some


class Weighing(nn.Module):
    """The gradient of ``weight`` is the input, exactly."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def mean_of(gradients: list[float], strategy: str = "full_shard", **precision: Any) -> float:
    """The gradient that every rank ends up with, where rank r contributes ``gradients[r]``."""
    models = [Weighing() for _ in gradients]

    def rank(comm: Comm) -> set[float]:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm, precision=Precision(**precision))
        sharded.model(torch.full((SIZE,), gradients[comm.rank])).backward()
        grad = models[comm.rank].weight.grad
        assert grad is not None
        return set(local(grad).tolist())

    [mean] = set().union(*run_threads(len(gradients), rank))
    return float(mean)


FP16_SUMS: dict[str, Any] = {"param_dtype": FP16, "reduce_dtype": FP16, "sum_dtype": FP16}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("average", "mean"), [("postdivide", math.inf), ("predivide", 3e4), ("sqrt", 3e4), (None, 3e4)]
)
def test_large_fp16_gradients_overflow_only_where_the_sum_comes_first(
    average: str | None, mean: float, strategy: str
) -> None:
    """4 × 30,000 is more than 65,504."""
    assert mean_of([3e4] * 4, strategy, average=average, **FP16_SUMS) == mean


def test_tiny_fp16_gradients_underflow_only_where_the_whole_division_comes_first() -> None:
    tiny = torch.tensor(1e-7, dtype=FP16).item()  # 1.19e-7, twice the smallest number above zero
    assert mean_of([1e-7] * 4, average="predivide", **FP16_SUMS) == 0.0
    assert mean_of([1e-7] * 4, average="sqrt", **FP16_SUMS) == tiny
    assert mean_of([1e-7] * 4, average="postdivide", **FP16_SUMS) == tiny


def test_the_backends_own_mean_can_be_chosen() -> None:
    assert mean_of([0.1, 0.7, 1.3], average="avg") == mean_of([0.1, 0.7, 1.3])


@pytest.mark.parametrize("average", ["postdivide", "predivide", "sqrt", "avg"])
def test_one_rank_alone_keeps_its_gradient(average: str) -> None:
    assert mean_of([0.1], average=average) == torch.tensor(0.1).item()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 16, 64, 1000, 1024])
def test_the_split_is_a_power_of_two_from_the_root_up_and_the_rest(world: int) -> None:
    averaging = Precision().reduction(Dtypes(FP32, FP16, FP16, FP32), world)
    assert averaging.how == "sqrt"
    assert averaging.before * averaging.after == world
    assert math.log2(averaging.before).is_integer()
    assert math.sqrt(world) <= averaging.before < 2 * math.sqrt(world)


@pytest.mark.parametrize(("wire", "how"), [(FP32, "postdivide"), (BF16, "postdivide")])
def test_wide_ranges_need_no_split(wire: torch.dtype, how: str) -> None:
    dtypes = Dtypes(FP32, wire, wire, FP32)
    assert Precision().reduction(dtypes, 8) == Reduction(wire, FP32, how, before=1.0, after=8.0)


# ---- narrow wire, wide sum -----------------------------------------------------------------------


def gradients_with(precision: Precision, world: int, strategy: str) -> tuple[list[Tensor], int]:
    """Each parameter's mean gradient, whole, and the bytes that a rank sent to reduce it."""
    torch.manual_seed(0)
    models = [nn.Linear(64, 16, bias=False)]
    models += [deepcopy(models[0]) for _ in range(world - 1)]

    def rank(comm: Comm) -> tuple[dict[str, Tensor], int]:
        model = models[comm.rank]
        sw.shard(model, strategy, sw.wrap.whole(), comm, precision=precision)
        comm.counters.reset()
        train(model, (numbers(comm.rank, (5, 64)), numbers(comm.rank + 9, (5, 16))))
        whole_gradients = {}
        for name, param in model.named_parameters():
            sharding = sharding_of(param)
            assert sharding is not None
            assert param.grad is not None
            whole = torch.zeros(sharding.shape.numel(), dtype=param.grad.dtype)
            whole[sharding.start : sharding.stop] = local(param.grad).flatten()
            whole_gradients[name] = whole
        return whole_gradients, comm.counters.bytes_sent["reduce"]

    ranks = run_threads(world, rank)
    parts = [whole_gradients["weight"] for whole_gradients, _ in ranks]
    whole = parts[0] if strategy == "no_shard" else torch.stack(parts).sum(0)
    return [whole], ranks[0][1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_narrow_wire_with_a_wide_sum_halves_the_bytes_and_rounds_once(strategy: str) -> None:
    world = 4
    [exact], sent = gradients_with(Precision(), world, strategy)
    [wide], narrow_sent = gradients_with(Precision(reduce_dtype=BF16), world, strategy)
    [narrow], _ = gradients_with(Precision(reduce_dtype=BF16, sum_dtype=BF16), world, strategy)
    assert 2 * narrow_sent == sent
    assert not torch.equal(wide, narrow)
    assert (wide - exact).abs().mean() < 0.6 * (narrow - exact).abs().mean()


def test_the_wide_sum_of_a_narrow_wire_is_the_sum_of_what_was_rounded_for_the_wire() -> None:
    model = nn.Linear(64, 16, bias=False)
    batches = [(numbers(r, (5, 64)), numbers(r + 9, (5, 16))) for r in range(3)]
    rounded = []
    for batch in batches:
        plain = deepcopy(model)
        train(plain, batch)
        assert plain.weight.grad is not None
        rounded.append({"weight": plain.weight.grad.bfloat16().float()})
    truth = mean_in_rank_order(rounded)["weight"]
    assert truth is not None
    models = [deepcopy(model) for _ in batches]

    def rank(comm: Comm) -> None:
        mine = models[comm.rank]
        sw.shard(mine, wrap=sw.wrap.whole(), comm=comm, precision=Precision(reduce_dtype=BF16))
        train(mine, batches[comm.rank])
        sharding = sharding_of(mine.weight)
        assert sharding is not None
        assert mine.weight.grad is not None
        assert torch.equal(local(mine.weight.grad), sharding.cut(truth, mine.weight.shape))

    run_threads(3, rank)


def test_what_is_accumulated_is_kept_in_the_dtype_of_sums_and_rounded_once_for_the_wire() -> None:
    models = [Weighing() for _ in range(2)]

    def rank(comm: Comm) -> list[float]:
        model = models[comm.rank]
        sharded = sw.shard(model, comm=comm, precision=Precision(reduce_dtype=BF16))
        for number in range(1, 9):
            with sharded.accumulate(last=number == 8):
                model(torch.full((SIZE,), 1.0 if number == 1 else 1 / 512)).backward()
            if number < 8:
                [bucket] = sharded.buckets
                assert bucket.gradients.full is not None
                assert bucket.gradients.full.dtype is FP32
        assert model.weight.grad is not None
        return sorted(set(local(model.weight.grad).tolist()))

    expected = torch.tensor(1 + 7 / 512).bfloat16().item()  # in bf16, 1 + 1 / 512 would stay 1
    assert run_threads(2, rank) == [[expected], [expected]]


# ---- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "device", "refused", "known"),
    [
        (
            Precision(reduce_dtype=torch.int16),
            "cpu",
            "reduce_dtype is torch.int16",
            "float32, torch.bfloat16",
        ),
        (
            Precision(param_dtype=torch.float8_e4m3fn),
            "cuda:1",
            "param_dtype is torch.float8",
            "float64",
        ),
        (
            Precision(sum_dtype=FP64),
            "xpu",
            "sum_dtype is torch.float64",
            "bfloat16, torch.float16.",
        ),
        (
            Precision(stored_dtype=FP16),
            "hpu",
            "stored_dtype is torch.float16",
            "float32, torch.bfloat16.",
        ),
    ],
)
def test_a_dtype_that_not_every_device_computes_in_is_refused(
    policy: Precision, device: str, refused: str, known: str
) -> None:
    with pytest.raises(sw.ConfigError, match=rf"{refused}.*Choose one of .*{known}"):
        policy.check(torch.device(device), nn.Linear(1, 1))


def test_it_is_refused_where_the_device_is_known() -> None:
    eighth = Precision(param_dtype=torch.float8_e5m2)
    with pytest.raises(sw.ConfigError, match="not every cpu device computes"):
        sw.shard(nn.Linear(2, 2), precision=eighth)
    with pytest.raises(sw.ConfigError, match="not every cpu device computes"):
        sw.trace(nn.Linear(2, 2), torch.ones(1, 2), precision=eighth)


def test_an_unknown_way_to_average_is_refused_with_those_there_are() -> None:
    with pytest.raises(sw.ConfigError, match=r"'mean'; choose one of 'postdivide', 'predivide'"):
        Precision(average="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("change", ["step", "load", "write"])
def test_a_forward_pass_without_a_backward_pass_keeps_no_old_cast(
    strategy: str, change: str
) -> None:
    """For logging, between backward and step: the next step computes with what came after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batch = torch.randn(4, 8)

    def rank(comm: Comm, logs: bool) -> float:
        mine = deepcopy(model)
        sharded = sw.shard(mine, strategy, comm=comm, precision=sw.Precision(param_dtype=BF16))
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
        mine(batch).float().square().mean().backward()
        if logs:
            mine(batch)
        if change == "step":
            optimizer.step()
        elif change == "load":
            mine.load_state_dict({k: 3 * v for k, v in mine.state_dict().items()})
        else:
            with sharded.full_params(writeback=True), torch.no_grad():
                for param in mine.parameters():
                    param.mul_(3)
        value: float = mine(batch).float().square().mean().item()
        return value

    for world in (1, 2):
        plain, logged = run_threads(world, rank, False), run_threads(world, rank, True)
        assert plain == logged
