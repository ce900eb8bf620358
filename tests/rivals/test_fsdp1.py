"""The cases of PyTorch's tests of ``FullyShardedDataParallel``, by their names, written for ours.

Left out is what asks for its flat parameters, handles, streams and warnings, and for its wrappers
in the tree of modules.
"""

from __future__ import annotations

from collections import namedtuple
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests.copies import clones, equal, error_text, seeded
from tests.rivals.test_fsdp2 import BF16, BY_BLOCK, BY_LINEAR, FP32, Skips, Tied, Twice, TwoOutputs
from tests.rivals.twins import ADAM, SGD, Block, batch, blocks, on_two, once, trains_alike

pytestmark = pytest.mark.prove

HOST = "everything"


# ---- core ----------------------------------------------------------------------------------------


def test_nested_wrapped_model() -> None:
    trains_alike(wrap=sw.wrap.by_class(Block, nn.LayerNorm), optimizer=ADAM)
    trains_alike(wrap=sw.wrap.by_class(Block, nn.LayerNorm), offload=HOST)


def test_nested_wrapped_model_single_iteration_mixed_precision() -> None:
    precision = sw.Precision(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    trains_alike(steps=1, precision=precision, tolerance=4e-2)


def test_nested_always_wrap_model() -> None:
    trains_alike(wrap=sw.wrap.by_size(1))


class Transformer(nn.Module):
    """torch's own, with an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        out: Tensor = self.head(self.body(x, x))
        return out


LAYERS = sw.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def test_transformer() -> None:
    trains_alike(Transformer, wrap=LAYERS)
    trains_alike(Transformer, wrap=LAYERS, offload=HOST, strategies=["full_shard"])


def test_delayed_optim_step() -> None:
    """Work between the backward pass and the optimizer's step changes nothing."""

    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        once(model, x, sync)
        with torch.no_grad():
            model(x)

    trains_alike(program=program)


class Experts(nn.Module):
    """Each token is sent to one of two experts, of which both get some on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        parts = [expert(x) * weights[:, k : k + 1] for k, expert in enumerate(self.experts)]
        out: Tensor = parts[0] + parts[1]
        return out


def test_mixture_of_experts() -> None:
    trains_alike(Experts, wrap=BY_LINEAR)


def test_param_change_after_init() -> None:
    """Values that are written between ``shard()`` and the first forward pass count."""

    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sharded = sw.shard(model, comm=comm)
        with sharded.full_params(writeback=True), torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        out: Tensor = model(batch(0, 0))
        return out

    plain = seeded(blocks)
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(0.5)
    for out in on_two(rank):
        torch.testing.assert_close(out, plain(batch(0, 0)))


def test_backward_hooks_after_save() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        clones(model.state_dict())
        once(model, x, sync)

    trains_alike(program=program)


def test_output_backward_hooks() -> None:
    """Hooks of the user's on outputs and modules are called in the backward pass."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        calls: list[str] = []
        model.get_submodule("1").register_full_backward_hook(lambda *_: calls.append("module"))
        out = model(batch(0, comm.rank))
        out.register_hook(lambda _: calls.append("output"))
        out.sum().backward()
        assert calls == ["output", "module"]

    on_two(rank)


def test_transformer_no_grad() -> None:
    def rank(comm: Comm, model: nn.Module) -> Tensor:
        sw.shard(model, comm=comm, wrap=LAYERS)
        with torch.no_grad():
            out: Tensor = model(batch(0, 0))
        return out

    expected = seeded(Transformer)(batch(0, 0))
    for out in on_two(rank, Transformer):
        torch.testing.assert_close(out, expected)


# ---- accumulation and clipping -------------------------------------------------------------------


def accumulating(counts: tuple[tuple[bool, int], ...]) -> Any:
    """Passes with and without ``no_sync()``, as many as are said."""

    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        for synced, count in counts:
            for number in range(count):
                if synced:
                    once(model, x + number, sync)
                    continue
                with sync.no_sync():
                    once(model, x - number, sync)

    return program


def test_grad_acc() -> None:
    for counts in (((False, 2), (True, 1)), ((False, 1), (True, 2)), ((True, 1), (False, 2))):
        ends = counts if counts[-1][0] else (*counts, (True, 1))
        trains_alike(program=accumulating(ends), wrap=BY_BLOCK)


def test_grad_acc_cpu_offload() -> None:
    trains_alike(program=accumulating(((False, 2), (True, 1))), offload=HOST)


def test_no_sync_correctness() -> None:
    """Between micro-batches ``.grad`` is this rank's sum, as under DDP."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded, plain = sw.shard(model, comm=comm), plains[comm.rank]
        with sharded.no_sync():
            once(model, batch(0, comm.rank), None)
        once(plain, batch(0, comm.rank), None)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)

    plains = [seeded(blocks) for _ in range(2)]
    on_two(rank)


def test_clip_grad_norm_ddp_parity() -> None:
    """The norm is that of ``no_shard``, whatever the strategy."""

    def rank(comm: Comm, model: nn.Module) -> list[float]:
        norms = []
        for strategy in ("no_shard", "full_shard", "shard_grad_op", "zero1"):
            sharded = sw.shard(model, strategy, comm=comm)
            once(model, batch(0, comm.rank), None)
            norms.append(sharded.clip_grad_norm_(0.1).item())
            model.zero_grad()
            sharded.unshard()
        return norms

    for norms in on_two(rank):
        assert norms == pytest.approx([norms[0]] * 4)


def test_clip_grad_norm_low_precision_grads() -> None:
    def rank(comm: Comm, model: nn.Module) -> float:
        sharded = sw.shard(model.bfloat16(), comm=comm)
        model(batch(0, comm.rank).bfloat16()).float().square().mean().backward()
        norm = sharded.clip_grad_norm_(1.0)
        assert norm.dtype is FP32
        return norm.item()

    one, other = on_two(rank)
    assert one == other > 0


def test_clip_grad_norm_no_gradients() -> None:
    def rank(comm: Comm, model: nn.Module) -> float:
        return sw.shard(model, comm=comm).clip_grad_norm_(1.0).item()

    assert on_two(rank) == [0.0, 0.0]


# ---- ignored -------------------------------------------------------------------------------------


def check_ignored(ignored: Any, left: set[str]) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm, ignored=ignored(model))
        optimizer = SGD(model.parameters())
        for step in range(2):
            once(model, batch(step, 0), None)  # alike on every rank, so that copies stay alike
            optimizer.step()
            optimizer.zero_grad()
        names = {m.name for unit in sharded.units for m in unit.members}
        assert set(dict(model.named_parameters())) - names == left

    on_two(rank)


def test_ignored_modules_transformer() -> None:
    check_ignored(lambda model: [model[0]], {"0.weight", "0.bias"})


def test_ignored_modules_nested() -> None:
    check_ignored(lambda model: [model[1].norm], {"1.norm.weight", "1.norm.bias"})


def test_ignored_states_auto_wrap() -> None:
    check_ignored(lambda model: [model[1].up.weight], {"1.up.weight"})


def test_ignored_modules_not_under_wrapped_root() -> None:
    left = {f"{k}.norm.{name}" for k in (1, 2) for name in ("weight", "bias")}
    check_ignored(lambda model: [model[1].norm, model[2].norm], left)


def test_ignored_modules_invalid() -> None:
    text = error_text(sw.ConfigError, lambda: sw.shard(seeded(blocks), ignored=[nn.Linear(1, 1)]))
    assert "ignored= has a Linear" in text


def test_ignored_states_check() -> None:
    text = error_text(sw.ConfigError, lambda: sw.shard(seeded(blocks), ignored=["nothing"]))
    assert "no module, parameter or name" in text


def test_diff_ignored_modules_across_ranks() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        ignored = ["0"] if comm.rank else []
        return error_text(sw.RanksDisagree, lambda: sw.shard(model, comm=comm, ignored=ignored))

    assert all("rank" in text for text in on_two(rank))


# ---- odds and ends -------------------------------------------------------------------------------

Named = namedtuple("Named", "a b")  # noqa: PYI024 - as users write it


class ReturnsNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return Named(self.head(self.body(x)), x)


def test_fsdp_namedtuple() -> None:
    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        out = model(x)
        assert type(out) is Named
        out.a.square().mean().backward()

    trains_alike(ReturnsNamed, program, wrap=BY_BLOCK)


def test_fsdp_not_all_outputs_used_in_loss() -> None:
    """At first both outputs are used, and then one."""
    seen = {"steps": 0}

    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        a, b = model(x)
        late = bool((x * 0 + seen["steps"] > 3).all())
        (a.square().mean() if late else (a * b).mean()).backward()

    trains_alike(TwoOutputs, program, wrap=BY_LINEAR)


def test_fsdp_module_no_compute_grad() -> None:
    trains_alike(Skips, wrap=BY_LINEAR, optimizer=ADAM)


def test_fsdp_same_model_across_ranks() -> None:
    def rank(comm: Comm, _: nn.Module) -> dict[str, Tensor]:
        sw.shard(models[comm.rank], comm=comm, sync_module_states=True)
        return clones(models[comm.rank].state_dict())

    models = [seeded(blocks, seed) for seed in range(2)]
    expected = clones(seeded(blocks, 0).state_dict())
    assert all(equal(state, expected) for state in on_two(rank))


def test_fsdp_zero2_eval_with_prefetch() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        once(model, x, sync)

    trains_alike(program=program, strategies=["shard_grad_op"], wrap=BY_BLOCK)


def test_fsdp_unsupported_module_cls() -> None:
    """Of a container without a forward its parts are called, and are units."""

    def rank(comm: Comm, model: nn.Module) -> None:
        assert isinstance(model, nn.ModuleList)
        sw.shard(model, comm=comm)
        once(model[0], batch(0, comm.rank), None)
        assert model.get_parameter("0.up.weight").grad is not None

    on_two(rank, lambda: nn.ModuleList(Block() for _ in range(2)))


def test_multiple_forward() -> None:
    def program(model: nn.Module, x: Tensor, _: Any) -> None:
        (model(x).square().mean() + model(x + 1).square().mean()).backward()

    trains_alike(program=program, wrap=BY_BLOCK)


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, given: Any) -> Tensor:
        out: Tensor = self.fc(given["in"] if isinstance(given, dict) else given[0])
        return out


def test_input_type() -> None:
    def of_dict(model: nn.Module, x: Tensor, _: Any) -> None:
        model({"in": x}).square().mean().backward()

    def of_list(model: nn.Module, x: Tensor, _: Any) -> None:
        model([x]).square().mean().backward()

    for program in (of_dict, of_list):
        trains_alike(TakesDict, program)


def test_uneven_one_iteration() -> None:
    trains_alike(lambda: nn.Linear(6, 1), world=3, steps=1)


def test_fsdp_modules() -> None:
    """The units say what is gathered together."""
    sharded = sw.shard(seeded(blocks), wrap=BY_BLOCK)
    assert [unit.name for unit in sharded.units] == ["", "1", "2"]


def test_freezing_weights() -> None:
    """A frozen trunk with a trained head, by ``requires_grad`` and by ``no_grad()``."""

    def build() -> nn.Module:
        model = blocks()
        model.get_submodule("0").requires_grad_(requires_grad=False)
        model.get_submodule("1").requires_grad_(requires_grad=False)
        return model

    trains_alike(build, wrap=sw.wrap.by_class(Block, nn.Linear))
    trains_alike(build, wrap=BY_BLOCK, optimizer=ADAM)


def test_nested_module_apply() -> None:
    def half(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5)

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        with sharded.full_params(writeback=True):
            model.apply(half)
        return clones(model.state_dict())

    expected = seeded(blocks)
    expected.apply(half)
    assert all(equal(state, clones(expected.state_dict())) for state in on_two(rank))


def test_pure_fp16() -> None:
    def rank(comm: Comm, model: nn.Module) -> set[torch.dtype]:
        sw.shard(model.half(), comm=comm)
        model(batch(0, comm.rank).half()).float().mean().backward()
        grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        return grads | {p.dtype for p in model.parameters()}

    assert on_two(rank) == [{torch.float16}] * 2


def test_communication() -> None:
    """One gather for a unit in each pass but of the last one, and one reduce."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, wrap=BY_BLOCK, comm=comm)
        once(model, batch(0, comm.rank), None)
        once(model, batch(0, comm.rank), None)
        comm.counters.reset()
        once(model, batch(0, comm.rank), None)
        calls = comm.counters.calls
        assert calls["reduce"] == len(sharded.units)
        assert len(sharded.units) <= calls["gather"] <= 2 * len(sharded.units) - 1

    on_two(rank)


def test_train_eval() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        once(model, x, sync)
        model.eval()
        model(x)
        model.train()

    trains_alike(program=program, wrap=BY_BLOCK)


def test_checkpoint_fsdp_wrapping() -> None:
    """A block that is recomputed by the user inside a unit, and around one."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            out: Tensor = self.head(x)
            return out

    for wrap in (BY_BLOCK, sw.wrap.whole()):
        trains_alike(Around, wrap=wrap)


def test_hooks_multi_traversal() -> None:
    trains_alike(Twice, wrap=BY_LINEAR, strategies=("full_shard", "shard_grad_op", "zero1"))


# ---- meta, hybrid, scaler ------------------------------------------------------------------------


def test_nested_model_with_meta_device_reset_params() -> None:
    with torch.device("meta"):
        model = blocks()
    sw.shard(model)
    assert not any(param.is_meta for param in model.parameters())
    model(batch(0, 0)).sum().backward()


def test_nested_model_with_meta_device_default_init() -> None:
    def ones(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)

    with torch.device("meta"):
        model = blocks()
    sw.shard(model, init=ones)
    assert all((value == 1).all() for value in model.state_dict().values())


def test_bad_arg_meta() -> None:
    with torch.device("meta"):
        model = blocks()
    text = error_text(sw.ConfigError, lambda: sw.shard(model, init=lambda module: None))
    assert "still has no value" in text


def test_fsdp_hybrid_shard_parity() -> None:
    trains_alike(world=4, strategies=("hybrid_shard", "hybrid_shard_zero2"), mesh=(2, 2))


def test_fsdp_ddp_parity_with_grad_scaler() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, dict[str, Tensor]]:
        states = {}
        for strategy in ("full_shard", "no_shard"):
            model.load_state_dict(start)
            sharded = sw.shard(model, strategy, comm=comm)
            optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler("cpu")
            for step in range(2):
                scaler.scale(model(batch(step, comm.rank)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            states[strategy] = clones(model.state_dict())
            sharded.unshard()
        return states

    start = clones(seeded(blocks).state_dict())
    for states in on_two(rank):
        torch.testing.assert_close(states["full_shard"], states["no_shard"])


# ---- state dicts ---------------------------------------------------------------------------------


def test_basic_save_and_load_state_dict() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, wrap=BY_BLOCK, comm=comm)
        model.load_state_dict(whole)
        return clones(model.state_dict())

    whole = clones(seeded(blocks, 1).state_dict())
    assert all(equal(state, whole) for state in on_two(rank))


def test_full_state_dict_missing_unexpected_keys_cleaned() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[list[str], list[str]]:
        sw.shard(model, comm=comm)
        state = model.state_dict()
        state["extra"] = state.pop("0.weight")
        result = model.load_state_dict(state, strict=False)
        return result.missing_keys, result.unexpected_keys

    assert on_two(rank) == [(["0.weight"], ["extra"])] * 2


def test_state_dict_rank0_offload_save_load_flow() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        state = sharded.state_dict("full", rank0_only=True)
        with sharded.full_params(writeback=True), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        sharded.load_state_dict(state)
        return clones(model.state_dict())

    expected = clones(seeded(blocks).state_dict())
    assert all(equal(state, expected) for state in on_two(rank))


def test_state_dict_with_ignored_modules() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        before = clones(model.state_dict())
        sharded = sw.shard(model, comm=comm, ignored=["0", "1.norm"])
        for state in (model.state_dict(), sharded.state_dict("full")):
            assert equal(clones(state), before)
        sharded.load_state_dict(sharded.state_dict("sharded"))
        assert equal(clones(model.state_dict()), before)

    on_two(rank)


def test_state_dict_with_shared_parameters() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm)
        return clones(model.state_dict())

    assert all(equal(s, clones(seeded(Tied).state_dict())) for s in on_two(rank, Tied))


def test_fsdp_state_dict_with_activation_checkpoint() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm, activation_checkpointing=True)
        return clones(model.state_dict())

    assert all(equal(state, clones(seeded(blocks).state_dict())) for state in on_two(rank))


def test_local_state_dict_with_empty_ranks() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        state = clones(sharded.state_dict("local"))
        model.load_state_dict(state)
        assert equal(clones(sharded.state_dict("local")), state)

    on_two(rank, lambda: nn.Linear(6, 1), world=3)


def test_buffers_save_and_load_state_dict() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm)
        model.load_state_dict(whole)
        return clones(model.state_dict())

    model = seeded(build)
    model(batch(0, 0))
    whole = clones(model.state_dict())
    assert all(equal(state, whole) for state in on_two(rank, build))


def test_save_and_load_after_forward_state_dict() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        before = clones(model.state_dict())
        with torch.no_grad():
            model(batch(0, comm.rank))
        assert equal(clones(model.state_dict()), before)

    on_two(rank)


def test_torch_save_load(tmp_path: Any) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        state = model.state_dict()
        if comm.rank == 0:
            torch.save(state, tmp_path / "model.pt")

    on_two(rank)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    seeded(blocks, 1).load_state_dict(state)
    assert equal(clones(state), clones(seeded(blocks).state_dict()))


# ---- optimizer state -----------------------------------------------------------------------------


def stepped(comm: Comm, model: nn.Module, make: Any = ADAM) -> tuple[sw.Sharded, Any]:
    sharded = sw.shard(model, comm=comm)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    once(model, batch(0, comm.rank), None)
    optimizer.step()
    optimizer.zero_grad()
    return sharded, optimizer


def test_optim_state_dict_nested() -> None:
    """By name and whole, as FSDP's; and a plain optimizer can have it."""

    def rank(comm: Comm, model: nn.Module) -> dict[str, Any]:
        sharded, optimizer = stepped(comm, model)
        return sharded.optimizer_state_dict(optimizer)

    for state in on_two(rank):
        plain = seeded(blocks)
        shapes = {name: param.shape for name, param in plain.named_parameters()}
        assert {n: v["exp_avg"].shape for n, v in state["state"].items()} == shapes
        ADAM(plain.parameters()).load_state_dict(sw.numbered(state))


def test_shard_full_optim_state_dict_nested() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded, optimizer = stepped(comm, model)
        for kind in ("full", "sharded"):
            state = sharded.optimizer_state_dict(optimizer, kind)
            other = ADAM(model.parameters())
            sharded.load_optimizer_state_dict(other, state)
            for param in model.parameters():
                mine, loaded = optimizer.state[param], other.state[param]
                assert torch.equal(mine["exp_avg"], loaded["exp_avg"])

    on_two(rank)


def test_rekey_optim_state_dict_to_ids() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded, optimizer = stepped(comm, model)
        state = sharded.optimizer_state_dict(optimizer)
        names = [name for name, _ in model.named_parameters()]
        again = sw.by_name(sw.numbered(state), names)
        assert again["state"].keys() == state["state"].keys()

    on_two(rank)


def test_save_load_without_0th_param_state() -> None:
    def build() -> nn.Module:
        model = blocks()
        model.get_parameter("0.weight").requires_grad = False
        return model

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded, optimizer = stepped(comm, model)
        state = sharded.optimizer_state_dict(optimizer)
        assert "0.weight" not in state["state"]
        other = ADAM([p for p in model.parameters() if p.requires_grad])
        sharded.load_optimizer_state_dict(other, state)

    on_two(rank, build)


def test_optim_state_with_no_shard() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, "no_shard", comm=comm)
        optimizer = ADAM(model.parameters())
        once(model, batch(0, comm.rank), None)
        optimizer.step()
        state = sharded.optimizer_state_dict(optimizer)
        sharded.load_optimizer_state_dict(ADAM(model.parameters()), state)

    on_two(rank)


