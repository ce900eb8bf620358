from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.comm.transports.local import LocalComm
from shardwise.recipe.recipe import Recipe
from shardwise.train.batches import Batches, Rows, RowSource
from shardwise.train.decoder import Decoder, initialiser
from shardwise.train.job import Job, build
from shardwise.train.learning_rate import learning_rate
from shardwise.train.packed import Examples, SampleRows
from tests.recorder.collectives import late_comm
from tests.recorder.device import Device
from tests.train.runs import Watched, checkpoint, losses
from tests.train.tiny import tiny_recipe

VOCABULARY = 40


def rows() -> Rows:
    draw = np.random.default_rng(0)
    return Rows(draw.integers(0, VOCABULARY, 16 * 50 + 1).astype(np.int32), context=16)


def samples(packed: bool) -> SampleRows:
    """Samples of 2 to 14 tokens, of which the last ones are trained on, from one to all but one."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(2, 15, 40)
    trained = [np.arange(n) >= draw.integers(1, n) for n in lengths]
    ids = draw.integers(0, VOCABULARY, lengths.sum()).astype(np.int32)
    return SampleRows(Examples(ids, np.concatenate(trained), lengths), context=16, packed=packed)


ROWS = rows()
Losses = list[tuple[float, float]]


def trained(job: Job) -> Losses:
    """(this rank's share of the loss, gradient norm) of a few steps."""
    results = []
    for step in range(3):
        rank_loss = float(job.forward_backward(step))
        norm = float(job.clip_and_set_lr(step)[0])
        job.update()
        job.optimizer.zero_grad()
        results.append((rank_loss, norm))
    return results


def run(recipe: Recipe, world: int, data: RowSource = ROWS) -> Losses:
    """Mean loss and gradient norm of each step, over all ranks."""
    by_rank = threads.run(world, lambda comm: trained(build(recipe, comm, data, VOCABULARY)))
    for of_ranks in zip(*by_rank, strict=True):
        assert len({norm for _, norm in of_ranks}) == 1
    return [
        (sum(rank_loss for rank_loss, _ in of_ranks), of_ranks[0][1])
        for of_ranks in zip(*by_rank, strict=True)
    ]


def plain(recipe: Recipe, data: RowSource = ROWS) -> Losses:
    """The same steps with no sharding, no accumulation and no code of ours but the decoder."""
    model = Decoder(recipe.model, VOCABULARY, recipe.data.context)
    model.apply(initialiser(torch.Generator().manual_seed(recipe.run.seed)))
    config = recipe.optimizer
    decay = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(decay, lr=1.0, betas=config.betas, eps=config.eps)
    job = build(recipe.model_copy(), LocalComm(), data, VOCABULARY)
    assert isinstance(job.batches, Batches)
    results = []
    for step in range(3):
        batch = data.take(job.batches.samples(step * 12, 12))
        logits = model(batch.ids, batch.positions, batch.segments)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.run.steps, config)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses and norms of the recipe as it is, on two ranks."""
    return run(tiny_recipe(tmp_path_factory.mktemp("usual")), 2)


@pytest.mark.parametrize(("micro", "world"), [(12, 1), (1, 1), (6, 2), (1, 2), (2, 3), (3, 4)])
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(
    tmp_path: Path, micro: int, world: int
) -> None:
    recipe = tiny_recipe(tmp_path, f"batch.micro={micro}")
    for actual, expected in zip(run(recipe, world), plain(recipe), strict=True):
        assert actual == pytest.approx(expected, rel=2e-5)


class Mark:
    """What an operator's node in autograd's graph keeps."""


class Marked(torch.autograd.Function):
    """Its input, by a node with a ``mark``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = Mark()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_the_graph_of_a_micro_batch_is_gone_when_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, compute = weakref.WeakSet[Any](), Job._loss

    def loss(job: Job, *batch: Any) -> Any:
        assert not graphs
        marked = cast("Any", Marked).apply(compute(job, *batch))
        graphs.add(marked.grad_fn.mark)
        return marked

    monkeypatch.setattr(Job, "_loss", loss)
    build(tiny_recipe(tmp_path, "batch.micro=1"), LocalComm(), ROWS, VOCABULARY).forward_backward(0)


def test_the_host_waits_for_no_device_until_all_of_a_step_is_issued(tmp_path: Path) -> None:
    device, recipe = Device(), tiny_recipe(tmp_path)
    with device.installed(), late_comm(device, 2) as comm:
        model = Decoder(recipe.model, VOCABULARY, 16)
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batches = Batches(ROWS, recipe.batch, 0, 0, 2)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        job = Job(recipe, model, sharded, optimizer, batches, scaler)
        device.begin_step()
        job.forward_backward(0)
        job.clip_and_set_lr(0)
        job.update()
        assert device.waits == []
    assert device.faults == []


@pytest.mark.parametrize(("value", "reduces"), [("false", 1), ("true", 6)])
def test_a_recipe_chooses_whether_each_micro_batch_is_reduced(
    tmp_path: Path, usual: Losses, value: str, reduces: int
) -> None:
    overrides = "batch.micro=1", f"sharding.sync_each_micro_batch={value}"
    recipe = tiny_recipe(tmp_path, *overrides)
    assert np.allclose(run(recipe, 2), usual, rtol=2e-5)

    def count(comm: Comm) -> tuple[int, int]:
        job = build(recipe, comm, ROWS, VOCABULARY)
        comm.counters.reset()
        job.forward_backward(0)
        trained = sum(bucket.spec.trainable for bucket in job.sharded.buckets)
        return comm.counters.calls["reduce"], trained

    for calls, trained in threads.run(2, count):
        assert calls == reduces * trained


