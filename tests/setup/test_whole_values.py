"""Whole values in and out of a sharded model mean what they mean for a plain one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.sharding import sharding_of
from tests import nets
from tests.copies import clones, equal, error_text, local, on_ranks, seeded
from tests.nets import NETS, Net
from tests.ranks import in_group, outcomes_of, run_threads
from tests.steps import STRATEGIES, train


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 1 for name, value in state.items()}


# --- state_dict ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_a_state_dict_is_the_plain_models(net: Net, strategy: str) -> None:
    plain = seeded(net.build).state_dict()

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, strategy, comm=comm)
        state = model.state_dict()
        assert equal(state, plain)
        assert {value.device for value in state.values()} == {torch.device("cpu")}
        assert state._metadata == plain._metadata  # type: ignore[attr-defined]

    on_ranks(3, net.build, rank)


def test_tied_tensors_are_one_tensor() -> None:
    def rank(comm: Comm, model: nn.Module) -> int:
        sw.shard(model, comm=comm)
        state = model.state_dict()
        assert state["lm_head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        file = io.BytesIO()
        torch.save(state, file)
        return file.tell()

    plain = io.BytesIO()
    torch.save(seeded(nets.tied_decoder).state_dict(), plain)
    for nbytes in on_ranks(2, nets.tied_decoder, rank):
        assert nbytes < 1.2 * plain.tell()  # no tensor drags its whole bucket along


@pytest.mark.parametrize("part", ["embed", "blocks", "blocks.1", "blocks.1.mlp", "lm_head"])
def test_a_submodule_has_a_state_dict_of_whole_tensors_too(part: str) -> None:
    plain = seeded(nets.tied_decoder).get_submodule(part).state_dict()

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        module = model.get_submodule(part)
        assert equal(module.state_dict(), plain)
        module.load_state_dict(changed(plain))
        assert equal(module.state_dict(), changed(plain))

    on_ranks(2, nets.tied_decoder, rank)


def test_a_sharded_model_inside_a_plain_one_is_whole_in_its_state_dict() -> None:
    plain = nn.ModuleDict({"inner": seeded(nets.decoder), "other": nn.Linear(2, 2)})

    def rank(comm: Comm, model: nn.Module) -> None:
        outer = nn.ModuleDict({"inner": model, "other": copy.deepcopy(plain["other"])})
        sw.shard(model, comm=comm)
        assert equal(outer.state_dict(), clones(plain.state_dict()))
        outer.load_state_dict(changed(plain.state_dict()))
        assert equal(outer.state_dict(), changed(plain.state_dict()))

    on_ranks(2, nets.decoder, rank)


def ask_on_rank_1_only(comm: Comm) -> str:
    model = nets.decoder()
    sw.shard(model, comm=comm)
    if comm.rank != 1:
        return ""
    return error_text(sw.RanksDisagree, model.state_dict)


def test_a_state_dict_on_one_rank_only_is_an_error_instead_of_a_hang() -> None:
    text = run_threads(2, ask_on_rank_1_only)[1]
    assert "while rank 1 waits at whole" in text
    assert "rank 0 has left (its thread ended normally" in text


@pytest.mark.prove
@pytest.mark.spawn
def test_the_same_between_processes() -> None:
    first, second = outcomes_of(2, in_group, ask_on_rank_1_only)
    assert not first.error
    assert "rank 0 has left" in second.value
    assert "while rank 1 waits at whole" in second.value


def test_a_state_dict_in_the_middle_of_a_step_is_an_error() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sw.shard(model, comm=comm)
        norm, texts = model.get_submodule("norm"), list[str]()

        def ask(*_: object) -> None:
            texts.append(error_text(sw.ScheduleError, model.state_dict))

        batch = nets.decoder_batch(comm.rank, 2)
        handles = [norm.register_forward_hook(ask)]
        with torch.no_grad():
            nets.loss(model, batch)
        handles[0].remove()
        value = nets.loss(model, batch)
        model.get_parameter("norm.weight").register_hook(ask)
        value.backward()
        assert model.state_dict()
        return texts

    for texts in on_ranks(2, nets.decoder, rank):
        assert len(texts) == 2
        for text in texts:
            assert text == (
                "a state dict was asked for in the middle of a step, while units are gathered and "
                "gradients are being reduced, and other ranks may be at another unit. Do it "
                "between steps: after backward(), or before the forward pass."
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_values_between_forward_and_backward_are_right_and_disturb_nothing(
    strategy: str,
) -> None:
    plain = seeded(nets.decoder)
    before = clones(plain.state_dict())

    def rank(comm: Comm, model: nn.Module) -> list[Tensor | None]:
        sharded = sw.shard(model, strategy, comm=comm)
        for asks in (True, False):
            model.zero_grad()
            value = nets.loss(model, nets.decoder_batch(comm.rank, 2))
            if asks:
                assert equal(model.state_dict(), before)
                with sharded.full_params():
                    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
            value.backward()
            gradients = [p.grad for p in model.parameters()]
            if asks:
                expected = gradients
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))  # type: ignore[arg-type]
        return gradients

    on_ranks(2, nets.decoder, rank)


def write(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    state["norm.weight"].mul_(0.9)
    return state


@pytest.mark.parametrize(
    "use",
    [
        lambda model, _: nets.loss(model, nets.decoder_batch(0, 2)),
        lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step(),
        lambda model, sharded: sharded.local_state_dict(),
        lambda model, _: model.state_dict(),
    ],
    ids=["forward", "step", "local_state_dict", "state_dict"],
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_write_into_a_state_dict_is_told_since_it_changes_nothing(
    use: Callable[[nn.Module, sw.Sharded], object], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        state = write(model)
        if not kept:
            del state
        use(model, sharded)
        use(model, sharded)

    on_ranks(2, nets.decoder, rank)
    warnings = [text for text in caplog.messages if "state_dict() was written in place" in text]
    assert len(warnings) == 2  # once on each rank
    assert "`for p in model.parameters(): p.mul_(0.9)`" in warnings[0]


def test_a_state_dict_that_is_only_read_or_loaded_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        with torch.inference_mode():
            state = write(model)
        model.load_state_dict(state)
        assert equal(model.state_dict(), state)
        clones(model.state_dict())["norm.weight"].zero_()
        nets.loss(model, nets.decoder_batch(0, 2))

    on_ranks(2, nets.decoder, rank)
    assert not caplog.messages


# --- load_state_dict -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_whole_tensors_are_loaded(net: Net, strategy: str) -> None:
    other = clones(seeded(net.build, seed=1).state_dict())

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, strategy, comm=comm)
        train(model, net.batch(comm.rank, 2))
        missing = model.load_state_dict(other)
        assert missing.missing_keys == missing.unexpected_keys == []
        assert equal(model.state_dict(), other)
        assert {p.numel() > 0 for p in model.parameters()} <= {True, False}

    on_ranks(3, net.build, rank)


def test_a_local_state_dict_costs_nothing_and_is_the_ranks_own() -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        comm.counters.reset()
        state = sharded.local_state_dict()
        assert comm.counters.calls == {}
        for name, param in model.named_parameters(remove_duplicate=False):
            assert state[name].data_ptr() == local(param).data_ptr()
            assert not state[name].requires_grad
        return state

    plain = dict(seeded(nets.tied_decoder).named_parameters(remove_duplicate=False))
    ranks = on_ranks(3, nets.tied_decoder, rank)
    for name, whole in plain.items():
        parts = [state[name].flatten() for state in ranks]
        assert torch.equal(torch.cat(parts), whole.flatten())


@pytest.mark.parametrize("name", ["norm.weight", "blocks.1.mlp.down.weight"])
def test_a_wrong_shape_is_an_error_that_names_the_parameter(name: str) -> None:
    other = clones(seeded(nets.decoder).state_dict())
    whole = tuple(other[name].shape)
    other[name] = torch.zeros(5, 5, 5)

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        text = error_text(sw.ConfigError, lambda: model.load_state_dict(other))
        local = tuple(model.get_parameter(name).shape)
        assert text.startswith(
            f"parameter {name!r} has shape (5, 5, 5) in the state dict and {whole} in the model "
            f"(this rank's shard: {local}), so it cannot be loaded."
        )

    on_ranks(2, nets.decoder, rank)


def test_missing_and_unexpected_names_are_torchs_business() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        state = clones(model.state_dict())
        state["spare"] = state.pop("norm.weight")
        text = error_text(RuntimeError, lambda: model.load_state_dict(state))
        assert 'Missing key(s) in state_dict: "norm.weight"' in text
        result = model.load_state_dict(state, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["norm.weight"], ["spare"])

    on_ranks(2, nets.decoder, rank)


def test_assigning_is_refused_since_the_ranks_would_go_on_with_the_old_parameters() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, comm=comm)
        state = model.state_dict()
        return error_text(sw.ConfigError, lambda: model.load_state_dict(state, assign=True))

    for text in on_ranks(2, nets.decoder, rank):
        assert "load_state_dict(assign=True) would put new parameters in place" in text


# --- deepcopy --------------------------------------------------------------------------------


def all_hooks(model: nn.Module) -> list[Any]:
    named = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    )
    hooks: list[Any] = []
    for module in model.modules():
        hooks += [hook for name in named for hook in getattr(module, name).values()]
        hooks += [name for name in ("__deepcopy__", "forward") if name in vars(module)]
    params: Iterable[nn.Parameter] = model.parameters()
    hooks += [hook for p in params for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return hooks


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_deep_copy_is_plain_whole_and_on_its_own(strategy: str, checkpointing: bool) -> None:
    plain = seeded(nets.mostly_frozen)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm, activation_checkpointing=checkpointing)
        copied = copy.deepcopy(model)
        assert equal(copied.state_dict(), clones(plain.state_dict()))
        assert {type(param) for param in copied.parameters()} == {nn.Parameter}
        assert [p.requires_grad for p in copied.parameters()] == [
            p.requires_grad for p in plain.parameters()
        ]
        assert all_hooks(copied) == []
        assert all(sharding_of(param) is None for param in copied.parameters())
        comm.counters.reset()
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        train(copied, nets.decoder_batch(0, 2))
        optimizer.step()
        assert comm.counters.calls == {}
        assert not equal(copied.state_dict(), clones(plain.state_dict()))
        assert equal(model.state_dict(), clones(plain.state_dict()))  # which is as it was
        train(model, nets.decoder_batch(comm.rank, 2))
        assert sharded.unshard() is model

    on_ranks(2, nets.mostly_frozen, rank)


def test_a_deep_copy_keeps_ties_buffers_and_what_it_shares_with_its_surroundings() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        around = copy.deepcopy({"model": model, "tied": model.get_parameter("lm_head.weight")})
        copied = around["model"]
        assert isinstance(copied, nn.Module)
        assert copied.get_parameter("lm_head.weight") is copied.get_parameter("embed.weight")
        assert around["tied"] is copied.get_parameter("embed.weight")

    on_ranks(2, nets.tied_decoder, rank)


def test_a_handle_is_not_copied() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        return error_text(sw.ConfigError, lambda: copy.deepcopy(sw.shard(model, comm=comm)))

    assert "copy.deepcopy(model)" in on_ranks(2, nets.decoder, rank)[0]


# --- unshard and relayout --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_unshard_gives_back_the_plain_model(net: Net, strategy: str) -> None:
    plain = seeded(net.build)

    def rank(comm: Comm, model: nn.Module) -> None:
        params = list(model.parameters())
        sharded = sw.shard(model, strategy, comm=comm, activation_checkpointing=True)
        assert sharded.unshard() is model
        assert equal(model.state_dict(), clones(plain.state_dict()))
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert {type(param) for param in params} == {nn.Parameter}
        assert all(sharding_of(param) is None for param in params)
        assert all_hooks(model) == []
        train(model, net.batch(0, 2))
        sw.shard(model, strategy, comm=comm)  # and it can be sharded again

    on_ranks(2, net.build, rank)


def test_training_goes_on_after_a_change_of_what_is_trained() -> None:
    """Optimizer state goes along: momentum of the old layout would be that of other rows."""

    def steps(
        model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], None]
    ) -> None:
        for number in range(4):
            if number == 2:
                model.requires_grad_(True)
                between()
            train(model, nets.decoder_batch(0, 2))
            optimizer.step()
            optimizer.zero_grad()

    def build() -> nn.Module:
        model = nets.decoder()
        for name, param in model.named_parameters():
            param.requires_grad = "attention" in name
        return model

    plain = seeded(build)
    steps(plain, torch.optim.Adam(plain.parameters(), lr=0.1), lambda: None)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        steps(model, optimizer, sharded.relayout)
        assert equal(model.state_dict(), clones(plain.state_dict()))  # a mean of equals is exact
        sharded.unshard()
        for param in model.parameters():
            assert optimizer.state[param]["exp_avg"].shape == param.shape

    on_ranks(4, build, rank)