def test_optim_state_with_param_groups() -> None:
    def groups(params: Any) -> Any:
        listed = list(params)
        halves: list[dict[str, Any]] = [{"params": listed[:3], "lr": 0.1}, {"params": listed[3:]}]
        return ADAM(halves)

    trains_alike(optimizer=groups)


def test_diff_hyperparams() -> None:
    def groups(params: Any) -> Any:
        listed = list(params)
        matrices = [p for p in listed if p.ndim > 1]
        others = [p for p in listed if p.ndim <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=0.01,
            eps=1e-4,
        )

    trains_alike(optimizer=groups, wrap=BY_BLOCK)


def test_multiple_optimizers() -> None:
    class Both:
        def __init__(self, params: Any) -> None:
            listed = list(params)
            self.each = [SGD(listed[:4]), ADAM(listed[4:])]

        def step(self) -> None:
            for optimizer in self.each:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in self.each:
                optimizer.zero_grad()

    trains_alike(optimizer=Both)


# ---- whole parameters ----------------------------------------------------------------------------


def test_summon_full_param_writeback() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        with sharded.full_params(writeback=True), torch.no_grad():
            model.get_parameter("0.bias").fill_(7.0)
        return clones(model.state_dict())

    assert all((state["0.bias"] == 7).all() for state in on_two(rank))


