"""Ranks that do not all have the same to do: other numbers of batches, other sizes of them.

The truth is one process that plays, in each step, the ranks that still have data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.gradients import Share
from shardwise.runtime.join import share_of
from tests.copies import assert_near, clones, equal, on_ranks, said, seeded
from tests.nets import loss, odd_convnet, odd_convnet_batch, tied_decoder, tied_decoder_batch
from tests.parity.plain import mean_in_rank_order, put_gradients
from tests.parity.sharded import distance
from tests.ranks import run_processes, run_sharing, run_threads
from tests.steps import STRATEGIES, assert_at_rest

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
COUNTS = (3, 1, 4, 0)  # batches of each rank
prove = pytest.mark.prove


def sgd(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def batches(rank: int) -> list[Any]:
    return [tied_decoder_batch(100 * rank + number, 2) for number in range(COUNTS[rank])]


def one_process(
    model: nn.Module,
    make: MakeOptimizer,
    steps: int,
    losses: Callable[[nn.Module, int], Iterator[list[Tensor]]],
) -> dict[str, Tensor]:
    """The model after ``steps``, each with the mean over the ranks whose ``losses`` there are."""
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        parts = []
        for of_rank in losses(model, step):
            for one in of_rank:
                one.backward()
            parts.append({name: param.grad for name, param in model.named_parameters()})
            model.zero_grad()
        put_gradients(model, mean_in_rank_order(parts))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def by_one_process(make: MakeOptimizer) -> dict[str, Tensor]:
    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        for rank in range(len(COUNTS)):
            for batch in batches(rank)[step : step + 1]:
                yield [loss(model, batch)]

    return one_process(seeded(tied_decoder), make, max(COUNTS), losses)


def train(sharded: sw.Sharded, make: MakeOptimizer) -> int:
    optimizer = make(list(sharded.model.parameters()))
    with sharded.join(optimizer) as joined:
        for batch in batches(sharded.comm.rank):
            loss(sharded.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return joined.missed_steps


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_shard", "hybrid_full"])
def test_ranks_that_run_out_of_data_change_nothing_for_the_others(
    strategy: str, make: MakeOptimizer
) -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[int, dict[str, Tensor]]:
        mesh: Any = {"mesh": (2, 2)} if "hybrid" in strategy else {}
        sharded = sw.shard(model, strategy, comm=comm, **mesh)
        missed = train(sharded, make)
        return missed, sharded.model.state_dict()

    expected = by_one_process(make)
    for (missed, state), count in zip(on_ranks(4, tied_decoder, rank), COUNTS, strict=True):
        assert missed == max(COUNTS) - count
        assert strategy.startswith("hybrid") or equal(state, expected)
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-6


def in_a_process(comm: Comm) -> tuple[int, dict[str, Tensor]]:
    sharded = sw.shard(seeded(tied_decoder), comm=comm)
    return train(sharded, sgd), sharded.model.state_dict()


@pytest.mark.spawn
def test_processes_run_out_of_data_alike() -> None:
    missed, states = zip(*run_processes(len(COUNTS), in_a_process), strict=True)
    assert missed == tuple(max(COUNTS) - count for count in COUNTS)
    assert all(equal(state, by_one_process(sgd)) for state in states)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_share_memory_run_out_of_data_alike(strategy: str) -> None:
    models = [seeded(tied_decoder) for _ in COUNTS]

    def rank(comm: Comm) -> dict[str, Tensor]:
        sharded = sw.shard(models[comm.rank], strategy, comm=comm)
        with torch.no_grad():
            loss(sharded.model, tied_decoder_batch(0, 2))
        train(sharded, sgd)
        return sharded.model.state_dict()

    states = run_sharing(len(COUNTS), rank)
    assert all(equal(state, by_one_process(sgd)) for state in states)


# --- every kind of call ------------------------------------------------------------------------


class Skipping(nn.Module):
    """Skips its second layer where it is told to, and reads a weight outside of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if skips and number == 1 else torch.tanh(layer(x))
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        return x @ weight


def rows(seed: int, count: int) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


