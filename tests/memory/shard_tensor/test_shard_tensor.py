"""What is computed from a shard: the global answer, a shard again, or one clear sentence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.shard_tensor.shard_tensor import ShardTensor
from shardwise.memory.shard_tensor.tensor_reductions import vector_norm
from shardwise.memory.sharding import sharding_of
from tests import nets
from tests.copies import assert_near, error_text, local, on_ranks, seeded
from tests.parity.plain import put_gradients
from tests.steps import averaged, train

BUILD, BATCH = nets.scalar_and_13_rows, nets.scalar_and_13_rows_batch
WORLD = 3


def trained_plain() -> nn.Module:
    """The plain model, trained with the mean gradient of all ranks."""
    model = seeded(BUILD)
    batches = [BATCH(rank, 2) for rank in range(WORLD)]
    put_gradients(model, averaged(seeded(BUILD), train, batches))
    return model


def trained(comm: Comm, model: nn.Module, strategy: str = "full_shard") -> sw.Sharded:
    sharded = sw.shard(model, strategy, comm=comm)
    train(model, BATCH(comm.rank, 2))
    return sharded


def gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of a scalar, of rows and of elements that are cut, and of one rank's alone."""
    for name in ("temperature", "project.weight", "blocks.0.rows", "head.bias"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        yield name, gradient


def gradient_of(model: nn.Module, name: str) -> Tensor:
    """The gradient of one parameter."""
    return dict(gradients(model))[name]


# ---- one number over all elements ---------------------------------------------------------------

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": Tensor.norm,
    "1-norm": lambda g: g.norm(1),
    "largest norm": lambda g: g.norm(p=math.inf),
    "smallest norm": lambda g: torch.norm(g, -math.inf),
    "0-norm": lambda g: torch.linalg.vector_norm(g, 0),
    "vector norm": lambda g: torch.linalg.vector_norm(g, 3.0, dtype=torch.float64),
    "linalg norm": torch.linalg.norm,
    "sum": torch.sum,
    "wide sum": lambda g: g.sum(dtype=torch.float64),
    "mean": Tensor.mean,
    "max": Tensor.max,
    "amax": Tensor.amax,
    "min": torch.min,
    "amin": Tensor.amin,
    "largest": lambda g: g.abs().max(),
    "root mean square": lambda g: g.square().mean().sqrt(),
    "root mean square by hand": lambda g: g.norm() / g.numel() ** 0.5,
    "mean magnitude by hand": lambda g: g.abs().sum() / g.nelement(),
    "any": lambda g: g.isnan().any(),
    "all": lambda g: torch.isfinite(g).all(),
    "count": lambda g: (g > 0).sum(),
    "count of other than 0": torch.count_nonzero,
    "largest flag": lambda g: (g > 0).max(),
    "smallest integer": lambda g: (g * 100).to(torch.int32).min(),
    "sum over all dimensions": lambda g: torch.sum(g, dim=None, keepdim=False),
    "sum over each of them": lambda g: g.sum(dim=()),
    "sum of complex numbers": lambda g: (g.to(torch.complex64) * 1j).sum(),
    "norm of complex numbers": lambda g: (g.to(torch.complex64) * (1 + 2j)).norm(),
    "norms of a list": lambda g: torch._foreach_norm([g.to(torch.complex64) * (1 + 2j)])[0],
    "mean of complex numbers": lambda g: (g.to(torch.complex64) * 1j).mean(),
    "sum beyond float32": lambda g: (g.double() * 0 + 1e300).sum(),
}


