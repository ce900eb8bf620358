"""The cases of PyTorch's tests of ``fully_shard``, by their names, written for ours.

What applies to one engine alone is left out: CUDA streams and memory, DTensor placements, tensor
parallelism, ``torch.compile`` of their hooks, their log and their private state.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.sharding import sharding_of
from tests.copies import clones, equal, error_text, seeded
from tests.nets import Table
from tests.rivals.twins import ADAM, SGD, Block, batch, blocks, on_two, once, plainly, trains_alike

pytestmark = pytest.mark.prove

BF16, FP32 = torch.bfloat16, torch.float32
BY_LINEAR = sw.wrap.by_class(nn.Linear)
BY_BLOCK = sw.wrap.by_class(Block)


# ---- training ------------------------------------------------------------------------------------


def test_param_registration_after_forward() -> None:
    check_registration(lambda model, x: model(x))


def test_param_registration_after_backward() -> None:
    check_registration(lambda model, x: model(x).sum().backward())


def check_registration(use: Any) -> None:
    """Names and objects are those of before, and no module holds another parameter."""

    def rank(comm: Comm, model: nn.Module) -> None:
        before = dict(model.named_parameters())
        sw.shard(model, comm=comm)
        use(model, batch(0, comm.rank))
        after = dict(model.named_parameters())
        assert list(before) == list(after)
        assert all(after[name] is param for name, param in before.items())

    on_two(rank)


def test_train_parity_single_group_shard_dim0() -> None:
    def odd() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.Linear(15, 5))

    trains_alike(odd, wrap=sw.wrap.whole(), world=3, optimizer=ADAM)


def test_train_parity_single_group_shard_largest_dim() -> None:
    """A parameter with fewer rows than ranks has its elements cut."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 31), nn.Linear(31, 2))

    trains_alike(wide, wrap=sw.wrap.whole(), world=3)


def test_train_parity_multi_group() -> None:
    trains_alike(wrap=BY_BLOCK, optimizer=ADAM)


def test_train_parity_multi_group_cpu_offload_eager() -> None:
    trains_alike(wrap=BY_BLOCK, offload="everything", optimizer=ADAM)


def test_train_parity_multi_group_unshard_async_op() -> None:
    trains_alike(wrap=BY_BLOCK, prefetch=sw.Prefetch(forward=2**20, backward=2**20))


def test_explicit_prefetching() -> None:
    for when in ("pre", "post"):
        trains_alike(wrap=BY_LINEAR, prefetch=sw.Prefetch(when=when, forward=2**10))


def test_non_root_forward_backward() -> None:
    """A module inside is called before the model is."""

    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        with sync.no_sync():
            model.get_submodule("1")(x).sum().backward()
        once(model, x, sync)

    trains_alike(program=program, wrap=BY_BLOCK)


class Twice(nn.Module):
    """Calls one layer twice, and another one in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(self.inner(x)) + self.outer(x))
        return out


def test_multi_forward_module() -> None:
    trains_alike(Twice, wrap=BY_LINEAR)


def test_train_parity_with_activation_checkpointing() -> None:
    trains_alike(wrap=BY_BLOCK, activation_checkpointing=True)


class Checkpointed(nn.Module):
    """Recomputes its blocks itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.reentrant = nn.Linear(6, 6), blocks(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.blocks, self.first(x), use_reentrant=self.reentrant)
        return out


def test_train_parity_with_checkpoint_api() -> None:
    for reentrant in (False, True):
        trains_alike(partial(Checkpointed, reentrant), wrap=BY_BLOCK)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = Table(6, 6), Block()
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(x.argmax(-1))))
        return out


def test_train_parity_with_shared_params() -> None:
    for checkpointing in (False, True):
        trains_alike(Tied, wrap=BY_BLOCK, activation_checkpointing=checkpointing, optimizer=ADAM)


def micro_batches(model: nn.Module, x: Tensor, sync: Any) -> None:
    for part in x.chunk(2)[:-1]:
        with sync.no_sync():
            once(model, part, sync)
    once(model, x.chunk(2)[-1], sync)


def test_gradient_accumulation() -> None:
    trains_alike(program=micro_batches, wrap=BY_BLOCK, strategies=("full_shard", "zero1"))


def test_set_requires_gradient_sync() -> None:
    """Some micro-batches reduce, and others do not."""

    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        once(model, x[:1], sync)
        with sync.no_sync():
            once(model, x[1:2], sync)
        once(model, x[2:], sync)

    trains_alike(program=program, wrap=BY_BLOCK)


