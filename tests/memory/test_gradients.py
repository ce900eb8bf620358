"""From autograd to ``shard.grad``: each gradient is written once, where it is sent from."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.memory.gradients import Gradients
from shardwise.memory.shard_tensor.sharded_parameter import LocalGradient
from shardwise.memory.sharding import sharding_of
from tests.copies import assert_near, local
from tests.fake import FakeComm
from tests.nets import NETS, Batch, Net, decoder, decoder_batch, loss, numbers, tokens
from tests.parity.plain import mean_in_rank_order
from tests.ranks import run_threads
from tests.steps import STRATEGIES, assert_at_rest, assert_gradients, averaged, train
from tests.watched import Late, Watched
from tests.written import Written, storage

WORLDS = (1, 2, 3)


# ---- what is there already ---------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_there_is_set_aside_and_added_to(strategy: str, world: int) -> None:
    models = [decoder()]
    models += [deepcopy(models[0]) for _ in range(world - 1)]
    batches = [decoder_batch(rank, 2) for rank in range(world)]
    truth = averaged(models[0], train, batches)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, comm=comm)
        before = {name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}
        for name, param in model.named_parameters():
            param.grad = before[name]
        train(model, batches[comm.rank])
        for name, param in model.named_parameters():
            assert param.grad is before[name]
        quarter = {n: None if g is None else torch.full_like(g, 0.25) + g for n, g in truth.items()}
        assert_gradients(model, quarter)

    run_threads(world, rank)


def test_a_gradient_from_before_shard_is_cut_and_kept() -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    for model in models:
        model.weight.grad = torch.arange(15.0).view(3, 5)

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, wrap=sw.wrap.whole(), comm=comm)
        sharding = sharding_of(model.weight)
        assert sharding is not None
        assert model.weight.grad is not None
        whole = torch.arange(15.0).view(3, 5)
        assert torch.equal(model.weight.grad, sharding.cut(whole, model.weight.shape))

    run_threads(2, rank)


# ---- one pass ----------------------------------------------------------------------------------


class Collected:
    """Every gradient bucket that was there at an event."""

    def __init__(self, sharded: sw.Sharded) -> None:
        self.fulls: dict[int, Tensor] = {}
        self.most = 0
        self._sharded = sharded
        sharded.runtime.listeners.append(self._look)

    def _look(self, event: object) -> None:
        fulls = [b.gradients.full for b in self._sharded.buckets if b.gradients.full is not None]
        self.fulls |= {storage(full): full for full in fulls}
        self.most = max(self.most, len(fulls))


def with_gradient(model: nn.Module, batch: Batch) -> int:
    """Bytes of the parameters that have a gradient after a plain step."""
    plain = deepcopy(model)
    train(plain, batch)
    return sum(p.numel() * p.element_size() for p in plain.parameters() if p.grad is not None)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_each_element_of_a_gradient_bucket_is_written_once(
    net: Net, strategy: str, world: int
) -> None:
    """By a gradient, or by a zero where there is none; afterwards by a sum in place at most."""
    models = [net.build() for _ in range(world)]
    used = [with_gradient(model, net.batch(rank, 2)) for rank, model in enumerate(models)]

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        train(sharded.model, net.batch(comm.rank, 2))
        buckets = [bucket for bucket in sharded.buckets if bucket.trainable]
        before = sum(bucket.gradients.copied for bucket in buckets)
        sharded.model.zero_grad()
        collected = Collected(sharded)
        with Written() as written:
            train(sharded.model, net.batch(comm.rank, 2))
        by_op = written.into(*collected.fulls.values())
        assert by_op.pop("copy_", 0) + by_op.pop("_foreach_copy_", 0) == used[comm.rank]
        assert sum(b.gradients.copied for b in buckets) - before == used[comm.rank]
        whole = sum(full.nbytes for full in collected.fulls.values())
        assert by_op.pop("_foreach_zero_", 0) == whole - used[comm.rank]
        sums = {name for name in ("add", "addr", "div_") if by_op.pop(name, 0)}
        assert bool(sums) is any(bucket.spec.in_place for bucket in buckets)
        assert by_op == {}

    run_threads(world, rank)


@pytest.mark.parametrize("world", [3, 4])
def test_the_mean_of_copies_takes_the_place_of_the_gradient_bucket(world: int) -> None:
    """No second bucket: what was collected is what ``.grad`` shows, for as long as it is kept."""
    models = [decoder() for _ in range(world)]
    batches = [decoder_batch(rank, 2) for rank in range(world)]
    truth = averaged(models[0], train, batches)

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], "no_shard", comm=comm)
        fulls = Collected(sharded).fulls
        train(sharded.model, batches[comm.rank])
        gradients = [grad for p in sharded.model.parameters() if (grad := p.grad) is not None]
        assert {storage(grad) for grad in gradients} == fulls.keys()
        sharded.model.zero_grad()
        train(sharded.model, decoder_batch(comm.rank + world, 2))
        sharded.model.zero_grad()
        for param, grad in zip(sharded.model.parameters(), gradients, strict=True):
            param.grad = grad
        assert_gradients(sharded.model, truth)

    run_threads(world, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_nothing_relies_on_what_is_in_new_memory(net: Net, strategy: str) -> None:
    models = [net.build()]
    models.append(deepcopy(models[0]))
    batches = [net.batch(rank, 2) for rank in range(2)]
    truth = averaged(models[0], train, batches)

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=Watched(comm, dirty=True))
        for _ in range(2):
            train(sharded.model, batches[comm.rank])
            assert_gradients(sharded.model, truth)
            sharded.model.zero_grad()

    run_threads(2, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_at_most_two_gradient_buckets_exist_at_once(strategy: str) -> None:
    """One is filled while one travels. DDP and ZeRO-1 as others build them keep all."""
    models = [decoder(), decoder()]

    def rank(comm: Comm) -> int:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        collected = Collected(sharded)
        train(sharded.model, decoder_batch(comm.rank, 2))
        assert len(collected.fulls) == len(sharded.buckets)
        return collected.most

    assert run_threads(2, rank) == [2, 2]


@pytest.mark.parametrize("world", [2, 3])
def test_two_copies_take_one_collective_for_a_bucket(world: int) -> None:
    models = [decoder() for _ in range(world)]

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], "no_shard", comm=comm)
        comm.counters.reset()
        train(sharded.model, decoder_batch(comm.rank, 2))
        calls, buckets = comm.counters.calls, len(sharded.buckets)
        assert (calls["reduce"], calls.get("spread", 0)) == (buckets, buckets * (world > 2))

    run_threads(world, rank)


# ---- kinds of gradients --------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed(ids).sum(1)
        return out


def test_sparse_gradients_arrive_as_dense_shards() -> None:
    dense = Sparse(sparse=False)
    batches = [(tokens(rank, (2, 3), 7), numbers(rank, (2, 4))) for rank in range(2)]
    truth = averaged(dense, train, batches)
    models = [Sparse(sparse=True) for _ in range(2)]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        model.load_state_dict(dense.state_dict())
        sw.shard(model, comm=comm)
        train(model, batches[comm.rank])
        assert_gradients(model, truth)

    run_threads(2, rank)


# ---- accumulation ------------------------------------------------------------------------------


def parts(rank: int) -> list[Batch]:
    return [decoder_batch(100 * rank + part, 2) for part in range(3)]


def accumulated(model: nn.Module, world: int) -> dict[str, Tensor | None]:
    """Each rank's three micro-batches one by one, then the mean over ranks."""
    ranks = []
    for rank in range(world):
        plain = deepcopy(model)
        for batch in parts(rank):
            (loss(plain, batch) / 3).backward()
        ranks.append({name: param.grad for name, param in plain.named_parameters()})
    return dict(mean_in_rank_order(ranks))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients_stay_on_the_rank_until_the_last_micro_batch(
    strategy: str, world: int
) -> None:
    models = [decoder()]
    models += [deepcopy(models[0]) for _ in range(world - 1)]
    truth = accumulated(models[0], world)

    def rank(comm: Comm) -> None:
        watched = Watched(comm)
        sharded = sw.shard(models[comm.rank], strategy, comm=watched)
        first, second, last = parts(comm.rank)
        for _ in range(2):
            with sharded.no_sync():
                (loss(sharded.model, first) / 3).backward()
            assert not [line for line in watched.log if line.startswith("reduce")]
            watched.log.clear()
            with sharded.accumulate(last=False):
                (loss(sharded.model, second) / 3).backward()
            assert not [line for line in watched.log if not line.startswith("gather")]
            assert (watched.log == []) == (strategy != "full_shard" or world == 1)
            assert all(type(param.grad) is LocalGradient for param in sharded.model.parameters())
            assert all(b.gradients.full is not None for b in sharded.buckets)
            with sharded.accumulate(last=True):
                (loss(sharded.model, last) / 3).backward()
            assert_gradients(sharded.model, truth)
            assert_at_rest(sharded)
            sharded.model.zero_grad()
            watched.log.clear()

    run_threads(world, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reducing_every_micro_batch_gives_the_same_gradient_for_less_memory(strategy: str) -> None:
    models = [decoder(), decoder()]
    truth = accumulated(models[0], 2)
    models[1].load_state_dict(models[0].state_dict())

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        for batch in parts(comm.rank):
            (loss(sharded.model, batch) / 3).backward()
            assert_at_rest(sharded)
        for name, param in sharded.model.named_parameters():
            sharding, whole = sharding_of(param), truth[name]
            assert sharding is not None
            assert param.grad is not None
            assert whole is not None
            mine = sharding.cut(whole, param.shape)
            assert_near(local(param.grad), mine)

    run_threads(2, rank)


NoSync = Callable[[], AbstractContextManager[None]]


def assert_averages_plain_gradients(
    step: Callable[[nn.Module, Batch, NoSync], None], strategy: str
) -> None:
    """``step`` leaves on two ranks the mean of what it leaves on two plain models."""
    models = [decoder()]
    models.append(deepcopy(models[0]))
    batches = [decoder_batch(rank, 2) for rank in range(2)]
    truth = averaged(models[0], lambda model, batch: step(model, batch, nullcontext), batches)

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        step(sharded.model, batches[comm.rank], sharded.no_sync)
        assert_gradients(sharded.model, truth)
        assert_at_rest(sharded)

    run_threads(2, rank)


def by_model(model: nn.Module) -> None:
    model.zero_grad()


def by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def to_zero(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)


def half_of_them(model: nn.Module) -> None:
    torch.optim.SGD(list(model.parameters())[::2], lr=0.1).zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("throw_away", [by_model, by_hand, to_zero, half_of_them])
def test_what_zero_grad_takes_from_an_accumulation_is_gone(
    throw_away: Callable[[nn.Module], None], strategy: str
) -> None:
    """As in plain torch, and for each parameter by itself."""

    def step(model: nn.Module, batch: Batch, no_sync: NoSync) -> None:
        with no_sync():
            (loss(model, batch) * 1000).backward()
        throw_away(model)
        train(model, batch)

    assert_averages_plain_gradients(step, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_between_micro_batches_grad_is_this_ranks_whole_sum(strategy: str) -> None:
    """As under DDP's ``no_sync``, also where the parameter itself is a shard."""
    models = [decoder()]
    models.append(deepcopy(models[0]))
    plain = deepcopy(models)

    def rank(comm: Comm) -> None:
        batch = decoder_batch(comm.rank, 2)
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        with sharded.no_sync():
            train(sharded.model, batch)
        train(plain[comm.rank], batch)
        pairs = zip(sharded.model.parameters(), plain[comm.rank].parameters(), strict=True)
        for param, whole in pairs:
            assert param.grad is not None
            assert whole.grad is not None
            assert torch.equal(param.grad, whole.grad)

    run_threads(2, rank)


def test_what_was_accumulated_and_averaged_takes_no_memory() -> None:
    sharded = sw.shard(decoder(), comm=FakeComm(0, 2))
    with sharded.no_sync():
        train(sharded.model, decoder_batch(0, 2))
    fulls = [b.gradients.full for b in sharded.buckets]
    memory = [weakref.ref(full) for full in fulls if full is not None]
    assert len(memory) == len(fulls)
    del fulls
    train(sharded.model, decoder_batch(0, 2))
    assert all(full() is None for full in memory)


def test_a_shards_gradient_in_place_of_an_accumulation_is_added_to() -> None:
    models = [decoder()]
    models.append(deepcopy(models[0]))
    batches = [decoder_batch(rank, 2) for rank in range(2)]
    truth = averaged(models[0], train, batches)
    quarter = {n: None if g is None else torch.full_like(g, 0.25) + g for n, g in truth.items()}

    def rank(comm: Comm) -> None:
        sharded = sw.shard(models[comm.rank], comm=comm)
        for _ in range(2):  # beside nothing, and beside a mean
            with sharded.no_sync():
                (loss(sharded.model, batches[comm.rank]) * 1000).backward()
            for param in sharded.model.parameters():
                param.grad = torch.full_like(param, 0.25)
            train(sharded.model, batches[comm.rank])
            assert_gradients(sharded.model, quarter)

    run_threads(2, rank)


@pytest.mark.parametrize("change", [lambda grad: grad * 2, lambda grad: grad.add_(1)])
def test_a_gradient_that_is_averaged_in_part_only_is_not_changed(
    change: Callable[[Tensor], Tensor],
) -> None:
    sharded = sw.shard(decoder(), comm=LocalComm())
    train(sharded.model, decoder_batch(0, 2))
    with sharded.no_sync():
        train(sharded.model, decoder_batch(0, 2))
    param = next(sharded.model.parameters())
    assert param.grad is not None
    param.grad = change(param.grad)
    with pytest.raises(sw.ShardUseError, match="cannot be applied to both"):
        train(sharded.model, decoder_batch(0, 2))


def test_a_backward_pass_that_meets_no_unit_adds_to_an_accumulation() -> None:
    """A penalty on whole parameters: autograd has added to ``.grad`` before it tells us."""
    model = decoder()
    plain = deepcopy(model)
    sharded = sw.shard(model, "no_shard", comm=LocalComm())
    batch = decoder_batch(0, 2)
    for one, last in ((plain, nullcontext()), (model, sharded.no_sync())):
        train(one, batch)
        with last:
            train(one, batch)
        torch.stack([param.pow(2).sum() for param in one.parameters()]).sum().backward()
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, whole.grad)


def test_dropped_gradients_are_forgotten_and_those_of_shards_stay() -> None:
    model = decoder()
    sharded = sw.shard(model, comm=LocalComm())
    with sharded.accumulate(last=False):
        train(model, decoder_batch(1, 2))
    sharded.drop_gradients()
    assert all(param.grad is None for param in model.parameters())
    train(model, decoder_batch(0, 2))
    gradients = {
        name: None if p.grad is None else local(p.grad).clone()
        for name, p in model.named_parameters()
    }
    with sharded.accumulate(last=False):
        train(model, decoder_batch(1, 2))
    sharded.drop_gradients()
    assert_at_rest(sharded)
    assert_gradients(model, gradients)


def test_a_gradient_of_one_micro_batch_is_not_the_users_memory_in_the_next() -> None:
    """What ``backward(gradient)`` was given may be written again as soon as it has returned."""

    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))

        def forward(self) -> Tensor:
            return self.weight.view(-1)

    def rank(comm: Comm) -> list[float]:
        sharded = sw.shard(View(), "zero1", comm=comm)
        ones = torch.ones(6)
        with sharded.accumulate(last=False):
            sharded.model().backward(ones)
        ones.fill_(10.0)
        with sharded.accumulate(last=True):
            sharded.model().backward(ones)
        weight = sharded.model.get_parameter("weight")
        assert weight.grad is not None
        return list(local(weight.grad).flatten().tolist())

    for world in (1, 2):
        values = [value for mine in run_threads(world, rank) for value in mine]
        assert values == [11.0] * 6


