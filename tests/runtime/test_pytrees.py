"""The tensors in what a module takes and returns, however they are packed."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers.modeling_outputs import BaseModelOutput

from shardwise.runtime.pytrees import cast, grad_fns, may_hide_tensors, tensors


@dataclass
class Packed:
    y: Any
    n: int = 0
    made: list[Tensor] = field(default_factory=list, init=False)


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - as users write it

A, B = torch.zeros(2), torch.ones(3)

TREES = {
    "a tensor": (A, [A]),
    "a tuple": ((A, B), [A, B]),
    "a list in a dict": ({"x": [A, 3], "y": B}, [A, B]),
    "an ordered dict": (OrderedDict(x=A, y=None), [A]),
    "a named tuple": (Pair(A, B), [A, B]),
    "a dataclass": (Packed(A, 7), [A]),
    "dataclasses in each other": ([Packed(Packed((A, "b")))], [A]),
    "an output of transformers": (BaseModelOutput(last_hidden_state=A), [A]),
    "a dataclass itself": (Packed, []),
    "no tensors": ((1, 2.0, "three", None), []),
}


@pytest.mark.parametrize("name", TREES)
def test_tensors_are_found_in(name: str) -> None:
    tree, expected = TREES[name]
    assert [id(tensor) for tensor in tensors(tree)] == [id(tensor) for tensor in expected]


def test_what_cannot_be_looked_into_is_known_to_hide_tensors() -> None:
    class Opaque:
        y = A

    assert may_hide_tensors(Opaque())
    assert may_hide_tensors([A, {"x": Opaque()}])
    assert not may_hide_tensors(
        (A, 1, 2.0, 3j, "four", b"five", None, torch.float32, torch.device("cpu"))
    )
    assert not may_hide_tensors(Packed(A))


def test_makers_are_the_nodes_of_what_requires_a_gradient_each_once() -> None:
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    nodes = grad_fns(tensors([product, (product, A), {"leaf": leaf}]))
    assert nodes[0] is product.grad_fn
    assert len(nodes) == 2
    assert "AccumulateGrad" in nodes[1].name()


def test_the_makers_of_a_view_are_its_own_and_that_of_its_base() -> None:
    base = torch.ones(4, requires_grad=True) * 2
    view = base[:2]
    assert grad_fns([view]) == [view.grad_fn]
    assert grad_fns([view], with_bases=True) == [view.grad_fn, base.grad_fn]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # that torch imports for duals
def test_the_makers_of_a_dual_are_those_of_its_tangent_too() -> None:
    value, tangent = (torch.ones(2, requires_grad=True) * factor for factor in (2, 3))
    with forward_ad.dual_level():
        dual, count = forward_ad.make_dual(value, tangent), torch.ones(2, dtype=torch.int64)
        assert grad_fns([dual, count]) == [dual.grad_fn, tangent.grad_fn]


@pytest.mark.parametrize("name", TREES)
def test_casts_reach_every_tensor_and_leave_the_packing(name: str) -> None:
    tree, expected = TREES[name]
    narrowed = cast(tree, torch.float16)
    assert type(narrowed) is type(tree)
    leaves = list(tensors(narrowed))
    assert [tensor.shape for tensor in leaves] == [tensor.shape for tensor in expected]
    assert all(tensor.dtype is torch.float16 for tensor in leaves)


def test_only_floating_point_is_cast() -> None:
    ids, mask = torch.arange(3), torch.ones(3, dtype=torch.bool)
    assert cast((ids, mask), torch.float16) == (ids, mask)


def test_entries_that_are_no_fields_are_found() -> None:
    """An output of transformers is a dataclass and a dictionary, and models add entries to it."""
    output = BaseModelOutput(last_hidden_state=A)
    output["aux"] = B
    assert [id(tensor) for tensor in tensors(output)] == [id(A), id(B)]
