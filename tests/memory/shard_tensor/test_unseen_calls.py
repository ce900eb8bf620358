"""A shard that goes to C++ past ``__torch_function__``: whole in a pass, refused outside of one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import memory, pages
from shardwise.comm.protocol import Comm
from tests.copies import error_text, on_ranks
from tests.forked import forked
from tests.ranks import run_threads
from tests.steps import assert_gradients


class Product(torch.autograd.Function):
    """A product as fused kernels are: one function for the product and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(gradient, weight), torch.mm(gradient.T, x)


def fused(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def scripted(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = torch.matmul(x, weight.t())
        return out


def mapped(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.func.vmap(lambda row: x @ row)(weight)
    return out.T


def sloped(x: Tensor, weight: Tensor) -> Tensor:
    slope: Tensor = torch.func.grad(lambda w: w.pow(2).sum())(weight)
    return x @ slope.T


def traced(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.func.functionalize(lambda w: x @ w.T)(weight)
    return out


def recomputed(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda x, w: x @ w.T, x, weight, use_reentrant=True)
    return out


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autograd.Function": fused,
    "a scripted function": scripted,
    "vmap": mapped,
    "func.grad": sloped,
    "functionalize": traced,
    "a reentrant checkpoint": recomputed,
}


class Fused(nn.Module):
    """Gives the weight of its head to a function that torch does not show to the weight's class."""

    def __init__(self, call: str, classes: int = 3) -> None:
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return CALLS[self.call](x, self.head.weight)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_in_a_pass_it_is_given_the_whole_parameter(
    name: str, classes: int, compute: torch.dtype | None
) -> None:
    """With two classes a rank's row broadcasts against the whole weight; with three none does."""
    x = torch.randn(5, 6)
    torch.manual_seed(0)
    plain = Fused(name, classes)
    models = [copy.deepcopy(plain) for _ in range(2)]
    plain = plain.to(compute)
    plain(x.to(compute)).square().mean().backward()
    gradients = {n: None if p.grad is None else p.grad.float() for n, p in plain.named_parameters()}

    def rank(comm: Comm) -> None:
        model, precision = models[comm.rank], sw.Precision(param_dtype=compute)
        sw.shard(model, wrap=sw.wrap.by_class(nn.Linear), comm=comm, precision=precision)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x.to(compute)))
        model(x).square().mean().backward()
        assert_gradients(model, gradients)

    run_threads(2, rank)


@pytest.mark.parametrize("world", [1, 2])
def test_outside_of_a_pass_every_rank_refuses_it(world: int) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        weight, x = model.get_parameter("head.weight"), torch.ones(5, 6)
        for call, value in product(CALLS.values(), (weight, weight.detach())):
            text = error_text(sw.ShardUseError, partial(call, x, value))
            assert "'head.weight'" in text
            assert "needs the full tensor" in text

    on_ranks(world, lambda: Fused("vmap"), rank)


# ---- copies and memory ---------------------------------------------------------------------------


DLPACK: Any = torch.utils.dlpack

READS: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": lambda weight: torch.tensor(weight, dtype=torch.float64),
    "torch.as_tensor": lambda weight: torch.as_tensor(weight, dtype=torch.float64),
    "torch.asarray": lambda weight: torch.asarray(weight, copy=True),
    "a list": lambda weight: torch.nested.nested_tensor([weight]).unbind()[0],
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "__array__": lambda weight: torch.from_numpy(weight.detach().__array__()),
    "tolist": lambda weight: torch.Tensor(weight.tolist()),
    "DLPack": lambda weight: DLPACK.from_dlpack(DLPACK.to_dlpack(weight.detach())),
    "new_tensor": lambda weight: torch.zeros(1).new_tensor(weight),
    "new": lambda weight: torch.zeros(1).new(weight.detach()),
    "torch.Tensor": lambda weight: torch.Tensor(weight.detach()),
    "Variable": lambda weight: torch.autograd.Variable(weight.detach()),
    "as_subclass": lambda weight: weight.detach().as_subclass(Tensor),
    "set_": lambda weight: torch.zeros(1).set_(weight.detach()),  # type: ignore[call-overload]
    "sparse": lambda weight: torch.sparse_coo_tensor(
        torch.arange(3).view(1, 3), weight.detach(), (3, 6)
    ).to_dense(),
}