def test_raises_where_a_write_would_be_lost() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)

        def write() -> None:
            with sharded.full_params(), torch.no_grad():
                model.get_parameter("0.bias").fill_(7.0)

        return error_text(sw.ShardUseError, write)

    assert all("writeback=True" in text for text in on_two(rank))


def test_params_count_and_value() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        with sharded.full_params():
            params = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert equal(params, expected)

    expected = {n: p.detach().clone() for n, p in seeded(blocks).named_parameters()}
    on_two(rank)


def test_cannot_summon_full_params_from_forward() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        texts = []

        def hook(*_: Any) -> None:
            texts.append(error_text(sw.ScheduleError, lambda: sharded.full_params().__enter__()))

        model.get_submodule("1").register_forward_hook(hook)
        model(batch(0, comm.rank))
        return texts[0]

    assert all("in the middle of a step" in text for text in on_two(rank))


def test_cannot_summon_full_params_from_backward() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        texts = []

        def hook(_: Tensor) -> None:
            texts.append(error_text(sw.ScheduleError, lambda: sharded.full_params().__enter__()))

        def watch(_: nn.Module, __: Any, out: Tensor) -> None:
            out.register_hook(hook)

        model.get_submodule("1").register_forward_hook(watch)
        model(batch(0, comm.rank)).sum().backward()
        return texts[0]

    assert all("in the middle of a step" in text for text in on_two(rank))