# ---- call by call ------------------------------------------------------------------------------


def linears(*inputs: int) -> tuple[sw.Sharded, Gradients]:
    """Linear layers without biases, of one output each, in one bucket of one rank."""
    model = nn.Sequential(*(nn.Linear(count, 1, bias=False) for count in inputs))
    sharded = sw.shard(model, wrap=sw.wrap.whole(), comm=LocalComm())
    [bucket] = sharded.buckets
    return sharded, bucket.gradients


def test_a_gradient_is_written_when_it_is_collected_and_a_second_one_is_added() -> None:
    _, gradients = linears(16_384, 16_383, 5)
    assert gradients.arrivals.small == [1, 2]
    large, small, least = (torch.ones(1, count) for count in (16_384, 16_383, 5))
    copied = []
    for index, grad in ((1, small), (0, large), (2, least), (2, least)):
        complete = gradients.collect(index, grad, carried=False)
        copied.append((gradients.copied // 4, complete))
    assert copied == [(16_383, False), (32_767, False), (32_772, True), (32_777, True)]
    assert gradients.full is not None
    assert [view.max().item() for view in gradients.spec.full_views(gradients.full)] == [1, 1, 2]


def test_small_gradients_that_come_together_lie_in_grad_until_they_are_collected() -> None:
    sharded, gradients = linears(3, 4, 5)
    params = [*sharded.model.parameters()]

    def come(*grads: Tensor | None) -> list[float]:
        gradients.expect(together=True)
        for param, grad in zip(params, grads, strict=False):
            param.grad = grad
            gradients.arrivals(param)
        before = set(gradients.touched)
        gradients.collect_arrivals()
        assert gradients.touched >= before
        assert all(param.grad is None for param in params)
        assert gradients.full is not None
        return [view.sum().item() for view in gradients.spec.full_views(gradients.full)]

    ones = [torch.ones(1, count) for count in (3, 4, 5)]
    assert come(*ones) == [3, 4, 5]
    assert gradients.missing == set()
    assert come(*ones[:2]) == [6, 8, 5]  # of a second call
    assert gradients.missing == {2}
    assert come(None, ones[1].to_sparse(), ones[2]) == [6, 12, 10]
    assert gradients.missing == {0}


def test_small_gradients_that_had_come_when_a_pass_stopped_are_forgotten() -> None:
    sharded, gradients = linears(3, 4)
    first, second = sharded.model.parameters()
    first.grad = torch.ones(1, 3)
    gradients.set_aside()
    gradients.expect(together=True)
    for param in (first, second, first):
        param.grad = torch.full_like(param, 2.0)
        gradients.arrivals(param)
    gradients.drop()
    assert first.grad is not None
    assert (first.grad.sum().item(), second.grad) == (3, None)
    assert not gradients.touched


def test_of_dropped_gradients_nothing_is_left() -> None:
    sharded, gradients = linears(3, 4)
    gradients.collect(0, torch.ones(1, 3), carried=True)
    sharded.drop_gradients()
    gradients.expect()
    gradients.collect(1, torch.ones(1, 4), carried=False)
    assert gradients.touched == {1}
    gradients.reduce()
    assert gradients.full is not None
    assert [view.sum().item() for view in gradients.spec.full_views(gradients.full)] == [0, 4]
    gradients.settle()
    gradients.deliver([False, True], at_rest=True)
    assert [param.grad is None for param in sharded.model.parameters()] == [True, False]
    assert gradients.touched == set()


def test_the_memory_of_what_was_thrown_away_goes_and_the_pass_is_remembered() -> None:
    """So the last micro-batch finds units whole, wherever gradients were thrown away."""
    sharded, gradients = linears(3)
    state = sharded.runtime.units[""]
    collected = [state.collected]
    for evaluates in (True, False):
        with sharded.accumulate(last=False):
            sharded.model(torch.ones(1, 3)).backward()
        sharded.model.zero_grad()
        if evaluates:
            with torch.no_grad():
                sharded.model(torch.ones(1, 3))
        else:
            gradients.adopt()
        assert gradients.full is None
        collected.append(state.collected)
        sharded.model(torch.ones(1, 3)).backward()
        collected.append(state.collected)
    assert collected == [False, True, False, True, False]


# ---- collectives that take their time ------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_shard", "hybrid_full"])
def test_nothing_is_read_before_it_was_waited_for_and_nothing_is_left_in_flight(
    strategy: str,
) -> None:
    def trained(comm: Comm) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = decoder()
        mesh = (2, 3) if strategy.startswith("hybrid") else None
        sharded = sw.shard(model, strategy, comm=comm, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for last in (False, True, True):
            with sharded.accumulate(last=last):
                train(model, decoder_batch(0, 2))
            if last:
                sharded.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected, late = trained(FakeComm(4, 6)), Late(4, 6)
    gradients = trained(late)
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())
    assert late.waited
    assert all(late.waited)


def test_gradients_that_are_dropped_are_waited_for_since_peers_still_read_them() -> None:
    comm = Late(0, 2)
    sharded = sw.shard(decoder(), comm=comm)
    [bucket] = sharded.runtime.units["blocks.0"].buckets
    for index, member in enumerate(bucket.members):
        bucket.gradients.collect(index, torch.ones(member.shape), carried=False)
    bucket.gradients.reduce()
    assert not all(comm.waited)
    bucket.gradients.drop()
    assert all(comm.waited)
    assert bucket.gradients.full is None