STEPS = {  # the batches of each rank in each optimizer step: (seed, rows) of its micro-batches
    "two micro-batches": [[[(1, 4), (2, 4)], [(3, 4)], []], [[(4, 4), (5, 4)], [], []]],
    "other sizes": [[[(1, 4)], [(2, 1)], [(3, 2)]], [[(4, 3)], [], [(5, 1)]], [[(6, 2)], [], []]],
}


def steps_by_one_process(steps: list[Any]) -> dict[str, Tensor]:
    """Every sample counts alike, whichever rank and micro-batch it is in."""
    model = seeded(Skipping)
    optimizer = sgd(list(model.parameters()))
    for number, by_rank in enumerate(steps):
        batches = [rows(*one) for micro in by_rank for one in micro]
        total = sum(map(len, batches))
        for batch in batches:
            (model(batch, number == 1).pow(2).mean() * len(batch) / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.param_groups[0]["lr"] *= 0.5
    return model.state_dict()


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid_full"])
@pytest.mark.parametrize("name", STEPS)
def test_what_ranks_do_in_a_step_is_done_without_data(name: str, strategy: str) -> None:
    """Accumulate, validate, clip, skip a layer, change the learning rate, keep zeroed gradients."""
    steps = STEPS[name]

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        mesh: Any = {"mesh": (3, 1)} if "hybrid" in strategy else {}
        wrap = sw.wrap.by_class(nn.Linear)
        sharded = sw.shard(model, strategy, wrap, comm, **mesh)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer, samples=lambda x, skips: len(x)):
            for number, by_rank in enumerate(steps):
                micro, most = by_rank[comm.rank], max(map(len, by_rank))
                for part, one in enumerate(micro, start=1):
                    with sharded.accumulate(last=part == most):
                        (model(rows(*one), number == 1).pow(2).mean() / most).backward()
                    with torch.no_grad():
                        model(rows(0, 2), False)
                if len(micro) < most:
                    break
                sharded.clip_grad_norm_(0.3)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                optimizer.param_groups[0]["lr"] *= 0.5
        return model.state_dict()

    expected = steps_by_one_process(steps)
    for state in on_ranks(3, Skipping, rank):
        assert max(distance(state[key], expected[key]) for key in expected) < 1e-5


def test_a_sample_counts_alike_on_every_rank() -> None:
    assert share_of(0, [(1, 1), (1, 1), (0, 0)]) == Share(1.0, 2.0)
    assert share_of(2, [(1, 1), (1, 1), (0, 0)]) == Share(0.0, 2.0)
    assert share_of(1, [(2, 2), (1, 1)]) == Share(1.0, 1.5)  # a rank left between micro-batches
    assert share_of(1, [(8, 1), (2, 1)]) == Share(0.25, 1.25)
    assert share_of(0, [(1, 1), (0, 0)]) == Share(1.0, 1.0)
    for samples in ([0, 0], [-1, 3]):
        text = said(sw.ScheduleError, lambda: share_of(0, [(count, 1) for count in samples]))  # noqa: B023
        assert f"have {samples} samples, of which no mean" in text


def test_ranks_stop_together() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[tuple[bool, bool]]:
        sharded = sw.shard(model, comm=comm)
        votes = [(sharded.any(comm.rank == 1), sharded.all(comm.rank == 1))]
        votes += [(sharded.any(False), sharded.all(torch.tensor(True)))]
        with sharded.join():
            for batch in batches(comm.rank):
                loss(model, batch).backward()
                votes.append((sharded.any(comm.rank == 0), sharded.all(comm.rank != 0)))
        return votes

    ranks = on_ranks(3, tied_decoder, rank)
    outside, together, alone = [(True, False), (False, True)], (True, False), (False, True)
    assert ranks[0] == [*outside, *[together] * 3]
    assert ranks[1] == [*outside, together]
    assert ranks[2] == [*outside, *[together] * 3, alone]


# --- what else goes on without data ------------------------------------------------------------


def statistics_by_one_process(policy: str) -> dict[str, Tensor]:
    """Those that each rank with data comes to by itself, and then their mean or the first's."""
    models = [seeded(odd_convnet) for _ in COUNTS]
    for step in range(max(COUNTS)):
        updated = []
        for rank, model in enumerate(models):
            if step < COUNTS[rank]:
                with torch.no_grad():
                    model(odd_convnet_batch(10 * step + rank, 4)[0])
                updated.append(clones(dict(model.named_buffers())))
        for model, (name, first) in product(models, updated[0].items()):
            every = torch.stack([buffers[name].double() for buffers in updated])
            is_mean = policy == "average" and first.is_floating_point()
            model.get_buffer(name).copy_(every.mean(0) if is_mean else first)
    return clones(dict(models[0].named_buffers()))