def test_1f1b_microbatching() -> None:
    """Several forward passes, then as many backward passes; the last one reduces."""

    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        losses = [model(part).square().mean() for part in x.chunk(4)]
        for loss in losses[:-1]:
            with sync.no_sync():
                loss.backward()
        losses[-1].backward()

    trains_alike(program=program, wrap=BY_BLOCK)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = blocks(), nn.Linear(3, 2)

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_register_fsdp_forward_method() -> None:
    expected = seeded(Encodes)(batch(0, 0))

    def rank(comm: Comm, model: nn.Module) -> None:
        assert isinstance(model, Encodes)
        sharded = sw.shard(model, wrap=BY_BLOCK, comm=comm)
        sharded.register_forward_method(model, "encode")
        out = model.encode(batch(0, 0))
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        assert all(param.grad is not None for param in model.parameters())

    on_two(rank, Encodes)


def test_train_parity_hsdp() -> None:
    hybrids = ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
    trains_alike(world=4, strategies=hybrids, mesh=(2, 2), wrap=BY_BLOCK)


def test_post_optim_event() -> None:
    """Values that an optimizer wrote are those of the next forward pass."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        optimizer, x = SGD(model.parameters()), batch(0, comm.rank)
        first = model(x)
        first.square().mean().backward()
        optimizer.step()
        assert not torch.equal(model(x), first)

    on_two(rank)


def test_set_custom_reduce_mean() -> None:
    """``set_gradient_divide_factor``: how the mean is formed changes no value here."""
    for average in ("predivide", "sqrt", "postdivide"):
        trains_alike(precision=sw.Precision(average=average), strategies=["full_shard"])


# ---- autograd ------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.used(x), self.unused(x)


def test_unused_forward_output() -> None:
    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        model(x)[0].square().mean().backward()

    trains_alike(TwoOutputs, program, wrap=BY_LINEAR)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_unused_forward_module() -> None:
    for wrap in (BY_LINEAR, sw.wrap.whole()):
        trains_alike(Skips, wrap=wrap)


@dataclass
class Out:
    y: Tensor
    words: tuple[str, ...] = ()


class NoTensors(nn.Module):
    """Layers that take and give numbers, words and nothing beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, 3, None, words=["a"])
        return self.head(out["y"]) * float(out["n"])  # type: ignore[no-any-return]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, n: int, nothing: None, words: list[str]) -> dict[str, Any]:
        return {"y": self.fc(x), "n": n, "nothing": nothing, "words": words}


def test_nontensor_activations() -> None:
    trains_alike(NoTensors, wrap=sw.wrap.by_class(Inner))


def test_post_acc_grad_hook_runs() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        calls: list[str] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        once(model, batch(0, comm.rank), None)
        assert sorted(calls) == sorted(name for name, _ in model.named_parameters())

    on_two(rank)


def test_post_acc_grad_hook_optim_parity() -> None:
    """An optimizer for each parameter, which steps when its gradient is there."""
    expected = plainly(blocks, once, 2, 2, partial(torch.optim.SGD, lr=0.05))

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm)
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()  # type: ignore[index]
            optimizers[param].zero_grad()  # type: ignore[index]

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for number in range(2):
            once(model, batch(number, comm.rank), None)
        return clones(model.state_dict())

    for state in on_two(rank):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value)