def test_with_grads_core() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        once(model, batch(0, 0), None)
        with sharded.full_params():
            for name, param in model.named_parameters():
                torch.testing.assert_close(param.grad, expected[name])

    plain = seeded(blocks)
    once(plain, batch(0, 0), None)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    on_two(rank)


def test_with_grads_none_grads() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        with sw.shard(model, comm=comm).full_params():
            assert all(param.grad is None for param in model.parameters())

    on_two(rank)


def test_named_parameters_buffers() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        with sw.shard(model, comm=comm).full_params():
            return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]

    assert on_two(rank) == [[name for name, _ in seeded(blocks).named_parameters()]] * 2


def test_summon_between_two_forwards() -> None:
    def program(model: nn.Module, x: Tensor, sync: Any) -> None:
        with torch.no_grad():
            model(x)
        if isinstance(sync, sw.Sharded):
            with sync.full_params():
                pass
        once(model, x, sync)

    trains_alike(program=program)


def test_access_params_after_forward() -> None:
    """Outside their unit's call parameters are shards, and say so."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        with torch.no_grad():
            model(batch(0, comm.rank))
        return error_text(sw.ShardUseError, lambda: model.get_parameter("0.weight")[0])

    assert all("is sharded" in text for text in on_two(rank))


def test_deepcopy_is_a_plain_model() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sw.shard(model, comm=comm)
        return clones(deepcopy(model).state_dict())

    assert all(equal(state, clones(seeded(blocks).state_dict())) for state in on_two(rank))


def test_custom_optimizer_of_partial_parameters() -> None:
    """Only the head is in an optimizer; the rest keeps its values."""

    def head_only(params: Any) -> Any:
        return partial(torch.optim.SGD, lr=0.1)(list(params)[-2:])

    trains_alike(optimizer=head_only)
