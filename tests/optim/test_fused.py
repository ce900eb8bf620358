"""The update rules are torch's, bit for bit on the same pieces; and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.parameters import Bucket
from tests import nets
from tests.copies import error_text, local, on_ranks
from tests.nets import Net
from tests.steps import train

ODD = Net(nets.scalar_and_13_rows, nets.scalar_and_13_rows_batch)
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (sw.optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, amsgrad": (
        sw.optim.AdamW, torch.optim.AdamW, {"amsgrad": True, "betas": (0.5, 0.9), "eps": 0.1},
    ),
    "AdamW, eps 0": (sw.optim.AdamW, torch.optim.AdamW, {"eps": 0.0}),
    "AdamW, tensor lr": (sw.optim.AdamW, torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
}  # fmt: skip
QUICK = ("AdamW", "AdamW, amsgrad")


def pieces(bucket: Bucket) -> list[tuple[int, int]]:
    """Where slots touch each other in a bucket's shard, and where ranks' pieces end."""
    used = torch.zeros(bucket.shard.numel(), dtype=torch.bool)
    for view in bucket.spec.rest_views(used):
        view.fill_(True)
    size, pieces = bucket.layout.shard_numel, list[tuple[int, int]]()
    for at in [at for at, here in enumerate(used.tolist()) if here]:
        if pieces and pieces[-1][1] == at and at % size:
            pieces[-1] = pieces[-1][0], at + 1
        else:
            pieces.append((at, at + 1))
    return pieces


def gradients(bucket: Bucket) -> Tensor:
    """Every gradient of a bucket, where its parameter is in the shard."""
    flat = torch.zeros_like(bucket.shard)
    for param, view in zip(bucket.params, bucket.spec.rest_views(flat), strict=True):
        view.copy_(local(param.grad))
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.prove) for name in RULES],
)
def test_an_update_is_torchs_fused_one_on_the_same_pieces(name: str, dtype: torch.dtype) -> None:
    ours, torchs, options = RULES[name]

    def rank(comm: Comm, model: nn.Module, strategy: str) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        buckets = [bucket for bucket in sharded.buckets if bucket.shard.numel()]
        places = [(b, start, stop) for b in buckets for start, stop in pieces(b)]
        twins = [nn.Parameter(b.shard[start:stop].clone()) for b, start, stop in places]
        flat, plain = ours(sharded, **options), torchs(twins, fused=True, **options)
        for step in range(3):
            batch = tuple(t.to(dtype) for t in ODD.batch(comm.rank + 10 * step, 2))
            train(model, batch)
            whole = {bucket: gradients(bucket) for bucket in buckets}
            for twin, (bucket, start, stop) in zip(twins, places, strict=True):
                twin.grad = whole[bucket][start:stop].clone()
            flat.step()
            plain.step()
            flat.zero_grad()
            for twin, (bucket, start, stop) in zip(twins, places, strict=True):
                assert torch.equal(bucket.shard[start:stop], twin)

    for world, strategy in ((1, "full_shard"), (3, "full_shard"), (3, "no_shard")):
        on_ranks(world, lambda: ODD.build().to(dtype), lambda c, m: rank(c, m, strategy))  # noqa: B023


def test_state_has_the_names_dtypes_and_shapes_of_torchs() -> None:
    ours, torchs, options = RULES["AdamW, amsgrad"]

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        flat, plain = ours(sharded, **options), torchs(model.parameters(), fused=True, **options)
        train(model, nets.decoder_batch(comm.rank, 2))
        flat.step()
        plain.step()

        def facts(optimizer: Optimizer) -> list[list[tuple[str, torch.dtype, torch.Size]]]:
            params = [optimizer.state[param] for param in model.parameters()]
            return [[(n, v.dtype, v.shape) for n, v in state.items()] for state in params]

        assert facts(flat) == facts(plain)
        groups = plain.param_groups[0]
        assert {n: v for n, v in flat.param_groups[0].items() if n in flat.defaults} == {
            n: groups[n] for n in flat.defaults
        }

    on_ranks(2, nets.decoder, rank)


def test_the_defaults_are_torchs() -> None:
    sharded = sw.shard(nets.decoder())
    flat = sw.optim.AdamW(sharded)
    plain = torch.optim.AdamW(sharded.model.parameters())
    assert flat.defaults == {name: plain.defaults[name] for name in flat.defaults}


# ---- options -------------------------------------------------------------------------------

REFUSED: list[tuple[Callable[..., Optimizer], dict[str, Any], str]] = [
    (sw.optim.AdamW, {"momentum": 0.9}, "AdamW() has no option 'momentum'; nearest is"),
    (sw.optim.AdamW, {"lr": -0.1}, "lr is -0.1; it must not be negative."),
    (sw.optim.AdamW, {"eps": float("nan")}, "eps is nan; it must not be negative."),
    (sw.optim.AdamW, {"weight_decay": -1}, "weight_decay is -1; it must not be negative."),
    (sw.optim.AdamW, {"betas": (1.0, 0.9)}, "betas are (1.0, 0.9); each must be in [0, 1)"),
    (sw.optim.AdamW, {"max_norm": 0.0}, "max_norm is 0.0; gradients would vanish. Set a norm"),
]


@pytest.mark.parametrize(("kind", "options", "start"), REFUSED)
def test_options_that_cannot_work_are_refused(
    kind: Callable[..., Optimizer], options: dict[str, Any], start: str
) -> None:
    sharded = sw.shard(nets.decoder())
    assert error_text(sw.ConfigError, lambda: kind(sharded, **options)).startswith(start)


def test_an_option_that_does_not_exist_is_refused_with_the_nearest() -> None:
    sharded = sw.shard(nets.decoder())
    text = error_text(sw.ConfigError, lambda: sw.optim.AdamW(sharded, weigth_decay=0.1))  # type: ignore[call-arg]
    assert text == (
        "AdamW() has no option 'weigth_decay'; nearest is 'weight_decay'. Options are amsgrad, "
        "betas, eps, groups, lr, max_norm, sharded, weight_decay."
    )
