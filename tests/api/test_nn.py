"""Chunked cross-entropy: the numbers of the plain one, a fraction of its bytes, also on shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.plan.schedule.events import Op
from tests.copies import assert_near, local, on_ranks, seeded
from tests.nets import Batch, Decoder, decoder_batch
from tests.steps import STRATEGIES, Step, averaged, play, units_of

BATCHES = [decoder_batch(rank, 2) for rank in range(2)]


class Adapted(nn.Module):
    """A head that is no ``nn.Linear``: one with an adapter beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 2).to(inner.weight)
        self.up = nn.Linear(2, inner.out_features).to(inner.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.inner(hidden) + self.up(self.down(hidden))
        return out


Loss = Callable[[Tensor], Tensor]


def gradients(loss: Loss, head: nn.Module, hidden: Tensor) -> list[Tensor]:
    """The loss, and its gradients by ``hidden`` and by the parameters of ``head``."""
    hidden = hidden.clone().requires_grad_()
    value = 3 * loss(hidden)
    trained = [param for param in head.parameters() if param.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, [hidden, *trained])]


def both(
    head: nn.Module, target: Tensor, ignored: int = -100, **options: Any
) -> tuple[Callable[..., Tensor], Loss]:
    """The chunked loss, and the plain one."""

    def chunked(hidden: Tensor, target: Tensor = target) -> Tensor:
        return sw.nn.chunked_cross_entropy(hidden, head, target, ignore_index=ignored, **options)

    def plain(hidden: Tensor) -> Tensor:
        reduction, logits = options.get("reduction", "mean"), head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), ignore_index=ignored, reduction=reduction)

    return chunked, plain


@pytest.mark.parametrize("kind", ["linear", "biased", "frozen", "adapted"])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("chunk", [None, 1, 7, 1000])
def test_loss_and_gradients_are_those_of_the_plain_one(
    kind: str, ignored: int, chunk: int | None
) -> None:
    head: nn.Module = nn.Linear(6, 41, bias=kind == "biased", dtype=torch.float64)
    head.requires_grad_(kind in ("linear", "biased"))
    head = Adapted(head) if kind == "adapted" and isinstance(head, nn.Linear) else head
    hidden, target = torch.randn(3, 5, 6, dtype=torch.float64), torch.randint(41, (3, 5))
    target[0, :3] = ignored
    chunked, plain = both(head, target, ignored, chunk=chunk)
    pairs = zip(gradients(chunked, head, hidden), gradients(plain, head, hidden), strict=True)
    for mine, right in pairs:
        assert_near(mine, right, 1e-12)


@pytest.mark.parametrize("labels", [0, 4, 15])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_head_runs_where_there_is_a_label(labels: int, adapted: bool) -> None:
    """Without any, the sum and all gradients are 0, so every rank has the same ones."""
    linear = nn.Linear(6, 41, dtype=torch.float64)
    head = Adapted(linear) if adapted else linear
    target = torch.full((3, 5), -100)
    target.view(-1)[:labels] = torch.randint(41, (labels,))
    hidden = torch.randn(3, 5, 6, dtype=torch.float64)
    hidden.view(15, 6)[labels:] = torch.nan  # nobody reads it
    chunked, plain = both(head, target[target >= 0][None], reduction="sum", chunk=3)
    chunked = partial(chunked, target=target)
    mine = gradients(chunked, head, hidden)
    right = gradients(plain, head, hidden.flatten(0, 1)[:labels][None])
    assert_near(mine[1].flatten(0, 1)[:labels], right[1][0], 1e-12)
    assert not mine[1].flatten(0, 1)[labels:].any()
    assert_near([mine[0], *mine[2:]], [right[0], *right[2:]], 1e-12)


@pytest.mark.parametrize("adapted", [False, True])
def test_without_labels_the_mean_is_nan_and_its_gradients_are_0_as_the_plain_ones(
    adapted: bool,
) -> None:
    """One micro-batch without a label would else make NaN of the head for good."""
    linear = nn.Linear(6, 41)
    head = Adapted(linear) if adapted else linear
    value, *slopes = gradients(both(head, torch.full((3, 5), -100))[0], head, torch.ones(3, 5, 6))
    assert value.isnan()
    assert not any(slope.any() for slope in slopes)


def test_a_loss_of_half_precision_is_summed_in_float32() -> None:
    head, target = nn.Linear(64, 512, dtype=torch.bfloat16), torch.randint(512, (300,))
    hidden = torch.randn(300, 64, dtype=torch.bfloat16)
    loss = sw.nn.chunked_cross_entropy(hidden, head, target, chunk=50)
    with torch.no_grad():
        unchanged = sw.nn.chunked_cross_entropy(hidden, head, target)
    assert loss.dtype is unchanged.dtype is torch.float32
    assert_near([loss, unchanged], [F.cross_entropy(head(hidden).float(), target)] * 2, 1e-6)


