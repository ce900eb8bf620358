"""A large weight's gradient is computed where it is sent from: the same bits, and no copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports.local import LocalComm
from shardwise.memory import grad_hooks
from shardwise.plan import in_slot
from tests.copies import local
from tests.nets import numbers
from tests.ranks import run_sharing, run_threads
from tests.steps import STRATEGIES

RUNS = {"messages": run_threads, "memory": run_sharing}
BF16 = sw.Precision(param_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_slot, "LARGE", 1)


class Net(nn.Module):
    """A map of rows, one of rows in rows without a bias, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.twice = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4] → [rows, 6]``."""
        x = self.second(torch.tanh(self.first(x)).view(2, -1, 6)).view(-1, 6)
        out: Tensor = self.twice(torch.tanh(self.twice(x)))
        return out


def rows(rank: int) -> Tensor:
    return numbers(rank, (8, 4))


def steps(model: nn.Module, rank: int, compute: Callable[..., Any]) -> dict[str, Tensor]:
    for _ in range(2):
        compute(model, rows(rank))
    return {
        name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def with_graph(model: nn.Module, x: Tensor) -> None:
    """The derivative of a derivative with respect to the input."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()


def by_autocast(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # threads share the cache
        out = model(x)
    out.float().square().mean().backward()


def expanded(model: nn.Module, x: Tensor) -> None:
    """What comes back has strides of zero."""
    model(x).sum().backward()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "compute", [backward, expanded, with_graph, by_autocast], ids=lambda f: f.__name__
)
def test_gradients_have_the_bits_of_the_ordinary_way(
    compute: Any, strategy: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()

    def rank(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(net)
        sw.shard(model, strategy, comm=comm)
        return steps(model, comm.rank, compute)

    ours = run(2, rank)
    monkeypatch.setattr(in_slot, "LARGE", 1 << 30)
    for one, other in zip(ours, run(2, rank), strict=True):
        assert one.keys() == other.keys()
        same = torch.allclose if compute is with_graph else torch.equal  # sums of another order
        assert all(same(one[name], other[name]) for name in one)


class Counted(nn.Module):
    """A parametrization that changes with each call, as that of spectral norm does."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight


def test_a_parametrized_weight_is_computed_once_a_pass_and_never_to_see_its_size() -> None:
    layer, counted = nn.Linear(4, 6), Counted()
    parametrize.register_parametrization(layer, "weight", counted)
    model, counted.calls = nn.Sequential(layer), 0
    sw.shard(model, comm=LocalComm())
    assert counted.calls == 0
    backward(model, rows(0))
    assert counted.calls == 1


@pytest.mark.parametrize("precision", [sw.Precision(), BF16], ids=["float32", "bfloat16"])
def test_no_gradient_that_comes_once_is_copied(
    precision: sw.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_hooks, "SMALL_GRADIENT", 1)

    def rank(comm: Comm) -> None:
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False))
        sharded = sw.shard(model, comm=comm, wrap=sw.wrap.whole(), precision=precision)
        for _ in range(2):
            backward(model, rows(comm.rank))
        first = 0 if precision is not BF16 else 2 * 30 * 2  # it opens the bucket, in two steps
        assert [bucket.gradients.copied for bucket in sharded.buckets] == [first]

    run_threads(2, rank)


def test_micro_batches_are_added_and_a_gradient_that_is_dropped_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net()

    def rank(comm: Comm) -> list[Tensor]:
        model = copy.deepcopy(net)
        sharded = sw.shard(model, comm=comm)
        for drops in (False, True):
            with sharded.accumulate():
                backward(model, rows(comm.rank))
            if drops:
                sharded.drop_gradients()
        backward(model, rows(2 + comm.rank))
        return [local(p.grad).clone() for p in model.parameters() if p.grad is not None]

    ours = run_threads(2, rank)
    monkeypatch.setattr(in_slot, "LARGE", 1 << 30)
    for one, other in zip(ours, run_threads(2, rank), strict=True):
        assert len(one) == 5
        assert all(map(torch.equal, one, other))


def test_a_hook_keeps_the_gradient_that_it_was_given() -> None:
    """Also one on a node, which is found out when the gradient comes back as a copy."""

    def rank(comm: Comm) -> None:
        model, gradients = Net(), list[Tensor]()
        node: Any = get_gradient_edge(model.first.weight).node
        sw.shard(model, comm=comm)
        model.second.weight.register_hook(lambda grad: gradients.append(grad[1:]))
        node.register_prehook(gradients.extend)
        backward(model, rows(comm.rank))
        before = [one.clone() for one in gradients]
        backward(model, rows(5))
        assert len(before) == 2
        assert all(map(torch.equal, gradients, before))

    run_threads(2, rank)


class Twice(nn.Module):
    """A map that a reentrant checkpoint uses while a gradient of it waits for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 4] → [rows, 4]``."""
        x = self.inner(x)
        first = self.fc(x)  # whose backward pass comes last
        recomputed: Tensor = checkpoint(self.fc, x.tanh(), use_reentrant=True)
        out: Tensor = self.fc(first + recomputed.tanh())
        return out


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp")
def test_a_gradient_that_comes_while_its_slot_is_lent_does_not_write_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Twice()

    def rank(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(net)
        sw.shard(model, comm=comm)
        return steps(model, comm.rank, backward)

    ours = run_threads(2, rank)
    monkeypatch.setattr(in_slot, "LARGE", 1 << 30)
    for one, other in zip(ours, run_threads(2, rank), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("before_it_comes", ["another gradient", "the reduce", "the end"])
def test_a_bucket_of_which_a_slot_is_lent_is_left_to_the_borrower(before_it_comes: str) -> None:
    def rank(comm: Comm) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sharded = sw.shard(model, wrap=sw.wrap.whole(), comm=comm)
        (gradients,) = (bucket.gradients for bucket in sharded.buckets)
        gradients.collect(1, torch.full((4,), 3.0), carried=False)
        borrowed = gradients.lend(0, torch.float32)
        assert borrowed is not None
        assert gradients.lend(0, torch.float32) is None
        borrowed.fill_(7)
        if before_it_comes == "another gradient":
            gradients.collect(0, torch.ones(4, 4), carried=False)
        elif before_it_comes == "the reduce":
            gradients.reduce()
        gradients.settle()
        gradients.collect(0, torch.zeros(4, 4), carried=False)
        assert borrowed.eq(7).all()
        gradients.drop()

    run_threads(2, rank)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # that torch imports for them
def test_other_derivatives_take_the_ordinary_way_and_a_copy_has_no_other() -> None:
    model, x = Net(), rows(0)
    plain = copy.deepcopy(model)
    sharded = sw.shard(model, comm=LocalComm())
    assert "forward" not in vars(copy.deepcopy(model).first)
    with sharded.full_params():
        assert torch.equal(torch.func.jacrev(model)(x), torch.func.jacrev(plain)(x))
    with forward_ad.dual_level():
        ours, expected = (
            forward_ad.unpack_dual(m(forward_ad.make_dual(x, x))) for m in (model, plain)
        )
        assert torch.equal(ours.tangent, expected.tangent)
    sharded.unshard()
    assert "forward" not in vars(model.first)


def test_a_forward_of_the_users_own_stays() -> None:
    model = Net()
    model.first.forward = lambda x: 2 * F.linear(x, model.first.weight)  # type: ignore[assignment]
    expected = model(rows(0))
    sw.shard(model, comm=LocalComm())
    assert torch.equal(model(rows(0)), expected)


def test_a_class_computes_as_torchs_does_unless_it_has_a_forward_of_its_own() -> None:
    class Inheriting(nn.Linear):
        """Such a class initialises, or is asked for by name."""

    class Doubling(nn.Linear):
        def forward(self, *given: Any) -> Tensor:
            return 2 * super().forward(*given)

    model = nn.Sequential(Inheriting(4, 6), Doubling(6, 6))
    expected = model(rows(0))
    sw.shard(model, comm=LocalComm())
    assert [in_slot.is_in_slot(vars(part).get("forward")) for part in model] == [True, False]
    assert torch.equal(model(rows(0)), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_the_graph_is_torchs_but_for_a_name_and_keeps_the_view_and_not_the_parameter(
    bias: bool,
) -> None:
    """By what is kept, a later backward pass would see what the parameter shows by then."""
    model: Any = nn.Sequential(nn.Linear(4, 6, bias=bias))
    sw.shard(model, comm=LocalComm())
    x = rows(0).requires_grad_()
    out = model(x)  # before torch 2.13 it alone holds the node
    ours = out.grad_fn
    torchs: Any = F.linear(x, torch.ones(6, 4, requires_grad=True), model[0].bias).grad_fn
    names = [[node.name() for node, _ in one.next_functions if node] for one in (ours, torchs)]
    assert names[0] == names[1]
    assert not any(kept is model[0].weight for kept in ours.saved_tensors)


def test_a_vector_and_rows_out_of_order_take_the_ordinary_way() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    sw.shard(model, comm=LocalComm())
    for x in (torch.ones(4), torch.ones(3, 2, 4).transpose(0, 1)):
        assert "Linear" not in type(model(x).grad_fn).__name__
    assert "Linear" in type(model(torch.ones(3, 2, 4)).grad_fn).__name__


# ---- embeddings ----------------------------------------------------------------------------


class Words(nn.Module):
    """Two embeddings, one of which does not learn its first row, and a head of ``kind``."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(9, 4, padding_idx=0, **options)
        self.places, self.between = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        if kind != "of its own":
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """``[rows, 4]``, int64 ``→ [rows, 4, 9]``."""
        x = self.between(torch.tanh(self.words(ids) + self.places(torch.arange(4))))
        if self.kind == "and used twice":
            x = x + self.words(ids.flip(1))
        out: Tensor = self.head(x)
        return out if self.kind != "and a function" else out + F.linear(x, self.words.weight)


def ids(rank: int) -> Tensor:
    """``[3, 4]``; every id comes more than once, or not at all."""
    return torch.tensor([[0, 1, 1, 2], [5, 0, 5, 5], [1, 2, 2, 7]]) + rank % 2


KINDS = ("of its own", "tied", "and used twice", "and a function")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [sw.Precision(), BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_gradients_of_embeddings_have_the_bits_of_the_ordinary_way(
    strategy: str, precision: sw.Precision, kind: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words(kind)

    def rank(comm: Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(words)
        sw.shard(model, strategy, comm=comm, precision=precision)
        for number in range(3):
            backward(model, ids(comm.rank + number))
        return {name: local(p.grad).clone() for name, p in model.named_parameters()}

    ours = run(2, rank)
    monkeypatch.setattr(in_slot, "LARGE", 1 << 30)
    for one, other in zip(ours, run(2, rank), strict=True):
        if kind in KINDS[:2]:
            assert all(torch.equal(one[name], other[name]) for name in one)
        for name in one:  # more than two addends are added in another order
            torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_no_gradient_of_an_embedding_is_copied_of_a_tied_one_neither(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_hooks, "SMALL_GRADIENT", 1)

    def rank(comm: Comm) -> None:
        model = Words(kind)
        bias = model.between.bias.nbytes
        sharded = sw.shard(model, comm=comm, wrap=sw.wrap.whole())
        for _ in range(2):
            backward(model, ids(comm.rank))
        assert sum(bucket.gradients.copied for bucket in sharded.buckets) == 2 * bias

    run_threads(2, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_who_asks_for_the_gradient_of_an_embedding_gets_all_of_it(kind: str) -> None:
    """A hook, and ``torch.autograd.grad`` with and without a graph."""

    def gradients(model: Any) -> Iterator[Tensor]:
        for records in (False, True):
            loss = model(ids(0)).square().mean()
            yield from torch.autograd.grad(loss, model.parameters(), create_graph=records)

    def hooked(model: Any) -> Iterator[Tensor]:
        seen = list[Tensor]()
        handle = model.words.weight.register_hook(lambda grad: seen.append(grad.clone()))
        backward(model, ids(0))
        handle.remove()
        backward(model, ids(1))
        yield from (*seen, *(local(p.grad) for p in model.parameters()))

    words = Words(kind)
    plain, sharded = copy.deepcopy(words), sw.shard(words, comm=LocalComm())
    with sharded.full_params():
        ours = [*gradients(words)]
    for one, other in zip(
        (*ours, *hooked(words)), (*gradients(plain), *hooked(plain)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_slot_that_a_pass_has_not_given_back_takes_no_rows_of_the_next_one() -> None:
    """The head's gradient is computed and dropped, and the next pass is that of the embedding."""
    words = Words("tied")
    plain = copy.deepcopy(words)

    def head_alone(model: Any) -> None:
        model(ids(0)).square().mean().backward(inputs=[model.between.bias])

    def embedding_alone(model: Any) -> None:
        model.words(ids(1)).square().mean().backward()

    sharded = sw.shard(words, "no_shard", comm=LocalComm())
    head_alone(plain)
    with sharded.accumulate(last=False):
        head_alone(words)
    embedding_alone(plain)
    embedding_alone(words)
    for one, other in zip(words.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(local(one.grad), other.grad)


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_an_embedding_with_options_takes_torchs_way(options: dict[str, Any]) -> None:
    model = Words("of its own", **options)
    sw.shard(model, "no_shard", comm=LocalComm())
    assert "_Embedding" not in type(model.words(ids(0)).grad_fn).__name__
    assert "_Embedding" in type(model.places(ids(0)).grad_fn).__name__


def test_an_embedding_of_nothing_and_of_padding_alone_has_gradients_of_zero() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, padding_idx=0))
    sw.shard(model, "no_shard", comm=LocalComm())
    for given in (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)):
        model(given).sum().backward()
        (weight,) = model.parameters()
        assert local(weight.grad).eq(0).all()
