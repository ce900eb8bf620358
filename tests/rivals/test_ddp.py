"""The cases of PyTorch's tests of ``DistributedDataParallel``, by their names, written for ours.

Left out are those of its buckets, its logging, and its communication hooks: what is sent, and in
which dtype, is said by ``sw.Precision``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import clones, equal, seeded
from tests.rivals.test_fsdp2 import BY_LINEAR, Skips, Tied, TwoOutputs
from tests.rivals.twins import SGD, Block, batch, blocks, on_two, once, trains_alike

pytestmark = pytest.mark.prove

DDP = ("no_shard", "full_shard")


def test_accumulate_gradients_no_sync() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        with sync.no_sync():
            once(model, x, sync)
        once(model, x + 1, sync)

    trains_alike(program=program, strategies=DDP)


def test_grad_accumulation_without_no_sync() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        once(model, x, sync)
        once(model, x + 1, sync)

    trains_alike(program=program, strategies=DDP)


def test_find_unused_parameters() -> None:
    trains_alike(Skips, strategies=DDP)


def test_output_unused_in_loss() -> None:
    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        model(x)[1].square().mean().backward()

    trains_alike(TwoOutputs, program, strategies=DDP)


def test_static_graph_multi_forward() -> None:
    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        (model(x) + model(x * 2)).square().mean().backward()

    trains_alike(program=program, strategies=DDP)


class Branches(nn.Module):
    """Takes another branch in some steps, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.second(x)
        return out if self.calls % 2 else out + self.first(x)


def test_control_flow_same_across_ranks() -> None:
    """With an optimizer without momentum: which branch a twin takes depends on its calls."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, "no_shard", BY_LINEAR, comm)
        optimizer = SGD(model.parameters())
        for step in range(4):
            once(model, batch(step, comm.rank), None)
            optimizer.step()
            used = model.get_parameter("first.weight").grad is not None
            assert used == bool(step % 2)
            optimizer.zero_grad()

    on_two(rank, Branches)


class ByRank(nn.Module):
    """Rank 0 leaves out a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.second(x)
        return out + self.first(x) if both else out


def test_control_flow_different_across_ranks() -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sharded = sw.shard(model, "no_shard", sw.wrap.whole(), comm)
        model(batch(0, comm.rank), bool(comm.rank)).sum().backward()
        with sharded.full_params():
            grad = model.get_parameter("first.weight").grad
            assert grad is not None
            return grad.clone()

    one, other = on_two(rank, ByRank)
    assert torch.equal(one, other)
    assert one.any()


def test_returns_tensor_with_no_grad() -> None:
    class NoGrad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(x)
            return self.head(y), y.detach()

    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        model(x)[0].square().mean().backward()

    trains_alike(NoGrad, program, strategies=DDP)


@dataclass
class Outputs:
    loss: Tensor
    aux: Any = None


def test_dataclass_output() -> None:
    class GivesDataclass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = blocks()

        def forward(self, x: Tensor) -> Outputs:
            return Outputs(self.body(x).square().mean(), {"n": len(x)})

    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        model(x).loss.backward()

    trains_alike(GivesDataclass, program, strategies=DDP)


class Anything:
    def __init__(self, y: Tensor) -> None:
        self.y = y


def test_output_of_a_class_of_its_own() -> None:
    class GivesAnything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = blocks()

        def forward(self, x: Tensor) -> Anything:
            return Anything(self.body(x))

    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        for _ in range(2):
            model(x).y.square().mean().backward()

    trains_alike(GivesAnything, program, strategies=DDP, wrap=sw.wrap.whole())


def test_multiple_outputs_multiple_backward() -> None:
    """Each output has a backward pass of its own; the first is not reduced."""

    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        a, b = model(x)
        with sync.no_sync():
            a.square().mean().backward(retain_graph=True)
        b.square().mean().backward()

    trains_alike(TwoOutputs, program, strategies=DDP)


def test_multiple_nested_unused_params_error() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Block(), nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    trains_alike(Nested, strategies=DDP)


def test_shared_grad_acc_unused_params() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        with sync.no_sync():
            once(model, x, sync)
        once(model, x, sync)

    trains_alike(Skips, program, strategies=DDP)


def test_weight_sharing() -> None:
    trains_alike(Tied, strategies=DDP)


def test_new_tensor_in_fwd() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            made = torch.randn(1, requires_grad=True)
            return {"out": self.head(self.fc(x)), "made": made}

    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        model(x)["out"].square().mean().backward()

    trains_alike(Makes, program, strategies=DDP)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.fc(x))
        return out