@pytest.mark.parametrize("policy", ["average", "broadcast"])
def test_buffers_of_a_rank_without_data_do_not_count(policy: Any) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, buffers=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # only buffers change
        with sharded.join(optimizer):
            for step in range(COUNTS[comm.rank]):
                loss(model, odd_convnet_batch(10 * step + comm.rank, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return clones(dict(model.named_buffers()))

    expected = statistics_by_one_process(policy)
    for found in on_ranks(len(COUNTS), odd_convnet, rank):
        assert_near(found, expected)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=prove) for name in ("full_shard", "hybrid_shard")] + ["hybrid_full"],
)
def test_a_scaler_unscales_and_skips_without_data(strategy: str) -> None:
    """The third step overflows on one rank; its gradients are zeroed, and not taken away."""

    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        for rank in range(len(COUNTS)):
            for batch in batches(rank)[(0, 1, 3)[step] :][:1]:
                yield [loss(model, batch)]

    def rank(comm: Comm, model: nn.Module) -> tuple[int, dict[str, Tensor]]:
        mesh: Any = {"mesh": (2, 2)} if "hybrid" in strategy else {}
        sharded = sw.shard(model, strategy, comm=comm, **mesh)
        optimizer = sgd(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with sharded.join(optimizer) as joined:
            for step, batch in enumerate(batches(comm.rank)):
                value = loss(model, batch)
                overflows = (step, comm.rank) == (2, 2)
                scaler.scale(value * torch.inf if overflows else value).backward()
                scaler.unscale_(optimizer)
                sharded.clip_grad_norm_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=False)
        return joined.missed_steps, model.state_dict()

    expected = one_process(seeded(tied_decoder), sgd, 3, losses)
    ranks = on_ranks(len(COUNTS), tied_decoder, rank)
    assert [missed for missed, _ in ranks] == [1, 2, 0, 3]
    for _, state in ranks:
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize("how", ["a scaler", "torch's clipping"])
def test_what_changes_whole_gradients_unseen_is_an_error_on_a_rank_without_data(how: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, "no_shard", comm=comm)
        optimizer = sgd(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled=how == "a scaler")
        with sharded.join(optimizer, scaler=scaler):
            for batch in batches(0)[: 1 + comm.rank]:
                scaler.scale(loss(model, batch)).backward()
                if how == "torch's clipping":
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    with pytest.raises(Exception, match=r"(?s)changed after backward\(\) .* and not on rank 0"):
        on_ranks(2, tied_decoder, rank)


def scales_of_two_epochs(comm: Comm, model: nn.Module, is_given: bool) -> list[dict[str, Any]]:
    """The last step of the first one overflows, and only rank 1 has data for it."""
    sharded = sw.shard(model, comm=comm)
    optimizer = sgd(list(model.parameters()))
    scaler, states = torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    for factors in ((1.0, torch.inf)[: 1 + comm.rank], (1.0,)):
        with sharded.join(optimizer, scaler=scaler if is_given else None):
            for factor in factors:
                scaler.scale(loss(model, batches(0)[0]) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        states.append(scaler.state_dict())
    return states


def test_a_scaler_is_the_same_on_all_ranks_after_the_block() -> None:
    ranks = on_ranks(2, tied_decoder, partial(scales_of_two_epochs, is_given=True))
    for states in ranks:
        assert [state["scale"] for state in states] == [2.0**9] * 2
        assert [state["_growth_tracker"] for state in states] == [0, 1]


def test_a_scaler_that_came_apart_is_found() -> None:
    with pytest.raises(sw.RanksDisagree, match=r"another scale on rank 1 .* scaler=scaler\)"):
        on_ranks(2, tied_decoder, partial(scales_of_two_epochs, is_given=False))


def test_a_rank_that_keeps_its_gradients_while_others_drop_theirs_is_found() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer):
            for batch in batches(0)[:2]:
                loss(model, batch).backward()
                optimizer.step()
                if comm.rank == 0:
                    optimizer.zero_grad()

    with pytest.raises(sw.RanksDisagree, match=r"before a forward pass on rank 0 than on rank 1"):
        on_ranks(2, tied_decoder, rank)