class Reading(nn.Module):
    """Reads the weight of another unit, which has not computed yet, or of its own."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read, self.first, self.head = read, nn.Linear(6, 6), nn.Linear(6, 3)
        self.copies = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.copies.append(self.read(self.head.weight).double().clone())
        out: Tensor = self.head(x)
        return out


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_copy_of_a_parameter_is_whole_in_a_pass_and_refused_at_rest(
    name: str, world: int
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        assert isinstance(model, Reading)
        expected = model.head.weight.detach().double().clone()
        sw.shard(model, comm=comm, wrap=sw.wrap.by_class(nn.Linear))
        for value in (model.head.weight, model.head.weight.detach()):
            assert "'head.weight'" in error_text(sw.ShardUseError, partial(READS[name], value))
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
        for copied in model.copies:
            assert torch.equal(copied, expected)

    on_ranks(world, lambda: Reading(READS[name]), rank)


ADDRESSES: dict[str, Callable[[Tensor], object]] = {
    "data_ptr": Tensor.data_ptr,
    "storage": Tensor.untyped_storage,
    "typed storage": Tensor.storage,
    "safetensors": lambda value: safetensors.torch.save({"weight": value}),
}


@pytest.mark.parametrize("world", [1, 2])
def test_nobody_reads_at_rest_where_the_elements_are(world: int) -> None:
    """A kernel would read a whole parameter there, and a file would hold one rank's part of it."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        model(torch.ones(2, 6)).sum().backward()
        weight: Any = model.get_parameter("weight")
        for use, value in product(ADDRESSES.values(), (weight, weight.detach(), weight.grad)):
            assert "'weight'" in error_text(sw.ShardUseError, partial(use, value))
        assert weight.to_local().data_ptr() or not weight.to_local().numel()

    on_ranks(world, lambda: nn.Linear(6, 1), rank)


@pytest.mark.parametrize("world", [1, 2])
def test_a_shard_is_not_swapped_for_another_tensor(world: int) -> None:
    """The engine would go on with the object, which is then no shard."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        pair = model.get_parameter("weight"), nn.Parameter(torch.ones(4, 3))
        for first, second in (pair, pair[::-1]):
            text = error_text(sw.ShardUseError, partial(torch.utils.swap_tensors, first, second))
            assert "and 'swap_tensors' needs the full tensor" in text
        model(torch.ones(2, 3)).sum().backward()

    on_ranks(world, lambda: nn.Linear(3, 4), rank)


DRAWS = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]


@pytest.mark.parametrize("world", [1, 2])
def test_an_initialisation_by_shape_is_refused_also_where_nothing_is_held(world: int) -> None:
    """Some of torch's return early, or divide by zero, where a tensor has no elements."""

    def rank(comm: Comm, model: nn.Module) -> int:
        sw.shard(model, comm=comm, bucketing="none")
        for name in set(DRAWS) - {"zeros_", "ones_", "constant_"}:
            weight = model.get_parameter("1.weight" if name == "dirac_" else "0.weight")
            args = (weight, 0.1) if name == "sparse_" else (weight,)
            text = error_text(sw.ShardUseError, partial(getattr(nn.init, name), *args))
            assert f"'{name}' needs the full" in text
        return len(model.get_parameter("1.weight"))

    build = lambda: nn.Sequential(nn.Linear(3, 1), nn.Conv1d(1, 1, 3))  # noqa: E731
    assert min(on_ranks(world, build, rank)) == (1 if world == 1 else 0)


# ---- conversions of the model --------------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "half": nn.Module.half,
    "to a dtype": lambda model: model.to(torch.float64),
    "a module": lambda model: model.get_submodule("2").bfloat16(),
    "to a device": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_sharded_model_is_not_converted(world: int, strategy: str) -> None:
    """Refused before anything has changed; what changes nothing is no conversion."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        for convert in CONVERSIONS.values():
            text = error_text(sw.ConfigError, partial(convert, model))
            assert text.startswith("the model was to be converted to torch.")
            assert "pass precision=sw.Precision(param_dtype=torch." in text
        assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
        for same in (nn.Module.float, nn.Module.cpu, nn.Module.share_memory):
            model(torch.ones(2, 3)).sum().backward()
            same(model)
            model(torch.ones(2, 3)).sum().backward()
        assert copy.deepcopy(model).half()[2].weight.dtype is torch.float16  # type: ignore[index]
        assert sharded.unshard().double()(torch.ones(2, 3).double()).dtype is torch.float64

    on_ranks(world, lambda: nn.Sequential(Buffered(), nn.Linear(3, 4), nn.Linear(4, 3)), rank)


class Buffered(nn.Identity):
    """Comes first, so its buffer would have been converted before a parameter was looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


class Arrays(nn.Linear):
    """Makes an array of its weight, in the weight's own memory, in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.array = self.weight.detach().numpy()
        return super().forward(x)


@pytest.mark.parametrize("large", [pages.LARGE, 1])
def test_an_array_in_the_memory_of_a_gathered_parameter_stays_readable(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LARGE", large)

    def rank(comm: Comm, model: nn.Module) -> None:
        assert isinstance(model, nn.Sequential)
        assert isinstance(model[0], Arrays)
        expected = model[0].weight.detach().clone()
        sw.shard(model, comm=comm, wrap=sw.wrap.by_class(nn.Linear))
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            assert torch.equal(torch.from_numpy(model[0].array), expected)

    on_ranks(2, lambda: nn.Sequential(Arrays(6, 6), nn.Linear(6, 3)), rank)


@forked
def test_the_first_device_context_of_a_process_is_for_functions_that_are_wrapped() -> None:
    # transformers asks in this way whether it builds a model on the meta device.
    sw.shard(nn.Linear(2, 2))
    with torch.device("meta"):
        assert torch.tensor([]).is_meta