def test_a_number_over_all_elements_is_that_of_the_whole_on_every_rank() -> None:
    """Also where ranks hold no element, and with the same bits."""
    plain = dict(gradients(trained_plain()))
    expected = {(n, what): f(g) for n, g in plain.items() for what, f in NUMBERS.items()}

    def rank(comm: Comm, model: nn.Module) -> dict[tuple[str, str], Tensor]:
        trained(comm, model)
        of = {(n, what): f(g) for n, g in gradients(model) for what, f in NUMBERS.items()}
        assert any(grad.shape.numel() == 0 for _, grad in gradients(model))
        return of

    first, *others = on_ranks(WORLD, BUILD, rank)
    for key, number in expected.items():
        assert type(first[key]) is Tensor
        torch.testing.assert_close(first[key], number)
        assert all(torch.equal(first[key], other[key]) for other in others)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_one_rank_has_is_found_on_every_rank(value: float) -> None:
    def rank(comm: Comm, model: nn.Module) -> list[bool]:
        trained(comm, model)
        gradient = model.get_parameter("project.weight").grad
        if comm.rank == 1:
            local(gradient)[-1] = value
        assert gradient is not None
        guards = (
            not gradient.isfinite().all(),
            bool(torch.isnan(gradient).any() or torch.isinf(gradient).any()),
            not math.isfinite(gradient.norm()),
            not torch.isfinite(gradient.sum()),
        )
        gradient[~gradient.isfinite()] = 0.0
        return [*guards, bool(gradient.isfinite().all())]

    assert on_ranks(2, BUILD, rank) == [[True] * 5] * 2


def test_tensors_are_equal_where_they_are_equal_on_every_rank() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[bool]:
        trained(comm, model)
        gradient = gradient_of(model, "project.weight")
        other = gradient.clone()
        same = [gradient.equal(other), gradient.allclose(other)]
        if comm.rank == 1:
            local(other)[-1] += 1
        return [*same, gradient.equal(other), gradient.allclose(other)]

    assert on_ranks(2, BUILD, rank) == [[True, True, False, False]] * 2


def test_a_scaled_gradient_that_is_infinite_on_one_rank_is_found_on_every_rank() -> None:
    """As ``torch.amp.GradScaler`` unscales: in place, and told by a flag."""

    def rank(comm: Comm, model: nn.Module) -> list[float]:
        trained(comm, model)
        gradient = gradient_of(model, "project.weight")
        flags = []
        for value in (1.0, math.inf):
            local(gradient).fill_(value if comm.rank == 1 else 4.0)
            is_infinite = torch.zeros(1)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [gradient], is_infinite, torch.tensor(0.25)
            )
            flags.append(is_infinite.item())
        return [*flags, local(gradient).flatten()[0].item()]

    assert on_ranks(2, BUILD, rank) == [[0.0, 1.0, 1.0], [0.0, 1.0, math.inf]]


def test_a_number_costs_one_collective_and_a_list_of_norms_one_for_all() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        shards = [gradient for _, gradient in gradients(model)]
        comm.counters.reset()
        norms = torch._foreach_norm(shards)
        assert comm.counters.calls == {"norm": 1}
        singly = [gradient.norm() for gradient in shards]
        assert comm.counters.calls == {"norm": 1 + len(shards)}
        torch.testing.assert_close(list(norms), singly)
        others = torch._foreach_norm([*shards, torch.ones(3)], 1, dtype=torch.float64)
        singly = [gradient.norm(1, dtype=torch.float64) for gradient in shards]
        expected = [*singly, torch.tensor(3.0).double()]
        assert_near(others, expected)

    on_ranks(WORLD, BUILD, rank)


def test_a_number_that_one_rank_alone_asks_for_is_an_error_that_names_it() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        gradient = dict(gradients(model))["project.weight"]
        if comm.rank == 0:
            gradient.norm()
        train(model, BATCH(comm.rank, 2))

    with pytest.raises(sw.RanksDisagree, match=r"at norm project\.weight"):
        on_ranks(2, BUILD, rank)


def test_the_norm_of_a_million_elements_is_exact() -> None:
    """torch adds them up one by one on a CPU, with an error of 4e-4."""
    norm = vector_norm(torch.full((1 << 20,), 0.1), 2.0).item()
    assert norm == pytest.approx(0.1 * 2**10, rel=1e-5)


# ---- what stays a shard -------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda g: 1 - 2 * g / 3 + g**2 - (-g),
    "functions": lambda g: g.abs().sqrt().clamp(max=1.0).tanh(),
    "sign": torch.sign,
    "comparison": lambda g: (g > 0).logical_or(g < -1).float(),
    "chosen": lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
    "masked": lambda g: g.masked_fill(g > 0, 0.5),
    "in place": lambda g: g.clone().mul_(2).add_(g, alpha=0.5),
    "foreach": lambda g: torch._foreach_add(torch._foreach_mul([g], 2), [g])[0],
    "foreach in place": lambda g: _foreach_in_place(g.clone(), g),
    "dtypes": lambda g: g.double().to(torch.bfloat16).float(),
    "attributes": lambda g: g.data.detach(),
    "copies": lambda g: copy.deepcopy(g).contiguous(),
    "likewise": lambda g: torch.full_like(g, 3) + torch.ones_like(g),
    "into new memory": lambda g: torch.zeros(g.shape).add_(g),
    "into new memory, foreach": lambda g: _add(torch.zeros(g.shape), g),
    "a number first": lambda g: torch.tensor(2.0) * g,
    "a number where a mask is": lambda g: _set_where(g.clone(), torch.tensor(0.5)),
}


