"""A shard is never taken for the whole parameter, on no rank; and what is right on shards works."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter, put_grad
from shardwise.memory.sharding import sharding_of
from shardwise.torch_internals import disable_torch_function
from tests import nets
from tests.copies import error_text, local, on_ranks, seeded
from tests.fake import FakeComm
from tests.steps import STRATEGIES, train


class Normed(nn.Module):
    """A layer that splits between the ranks, and small parameters that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 40)
        self.back = nn.Linear(40, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.back(self.linear(x))) * self.scale
        return out


MISUSES: dict[str, Callable[[Tensor], object]] = {
    "broadcasts": lambda p: torch.ones(5, 8) * p,
    "adds in place": lambda p: torch.ones(7, 40, 8).add_(p),
    "is added to": lambda p: p + torch.ones(3, 40, 8),
    "normalises": lambda p: F.layer_norm(torch.ones(2, 8), (8,), p, p),
    "multiplies": lambda p: torch.ones(2, 8) @ p.T,
    "is a layer": lambda p: F.linear(torch.ones(2, 8), p),
    "looks up": lambda p: F.embedding(torch.tensor([0]), p),
    "sums over a dimension": lambda p: p.sum(0),
    "sorts": torch.sort,
    "is indexed": lambda p: p[0],
    "is written by index": lambda p: p.__setitem__(0, 1.0),
    "is reshaped": lambda p: p.view(-1),
    "is transposed": lambda p: p.mT,
    "is unrolled": lambda p: p.unbind(),
    "is a number": float,
    "is a scalar": lambda p: p.item(),
    "is a condition": bool,
    "joins": lambda p: torch.cat([p, p]),
    "stacks": lambda p: torch.stack([p]),
    "is drawn anew": nn.init.normal_,
    "flattens": lambda p: nn.utils.parameters_to_vector([p]),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_every_rank_refuses_what_needs_the_whole_parameter(misuse: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[bool]:
        sw.shard(model, comm=comm)
        holds_all = []
        for name, param in model.named_parameters():
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    text = error_text(sw.ShardUseError, partial(MISUSES[misuse], param))
                assert f"parameter {name!r} is sharded" in text
            holds_all.append(param.shape == _whole(param))
        return holds_all

    ranks = on_ranks(3, Normed, rank)
    # A rank that happens to hold all of a parameter is not asked differently from the others.
    assert any(map(any, ranks))
    assert not any(map(all, ranks))


def test_every_rank_refuses_an_initialisation_by_the_shape_of_its_shard() -> None:
    """Its fans would be those of a matrix with a third of the rows."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        weight = model.get_parameter("linear.weight")
        return error_text(sw.ShardUseError, lambda: nn.init.xavier_uniform_(weight))

    assert all("and 'xavier_uniform_' needs the full" in text for text in on_ranks(3, Normed, rank))


@pytest.mark.parametrize(
    "use",
    [lambda p: p * 2, lambda p: p.clone(), lambda p: -p, lambda p: p.double(), lambda p: p**2],
)
def test_every_rank_refuses_to_record_a_shard_for_a_loss(use: Callable[[Tensor], object]) -> None:
    """A weight penalty over ``model.parameters()`` would be a loss of one rank's part."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        for param in model.parameters():
            error_text(sw.ShardUseError, lambda: use(param))  # noqa: B023 - called at once
            param.requires_grad = False
            use(param)

    on_ranks(3, Normed, rank)


@pytest.mark.parametrize("ask", [lambda p: p != 0, torch.isnan, lambda p: p > p.detach().mean()])
def test_a_question_that_autograd_does_not_record_is_answered(
    ask: Callable[[Tensor], Tensor],
) -> None:
    """``(p != 0).sum()`` is a sparsity, and no part of a loss."""

    def rank(comm: Comm, model: nn.Module) -> list[int]:
        sw.shard(model, comm=comm)
        return [int(ask(param).sum()) for param in model.parameters()]

    plain = [int(ask(param).sum()) for param in seeded(Normed).parameters()]
    assert on_ranks(3, Normed, rank) == [plain] * 3


def test_an_average_of_the_parameters_is_kept_on_shards() -> None:
    """In each of the ways in which such averages are written."""

    def averages(model: nn.Module, change: Callable[[], None]) -> list[dict[str, Tensor]]:
        params = dict(model.named_parameters())
        averaged = [{n: p.detach().clone() for n, p in params.items()} for _ in range(4)]
        for _ in range(3):
            change()
            with torch.no_grad():
                for name, param in params.items():
                    averaged[0][name].mul_(0.75).add_(param, alpha=0.25)
                    averaged[1][name].lerp_(param, 0.25)
                    averaged[2][name] -= 0.25 * (averaged[2][name] - param)
                torch._foreach_lerp_(list(averaged[3].values()), list(params.values()), 0.25)
        return averaged

    def rank(comm: Comm, model: nn.Module) -> list[dict[str, Tensor]]:
        whole = averages(copy.deepcopy(model), lambda: None)
        sw.shard(model, comm=comm)
        averaged = averages(model, lambda: None)
        for mine, expected in zip(averaged, whole, strict=True):
            for name, param in model.named_parameters():
                sharding = sharding_of(param)
                assert sharding is not None
                assert torch.equal(local(mine[name]), sharding.cut(expected[name], param.shape))
        return averaged

    on_ranks(3, Normed, rank)


def test_metadata_is_that_of_the_shard() -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        sw.shard(model, comm=comm)
        numel = sum(param.shape.numel() for param in model.parameters())
        assert sum(p.numel() for p in model.parameters()) == count  # of the whole, as a sum is
        for param in model.parameters():
            assert isinstance(param, nn.Parameter)
            assert param.is_leaf
            assert param.requires_grad
            assert param.grad is None
            assert param.dtype is torch.float32
            assert param.device == comm.device
            assert param.shape == param.size() == param.detach().shape
            sharding = sharding_of(param)
            assert sharding is not None
            assert param.ndim == param.dim() == len(sharding.shape)  # none of a scalar
            assert param.nbytes == param.shape.numel() * param.element_size()
            assert torch.zeros_like(param).shape == torch.empty_like(param).shape == param.shape
            assert {param: 1}[param] == 1
            assert "Parameter containing" in repr(param)
            assert local(param).untyped_storage().nbytes() >= param.nbytes
            assert type(param.detach()) is type(param.data) is ShardTensor
            assert type(local(param.data)) is Tensor
        assert len(model.get_parameter("linear.weight")) <= 40
        return numel

    count = sum(p.numel() for p in Normed().parameters())
    assert sum(on_ranks(3, Normed, rank)) == count


class Looking(torch.optim.SGD):
    """An optimizer that says which classes it works on."""

    elementwise = True
    seen: list[type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.seen = [type(p) for group in self.param_groups for p in group["params"]]
        super().step()


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_with_a_closure_steps_on_what_the_closure_left(fused: bool) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        with torch.no_grad():  # ranks that are threads share torch's hooks: now all are there
            model(torch.ones(2, 8))

        def closure() -> float:
            optimizer.zero_grad()
            value = model(torch.ones(2, 8)).square().mean()
            value.backward()
            return float(value.item())

        values = [optimizer.step(closure) for _ in range(3)]
        assert values[0] > values[1] > values[2]
        return model.state_dict()

    first, second = on_ranks(2, Normed, rank)
    assert all(torch.equal(first[name], second[name]) for name in first)


class Marked(nn.Parameter):
    """A user's own kind of parameter."""


class Marking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Marked(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_classes_that_users_gave_their_parameters_are_left_alone() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm, bucketing="none")
        model(torch.ones(2, 3)).sum().backward()
        weight = model.get_parameter("weight")
        assert type(weight) is Marked
        assert weight.shape == (2, 3)
        assert torch.equal(weight.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]

    on_ranks(2, Marking, rank)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sharded_model_is_not_pickled(world: int, strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sw.shard(model, strategy, comm=comm)
        return [
            error_text(sw.ShardUseError, lambda: torch.save(model, io.BytesIO())),
            error_text(sw.ShardUseError, lambda: pickle.dumps(model)),
            error_text(sw.ShardUseError, lambda: copy.deepcopy(model.get_submodule("blocks.0"))),
        ]

    for texts in on_ranks(world, nets.decoder, rank):
        for text in texts[:2]:
            assert "model.state_dict() (full tensors)" in text
            assert "sharded.local_state_dict() (shards)" in text
        assert "opy" in texts[2]


def test_a_shard_alone_is_neither_pickled_nor_copied() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        weight = model.get_parameter("linear.weight")
        assert "would lose the other ranks' parts" in error_text(
            sw.ShardUseError, lambda: pickle.dumps(weight)
        )
        text = error_text(sw.ShardUseError, lambda: copy.deepcopy(weight))
        assert "copy.deepcopy(model) of the model that was passed to shard()" in text
        assert "would lose" in error_text(sw.ShardUseError, lambda: pickle.dumps(weight.detach()))
        assert type(copy.deepcopy(weight.detach())) is ShardTensor

    on_ranks(2, Normed, rank)


def test_what_cannot_stand_for_a_shard_is_refused_where_it_is_assigned() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm, bucketing="none")
        weight = model.get_parameter("linear.weight")

        def assign(value: Tensor) -> None:
            weight.data = value

        assign(torch.zeros(20, 8))
        assert error_text(sw.ConfigError, lambda: assign(torch.zeros(20, 8).half()))
        return error_text(sw.ConfigError, lambda: assign(torch.zeros(40, 8)))

    for text in on_ranks(2, Normed, rank):
        assert text == (
            "parameter 'linear.weight' was replaced by a tensor of shape (40, 8), torch.float32 on "
            "cpu; its shard is (20, 8), torch.float32 on cpu. After shard() a model's dtype and "
            "device are fixed: set them before shard(), or with precision=sw.Precision(...). Load "
            "full values by model.load_state_dict() or inside "
            "`with sharded.full_params(writeback=True):`."
        )


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "an index": lambda m: m.get_parameter("scale")[0],
    "numpy": lambda m: m.get_parameter("scale").detach().numpy(),
    "a product": lambda m: m.get_parameter("scale") * torch.ones(8),
    "another dtype": nn.Module.half,
    "a pickle": lambda m: torch.save(m, io.BytesIO()),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters()).step(lambda: torch.zeros(())),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()).step(),
}