def test_a_rank_that_leaves_without_its_gradients_is_found() -> None:
    """As where a loss that is not finite ends the loop on one rank, before the step."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer):
            loss(model, batches(0)[0]).backward()
            if comm.rank == 0:
                optimizer.zero_grad()
            else:
                optimizer.step()

    with pytest.raises(sw.RanksDisagree, match="rank 0 dropped gradients, left join"):
        on_ranks(2, tied_decoder, rank)


@pytest.mark.parametrize("begins_frozen", [False, True])
def test_requires_grad_that_changes_changes_without_data_too(begins_frozen: bool) -> None:
    """Also where that is the first of which a rank with data tells one that has none."""

    def freeze(model: nn.Module, step: int) -> None:
        model.get_submodule("blocks.0").requires_grad_(step % 2 == begins_frozen)

    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        freeze(model, step)
        for rank in range(len(COUNTS)):
            for batch in batches(rank)[step : step + 1]:
                yield [loss(model, batch)]

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer):
            for step, batch in enumerate(batches(comm.rank)):
                freeze(model, step)
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    expected = one_process(seeded(tied_decoder), sgd, max(COUNTS), losses)
    assert all(equal(state, expected) for state in on_ranks(len(COUNTS), tied_decoder, rank))


@pytest.mark.parametrize(
    ("to_none", "zeroes"), [(True, "after"), (False, "after"), (False, "before")]
)
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_no_gradient_of_a_step_without_data_is_left(
    strategy: str, to_none: bool, zeroes: str
) -> None:
    """So another epoch may follow, in which a rank has data that had none at the end of this.

    Where gradients are zeroed before each backward pass, a rank without data still has its last.
    """

    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        for rank in range(len(COUNTS)):
            for batch in batches(rank)[step % max(COUNTS) :][:1]:
                yield [loss(model, batch)]

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, strategy, comm=comm)
        optimizer = sgd(list(model.parameters()))
        for _ in range(2):
            with sharded.join(optimizer):
                for batch in batches(comm.rank):
                    if zeroes == "before":
                        optimizer.zero_grad(set_to_none=to_none)
                    loss(model, batch).backward()
                    optimizer.step()
                    if zeroes == "after":
                        optimizer.zero_grad(set_to_none=to_none)
        return model.state_dict()

    expected = one_process(seeded(tied_decoder), sgd, 2 * max(COUNTS), losses)
    assert all(equal(state, expected) for state in on_ranks(len(COUNTS), tied_decoder, rank))


@pytest.mark.parametrize("sharing", [False, True])
def test_units_are_recomputed_without_data_too(sharing: bool) -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        options = sw.ActivationCheckpointing(offload=sharing)
        train(sw.shard(models[comm.rank], comm=comm, activation_checkpointing=options), sgd)
        return models[comm.rank].state_dict()

    models = [seeded(tied_decoder) for _ in COUNTS]
    states = (run_sharing if sharing else run_threads)(len(COUNTS), rank)
    assert all(equal(state, by_one_process(sgd)) for state in states)


@prove
@pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own
def test_compiled_units_go_on_where_every_rank_has_taken_a_step() -> None:
    def rank(comm: Comm, model: nn.Module, counts: tuple[int, int], **options: Any) -> Any:
        sharded = sw.shard(model, comm=comm, **options)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer):
            for number in range(counts[comm.rank]):
                loss(model, tied_decoder_batch(10 * comm.rank + number, 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    plain = on_ranks(2, tied_decoder, partial(rank, counts=(1, 3)))
    options: Any = {"compile": "aot_eager", "offload": HOST}
    compiled = on_ranks(2, tied_decoder, partial(rank, counts=(1, 3), **options))
    for one, other in zip(compiled, plain, strict=True):
        assert_near(one, other)
    torch.compiler.reset()  # torch remembers what it has compiled, also for other models
    with pytest.raises(sw.ScheduleError, match="or read by a compiled unit's first call, while"):
        on_ranks(2, tied_decoder, partial(rank, counts=(1, 0), compile="aot_eager"))


HOST = sw.Offload(parameters=True, gradients=True, optimizer=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"residency": 1 << 30}, {"offload": HOST, "residency": 1 << 30}),
        pytest.param({"offload": HOST}, {"residency": 1 << 30}, marks=prove),
    ],
    ids=["residency, then both", "offload, then residency"],
)
def test_a_run_goes_on_from_a_checkpoint_between_two_blocks(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        for rank in range(len(COUNTS)):
            for batch in batches(rank)[step % max(COUNTS) :][:1]:
                yield [loss(model, batch)]

    def epoch(sharded: sw.Sharded, optimizer: torch.optim.Optimizer) -> None:
        with sharded.join(optimizer):
            for batch in batches(sharded.comm.rank):
                loss(sharded.model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, **before)
        optimizer = sgd(list(model.parameters()))
        epoch(sharded, optimizer)
        sharded.save(tmp_path / "epoch-1", optimizer)
        other = models[comm.rank]
        sharded = sw.shard(other, comm=comm, **after)
        optimizer = sgd(list(other.parameters()))
        sharded.load(tmp_path / "epoch-1", optimizer)
        epoch(sharded, optimizer)
        return other.state_dict()

    models = [seeded(tied_decoder, 1) for _ in COUNTS]
    expected = one_process(seeded(tied_decoder), sgd, 2 * max(COUNTS), losses)
    assert all(equal(state, expected) for state in on_ranks(len(COUNTS), tied_decoder, rank))


# --- what cannot be done -----------------------------------------------------------------------


def refused(
    act: Callable[[sw.Sharded, torch.optim.Optimizer], object], kind: type[Exception]
) -> str:
    """The message on rank 0, where it does ``act`` while rank 1 has no data."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer):
            for batch in batches(0)[: 2 - comm.rank]:
                loss(model, batch).backward()
                optimizer.step()
            return said(kind, lambda: act(sharded, optimizer)) if comm.rank == 0 else ""

    return on_ranks(2, tied_decoder, rank)[0]


