"""A flat optimizer is torch's to its user: what may happen to one between steps happens here.

Most tests train twins: a model with a flat optimizer, and the same with torch's on the same
shards, which must end alike up to rounding. (That the update itself is torch's, bit for bit on
the same pieces, is ``test_fused``.)
"""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.optim import fused
from shardwise.torch_internals import fused_adamw_
from tests import nets
from tests.copies import assert_near, clones, equal, error_text, local, on_ranks
from tests.fake import FakeComm
from tests.nets import NETS, Net
from tests.ranks import run_threads
from tests.steps import STRATEGIES, train

DECODER = Net(nets.decoder, nets.decoder_batch)
ODD = Net(nets.scalar_and_13_rows, nets.scalar_and_13_rows_batch)
EXPERTS = Net(nets.unused_expert, nets.unused_expert_batch)
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
OTHER: dict[str, Any] = {"lr": 0.02, "eps": 1e-3}


@dataclass(frozen=True)
class Twin:
    """A sharded model with its optimizer."""

    model: nn.Module
    sharded: sw.Sharded
    optimizer: Optimizer

    def step(self, batch: Any) -> None:
        train(self.model, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def twins(comm: Comm, model: nn.Module) -> tuple[Twin, Twin]:
    """A flat one and one of torch, with the same values."""
    other = copy.deepcopy(model)
    flat, plain = sw.shard(model, comm=comm), sw.shard(other, comm=comm)
    return (
        Twin(model, flat, sw.optim.AdamW(flat, **ADAMW)),
        Twin(other, plain, torch.optim.AdamW(other.parameters(), **ADAMW)),
    )


def assert_alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert_near(one, other, 2e-5)


# ---- the same bits in every strategy ---------------------------------------------------------


@pytest.mark.parametrize("other", STRATEGIES[:-1])
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_every_strategy_gives_the_same_bits(net: Net, world: int, other: str) -> None:
    """With clipping, weight decay, parameters in groups and accumulation."""

    def rank(comm: Comm, model: nn.Module, strategy: str) -> tuple[dict[str, Tensor], float]:
        sharded = sw.shard(model, strategy, comm=comm)
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": trained[::3], "weight_decay": 0.0}, {"params": ".*"}]
        optimizer = sw.optim.AdamW(sharded, groups, max_norm=0.05, **ADAMW)
        for step in range(3):
            for micro in range(2):
                with sharded.accumulate(last=micro == 1):
                    train(model, net.batch(100 * comm.rank + 10 * step + micro, 2))
            optimizer.step()
            optimizer.zero_grad()
        params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        state = {name: v for name, v in model.state_dict().items() if name in params}
        assert optimizer.norm is not None
        return clones(state), optimizer.norm.item()

    runs = [
        result
        for strategy in (STRATEGIES[-1], other)
        for result in on_ranks(world, net.build, lambda c, m: rank(c, m, strategy))  # noqa: B023
    ]
    for state, norm in runs[1:]:
        assert equal(state, runs[0][0])
        assert norm == runs[0][1] > 0.05


# ---- gradients: absent, replaced, clipped ------------------------------------------------------


def test_a_parameter_without_a_gradient_is_left_alone_and_its_steps_are_not_counted() -> None:
    """An expert that nobody reaches has none, and here every third parameter in turn has none."""

    def rank(comm: Comm, model: nn.Module) -> None:
        flat, plain = twins(comm, model)
        for step in range(4):
            for twin in (flat, plain):
                train(twin.model, EXPERTS.batch(comm.rank + 10 * step, 2))
                for number, param in enumerate(twin.model.parameters()):
                    if number % 3 == step % 3 and step:
                        param.grad = None
                twin.optimizer.step()
                twin.optimizer.zero_grad()
        assert_alike(clones(flat.model.state_dict()), clones(plain.model.state_dict()))
        pairs = zip(flat.model.parameters(), plain.model.parameters(), strict=True)
        for one, other in pairs:
            state, expected = flat.optimizer.state[one], plain.optimizer.state[other]
            assert state.keys() == expected.keys()
            assert state.get("step") == expected.get("step")
        unused = model.get_parameter("layers.0.moe.experts.3.up.weight")
        assert flat.optimizer.state[unused] == {}

    on_ranks(3, EXPERTS.build, rank)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_gradients_that_the_user_put_in_place_are_used_and_clipped(max_norm: float | None) -> None:
    """Copies of the same values give the same bits as the engine's own."""

    def rank(comm: Comm, model: nn.Module, strategy: str) -> None:
        other = copy.deepcopy(model)
        ends = []
        for net, replaces in ((model, False), (other, True)):
            sharded = sw.shard(net, strategy, comm=comm)
            optimizer = sw.optim.AdamW(sharded, max_norm=max_norm, **ADAMW)
            train(net, DECODER.batch(comm.rank, 2))
            for param in net.parameters():
                if replaces and param.grad is not None:
                    param.grad = param.grad.clone() + 0
            optimizer.step()
            grads = {
                name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None
            }
            ends.append((clones(net.state_dict()), grads))
        assert equal(ends[0][0], ends[1][0])
        assert equal(ends[0][1], ends[1][1])

    for strategy in ("no_shard", "full_shard"):
        on_ranks(2, DECODER.build, lambda c, m: rank(c, m, strategy))  # noqa: B023


@pytest.mark.parametrize("max_norm", [0.05, pytest.param(1e6, marks=pytest.mark.prove)])
def test_it_clips_as_clip_grad_norm_before_torchs_step(max_norm: float) -> None:
    """And ``.grad`` is clipped afterwards, with one collective, or none where all have all."""

    def rank(comm: Comm, model: nn.Module, strategy: str) -> None:
        other = copy.deepcopy(model)
        flat, plain = (sw.shard(net, strategy, comm=comm) for net in (model, other))
        one = sw.optim.AdamW(flat, max_norm=max_norm, **ADAMW)
        two = torch.optim.AdamW(other.parameters(), **ADAMW)
        assert one.norm is None
        for step in range(3):
            for net in (model, other):
                net.zero_grad()
                train(net, DECODER.batch(comm.rank + 10 * step, 2))
            norm = plain.clip_grad_norm_(max_norm)
            two.step()
            before = [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
            comm.counters.reset()
            one.step()
            splits = strategy != "no_shard"
            assert comm.counters.calls == ({"norm": 1} if splits and comm.size > 1 else {})
            torch.testing.assert_close(one.norm, norm, rtol=1e-6, atol=0)
            assert (norm.item() > max_norm) is (max_norm < 1)
            after = [local(p.grad) for p in model.parameters() if p.grad is not None]
            expected = [local(p.grad) for p in other.parameters() if p.grad is not None]
            assert_near(after, expected, 1e-5)
            if max_norm > 1:
                assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert_alike(clones(model.state_dict()), clones(other.state_dict()))

    for world, strategy in ((1, "full_shard"), (3, "full_shard"), (3, "no_shard")):
        on_ranks(world, DECODER.build, lambda c, m: rank(c, m, strategy))  # noqa: B023


def test_gradients_in_float64_are_clipped_in_float64() -> None:
    """Their norm was that of float32: nine digits were lost."""
    plain = nn.Linear(300, 200).double()

    def rank(comm: Comm) -> None:
        model = copy.deepcopy(plain)
        sharded = sw.shard(model, comm=comm)
        optimizer = sw.optim.AdamW(sharded, max_norm=1.0, lr=0.1, eps=1.0)  # which sees the scale
        model(x).square().sum().backward()
        optimizer.step()
        assert optimizer.norm is not None
        torch.testing.assert_close(optimizer.norm, norm, rtol=1e-14, atol=0)
        with sharded.full_params():
            for mine, whole in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine.data, whole.data, rtol=1e-14, atol=1e-16)

    x, expected = torch.randn(4, 300, dtype=torch.float64), copy.deepcopy(plain)
    expected(x).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    torch.optim.AdamW(expected.parameters(), lr=0.1, eps=1.0).step()
    run_threads(2, rank)


def test_a_gradient_that_is_not_finite_is_seen_in_the_norm_of_every_rank() -> None:
    def rank(comm: Comm, model: nn.Module) -> float:
        sharded = sw.shard(model, comm=comm)
        optimizer = sw.optim.AdamW(sharded, max_norm=1.0)
        train(model, DECODER.batch(comm.rank, 2))
        if comm.rank == 1:
            local(model.get_parameter("blocks.1.mlp.up.weight").grad)[-1] = torch.nan
        optimizer.step()
        assert optimizer.norm is not None
        for bucket in sharded.buckets:
            outside = bucket.shard.clone()
            for view in bucket.spec.rest_views(outside):
                view.zero_()
            assert not outside.any()
        return optimizer.norm.item()

    assert all(map(isnan, on_ranks(3, DECODER.build, rank)))


# ---- one call, and no Python for each parameter ------------------------------------------------


def test_a_step_on_many_parameters_is_one_call_of_few_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[int]()
    kernel = fused_adamw_

    def spy(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(params))
        kernel(params, *args, **kwargs)

    monkeypatch.setattr(fused, "fused_adamw_", spy)
    blocks = [nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(20))) for _ in range(4)]
    model = nn.Sequential(*blocks)
    wrap = sw.wrap.by_class(nn.Sequential)
    sharded = sw.shard(model, wrap=wrap, comm=FakeComm(0, 8))
    optimizer = sw.optim.AdamW(sharded)
    for _ in range(3):
        model(torch.randn(16, 16)).sum().backward()
        optimizer.step()
    assert calls == [len(sharded.buckets)] * 3


