"""One object, two states: what a parameter is at rest and while its unit computes, and why.

Each rule of the design's "Parameter identity" is one test. Bytes are counted twice: by the
engine, and by a dispatch mode that sees every operator and knows nothing of the engine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import shardwise as sw
from shardwise.comm import memory
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.config.placement import Placement
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.whole import gather_parts, gather_whole
from shardwise.plan.schedule.events import Event, Op
from tests.copies import local
from tests.fake import FakeComm
from tests.nets import NETS, Net, decoder, decoder_batch, loss, numbers
from tests.ranks import run_threads
from tests.steps import STRATEGIES, assert_at_rest, play, train
from tests.watched import Late, Watched
from tests.written import Written, storage

SPLIT = ("zero1", "shard_grad_op", "full_shard")


def in_forward(module: nn.Module, look: Callable[[], object]) -> None:
    """Call ``look`` whenever ``module`` computes."""

    def hook(*_: object) -> None:
        look()

    module.register_forward_pre_hook(hook)


# ---- identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_parameters_keep_identity_names_and_attributes(net: Net, strategy: str) -> None:
    models = [net.build(), net.build()]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        for number, param in enumerate(model.parameters()):
            param.mark = number  # type: ignore[attr-defined]
        sw.shard(model, strategy, comm=comm)
        train(model, net.batch(0, 2))
        after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        assert after == before
        for number, param in enumerate(model.parameters()):
            assert isinstance(param, nn.Parameter)
            assert param.mark == number  # type: ignore[attr-defined]

    run_threads(2, rank)


@pytest.mark.parametrize("strategy", SPLIT)
def test_at_rest_a_parameter_is_the_shard_and_gathered_a_view_of_the_full_bucket(
    strategy: str,
) -> None:
    models = [decoder(), decoder()]
    plain = decoder().state_dict()
    for model in models:
        model.load_state_dict(plain)

    def rank(comm: Comm) -> int:
        model = models[comm.rank]
        sharded = sw.shard(model, strategy, comm=comm)
        homes = {param: bucket for bucket in sharded.buckets for param in bucket.params}
        looks: list[None] = []

        def look(prefix: str) -> None:
            for name, param in model.get_submodule(prefix).named_parameters(prefix):
                assert not isinstance(param, ShardedParameter)
                assert storage(param) == storage(homes[param].full)
                assert torch.equal(param.detach(), plain[name])
                looks.append(None)

        for name in ("embed", "blocks.0", "blocks.1", "blocks.2"):
            in_forward(model.get_submodule(name), partial(look, name))
        train(model, decoder_batch(0, 2))
        for param in model.parameters():
            assert type(param) is ShardedParameter
            assert storage(param) == storage(homes[param].shard)
        numel = sum(param.shape.numel() for param in model.parameters())
        assert numel < 0.6 * sum(value.numel() for value in plain.values())
        return len(looks)

    assert run_threads(2, rank) == [1 + 3 * 13] * 2


# ---- one storage for life ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bucket_has_one_storage_for_life(strategy: str) -> None:
    """A pool that re-homes buckets leaves autograd's saved views stale, silently."""
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        optimizer = torch.optim.SGD(sharded.model.parameters(), lr=0.1)
        homes = [(storage(b.full), storage(b.shard)) for b in sharded.buckets]
        for _ in range(3):
            train(sharded.model, decoder_batch(comm.rank, 2))
            optimizer.step()
            with torch.inference_mode():
                loss(sharded.model, decoder_batch(comm.rank, 2))
            assert [(storage(b.full), storage(b.shard)) for b in sharded.buckets] == homes

    run_threads(2, rank)