def test_other_calls_wait_until_the_block_ends() -> None:
    message = refused(lambda sharded, _: sharded.model.state_dict(), sw.ScheduleError)
    assert message == (
        "a state dict was asked for while ranks [1] have run out of data. Until the end of join() "
        "they take part in forward and backward passes, sharded.clip_grad_norm_(), steps of the "
        "optimizers that join() was given, also by a GradScaler, sharded.any() and sharded.all(), "
        "and in nothing else. "
        "Do it after the block."
    )


def test_shards_are_not_written_by_hand_on_some_ranks_only() -> None:
    @torch.no_grad()
    def write(sharded: sw.Sharded, _: object) -> None:
        next(sharded.model.parameters()).mul_(2)

    def scale(sharded: sw.Sharded, _: object) -> None:
        local_gradient = next(sharded.model.parameters()).grad
        assert local_gradient is not None
        local_gradient.mul_(2)

    @torch.no_grad()
    def zero(sharded: sw.Sharded, _: object) -> None:
        next(sharded.model.parameters()).zero_()

    def put(sharded: sw.Sharded, _: object) -> None:
        param = next(sharded.model.parameters())
        param.data = torch.zeros_like(param.data)

    for by_hand in (write, scale, zero, put):
        message = refused(by_hand, sw.ScheduleError)
        name = "'embed.weight', or its gradient, is written by hand"
        assert message.startswith(f"{name} while ranks [1] have run out of data. Until the end of")


def test_shards_are_not_reduced_to_a_number_on_some_ranks_only() -> None:
    """Such as a norm of a gradient, for a log."""

    def norm(sharded: sw.Sharded, _: object) -> None:
        gradient = next(sharded.model.parameters()).grad
        assert gradient is not None
        gradient.norm()

    def norms(sharded: sw.Sharded, _: object) -> None:
        nn.utils.get_total_norm([p.grad for p in sharded.model.parameters() if p.grad is not None])

    def compare(sharded: sw.Sharded, _: object) -> None:
        param = next(sharded.model.parameters())
        torch.equal(param.data, param.data)

    for read, done in ((norm, "reduced"), (norms, "reduced"), (compare, "compared")):
        message = refused(read, sw.ScheduleError)
        assert message.startswith(f"'embed.weight', or its gradient, is {done}")
        assert " while ranks [1] have run out of data. " in message


