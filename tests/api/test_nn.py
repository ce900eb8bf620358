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


@pytest.fixture(params=["this torch", "an older torch"])
def each_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13 torch has no kernel for it."""
    if request.param == "an older torch":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)


EACH_TORCH = pytest.mark.usefixtures("each_torch")


def gradients(loss: Callable[[Tensor], Tensor], head: nn.Linear, hidden: Tensor) -> list[Tensor]:
    """The loss, and its gradients by ``hidden`` and by the parameters of ``head``."""
    hidden = hidden.clone().requires_grad_()
    value = loss(hidden)
    return [value.detach(), *torch.autograd.grad(value, [hidden, *head.parameters()])]


@EACH_TORCH
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("chunk", [None, 1, 7, 1000])
def test_loss_and_gradients_are_those_of_the_plain_one(
    bias: bool, ignored: int, chunk: int | None
) -> None:
    head = nn.Linear(6, 41, bias=bias, dtype=torch.float64)
    hidden, target = torch.randn(3, 5, 6, dtype=torch.float64), torch.randint(41, (3, 5))
    target[0, :3] = ignored

    def plain(hidden: Tensor) -> Tensor:
        logits = head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, target.flatten(), ignore_index=ignored)

    def chunked(hidden: Tensor) -> Tensor:
        return sw.nn.chunked_cross_entropy(hidden, head, target, ignore_index=ignored, chunk=chunk)

    pairs = zip(gradients(chunked, head, hidden), gradients(plain, head, hidden), strict=True)
    for mine, right in pairs:
        assert_near(mine, right, 1e-12)


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that ``run`` held at once, as torch's allocator reports them."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    held, most = 0, 0
    for event in profiled.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


@EACH_TORCH
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_logits_are_never_held_whole() -> None:
    head, hidden = nn.Linear(32, 4096), torch.randn(512, 32, requires_grad=True)
    target = torch.randint(4096, (512,))
    logits = 512 * 4096 * 4
    plain = allocated(lambda: F.cross_entropy(head(hidden), target).backward())
    head.zero_grad()
    chunked = allocated(lambda: sw.nn.chunked_cross_entropy(hidden, head, target).backward())
    assert plain > 2 * logits
    # The gradient of the head, twice: while it is scaled; or while autograd adds up the chunks'.
    weight = 32 * 4096 * 4
    assert chunked < (2.5 if "linear_cross_entropy" in vars(F) else 4.5) * weight
    assert chunked < logits / 3


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


@EACH_TORCH
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_unit_is_gathered_while_the_models_own_loss_runs(
    strategy: str, tied: bool
) -> None:
    taken = play(WithLoss(tied=tied), [loss_inside] * 3, BATCHES, strategy=strategy)
    assert taken[2].follows


@EACH_TORCH
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True])
def test_and_while_a_loss_after_the_forward_pass_runs(strategy: str, tied: bool) -> None:
    taken = play(Body(tied=tied), [loss_outside] * 3, BATCHES, strategy=strategy)
    assert units_of(taken[2].done, Op.REDUCE)


@pytest.mark.filterwarnings("ignore")  # the compiler raises and hides its own
def test_in_checkpointed_and_compiled_models_too() -> None:
    options = {"activation_checkpointing": True, "compile": "eager"}
    assert play(WithLoss(tied=False), [loss_inside] * 2, BATCHES, **options)[1].follows


@EACH_TORCH
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
        ((2, 4), torch.zeros(2), None, "target is torch.float32 and chunk None"),
        ((2, 4), torch.zeros(2, dtype=torch.int64), 0, "a chunk is of 1 token or more"),
    ],
)
def test_what_does_not_fit_is_refused(
    hidden: tuple[int, ...], target: Tensor, chunk: int | None, text: str
) -> None:
    with pytest.raises(sw.ConfigError, match=text):
        sw.nn.chunked_cross_entropy(torch.zeros(hidden), nn.Linear(4, 7), target, chunk=chunk)