@pytest.mark.parametrize(("micro", "world"), [(1, 1), (6, 2), (2, 3)])
@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_is_the_mean_over_all_tokens_that_are_trained_on(
    tmp_path: Path, micro: int, world: int, packed: bool
) -> None:
    """However many of them each micro-batch of each rank has."""
    recipe, data = tiny_recipe(tmp_path, f"batch.micro={micro}"), samples(packed)
    for actual, expected in zip(run(recipe, world, data), plain(recipe, data), strict=True):
        assert actual == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    "mode",
    [
        "strategy=no_shard",
        "strategy=zero1",
        "strategy=shard_grad_op",
        "wrap=none",
        "unsharded=100000",
        "prefetch.backward=0",
        "activation_checkpointing=true",
    ],
)
def test_how_it_is_sharded_does_not_change_a_bit(tmp_path: Path, mode: str, usual: Losses) -> None:
    changed = tiny_recipe(tmp_path, f"sharding.{mode}")
    assert [loss for loss, _ in run(changed, 2)] == [loss for loss, _ in usual]


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own
def test_a_compiled_model_has_the_bits_of_one_that_computes_all_logits(tmp_path: Path) -> None:
    compiled, whole = "sharding.compile=aot_eager", "batch.logits=all"
    assert run(tiny_recipe(tmp_path, compiled), 2) == run(tiny_recipe(tmp_path, whole), 2)


@pytest.mark.prove
def test_the_seed_decides_weights_and_order(tmp_path: Path) -> None:
    one, same, other = (run(tiny_recipe(tmp_path, f"run.seed={seed}"), 2)[0] for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_computing_in_16_bits_is_near(tmp_path: Path, usual: Losses, precision: str) -> None:
    """Losses and norms are those of unscaled gradients."""
    narrow_losses = run(tiny_recipe(tmp_path, f"sharding.precision={precision}"), 2)
    assert narrow_losses != usual
    for narrow, wide in zip(narrow_losses, usual, strict=True):
        assert narrow == pytest.approx(wide, rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "scale"),
    [
        ([], None),
        (["sharding.precision=bf16"], None),
        (["sharding.precision=fp16"], 2.0**16),
        (["sharding.precision=fp16", "optimizer.loss_scale=0"], None),
        (["optimizer.loss_scale=1024"], 1024.0),
    ],
)
def test_a_loss_is_scaled_where_float16_is_computed_or_it_is_asked_for(
    tmp_path: Path, overrides: list[str], scale: float | None
) -> None:
    scaler = build(tiny_recipe(tmp_path, *overrides), LocalComm(), rows(), VOCABULARY).scaler
    assert (scaler.get_scale() if scaler.is_enabled() else None) == scale


def test_every_rank_starts_with_shards_and_never_had_the_whole(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)

    def rank(comm: Comm) -> tuple[int, int]:
        job = build(recipe, comm, rows(), VOCABULARY)
        shards = job.sharded.local_state_dict()
        del shards["lm_head.weight"]  # tied: it is the embedding's
        local = sum(shard.numel() for shard in shards.values())
        return local, sum(bucket.layout.used for bucket in job.sharded.buckets)

    (first, whole), (second, _) = threads.run(2, rank)
    assert first + second == whole


def test_the_rate_of_the_step_is_the_optimizer_s(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    job = build(recipe, LocalComm(), rows(), VOCABULARY)
    for step in range(3):
        job.forward_backward(step)
        _, lr = job.clip_and_set_lr(step)
        assert lr == learning_rate(step, recipe.run.steps, recipe.optimizer)
        assert {group["lr"] for group in job.optimizer.param_groups} == {lr}
        job.update()
        job.optimizer.zero_grad()


def test_prefetch_and_precision_reach_the_engine(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        "sharding.prefetch.backward=0",
        "sharding.precision.average=predivide",
        "sharding.bucketing=layer",
    )
    options = build(recipe, LocalComm(), rows(), VOCABULARY).sharded.options
    assert options.prefetch.backward == 0
    assert options.bucketing == "layer"
    assert options.precision.average == "predivide"


@pytest.mark.prove
def test_a_moving_average_is_validated_and_saved_and_survives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("optimizer.ema=0.5", "checkpoint.save_every=2")

    def recipe(folder: str) -> Recipe:
        return tiny_recipe(tmp_path, *options, f"run.folder={tmp_path / folder}")

    watched = Watched(monkeypatch)
    watched.run(recipe("whole"), 2)
    watched.killed(recipe("killed"), 2, at=(4, 1, 2))
    watched.run(recipe("killed"), 2)
    assert losses(recipe("killed")) == losses(recipe("whole"))
    model = load_file(tmp_path / "whole" / "model.safetensors")
    resumed = load_file(tmp_path / "killed" / "model.safetensors")
    assert all(map(torch.equal, resumed.values(), model.values()))
    last = load_file(checkpoint(recipe("whole"), 4) / "model.safetensors")
    assert not any(map(torch.equal, last.values(), model.values()))