def test_parameters_are_not_written_in_a_pass_of_some_ranks_only() -> None:
    def write(sharded: sw.Sharded, _: object) -> None:
        block = sharded.model.get_submodule("blocks.0")
        block.register_forward_pre_hook(double)
        with torch.no_grad():
            sharded.model(batches(0)[0][0])

    def double(block: nn.Module, _: object) -> None:
        next(block.parameters()).data.mul_(2)

    message = refused(write, sw.ScheduleError)
    assert message.startswith("parameters of unit 'blocks.0' are written in a pass, or read by a")
    assert " while ranks [1] have run out of data." in message


def test_an_optimizer_that_was_not_given_cannot_step_on_all_ranks() -> None:
    message = refused(lambda s, _: adamw(list(s.model.parameters())).step(), sw.ConfigError)
    assert message.startswith("AdamW steps inside join(), and join() was not given it, so ranks ")
    message = refused(lambda _, optimizer: optimizer.step(lambda: 0.0), sw.ConfigError)
    assert message.startswith("SGD steps inside join(), with a closure, so ranks ")


def test_a_scaler_whose_scale_only_a_fused_kernel_knows_cannot_step_on_all_ranks() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler("cpu")
        with sharded.join(optimizer):
            scaler.scale(loss(model, batches(0)[0])).backward()
            return said(sw.ConfigError, lambda: scaler.step(optimizer))

    for message in on_ranks(2, tied_decoder, rank):
        assert message.startswith("SGD steps inside join(), with a GradScaler and fused=True, so")


def test_learning_rates_that_came_apart_are_found() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = sgd(list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for epoch in range(2):
            with sharded.join(optimizer) as joined:
                for batch in batches(0)[: 2 + comm.rank]:
                    loss(model, batch).backward()
                    optimizer.step()
                    scheduler.step()
            for _ in range(0 if epoch else joined.missed_steps):
                scheduler.step()
        with sharded.join(optimizer):
            loss(model, batches(0)[0]).backward()
            optimizer.step()

    with pytest.raises(sw.RanksDisagree, match=r"\(such as the learning rate\) on rank 1 than on"):
        on_ranks(2, tied_decoder, rank)


def test_ranks_with_data_do_the_same() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        with sharded.join(), torch.set_grad_enabled(comm.rank == 0):
            model(batches(0)[0][0])

    with pytest.raises(sw.RanksDisagree, match="rank 0 is at a call of kind 'train', and rank 1"):
        on_ranks(2, tied_decoder, rank)


def test_who_follows_cannot_follow_ranks_that_differ() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm, divergence="participate")

        def joins() -> None:
            with sharded.join():
                pass

        return said(sw.ConfigError, joins)

    for text in on_ranks(2, tied_decoder, rank):
        assert "join() was called with divergence='participate'" in text


# --- other branches and other lengths ------------------------------------------------------------