def test_backward_runs_once() -> None:
    head, target = nn.Linear(6, 41), torch.randint(41, (5,))
    loss = sw.nn.chunked_cross_entropy(torch.zeros(5, 6), head, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that ``run`` held at once, as torch's allocator reports them."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    nbytes, most = 0, 0
    for event in profiled.profiler.kineto_results.events():
        nbytes += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, nbytes)
    return most


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
@pytest.mark.parametrize("adapted", [False, True])
def test_logits_are_never_held_whole(adapted: bool) -> None:
    linear, hidden = nn.Linear(32, 4096), torch.randn(1024, 32, requires_grad=True)
    target = torch.randint(4096, (1024,))
    head = Adapted(linear) if adapted else linear

    def of(chunk_bytes: int) -> int:
        head.zero_grad()
        loss = partial(sw.nn.chunked_cross_entropy, hidden, head, target, chunk_bytes=chunk_bytes)
        return allocated(lambda: loss().backward())

    logits = 1024 * 4096 * 4
    plain = allocated(lambda: F.cross_entropy(head(hidden), target).backward())
    weight = 32 * 4096 * 4  # and its gradient, and what is added to it
    assert plain > 2 * logits
    assert of(logits // 16) < 4 * logits // 16 + 4 * weight < plain / 3


# ---- on shards ---------------------------------------------------------------------------------


class Body(Decoder):
    """Ends before its head."""

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class WithLoss(Body):
    """Its forward ends with the loss."""

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        assert target is not None
        return sw.nn.chunked_cross_entropy(super().forward(ids), self.lm_head, target, chunk=3)


def loss_inside(model: nn.Module, batch: Batch) -> None:
    model(*batch).backward()


def loss_outside(model: nn.Module, batch: Batch) -> None:
    head = model.get_submodule("lm_head")
    assert isinstance(head, nn.Linear)
    sw.nn.chunked_cross_entropy(model(batch[0]), head, batch[1], chunk=3).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_unit_is_gathered_while_the_models_own_loss_runs(
    strategy: str, tied: bool
) -> None:
    taken = play(WithLoss(tied=tied), [loss_inside] * 3, BATCHES, strategy=strategy)
    assert taken[2].follows


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True])
def test_and_while_a_loss_after_the_forward_pass_runs(strategy: str, tied: bool) -> None:
    taken = play(Body(tied=tied), [loss_outside] * 3, BATCHES, strategy=strategy)
    assert units_of(taken[2].done, Op.REDUCE)


@pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own
def test_in_checkpointed_and_compiled_models_too() -> None:
    options = {"activation_checkpointing": True, "compile": "eager"}
    assert play(WithLoss(tied=False), [loss_inside] * 2, BATCHES, **options)[1].follows


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_full"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("step", [loss_inside, loss_outside])
def test_in_hybrids_with_and_without_recomputed_blocks(
    step: Step, recomputes: bool, strategy: str
) -> None:
    kind = WithLoss if step is loss_inside else Body
    batches = [decoder_batch(rank, 2) for rank in range(4)]
    expected = averaged(seeded(partial(kind, tied=True)), step, batches)

    def rank(comm: Comm, model: nn.Module) -> None:
        options: dict[str, Any] = {"mesh": (2, 2), "activation_checkpointing": recomputes}
        sharded = sw.shard(model, strategy, comm=comm, **options)
        for _ in range(2):
            model.zero_grad()
            step(model, batches[comm.rank])
        with sharded.full_params():
            for name, param in model.named_parameters():
                torch.testing.assert_close(local(param.grad), expected[name])

    on_ranks(4, partial(kind, tied=True), rank)


# ---- what does not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "target", "chunk", "text"),
    [
        ((2, 3, 4), torch.zeros(2, 2, dtype=torch.int64), None, r"hidden is \(2, 3, 4\) and tar"),
        ((2, 5), torch.zeros(2, dtype=torch.int64), None, "and then the head's 4 features"),
        ((2, 4), torch.zeros(2), None, "target is torch.float32, chunk None"),
        ((2, 4), torch.zeros(2, dtype=torch.int64), 0, "a chunk is of 1 token and 1 byte or more"),
    ],
)
def test_what_does_not_fit_is_refused(
    hidden: tuple[int, ...], target: Tensor, chunk: int | None, text: str
) -> None:
    with pytest.raises(sw.ConfigError, match=text):
        sw.nn.chunked_cross_entropy(torch.zeros(hidden), nn.Linear(4, 7), target, chunk=chunk)


def test_a_head_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(sw.ConfigError, match=r"head is a Identity without an nn\.Linear"):
        sw.nn.chunked_cross_entropy(torch.zeros(2, 4), nn.Identity(), torch.tensor([0, 0]))