@pytest.mark.parametrize("strategy", SPLIT)
def test_what_another_model_frees_does_not_replace_values(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two were sharded, and the first had left pages for the second when that gathered."""
    monkeypatch.setattr(memory, "LARGE", 1)
    models = [(decoder(), decoder()) for _ in range(2)]
    expected = loss(models[0][1], decoder_batch(0, 2)).item()
    for _, second in models:
        second.load_state_dict(models[0][1].state_dict())

    def rank(comm: Comm) -> None:
        first, second = models[comm.rank]
        sharded = [sw.shard(model, strategy, comm=comm) for model in (first, second)]
        train(first, decoder_batch(comm.rank, 2))
        assert loss(second, decoder_batch(0, 2)).item() == expected
        assert len(sharded) == 2  # both were there

    run_threads(2, rank)


class Doubled(nn.Module):
    """Its backward pass needs ``weight``, through a view that autograd saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(-1)


def test_a_view_that_was_saved_before_a_change_of_the_shard_sees_the_change_not_stale_memory() -> (
    None
):
    """As with any tensor: a saved view shows what its memory holds when it is read."""
    models = [Doubled(), Doubled()]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, wrap=sw.wrap.whole(), comm=comm)
        x = torch.ones(1, 12, requires_grad=True)
        value = model(x).sum()
        with torch.no_grad():
            model(x)  # evaluation: gathers, and frees again
        sharded.runtime.end_step()  # else it stays whole for the backward pass
        for bucket in sharded.buckets:
            bucket.shard.mul_(2)
        value.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * Doubled().weight.detach().view(1, -1))

    run_threads(2, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathers_do_not_move_the_version_counter_of_saved_views(strategy: str) -> None:
    """Else backward says "modified by an inplace operation" after the second gather."""
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> set[tuple[int, int]]:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        weight = sharded.model.get_parameter("blocks.1.mlp.up.weight")
        bucket = next(b for b in sharded.buckets if any(p is weight for p in b.params))
        versions: set[tuple[int, int]] = set()

        def look() -> None:
            versions.add((weight._version, bucket.full._version))

        in_forward(sharded.model.get_submodule("blocks.1.mlp.up"), look)
        for _ in range(3):
            train(sharded.model, decoder_batch(comm.rank, 2))
            look()
        return versions

    for versions in run_threads(2, rank):
        assert len(versions) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_is_sharded_and_first_used_in_inference_mode_can_be_trained(
    strategy: str,
) -> None:
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> None:
        with torch.inference_mode():
            sharded = sw.shard(models[comm.rank], strategy, comm=comm)
            loss(sharded.model, decoder_batch(comm.rank, 2))
        optimizer = torch.optim.SGD(sharded.model.parameters(), lr=0.1)
        for _ in range(2):
            train(sharded.model, decoder_batch(comm.rank, 2))
            optimizer.step()
            with torch.inference_mode():
                loss(sharded.model, decoder_batch(comm.rank, 2))
        for bucket in sharded.buckets:
            assert not bucket.full.is_inference()
            assert not bucket.shard.is_inference()

    run_threads(2, rank)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_at_every_moment_the_full_buckets_weigh_what_the_schedule_says(strategy: str) -> None:
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> int:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        runtime, gathered, peaks = sharded.runtime, set[str](), [0]

        def weigh(event: Event) -> None:
            if event.op is Op.GATHER:
                gathered.add(event.unit)
            elif event.op is Op.FREE:
                gathered.remove(event.unit)
            scheduled = sum(runtime.schedules.nbytes()[unit].gathered for unit in gathered)
            assert sum(b.full.untyped_storage().nbytes() for b in sharded.buckets) == scheduled
            peaks.append(scheduled)

        runtime.listeners.append(weigh)
        for _ in range(2):
            train(sharded.model, decoder_batch(comm.rank, 2))
            assert_at_rest(sharded)
        assert gathered == set()
        return max(peaks)

    whole = sum(p.numel() * 4 for p in decoder().parameters())
    [peak, other] = run_threads(2, rank)
    assert peak == other
    assert (peak < whole) == (strategy == "full_shard")


# ---- bytes that are copied ---------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_the_only_copy_of_a_gather_is_the_ranks_own_slice(
    net: Net, strategy: str, world: int
) -> None:
    models = [net.build() for _ in range(world)]

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        train(sharded.model, net.batch(comm.rank, 2))
        gathers: Counter[str] = Counter()
        sharded.runtime.listeners.append(
            lambda event: gathers.update([event.unit] if event.op is Op.GATHER else [])
        )
        before = [bucket.copied for bucket in sharded.buckets]
        with Written() as written:
            train(sharded.model, net.batch(comm.rank, 2))
        for bucket, copied in zip(sharded.buckets, before, strict=True):
            copies = 0 if bucket.allocation.aliased else gathers[bucket.unit]
            own = bucket.layout.shard_numel * 4 * copies
            assert bucket.copied - copied == own
            assert written.into(bucket.full) == ({"copy_": own} if own else {})

    run_threads(world, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_alone_copies_no_parameter_and_calls_nobody(strategy: str) -> None:
    model, comm = decoder(), Watched(LocalComm())
    sharded = sw.shard(model, strategy, comm=comm)
    comm.log.clear()
    with Written() as written:
        for _ in range(2):
            train(model, decoder_batch(0, 2))
            model.zero_grad()
    assert comm.log == []
    assert comm.counters.calls == {}
    assert written.into(*[bucket.full for bucket in sharded.buckets]) == {}
    assert [bucket.copied for bucket in sharded.buckets] == [0] * len(sharded.buckets)
    for bucket in sharded.buckets:
        assert storage(bucket.full) == storage(bucket.shard)


def test_a_cast_is_the_copy_of_the_own_slice() -> None:
    """bf16 compute on fp32 shards costs no copy more: half the bytes, once."""
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> None:
        precision = sw.Precision(param_dtype=torch.bfloat16)
        sharded = sw.shard(models[comm.rank], comm=comm, precision=precision)
        train(sharded.model, decoder_batch(comm.rank, 2))
        before = sum(bucket.copied for bucket in sharded.buckets)
        comm.counters.reset()
        with Written() as written:
            train(sharded.model, decoder_batch(comm.rank, 2))
        copied = sum(bucket.copied for bucket in sharded.buckets) - before
        assert written.into(*[b.full for b in sharded.buckets]) == {"copy_": copied}
        assert comm.counters.bytes_sent["gather"] == copied  # to one peer, the own slice

    run_threads(2, rank)


# ---- padding, frozen parameters, many dtypes ----------------------------------------------------


def padding_of(bucket: Bucket, flat: Tensor) -> Tensor:
    """The elements of a full bucket that belong to no parameter."""
    free = torch.ones(bucket.layout.numel, dtype=torch.bool)
    for slot in bucket.layout.slots:
        free[slot.start : slot.stop] = False
    return flat[free]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_padding_stays_zero(net: Net, strategy: str) -> None:
    models = [net.build() for _ in range(3)]

    def rank(comm: Comm) -> int:
        sharded = sw.shard(models[comm.rank], strategy, comm=Watched(comm, dirty=True))
        optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=0.1)
        for _ in range(2):
            train(sharded.model, net.batch(comm.rank, 2))
            optimizer.step()
            optimizer.zero_grad()
        for bucket in sharded.buckets:
            bucket.gather()
            bucket.ready()
            assert not padding_of(bucket, bucket.full).any()
            bucket.free()
        return sum(bucket.layout.padding for bucket in sharded.buckets)

    assert all(padding > 0 for padding in run_threads(3, rank))