class Routed(nn.Module):
    """Each rank's batch goes to the experts that its first number picks, and may end early."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.tail = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, picked: Sequence[int], depth: int) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = x + sum(torch.tanh(self.experts[index](x)) for index in picked)
        for layer in self.tail[:depth]:
            x = torch.tanh(layer(x))
        return x


Route = tuple[Tensor, list[int], int]

IN_ORDER: tuple[list[int], ...] = (
    [0],
    [1, 2],
    [1, 1],
    [],
    [0, 2, 2],
)  # the experts of a batch, 3 for nobody
ANY_ORDER = ([0, 1, 0], [2, 0], [1, 2], [2, 1, 2, 0])


def routes(ways: Sequence[list[int]], step: int, rank: int, part: int) -> Route:
    """Each rank calls other experts, some twice, and may leave out the last layers."""
    picked = ways[(rank + 2 * step + part) % len(ways)]
    only_later = [3] if (step, rank) == (1, 0) else []  # the others call it never
    return rows(100 * step + 10 * rank + part, 1 + rank), picked + only_later, (rank + step) % 3


def routed_by_one_process(world: int, ways: Sequence[list[int]]) -> dict[str, Tensor]:
    def losses(model: nn.Module, step: int) -> Iterator[list[Tensor]]:
        for rank in range(world):
            yield [model(*routes(ways, step, rank, part)).pow(2).mean() / 2 for part in range(2)]

    return one_process(seeded(Routed), sgd, 3, losses)


MESHES = {4: (2, 2), 3: (3, 1), 2: (1, 2)}


@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize(
    ("strategy", "ways"),
    [(strategy, IN_ORDER) for strategy in (*STRATEGIES, "hybrid_shard", "hybrid_full")]
    + [(strategy, ANY_ORDER) for strategy in (*STRATEGIES[:3], "hybrid_shard_zero2")],
)
def test_experts_and_early_exits_may_differ_by_rank(
    strategy: str, ways: Sequence[list[int]], world: int
) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        mesh: Any = {"mesh": MESHES[world]} if "hybrid" in strategy else {}
        wrap = sw.wrap.by_class(nn.Linear)
        sharded = sw.shard(model, strategy, wrap, comm, divergence="participate", **mesh)
        optimizer = sgd(list(model.parameters()))
        for step in range(3):
            with torch.no_grad():
                model(*routes(ways, step, comm.rank, 7))
            for part in range(2):
                with sharded.accumulate(last=part == 1):
                    (model(*routes(ways, step, comm.rank, part)).pow(2).mean() / 2).backward()
            if mesh.get("mesh") != (3, 1):  # there whole parameters and shards are one memory
                assert_at_rest(sharded)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = routed_by_one_process(world, ways)
    for state in on_ranks(world, Routed, rank):
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize("strategy", ["zero1", "shard_grad_op"])
def test_a_step_of_several_forward_passes_may_differ_by_rank(strategy: str) -> None:
    def both(model: nn.Module, rank: int) -> list[Tensor]:
        first, second = (model(*routes(IN_ORDER, step, rank, 0)) for step in range(2))
        return [first.pow(2).mean() + second.mean()]

    def work(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        wrap, optimizer = sw.wrap.by_class(nn.Linear), sgd(list(model.parameters()))
        sw.shard(model, strategy, wrap, comm, divergence="participate")
        both(model, comm.rank)[0].backward()
        optimizer.step()
        return model.state_dict()

    expected = one_process(
        seeded(Routed), sgd, 1, lambda model, _: (both(model, rank) for rank in range(2))
    )
    for state in on_ranks(2, Routed, work):
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-6


class Recomputed(Routed):
    """All its units are recomputed at once."""

    def forward(self, x: Tensor, picked: Sequence[int], depth: int) -> Any:
        return checkpoint(super().forward, x, picked, depth, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
@pytest.mark.parametrize(
    ("net", "picked", "how"),
    [
        (Routed, [0, 1, 0], r"experts\.0' is called after its last place"),
        (Routed, [1, 0], r"experts\.0' is called after its last place"),
        (Recomputed, [0], "embed' is recomputed before its place"),
    ],
)
def test_a_unit_that_other_ranks_would_not_gather_now_is_an_error(
    net: type[Routed], picked: list[int], how: str
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        wrap = sw.wrap.by_class(nn.Linear)
        sharded = sw.shard(model, "full_shard", wrap, comm, divergence="participate")
        model(rows(0, 2), [0, 1] if comm.rank else picked, 2).sum().backward()
        sharded.clip_grad_norm_(1.0)

    with pytest.raises(sw.ScheduleError, match=how):
        on_ranks(2, net, rank)


def test_sequences_of_other_lengths_are_averaged_over_tokens() -> None:
    lengths = (5, 2, 3)

    def batch(rank: int, step: int) -> Any:
        given, wanted = tied_decoder_batch(10 * rank + step, 2)
        return given[:, : lengths[rank]], wanted[:, : lengths[rank]]

    model = seeded(tied_decoder)
    optimizer = sgd(list(model.parameters()))
    for step in range(2):
        for rank, length in enumerate(lengths):
            (loss(model, batch(rank, step)) * length / sum(lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()

    def rank_of(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        optimizer = sgd(list(model.parameters()))
        with sharded.join(optimizer, samples=Tensor.numel):
            for step in range(2):
                loss(model, batch(comm.rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    for state in on_ranks(3, tied_decoder, rank_of):
        assert max(distance(state[name], expected[name]) for name in expected) < 1e-5
