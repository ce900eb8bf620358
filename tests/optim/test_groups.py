"""Parameter groups: by parameters, by names, with options of their own; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.copies import error_text, on_ranks

BIASES_AND_NORMS = [r".*\.bias", r".*norm.*"]


def names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def test_by_default_every_trainable_parameter_is_in_one_group() -> None:
    model = nets.mostly_frozen()
    (group,) = names(sw.optim.AdamW(sw.shard(model)))
    assert group == [n for n, p in model.named_parameters() if p.requires_grad]
    assert 0 < len(group) < len(list(model.parameters()))


def test_groups_are_as_torchs() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        params = list(model.parameters())
        for groups in (
            [{"params": params[:3]}, {"params": iter(params[3:]), "lr": 0.5}],
            [{"params": params[0]}, {"params": list(model.named_parameters())[1:], "lr": 0.5}],
        ):
            optimizer = sw.optim.AdamW(sharded, groups, lr=0.1, eps=0.5)
            assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
            assert [group["eps"] for group in optimizer.param_groups] == [0.5, 0.5]
            grouped = [param for group in optimizer.param_groups for param in group["params"]]
            assert all(a is b for a, b in zip(grouped, params, strict=True))
        assert names(sw.optim.AdamW(sharded, params[:2])) == [
            ["embed.weight", "blocks.0.norm1.weight"]
        ]

    on_ranks(2, nets.decoder, rank)


def test_patterns_match_whole_names_and_leave_what_earlier_groups_took() -> None:
    model = nets.decoder()
    sharded = sw.shard(model)
    groups: list[dict[str, Any]] = [
        {"params": BIASES_AND_NORMS, "weight_decay": 0.0},
        {"params": ".*", "name": "the rest"},
    ]
    first, rest = names(sw.optim.AdamW(sharded, groups))
    every = [name for name, _ in model.named_parameters()]
    assert sorted(first + rest) == sorted(every)
    assert set(first) == {n for n in every if n.endswith(".bias") or "norm" in n}
    assert names(sw.optim.AdamW(sharded, [{"params": r"norm\.bias"}])) == [["norm.bias"]]


def test_a_group_may_be_left_empty() -> None:
    sharded = sw.shard(nets.decoder())
    nothing: list[str] = []
    for empty in (nothing, r".*\.bias"):
        optimizer = sw.optim.AdamW(sharded, [{"params": ".*"}, {"params": empty}])
        assert names(optimizer)[1] == []
        nets.loss(sharded.model, nets.decoder_batch(0, 2)).backward()
        optimizer.step()


def test_a_pattern_finds_a_tied_parameter_by_each_of_its_names() -> None:
    sharded = sw.shard(nets.tied_decoder())
    assert names(sw.optim.AdamW(sharded, [{"params": r"lm_head\..*"}])) == [["embed.weight"]]


def test_a_pattern_finds_trainable_parameters_only() -> None:
    sharded = sw.shard(nets.mostly_frozen())
    (group,) = names(sw.optim.AdamW(sharded, [{"params": r"blocks\.0\..*"}]))
    assert group == [
        f"blocks.0.attention.{name}.{part}.weight"
        for name in ("query", "value")
        for part in ("down", "up")
    ]


def test_a_group_can_be_added_later() -> None:
    model = nets.decoder()
    optimizer = sw.optim.AdamW(sw.shard(model), [{"params": r"blocks\..*"}])
    nets.loss(model, nets.decoder_batch(0, 2)).backward()
    head = model.get_parameter("lm_head.weight")
    before = head.detach().clone()
    optimizer.step()
    assert torch.equal(head, before)
    optimizer.add_param_group({"params": [head], "lr": 0.5})
    optimizer.step()
    assert not torch.equal(head, before)
    steps = {
        optimizer.state[param]["step"].item()
        for param in model.parameters()
        if param in optimizer.state
    }
    assert steps == {1, 2}


# ---- what is refused -----------------------------------------------------------------------


def test_a_pattern_that_finds_nothing_is_refused_with_the_nearest_names() -> None:
    sharded = sw.shard(nets.decoder())
    text = error_text(sw.ConfigError, lambda: sw.optim.AdamW(sharded, [{"params": ["norm.bia"]}]))
    assert text.startswith("no trainable parameter has a name that 'norm.bia' matches; the nearest")
    assert "'norm.bias'" in text
    assert text.endswith("r'.*\\.bias' finds the bias of every module.")


def test_a_parameter_of_another_model_is_refused() -> None:
    sharded, other, plain = sw.shard(nets.decoder()), sw.shard(nets.decoder()), nn.Linear(2, 2)
    for param, what in (
        (other.model.get_parameter("norm.bias"), "parameter 'norm.bias'"),
        (plain.weight, "Parameter"),
        (3, "int"),
    ):
        text = error_text(sw.OptimizerError, lambda: sw.optim.AdamW(sharded, [{"params": [param]}]))  # noqa: B023
        assert text.startswith(
            f"{what} is in a parameter group and is none of this sharded model's"
        )


def test_a_parameter_in_two_groups_is_refused_by_torch() -> None:
    sharded = sw.shard(nets.decoder())
    head = sharded.model.get_parameter("lm_head.weight")
    with pytest.raises(ValueError, match="more than one parameter group"):
        sw.optim.AdamW(sharded, [{"params": [head]}, {"params": [head]}])
    with pytest.raises(TypeError, match="ordered collections"):
        sw.optim.AdamW(sharded, [{"params": {head}}])
    with pytest.raises(ValueError, match="empty parameter list"):
        sw.optim.AdamW(sharded, [])


def test_a_dtype_that_no_fused_kernel_takes_is_refused() -> None:
    sharded = sw.shard(nn.Linear(2, 2, dtype=torch.complex64))
    text = error_text(sw.OptimizerError, lambda: sw.optim.AdamW(sharded))
    assert text.startswith("parameter 'weight' is torch.complex64, and fused kernels update real")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "lr is -1.0; it must not be negative."),
    "betas": ({"betas": (0.9, 1.0)}, "betas are (0.9, 1.0); each must be in [0, 1)"),
    "max_norm": ({"max_norm": 1.0}, "a parameter group has a max_norm; the norm is that of all"),
    "maximize": ({"maximize": True}, "a parameter group has maximize=True, and the fused"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_group_with_an_option_that_cannot_work_is_refused(name: str) -> None:
    sharded = sw.shard(nets.decoder())
    group, start = BAD[name]
    text = error_text(sw.ConfigError, lambda: sw.optim.AdamW(sharded, [{"params": ".*", **group}]))
    assert text.startswith(start)


def test_an_optimizer_reads_as_its_groups_and_options_without_a_list_of_names() -> None:
    optimizer = sw.optim.AdamW(sw.shard(nets.decoder()), [{"params": ".*norm.*", "lr": 0.5}])
    assert repr(optimizer) == (
        "sw.optim.AdamW(\n    14 parameters: amsgrad=False, betas=(0.9, 0.999), eps=1e-08, lr=0.5, "
        "weight_decay=0.01\n)"
    )