def _add(value: Tensor, gradient: Tensor) -> Tensor:
    torch._foreach_add_([value], [gradient])
    return value


def _set_where(value: Tensor, number: Tensor) -> Tensor:
    value[value > 0] = number
    return value


def _foreach_in_place(value: Tensor, gradient: Tensor) -> Tensor:
    torch._foreach_lerp_([value], [gradient * 3], 0.25)
    return value


@pytest.mark.parametrize("what", ELEMENTWISE)
def test_an_elementwise_result_of_a_shard_is_a_shard(what: str) -> None:
    """Whose numbers are those of the whole."""
    function = ELEMENTWISE[what]
    whole = {name: function(gradient) for name, gradient in gradients(trained_plain())}
    if what.startswith("into new memory"):  # a scalar's owner has a 0-dim one, which is not taken
        del whole["temperature"]

    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        for name, gradient in gradients(model):
            if name in whole:
                result = function(gradient)
                assert isinstance(result, ShardTensor)
                assert result.dtype is whole[name].dtype
                torch.testing.assert_close(result.full_tensor(), whole[name])

    on_ranks(WORLD, BUILD, rank)


def test_shards_that_are_cut_otherwise_are_told_how_to_meet() -> None:
    """A moving average in a frozen copy, of a model of which a part is frozen."""

    def build() -> nn.Module:
        model = BUILD()
        model.get_parameter("project.weight").requires_grad_(False)
        return model

    def rank(comm: Comm, model: nn.Module) -> None:
        mean = copy.deepcopy(model).requires_grad_(False)
        sw.shard(model, comm=comm), sw.shard(mean, comm=comm)
        refused = 0
        for average, param in zip(mean.parameters(), model.parameters(), strict=True):
            alike = average.sharding.cuts_like(param.sharding)  # type: ignore[attr-defined]
            refused += not alike
            for update in (
                partial(average.data.lerp_, param.data, 0.5),
                partial(average.equal, param),
                partial(setattr, average, "data", param.data),
            ):
                if not alike:
                    assert "To update a moving average" in error_text(sw.ShardUseError, update)
        assert 0 < refused < len(list(model.parameters()))

    on_ranks(WORLD, build, rank)