class Reversible(torch.autograd.Function):
    """Computes the inputs of two layers again, and takes their backward passes in its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: nn.Module, g: nn.Module) -> Any:
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.layers = f, g
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    def backward(ctx: Any, to_a: Tensor, to_b: Tensor) -> Any:
        (a, b), (f, g) = ctx.saved_tensors, ctx.layers
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            out = g(a)
            out.backward(to_b)
        to_a = to_a + a.grad
        with torch.enable_grad():
            b = (b - out).detach().requires_grad_()
            f(b).backward(to_a)
        return to_a, to_b + b.grad, None, None


class OfReversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.pairs = nn.ModuleList(
            nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        a = b = self.first(x)
        pairs: Any = self.pairs
        for f, g in pairs:
            a, b = Reversible.apply(a, b, f, g)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(a + b)
        return out


def test_reversible_blocks() -> None:
    every = ("full_shard", "shard_grad_op", "zero1", "no_shard")
    trains_alike(OfReversible, wrap=BY_LINEAR, strategies=every)


# ---- frozen --------------------------------------------------------------------------------------


def frozen_in_a_group() -> nn.Module:
    """Biases are frozen, so each unit has some."""
    model = blocks()
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)
    return model


def frozen_groups() -> nn.Module:
    model = blocks()
    model.get_submodule("1").requires_grad_(requires_grad=False)
    return model


def test_train_mixed_requires_grad_per_group() -> None:
    trains_alike(frozen_in_a_group, wrap=BY_BLOCK)


def test_train_mixed_requires_grad_across_groups() -> None:
    for offload in ("none", "everything"):
        trains_alike(frozen_groups, wrap=BY_BLOCK, offload=offload)


def test_multi_forward_mixed_requires_grad() -> None:
    def build() -> nn.Module:
        model = Twice()
        model.inner.requires_grad_(requires_grad=False)
        return model

    trains_alike(build, wrap=BY_LINEAR)


# ---- clipping ------------------------------------------------------------------------------------


def test_clip_grad_norm_1d() -> None:
    """By torch's own function, and by the handle's; norms are those of the mean gradients."""
    for norm_type in (2.0, 1.0, float("inf")):
        plain = seeded(blocks)
        grads = []
        for rank in range(2):
            once(plain, batch(0, rank), None)
            grads.append([p.grad for p in plain.parameters()])
            plain.zero_grad()
        for param, one, two in zip(plain.parameters(), *grads, strict=True):
            param.grad = (one + two) / 2
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)

        def rank_of(
            comm: Comm, model: nn.Module, norm_type: float = norm_type
        ) -> tuple[Tensor, Tensor]:
            sharded = sw.shard(model, comm=comm)
            once(model, batch(0, comm.rank), None)
            before = sharded.clip_grad_norm_(0.1, norm_type)
            return before, sharded.clip_grad_norm_(0.1, norm_type)

        for before, after in on_two(rank_of):
            torch.testing.assert_close(before, norm)
            torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-4, atol=0)


# ---- mixed precision -----------------------------------------------------------------------------


def near(precision: sw.Precision, program: Any = once, build: Any = blocks) -> None:
    trains_alike(build, program, precision=precision, tolerance=4e-2, strategies=["full_shard"])


def test_compute_dtype() -> None:
    near(sw.Precision(param_dtype=BF16, output_dtype=FP32))


def test_reduce_dtype() -> None:
    near(sw.Precision(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32))
    near(sw.Precision(reduce_dtype=BF16))


def test_grad_acc_with_reduce_dtype() -> None:
    near(sw.Precision(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32), micro_batches)


class Embeds(nn.Module):
    """Makes float32 values between its layers, as a time embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), WithTime()

    def forward(self, x: Tensor) -> Tensor:
        time = torch.ones(len(x), 6)
        out: Tensor = self.second(self.first(x).float(), time)
        return out


class WithTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        assert (x.dtype, time.dtype) == (self.fc.weight.dtype,) * 2
        out: Tensor = self.fc(x + time)
        return out


def test_submodules_with_external_inputs() -> None:
    by = sw.wrap.by_class(nn.Linear, WithTime)
    precision = sw.Precision(param_dtype=BF16, output_dtype=FP32)
    trains_alike(
        Embeds, precision=precision, wrap=by, tolerance=4e-2, strategies=("full_shard", "no_shard")
    )


def test_norm_modules_bf16() -> None:
    near(sw.Precision(param_dtype=BF16, keep_in_fp32_modules=("norm",), output_dtype=FP32))


def test_norm_modules_fp16() -> None:
    near(sw.Precision(param_dtype=torch.float16, keep_in_fp32_modules=("norm",), output_dtype=FP32))


def test_float16_on_one_submodule() -> None:
    near(
        sw.Precision(
            param_dtype=torch.float16, keep_in_fp32_modules=("0", "2", "3"), output_dtype=FP32
        )
    )


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), OfOut()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(Out(self.first(x).float(), ("a",))).y
        return out


class OfOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, given: Out) -> Out:
        assert given.words == ("a",)
        return Out(self.fc(given.y))


def test_dataclass_input() -> None:
    precision = sw.Precision(param_dtype=BF16, output_dtype=FP32)
    by = sw.wrap.by_class(nn.Linear, OfOut)
    trains_alike(TakesDataclass, precision=precision, wrap=by, tolerance=4e-2)


def test_clamp_reduce_dtype() -> None:
    """Gradients travel in the dtype that is computed in, unless another one is said."""
    precision = sw.Precision(param_dtype=BF16)
    assert precision.of(FP32, trainable=True).reduce is BF16


# ---- making a model ------------------------------------------------------------------------------


def test_shard_tensor_parameters() -> None:
    """The ranks' shards are the parameter's rows, one behind the other."""

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        return {name: part.clone() for name, part in sharded.local_state_dict().items()}

    for name, value in seeded(blocks).state_dict().items():
        parts = [state[name].flatten() for state in on_two(rank, world=3)]
        assert torch.equal(torch.cat(parts), value.flatten())


def test_shard_tensor_parameters_memory() -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        sharded = sw.shard(model, comm=comm)
        return sum(part.numel() for part in sharded.local_state_dict().values())

    numel = sum(param.numel() for param in seeded(blocks).parameters())
    assert sum(on_two(rank, world=3)) == numel


def test_scalar_parameter() -> None:
    """``fully_shard`` refuses it."""

    def build() -> nn.Module:
        model = blocks()
        model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        model.register_forward_hook(lambda module, _, out: out * module.scale)
        return model

    trains_alike(build)