class Mixed(nn.Module):
    """fp32 and bf16 to train; bytes, small integers, bf16 and fp16 that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.narrow = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5).bfloat16())
        self.bytes = frozen(torch.arange(55, dtype=torch.uint8).view(11, 5))
        self.small = frozen(torch.arange(-6, 7, dtype=torch.int8).view(13, 1))
        self.offset = frozen(torch.linspace(-2, 2, 13).half())
        self.still = frozen(torch.linspace(0, 3, 5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.scale + self.still) @ self.narrow.float().t()
        x = x @ self.narrow.float() @ (self.bytes.float() / 128).t()
        return torch.cat([x, x[:, :2]], -1) * self.small.float().flatten() + self.offset


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


MIXED = [(numbers(seed, (4, 5)), numbers(seed + 1, (4, 13))) for seed in (0, 7, 14)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_unit_may_hold_many_dtypes(strategy: str, world: int) -> None:
    taken = play(Mixed(), [train] * 2, MIXED[:world], strategy=strategy)
    assert taken[1].follows


def test_each_dtype_and_trainability_is_a_bucket_of_its_own_and_bytes_travel_as_bytes() -> None:
    models = [Mixed(), Mixed()]

    def rank(comm: Comm) -> None:
        precision = sw.Precision(param_dtype=torch.bfloat16)
        sharded = sw.shard(models[comm.rank], comm=comm, precision=precision)
        assert [(b.dtypes.stored, b.dtypes.param, b.trainable) for b in sharded.buckets] == [
            (torch.float32, torch.bfloat16, True),
            (torch.bfloat16, torch.bfloat16, True),
            (torch.uint8, torch.uint8, False),
            (torch.int8, torch.int8, False),
            (torch.float16, torch.bfloat16, False),
            (torch.bfloat16, torch.bfloat16, False),
        ]
        plain = Mixed().state_dict()
        for name, value in sharded.model.state_dict().items():
            assert value.dtype == plain[name].dtype
            assert torch.equal(value, plain[name])

    run_threads(2, rank)


# ---- values that the user puts in ----------------------------------------------------------------


class Own(nn.Parameter):
    """A user's own class."""


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "full_shard"])
def test_values_of_another_dtype_are_not_taken_over(strategy: str) -> None:
    """Of a parameter of a user's own class, at which nobody is told when its values change."""
    model = nn.Linear(4, 6, bias=False)
    model.weight = Own(torch.ones(6, 4))
    sw.shard(model, strategy, comm=FakeComm(0, 2))
    model.weight.data = model.weight.data.double()
    with pytest.raises(sw.ConfigError, match=r"'weight' was replaced by a tensor .* torch.float64"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("own", [True, False])
def test_a_part_of_the_values_does_not_take_their_place(own: bool, strategy: str) -> None:
    """Though it lies where they lay."""
    model = nn.Linear(4, 6, bias=False)
    if own:
        model.weight = Own(torch.ones(6, 4))
    sw.shard(model, strategy, comm=FakeComm(0, 2))
    with pytest.raises(
        sw.ConfigError, match=r"'weight' was replaced by a tensor of shape \(1, 4\)"
    ):
        replace_and_call(model)


def replace_and_call(model: nn.Linear) -> None:
    model.weight.data = local(model.weight.data)[:1]
    model(torch.ones(1, 4))


def test_after_the_last_use_of_a_layout_nothing_of_it_is_left_on_a_parameter() -> None:
    model = decoder()
    sharded = sw.shard(model, comm=FakeComm(0, 2))
    assert all("before_write" in vars(param) for param in model.parameters())
    sharded.unshard()
    assert not any("before_write" in vars(param) for param in model.parameters())


def test_after_the_last_use_of_a_layout_its_memory_goes_though_its_buckets_are_held() -> None:
    """Since another layout may be made next."""
    sharded = sw.shard(decoder(), comm=FakeComm(0, 2))
    buckets = sharded.buckets
    with sharded.no_sync():
        train(sharded.model, decoder_batch(0, 2))
    flats = [flat for b in buckets for flat in (b.full, b.shard, b.gradients.full)]
    memory = [weakref.ref(flat.untyped_storage()) for flat in flats if flat is not None]
    assert len(memory) == 3 * len(buckets)
    del flats
    sharded.unshard()
    assert all(flat() is None for flat in memory)


# ---- one bucket, call by call --------------------------------------------------------------------

BF16 = sw.Precision(param_dtype=torch.bfloat16)


def test_a_bucket_is_gathered_once_however_often_that_is_asked_for() -> None:
    comm = Late(0, 2)
    [bucket, *_] = sw.shard(decoder(), comm=comm).buckets
    before = len(comm.waited)
    bucket.ready()  # gathers, since nobody has
    bucket.gather()
    assert (bucket.gathered, bucket.is_whole) == (True, True)
    assert comm.waited[before:] == [True]
    bucket.free()
    assert (bucket.gathered, bucket.is_whole) == (False, False)


def test_what_was_written_is_kept_once_and_nothing_else_is() -> None:
    [bucket, *_] = sw.shard(decoder(), comm=FakeComm(0, 2)).buckets
    written = [bucket.is_written()]
    for write in (False, True, False):
        bucket.ready()
        if write:
            with torch.no_grad():
                bucket.params[0].mul_(2)
        written.append(bucket.is_written())
        bucket.free()
        written.append(bucket.is_written())
    bucket.gather()  # and never used
    assert [*written, bucket.is_written()] == [
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_parameter_of_a_users_own_class_is_written_only_where_it_is() -> None:
    model = nn.Linear(4, 6, bias=False)
    model.weight = Own(torch.ones(6, 4))
    [bucket] = sw.shard(model, comm=FakeComm(0, 2)).buckets
    bucket.ready()
    assert not bucket.is_written()
    model.weight.data = torch.zeros(6, 4)
    assert bucket.is_written()


@pytest.mark.parametrize(("precision", "changes"), [(sw.Precision(), False), (BF16, True)])
def test_each_use_of_a_parameter_that_is_cast_has_a_node_of_its_own_for_its_gradient(
    precision: sw.Precision, changes: bool
) -> None:
    """As where it is freed between two uses: else strategies would add gradients up otherwise."""
    [bucket, *_] = sw.shard(decoder(), "zero1", comm=FakeComm(0, 2), precision=precision).buckets
    nodes = []
    for _ in range(2):
        bucket.ready()
        nodes.append(get_gradient_edge(bucket.params[0]).node)
    assert (nodes[0] is not nodes[1]) is changes


def test_what_was_written_to_a_parameter_that_is_cast_is_there_in_its_next_use() -> None:
    [bucket, *_] = sw.shard(decoder(), "zero1", comm=FakeComm(0, 2), precision=BF16).buckets
    bucket.ready()
    with torch.no_grad():
        bucket.params[0].fill_(3.0)
    bucket.ready()
    assert (bucket.params[0] == 3.0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_are_put_together_in_new_memory_and_missing_ones_are_zeros(strategy: str) -> None:
    models = [decoder() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def rank(comm: Comm) -> None:
        for bucket in sw.shard(models[comm.rank], strategy, comm=comm).buckets:
            values = gather_whole(bucket)
            assert {storage(value) for value in values} & {storage(bucket.shard)} == set()
            parts = [2 * bucket.part(index, value) for index, value in enumerate(values)]
            joined = gather_parts(bucket, [None, *parts[1:]], torch.float64)
            assert not joined[0].any()
            for value, double in zip(values[1:], joined[1:], strict=True):
                assert double.dtype is torch.float64
                assert torch.equal(double, 2 * value.double())

    run_threads(2, rank)


@pytest.mark.parametrize("how", ["load", "update"])
def test_values_put_in_before_they_are_sent_are_sent_once(how: str) -> None:
    """Of a parameter of a user's own class, whose values are looked at when they are used."""
    loads, hybrid = how == "load", {"strategy": "hybrid_full", "mesh": (2, 2)}
    options: dict[str, Any] = {"offload": "optimizer"} if loads else hybrid
    model = nn.Linear(4, 8, bias=False)
    model.weight = Own(torch.ones(8, 4))
    [bucket] = sw.shard(model, comm=FakeComm(0, 4), **options).buckets
    host, calls = bucket.host, bucket.mesh.replicate.counters.calls
    before = host.copied["load"]
    calls.clear()
    model.weight.data = torch.full_like(model.weight.data, 2.0)
    bucket.load() if loads else bucket.update()
    bucket.ready()
    assert (bucket.params[0] == 2.0).all()
    assert host.copied["load"] - before == (bucket.shard.nbytes if loads else 0)
    assert calls == ({} if loads else {"update": 1})


def test_a_gather_that_nobody_used_is_waited_for_before_its_memory_goes() -> None:
    comm = Late(0, 2)
    [bucket, *_] = sw.shard(decoder(), comm=comm).buckets
    bucket.gather()
    bucket.free()
    assert all(comm.waited)
    assert bucket.full.untyped_storage().nbytes() == 0


def test_what_is_still_read_keeps_its_memory_until_the_next_free() -> None:
    [bucket, *_] = sw.shard(decoder(), comm=FakeComm(0, 2)).buckets
    bucket.ready()
    bucket.free(still_read=True)
    assert not bucket.gathered
    assert bucket.full.untyped_storage().nbytes() > 0
    bucket.free()
    assert bucket.full.untyped_storage().nbytes() == 0


def test_a_shard_is_cast_again_only_once_it_may_have_been_written() -> None:
    sharded = sw.shard(decoder(), "zero1", comm=FakeComm(0, 2), precision=BF16)
    [bucket, *_] = sharded.buckets
    casts = []
    for expires in (False, False, True, False):
        if expires:
            bucket.expire()
        before = bucket.copied
        bucket.ready()
        bucket.free()
        casts.append(bucket.copied > before)
    assert casts == [True, False, True, False]


PIECES = Placement("mine", (), (), ("shard", "replicate"), hybrid=True)


@pytest.mark.parametrize("precision", [sw.Precision(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["hybrid_full", PIECES], ids=["freed", "resident"])
def test_pieces_that_copies_have_written_are_joined_once_before_they_are_gathered(
    placement: str | Placement, precision: sw.Precision
) -> None:
    """Ranks 0 and 1 split the model, 2 and 3 have the same: each rank writes its number."""

    def rank(comm: Comm) -> None:
        model = nn.Linear(16, 64, bias=False)
        [bucket] = sw.shard(model, placement, comm=comm, mesh=(2, 2), precision=precision).buckets
        assert bucket.shard.numel() * 4 == bucket.layout.numel
        # The cast to a piece, once; and where the full bucket was freed, both pieces, twice.
        itemsize = bucket.dtypes.param.itemsize
        casts = bucket.shard.numel() * itemsize if precision is BF16 else 0
        moves = 0 if bucket.allocation.lasting else 2 * 2 * bucket.shard.numel() * itemsize
        for step in range(2):
            before = bucket.copied
            bucket.shard.fill_(10 * step + comm.rank)
            bucket.expire()
            bucket.mesh.replicate.counters.reset()
            for _ in range(2):
                bucket.ready()
                expected = torch.tensor([0, 2, 1, 3]).repeat_interleave(bucket.shard.numel())
                assert torch.equal(bucket.full, (10 * step + expected).to(bucket.full.dtype))
                bucket.free()
            assert bucket.mesh.replicate.counters.calls == {"update": 1}
            assert bucket.copied - before == casts + moves
            whole = torch.cat([value.flatten() for value in gather_whole(bucket)])
            assert torch.equal(whole, (10 * step + expected).float())

    run_threads(4, rank)