@pytest.mark.parametrize("precision", [sw.Precision(), sw.Precision(param_dtype=torch.bfloat16)])
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_refuses_what_many_refuse(
    world: int, strategy: str, precision: sw.Precision
) -> None:
    """So nobody meets a rule for the first time where the run is large."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, strategy, comm=comm, precision=precision)
        for what, use in REFUSED.items():
            error_text(sw.ShardwiseError, partial(use, model))
            assert {type(param) for param in model.parameters()} == {ShardedParameter}, what
            train(model, (torch.ones(2, 8), torch.ones(2, 8)))

    on_ranks(world, Normed, rank)


def test_one_rank_that_splits_nothing_holds_plain_parameters() -> None:
    model = Normed()
    sw.shard(model, "no_shard")
    train(model, (torch.ones(2, 8), torch.ones(2, 8)))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert model.get_parameter("scale").detach().numpy().shape == ()


def _whole(param: Tensor) -> torch.Size:
    sharding = sharding_of(param)
    assert sharding is not None
    return sharding.shape


def test_a_gradient_can_be_deleted() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        train(model, (torch.ones(2, 8), torch.ones(2, 8)))
        weight = model.get_parameter("linear.weight")
        assert type(weight) is ShardedParameter
        del weight.grad
        assert weight.grad is None
        for gradient in (torch.ones(3), None):
            with disable_torch_function():
                put_grad(weight, gradient)
            assert (weight.grad is None) is (gradient is None)

    on_ranks(2, Normed, rank)


def test_a_gradient_is_read_and_set_without_an_interception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which would cost more, for every parameter in every step."""
    model = Normed()
    sw.shard(model, comm=FakeComm(0, 2))
    train(model, (torch.ones(2, 8), torch.ones(2, 8)))
    weight, called = model.get_parameter("linear.weight"), list[object]()
    dispatch = ShardTensor.__torch_function__

    def noted(func: object, *args: object) -> object:
        called.append(func)
        return dispatch(func, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardTensor, "__torch_function__", staticmethod(noted))
    gradient = weight.grad
    weight.grad = gradient
    weight.grad = None
    assert called == []
    assert type(weight) is ShardedParameter


def test_a_shard_does_not_take_the_place_of_one_with_another_shape() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        weight, back = model.get_parameter("linear.weight"), model.get_parameter("back.weight")
        text = error_text(sw.ShardUseError, lambda: setattr(weight, "data", back.data))
        assert "parameter 'linear.weight' is sharded" in text

    on_ranks(2, Normed, rank)


def test_a_models_dtype_is_changed_before_it_is_sharded() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        assert "After shard() a model's dtype" in error_text(sw.ConfigError, model.double)
        params = list(model.parameters())
        assert all(map(operator.is_, model.float().parameters(), params))  # as they are
        assert {type(param) for param in params} == {ShardedParameter}

    on_ranks(2, Normed, rank)


def test_autograd_is_not_asked_for_the_gradient_of_a_shard() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        value, weight = model(torch.ones(2, 8)).sum(), model.get_parameter("linear.weight")
        text = error_text(sw.ShardUseError, lambda: torch.autograd.grad(value, weight))
        assert text.startswith("torch.autograd.grad was called for the gradient of parameter")

    on_ranks(2, Normed, rank)