def test_broadcast_buffer() -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sw.shard(model, "no_shard", comm=comm, buffers="broadcast")
        once(model, batch(0, comm.rank), None)
        return model.get_buffer("norm.running_mean").clone()

    plain = seeded(Normed)
    plain(batch(0, 0))
    for mean in on_two(rank, Normed):
        torch.testing.assert_close(mean, plain.get_buffer("norm.running_mean"))


def test_buffers_are_local() -> None:
    """``broadcast_buffers=False``."""

    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sw.shard(model, "no_shard", comm=comm)
        once(model, batch(0, comm.rank), None)
        return model.get_buffer("norm.running_mean").clone()

    one, other = on_two(rank, Normed)
    assert not torch.equal(one, other)


def test_broadcast_of_a_buffer_that_is_expanded() -> None:
    def build() -> nn.Module:
        model = Normed()
        model.register_buffer("scale", torch.ones(1).expand(4))
        return model

    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sw.shard(model, comm=comm, buffers=next(policies[comm.rank]))
        once(model, batch(0, comm.rank), None)
        return model.get_buffer("scale").clone()

    each: tuple[Literal["broadcast", "average"], ...] = ("broadcast", "average")
    policies = [iter(each) for _ in range(2)]
    for _ in range(2):
        assert all(torch.equal(scale, torch.ones(4)) for scale in on_two(rank, build))


def test_sync_module_states() -> None:
    def rank(comm: Comm, _: nn.Module) -> dict[str, Tensor]:
        sw.shard(models[comm.rank], "no_shard", comm=comm)
        return clones(models[comm.rank].state_dict())

    models = [seeded(blocks, seed) for seed in (3, 4)]
    expected = clones(seeded(blocks, 3).state_dict())
    assert all(equal(state, expected) for state in on_two(rank))


def test_sync_module_states_off_finds_what_differs() -> None:
    def rank(comm: Comm, _: nn.Module) -> str:
        with pytest.raises(sw.RanksDisagree) as error:
            sw.shard(models[comm.rank], "no_shard", comm=comm, sync_module_states=False)
        return str(error.value)

    models = [seeded(blocks, seed) for seed in (3, 4)]
    assert all("values of" in text for text in on_two(rank))


def test_ignore_params_arg() -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sw.shard(model, "no_shard", comm=comm, ignored=["0.weight"])
        once(model, batch(0, comm.rank), None)
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        return grad.clone()

    one, other = on_two(rank)
    assert not torch.equal(one, other)


def test_sparse_gradients() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.EmbeddingBag(6, 4, sparse=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(x.abs().argsort(-1)[:, :2]))
            return out

    def dense(model: nn.Module, x: Tensor, sync: Any) -> None:
        once(model, x, sync)
        weight = model.get_parameter("embed.weight")
        if weight.grad is not None and weight.grad.is_sparse:  # of the twin
            weight.grad = weight.grad.to_dense()

    trains_alike(Sparse, dense, strategies=DDP)


def test_checkpointing_once() -> None:
    trains_alike(recomputing(1), strategies=DDP)


def test_checkpointing_twice() -> None:
    trains_alike(recomputing(2), strategies=DDP)


def recomputing(times: int) -> Any:
    """A model that recomputes one block, called so many times."""

    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times):
                x = checkpoint(self.block, x, use_reentrant=False)
            out: Tensor = self.head(x)
            return out

    return Recomputes


def test_checkpointing_unused_params() -> None:
    class Recomputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.unused, self.head = Block(), Block(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(checkpoint(self.block, x, use_reentrant=False))
            return out

    trains_alike(Recomputes, strategies=DDP)


def test_undefined_grad() -> None:
    """A function whose backward gives no gradient for an input."""

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y * 0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Passes.apply(self.one(x), self.two(x))  # type: ignore[no-untyped-call]
            return out

    trains_alike(Drops, strategies=DDP, wrap=BY_LINEAR)


def test_save_load_checkpoint(tmp_path: Any) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, "no_shard", comm=comm)
        optimizer = SGD(model.parameters())
        once(model, batch(0, comm.rank), None)
        optimizer.step()
        before = clones(model.state_dict())
        sharded.save(tmp_path / "step-1", optimizer)
        once(model, batch(1, comm.rank), None)
        optimizer.step()
        sharded.load(tmp_path / "step-1", optimizer)
        assert equal(clones(model.state_dict()), before)

    on_two(rank)


def test_no_grad_forward_between_steps() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        once(model, x, sync)

    trains_alike(program=program, strategies=DDP)


def test_powers_of_a_communication_hook() -> None:
    """``bf16_compress_hook`` and ``fp16_compress_hook``: gradients travel in 16 bits."""
    for wire in (torch.bfloat16, torch.float16):
        precision = sw.Precision(reduce_dtype=wire)
        trains_alike(precision=precision, strategies=DDP, tolerance=4e-2)