# ---- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, Callable[[Tensor], object]] = {
    "a histogram": lambda g: torch.histc(g, 4),
    "a spread": Tensor.std,
    "a median": Tensor.median,
    "the largest few": lambda g: g.reshape(-1).topk(1),
    "another shape": lambda g: g.view(-1),
    "an index": lambda g: g[0],
    "an index to write": lambda g: g.__setitem__(0, 1.0),
    "numbers where a mask is": lambda g: _set_where(g, torch.zeros(1)),
    "a number where indices are": lambda g: g.__setitem__((g > 0).long(), 1.0),
    "a number where a plain mask is": lambda g: g.__setitem__(torch.ones(g.shape).bool(), 1.0),
    "where it is": lambda g: torch.where(g > 0),
    "two at once": lambda g: torch.max(g, g),
    "one by its name": lambda g: torch.sum(input=g),
    "a transpose": lambda g: g.T,
    "a product": lambda g: g @ g.T,
    "rows": lambda g: g.sum(0),
    "an array": lambda g: g.cpu().numpy(),
    "numbers": Tensor.tolist,
    "a number": Tensor.item,
    "a joined vector": lambda g: torch.cat([g, g]),
    "a broadcast": lambda g: g * torch.ones(5, 1, 1, 1),
    "an output": lambda g: torch.add(g, g, out=torch.empty_like(g)),
    "a draw": lambda g: g.normal_(),
    "a nuclear norm": lambda g: torch.norm(g, "nuc"),
    "a norm of integers": lambda g: (g * 100).int().norm(),
    "a mean of integers": lambda g: (g * 100).int().mean(),
    "an unlike shape to compare with": lambda g: g.equal(torch.ones(5, 1, 1, 1)),
    "a number to write to": lambda g: torch.zeros(()).add_(g),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_all_elements_is_refused_on_every_rank(what: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        for name, gradient in gradients(model):
            text = error_text(sw.ShardUseError, partial(REFUSED[what], gradient))
            assert text.startswith(f"this tensor is a shard of parameter {name!r}")
            assert ".full_tensor()" in text
            assert ".to_local()" in text

    on_ranks(WORLD, BUILD, rank)


@pytest.mark.parametrize("world", [1, 2])
def test_a_collective_by_hand_is_told_how_to_average(world: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        name = "project.weight"
        for shard in (model.get_parameter(name), gradient_of(model, name)):
            text = error_text(sw.ShardUseError, partial(dist.all_reduce, shard))
            assert "so 'all_reduce' would mix it with other parts. " in text
            assert "backward() has averaged gradients over all ranks: leave it out" in text
            assert "sharded.comm.mean(value)" in text

    on_ranks(world, BUILD, rank)


def test_a_gradient_is_not_pickled() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        _, gradient = next(gradients(model))
        text = error_text(sw.ShardUseError, lambda: torch.save(gradient, "/dev/null"))
        assert "would lose the other ranks' parts" in text
        assert type(local(gradient)) is Tensor

    on_ranks(2, BUILD, rank)


def test_a_plain_whole_average_is_told_how_to_be_updated() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        mean = copy.deepcopy(model).requires_grad_(False)
        sw.shard(model, comm=comm)
        param, average = model.get_parameter("project.weight"), mean.get_parameter("project.weight")
        for update in (
            lambda: average.data.mul_(0.5).add_(param.data, alpha=0.5),
            lambda: average.detach().copy_(param.detach()),
            lambda: torch._foreach_lerp_([average], [param.detach()], 0.5),
        ):
            text = error_text(sw.ShardUseError, update)
            assert "shard the averaging model likewise and write to its parameters()" in text
        before = average.detach().clone()
        sw.shard(mean, comm=comm)
        mean.state_dict()["project.weight"].mul_(0.5)
        assert torch.equal(mean.state_dict()["project.weight"], before)
        with torch.no_grad():
            average.mul_(0.5)
        assert torch.equal(mean.state_dict()["project.weight"], before * 0.5)

    on_ranks(WORLD, BUILD, rank)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda p: p.pow(2).sum(),
        lambda p: p.norm(),
        lambda p: p.abs().sum(),
        lambda p: ((p - p.detach()) ** 2).sum(),
        lambda p: torch._foreach_norm([p])[0],
    ],
)
def test_a_penalty_in_the_loss_is_told_how_to_be_added(penalty: Callable[[Tensor], Tensor]) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        for param in model.parameters():
            text = error_text(sw.ShardUseError, lambda: penalty(param))  # noqa: B023 - called at once
            assert "p.grad.add_(p.detach(), alpha=2 * c)" in text

    on_ranks(2, BUILD, rank)


def test_a_penalty_that_is_added_as_told_is_that_of_the_plain_model() -> None:
    plain = trained_plain()
    for param in plain.parameters():
        assert param.grad is not None
        param.grad.add_(param.detach(), alpha=0.2)

    def rank(comm: Comm, model: nn.Module) -> None:
        trained(comm, model)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.add_(param.detach(), alpha=0.2)
        for (_, mine), (_, whole) in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(mine.full_tensor(), whole)  # type: ignore[attr-defined]

    on_ranks(WORLD, BUILD, rank)


def test_a_full_tensor_may_be_kept_over_steps() -> None:
    """It holds no node of autograd's, which would remember the shape of a shard."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        weight = model.get_parameter("project.weight")
        whole = weight.full_tensor()  # type: ignore[attr-defined]
        train(model, BATCH(comm.rank, 2))
        assert whole.shape == sharding_of(weight).shape  # type: ignore[union-attr]
        assert not whole.requires_grad
        assert sharded.clip_grad_norm_(1.0) > 0

    on_ranks(WORLD, BUILD, rank)