def test_noncontiguous_parameter() -> None:
    """``fully_shard`` refuses it."""

    def build() -> nn.Module:
        model = blocks()
        first: Any = model.get_submodule("0")
        first.weight = nn.Parameter(first.weight.detach().t())
        return model

    trains_alike(build)


def test_meta_device_1d_init() -> None:
    expected = seeded(lambda: deepcopy(blocks()))
    with torch.device("meta"):
        models = [blocks() for _ in range(2)]

    def rank(comm: Comm, _: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(models[comm.rank], comm=comm)
        sharded.load_state_dict(expected.state_dict())
        return clones(models[comm.rank].state_dict())

    assert all(equal(state, expected.state_dict()) for state in on_two(rank))


def test_rank0_broadcast_meta_device_init() -> None:
    """Rank 0 has values, and the others build on the meta device."""
    expected = seeded(blocks)

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(models[comm.rank], comm=comm)
        return clones(models[comm.rank].state_dict())

    with torch.device("meta"):
        empty = blocks()
    models = [seeded(blocks), empty]
    assert all(equal(state, clones(expected.state_dict())) for state in on_two(rank))


def test_list_of_modules() -> None:
    """Modules that are named one by one; the rest is the root's."""
    trains_alike(wrap=sw.wrap.by_hand("0", "1", "2.up"), strategies=["full_shard"])


def test_nested_fully_shard() -> None:
    trains_alike(wrap=sw.wrap.by_class(Block, nn.LayerNorm))


def test_world_size_one() -> None:
    trains_alike(world=1, optimizer=ADAM)


def test_ignored_params_and_modules() -> None:
    """``ignored_params``: plain, in no unit, and trained by nobody else."""

    def rank(comm: Comm, model: nn.Module) -> None:
        weight = model.get_parameter("0.weight")
        sw.shard(model, comm=comm, ignored=[weight, "1.norm"])
        assert type(weight) is nn.Parameter
        assert sharding_of(weight) is None
        once(model, batch(0, comm.rank), None)
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape

    on_two(rank)


# ---- state dicts and scalers ---------------------------------------------------------------------


def test_dp_state_dict_save_load() -> None:
    whole = seeded(blocks, 1).state_dict()

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        sharded.load_state_dict(whole)
        shards = sharded.state_dict("sharded")
        model.load_state_dict(seeded(blocks, 2).state_dict())
        sharded.load_state_dict(shards)
        assert equal(clones(model.state_dict()), clones(whole))

    on_two(rank)


def test_dp_state_dict_cpu_offload() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        before = clones(model.state_dict())
        sharded = sw.shard(model, comm=comm, offload="everything")
        assert equal(clones(sharded.state_dict("full")), before)
        sharded.load_state_dict(sharded.state_dict("sharded"))
        assert equal(clones(model.state_dict()), before)

    on_two(rank)


def test_cached_state_dict() -> None:
    """State that was taken before a step is that of before it."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = SGD(model.parameters())
        for kind in ("full", "sharded"):
            state, before = sharded.state_dict(kind), clones(sharded.state_dict("full"))
            once(model, batch(0, comm.rank), None)
            optimizer.step()
            optimizer.zero_grad()
            sharded.load_state_dict(state)
            assert equal(clones(sharded.state_dict("full")), before)

    on_two(rank)


def test_rank0_offload_full_state_dict() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        return sw.shard(model, comm=comm).state_dict("full", rank0_only=True)

    first, second = on_two(rank)
    assert equal(first, clones(seeded(blocks).state_dict()))
    assert second == {}


def test_state_dict_through_files(tmp_path: Path) -> None:
    before = clones(seeded(blocks).state_dict())

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "step-1")
        with sharded.full_params(writeback=True), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        sharded.load(tmp_path / "step-1")
        assert equal(clones(model.state_dict()), before)

    on_two(rank)


def test_gradient_scaler() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[float, bool]:
        sharded = sw.shard(model, comm=comm)
        optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
        before = clones(model.state_dict())
        x = batch(0, comm.rank) * (float("inf") if comm.rank else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert sharded.comm.size == 2
        return scaler.get_scale(), equal(clones(model.state_dict()), before)

    assert on_two(rank) == [(32.0, True)] * 2


def test_no_gradient_until_backward_and_none_after_zero_grad() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        assert all(param.grad is None for param in model.parameters())
        once(model, batch(0, comm.rank), None)
        assert all(param.grad is not None for param in model.parameters())
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())

    on_two(rank)


def test_double_fully_shard_is_refused() -> None:
    model = seeded(blocks)
    sw.shard(model)
    assert "sharded already" in error_text(sw.ConfigError, lambda: sw.shard(model))
