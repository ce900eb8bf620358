"""Tensors that share memory: one object stays one, and two are refused before they come apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import error_text, on_ranks


def of(**tensors: Tensor) -> nn.Module:
    """A layer that has these parameters and buffers, too."""
    module = nn.Linear(2, 2)
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def tied_by_data() -> nn.Module:
    module = of(embed=nn.Parameter(torch.ones(6, 4)), head=nn.Parameter(torch.zeros(6, 4)))
    module.head.data = module.embed.data
    return module


def sharing(make: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """The maker of a module of a matrix ``a`` and of what is made of its values."""

    def build() -> nn.Module:
        a = nn.Parameter(torch.arange(24.0).view(6, 4))
        return of(a=a, b=make(a.data))

    return build


SHARED = {
    "tied by data": (tied_by_data, "parameter 'embed' and parameter 'head'"),
    "a slice": (sharing(lambda a: nn.Parameter(a[2:4])), "parameter 'a' and parameter 'b'"),
    "the transpose": (sharing(lambda a: nn.Parameter(a.T)), "parameter 'a' and parameter 'b'"),
    "a column": (sharing(lambda a: nn.Parameter(a[:, 1])), "parameter 'a' and parameter 'b'"),
    "other bytes": (
        sharing(lambda a: nn.Parameter(a.view(torch.int32), requires_grad=False)),
        "parameter 'a' and parameter 'b'",
    ),
    "a buffer": (sharing(lambda a: a[0]), "parameter 'a' and buffer 'b'"),
    "an expanded one": (
        lambda: of(a=nn.Parameter(torch.ones(1, 4).expand(6, 4))),
        "elements of 'a' (shape (6, 4), strides (0, 1)) share memory",
    ),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_in_the_memory_of_another_tensor_is_refused(
    device: str, what: str, world: int
) -> None:
    build, begins = SHARED[what]

    def rank(comm: Comm, model: nn.Module) -> None:
        assert error_text(sw.ConfigError, lambda: sw.shard(model, comm=comm)).startswith(begins)

    def built() -> nn.Module:
        with torch.device(device):
            return build()

    on_ranks(world, built, rank)


def holding(make: Callable[[nn.Linear], object]) -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.kept = make(layer)  # type: ignore[assignment]
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    "make", [lambda fc: fc.weight.t(), lambda fc: [fc.bias, fc.weight[0]]], ids=["one", "a list"]
)
def test_a_view_of_a_parameter_in_an_attribute_is_refused(make: Callable[[Any], object]) -> None:
    """It would show what the parameter was when the model was sharded."""
    text = error_text(sw.ConfigError, lambda: sw.shard(holding(make)))
    assert text.startswith("Linear.kept is a view of parameter '0.weight'")


def test_a_copy_of_a_parameter_and_its_values_may_be_in_an_attribute() -> None:
    """As torch's ``spectral_norm`` and ``prune`` have them."""
    sw.shard(holding(lambda fc: (fc.weight.data, fc.weight * 2, fc.weight)))


def test_tensors_beside_each_other_in_one_storage_are_cut_as_others() -> None:
    def build() -> nn.Module:
        flat = torch.arange(24.0)
        rows, columns = flat[:12].view(3, 4), flat[12:].view(6, 2)
        parts = {"a": rows[:2], "b": rows[2:], "c": columns[:, :1], "d": columns[:, 1:]}
        model = of(**{name: nn.Parameter(part) for name, part in parts.items()})
        model.register_buffer("e", flat[:0])
        return model

    def rank(comm: Comm, model: nn.Module) -> None:
        plain = {name: value.clone() for name, value in model.state_dict().items()}
        sw.shard(model, comm=comm)
        assert all(torch.equal(v, plain[k]) for k, v in model.state_dict().items())

    on_ranks(2, build, rank)


def test_one_buffer_in_two_modules_stays_one() -> None:
    """Strided in memory, expanded, and contiguous."""

    def build() -> nn.Module:
        model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        kinds = (torch.ones(2, 3).t(), torch.ones(1).expand(4), torch.ones(4))
        for number, buffer in enumerate(kinds):
            for layer in model:
                layer.register_buffer(f"seen_{number}", buffer)
        return model

    def rank(comm: Comm, model: nn.Module) -> None:
        first, second = model.children()
        strided = first.get_buffer("seen_0")
        sw.shard(model, comm=comm, buffers="average")
        assert first.get_buffer("seen_0") is strided
        for number in range(3):
            assert first.get_buffer(f"seen_{number}") is second.get_buffer(f"seen_{number}")

    on_ranks(2, build, rank)