def test_a_step_that_changed_nothing_is_not_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = list[int]()
    keys = sw.optim.AdamW._keys

    def spy(self: Any, *args: Any) -> Any:
        decided.append(1)
        return keys(self, *args)

    monkeypatch.setattr(sw.optim.AdamW, "_keys", spy)
    model = nets.decoder()
    sharded = sw.shard(model)
    twin = Twin(model, sharded, sw.optim.AdamW(sharded))
    for step in range(5):
        twin.step(DECODER.batch(step, 2))
    # Once for state that is new, and once for state that is not.
    assert len(decided) == 2 * len(sharded.buckets)
    twin.optimizer.state[next(model.parameters())]["step"].fill_(100)
    twin.step(DECODER.batch(9, 2))
    assert len(decided) == 3 * len(sharded.buckets)


# ---- state -----------------------------------------------------------------------------------


def test_state_survives_its_dict_and_a_file() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        first = Twin(model, sharded, sw.optim.AdamW(sharded, **ADAMW))
        for step in range(2):
            first.step(DECODER.batch(step, 2))
        file = io.BytesIO()
        torch.save(first.optimizer.state_dict(), file)
        start = clones(model.state_dict())
        first.step(DECODER.batch(7, 2))
        end = clones(model.state_dict())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert saved["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
        for reloads in (False, True):
            model.load_state_dict(start)
            second = Twin(model, sharded, sw.optim.AdamW(sharded, lr=0.7))
            if reloads:  # over state of its own
                second.step(DECODER.batch(3, 2))
                model.load_state_dict(start)
            second.optimizer.load_state_dict(saved)
            second.step(DECODER.batch(7, 2))
            assert equal(clones(model.state_dict()), end)

    on_ranks(3, DECODER.build, rank)


def test_state_of_the_whole_parameters_is_cut() -> None:
    """From a plain run that goes on sharded."""
    plain = nets.decoder()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)

    def steps(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        train(model, DECODER.batch(seed, 2))
        optimizer.step()
        optimizer.zero_grad()

    steps(plain, optimizer, 0)
    start, state = clones(plain.state_dict()), copy.deepcopy(optimizer.state_dict())
    steps(plain, optimizer, 1)

    def rank(comm: Comm, model: nn.Module) -> None:
        model.load_state_dict(start)
        flat = sw.optim.AdamW(sw.shard(model, comm=comm))
        flat.load_state_dict(copy.deepcopy(state))
        steps(model, flat, 1)
        assert_alike(clones(model.state_dict()), plain.state_dict())

    on_ranks(3, DECODER.build, rank)


def test_state_of_another_optimizer_or_shape_is_refused() -> None:
    model = nets.decoder()
    sharded = sw.shard(model)
    flat = sw.optim.AdamW(sharded)
    sgd = torch.optim.SGD(model.parameters()).state_dict()
    text = error_text(sw.ConfigError, lambda: flat.load_state_dict(sgd))
    assert text.startswith("a parameter group of the state dict has no 'betas', so it was saved by")
    for name, value in (("maximize", True), ("decoupled_weight_decay", False)):
        other = torch.optim.AdamW(model.parameters()).state_dict()
        other["param_groups"][0][name] = value
        text = error_text(sw.ConfigError, lambda: flat.load_state_dict(other))  # noqa: B023
        assert text.startswith(f"a parameter group has {name}={value}, and the fused optimizers")
    Twin(model, sharded, flat).step(DECODER.batch(0, 2))
    mine = copy.deepcopy(flat.state_dict())
    mine["state"][0]["exp_avg"] = torch.zeros(4, 4)
    text = error_text(sw.OptimizerError, lambda: flat.load_state_dict(mine))
    assert text.startswith("state 'exp_avg' of parameter 'embed.weight' is of other ranks, or has")


def cleared(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def put_anew(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def each_cleared(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.clear()


def each_put_anew(optimizer: Optimizer) -> None:
    for param in list(optimizer.state):
        optimizer.state[param] = {}


def each_with_other_tensors(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for name in list(state):
            state[name] = torch.zeros_like(state[name])


@pytest.mark.parametrize(
    "reset", [cleared, put_anew, each_cleared, each_put_anew, each_with_other_tensors]
)
def test_state_that_is_thrown_away_begins_anew(reset: Callable[[Optimizer], None]) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        flat, plain = twins(comm, model)
        for twin in (flat, plain):
            for step in range(2):
                twin.step(DECODER.batch(step, 2))
            reset(twin.optimizer)
            twin.step(DECODER.batch(5, 2))
        assert_alike(clones(flat.model.state_dict()), clones(plain.model.state_dict()))

    on_ranks(2, DECODER.build, rank)


def test_it_can_be_neither_copied_nor_pickled() -> None:
    optimizer = sw.optim.AdamW(sw.shard(nets.decoder()))
    for do in (lambda: copy.deepcopy(optimizer), lambda: torch.save(optimizer, io.BytesIO())):
        text = error_text(sw.OptimizerError, do)
        assert text.startswith("a sw.optim.AdamW works on the memory of one rank's shards")


# ---- several optimizers, and other layouts -----------------------------------------------------


def test_optimizers_that_share_a_model_hold_state_for_their_own_parameters_only() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        other = copy.deepcopy(model)
        sharded = sw.shard(model, comm=comm)
        sw.shard(other, comm=comm)
        adamw = sw.optim.AdamW(sharded, [{"params": r".*attention.*"}], **ADAMW)
        flat = sw.optim.AdamW(sharded, [{"params": r".*mlp.*"}], **OTHER)
        mine = [*adamw.param_groups[0]["params"], *flat.param_groups[0]["params"]]
        unclaimed = [p for p in model.parameters() if all(p is not q for q in mine)]
        optimizers: list[Optimizer] = [adamw, flat, torch.optim.SGD(unclaimed, lr=0.1)]
        named = dict(other.named_parameters())
        expected: list[Optimizer] = [
            torch.optim.AdamW([p for n, p in named.items() if "attention" in n], **ADAMW),
            torch.optim.AdamW([p for n, p in named.items() if "mlp" in n], **OTHER),
            torch.optim.SGD(
                [p for n, p in named.items() if "attention" not in n and "mlp" not in n], lr=0.1
            ),
        ]
        for step in range(3):
            for net, stepped in ((model, optimizers), (other, expected)):
                train(net, DECODER.batch(comm.rank + 10 * step, 2))
                for optimizer in stepped:
                    optimizer.step()
                net.zero_grad()
        assert_alike(clones(model.state_dict()), clones(other.state_dict()))
        storages = {s["exp_avg"].untyped_storage() for s in adamw.state.values()}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert sum(sizes.values()) == sum(p.nbytes for p in adamw.param_groups[0]["params"])

    on_ranks(2, DECODER.build, rank)


def test_it_goes_on_after_a_new_layout() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        flat, plain = twins(comm, model)
        for twin in (flat, plain):
            for step in range(2):
                twin.step(DECODER.batch(comm.rank + 10 * step, 2))
            for name, param in twin.model.named_parameters():
                param.requires_grad_("attention" not in name)
            twin.sharded.relayout()
            for step in range(2, 4):
                twin.step(DECODER.batch(comm.rank + 10 * step, 2))
        assert_alike(clones(flat.model.state_dict()), clones(plain.model.state_dict()))
        for param in model.parameters():
            for value in flat.optimizer.state[param].values():
                assert value.shape in (param.shape, torch.Size(()))

    on_ranks(3, DECODER.build, rank)


def test_after_unshard_it_says_so_and_torchs_goes_on_with_its_state() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        flat, plain = twins(comm, model)
        for twin in (flat, plain):
            for step in range(2):
                twin.step(DECODER.batch(comm.rank + 10 * step, 2))
            twin.sharded.unshard()
            train(twin.model, DECODER.batch(7, 2))
        comm.agree({})  # ranks as threads share torch's hooks, which unshard() removes
        plain.optimizer.step()
        before = clones(model.state_dict())
        text = error_text(sw.OptimizerError, flat.optimizer.step)
        assert text.startswith(
            "this AdamW updates the 5 buckets of a model that has been unsharded"
        )
        error_text(
            sw.OptimizerError, lambda: flat.optimizer.load_state_dict(flat.optimizer.state_dict())
        )
        assert equal(clones(model.state_dict()), before)
        goes_on = torch.optim.AdamW(model.parameters())
        goes_on.load_state_dict(flat.optimizer.state_dict())
        goes_on.step()
        assert_alike(model.state_dict(), plain.model.state_dict())
        again = sw.shard(model, comm=comm)  # the old one does not take the new shards for its own
        error_text(sw.OptimizerError, flat.optimizer.step)
        newer = sw.optim.AdamW(again, **ADAMW)
        newer.load_state_dict(goes_on.state_dict())
        Twin(model, again, newer).step(DECODER.batch(8, 2))

    on_ranks(2, DECODER.build, rank)


# ---- what torch does with an optimizer ---------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),  # momentum, too
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedules_work(name: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[float]:
        flat, plain = twins(comm, model)
        rates = list[list[float]]()
        for twin in (flat, plain):
            schedule = SCHEDULERS[name](twin.optimizer)
            rates.append([])
            for step in range(4):
                twin.step(DECODER.batch(step, 2))
                schedule.step()
                rates[-1].append(twin.optimizer.param_groups[0]["lr"])
        assert rates[0] == rates[1]
        assert_alike(clones(flat.model.state_dict()), clones(plain.model.state_dict()))
        return rates[0]

    assert len(set(on_ranks(2, DECODER.build, rank)[0])) > 1


def test_a_closure_computes_the_loss_anew() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        flat, plain = twins(comm, model)
        losses = []
        for twin in (flat, plain):

            def closure(twin: Twin = twin) -> Tensor:
                twin.optimizer.zero_grad()
                loss = nets.loss(twin.model, DECODER.batch(comm.rank, 2))
                loss.backward()
                return loss

            losses.append([twin.optimizer.step(closure).item() for _ in range(3)])  # type: ignore[arg-type, attr-defined]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert losses[0][0] > losses[0][2]

    on_ranks(2, DECODER.build, rank)


def test_hooks_run_and_the_engine_checks_the_step() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = sw.optim.AdamW(sharded)
        ran = list[str]()
        optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
        optimizer.register_step_post_hook(lambda *_: ran.append("after"))
        train(model, DECODER.batch(comm.rank, 2))
        optimizer.step()
        assert ran == ["before", "after"]
        assert {type(param) for param in model.parameters()} == {ShardedParameter}
        with sharded.no_sync():
            train(model, DECODER.batch(comm.rank, 2))
        assert "accumulated and never reduced" in error_text(sw.ScheduleError, optimizer.step)

    on_ranks(2, DECODER.build, rank)


def test_it_wants_the_handle_of_a_sharded_model() -> None:
    model = nets.decoder()
    sw.shard(model)
    for argument, what in ((model, "Decoder"), (model.parameters(), "generator"), ([], "list")):
        text = error_text(sw.ConfigError, lambda: sw.optim.AdamW(argument))  # type: ignore[arg-type] # noqa: B023
        assert text == (
            f"sw.optim.AdamW was given a {what}, and it needs the flat shards of a sharded model. "
            "Pass the handle that sw.shard() returned: sw.optim.AdamW(sharded)."
        )
