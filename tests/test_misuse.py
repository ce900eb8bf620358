"""What FSDP2 answers to misuse, row by row, and what the answer is here.

Each test first says what PyTorch 2.13's ``fully_shard`` answers, in our words. Some of its rows
are no misuse here at all: then the test shows that training is that of a plain model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from tests import nets
from tests.copies import error_text, on_ranks, seeded
from tests.nets import Batch, Net
from tests.parity.plain import SGD, Recipe, one_by_one
from tests.parity.sharded import How, assert_equal, on_threads
from tests.steps import STRATEGIES, assert_gradients, averaged, train


def pairs(width: int) -> Callable[[int, int], Batch]:
    return lambda seed, rows: (
        nets.numbers(seed, (rows, width)),
        nets.numbers(seed + 1, (rows, width)),
    )


def assert_trains_as_plain(net: Net, strategy: str) -> None:
    """Bit for bit, on three ranks."""
    recipe = Recipe.of(net, SGD)
    assert_equal(on_threads(3, recipe, How(strategy)), one_by_one(recipe, 3), strategy)


# --- past the module's call ------------------------------------------------------------------


class Rooted(nn.Module):
    """A root with a parameter of its own, around two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.gain


def test_forward_called_past_the_model_is_an_error_that_says_how_to_call_it() -> None:
    """FSDP2: an error of the dispatcher, that an operator got plain and distributed tensors mixed.

    Here the error names the parameter, what is there of it, and the two ways to read it whole.
    """

    def rank(comm: Comm, model: nn.Module) -> tuple[str, str]:
        sharded = sw.shard(model, comm=comm)
        x = torch.ones(2, 6)
        texts = [error_text(sw.ShardUseError, lambda: model.forward(x))]
        with torch.no_grad():
            texts.append(error_text(sw.ShardUseError, lambda: model.forward(x)))
        assert model(x).shape == (2, 6)  # nothing is broken by it
        with sharded.full_params():
            assert model.forward(x).shape == (2, 6)
        return texts[0], texts[1]

    for number, texts in enumerate(on_ranks(2, Rooted, rank)):
        start, stop = ((0, 6), (6, 6))[number]
        for text in texts:
            assert text == (
                f"parameter 'gain' is sharded: this rank has elements {start} to {stop} of 6 "
                f"(shape (6,), unit '(root)'), and 'mul' needs the full "
                "tensor. It is gathered only while its unit computes: call the model or the module "
                "through model(...), not .forward(...), and let the unit's own modules read it; "
                "give a block that is called by itself a unit, by "
                "wrap=sw.wrap.automatic(joined_nbytes=0); register a method that is called from "
                "outside by sharded.register_forward_method(module, 'encode'); or read it inside "
                "`with sharded.full_params():`. To update a moving average, shard the averaging "
                "model likewise and write to its parameters(), not to its state_dict(), which is a "
                "copy; or update it inside full_params(). .to_local() is this rank's part as a "
                "plain tensor. To write it, as nn.init does, do so inside `with "
                "sharded.full_params(writeback=True):`, alike on every rank."
            )


def test_forward_called_past_a_model_that_owns_nothing_is_no_misuse() -> None:
    """FSDP2: as above where the root's parameters are concerned; else nothing.

    Here units gather for their own modules' calls, so their parameters are whole.
    """
    batch = nets.decoder_batch(0, 2)
    truth = averaged(seeded(nets.decoder), train, [batch, batch])

    def rank(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm)
        out = model.forward(batch[0])
        F.cross_entropy(out.flatten(0, 1), batch[1].flatten()).backward()
        assert_gradients(model, truth)

    on_ranks(2, nets.decoder, rank)


@pytest.mark.parametrize("grad", [True, False])
def test_a_layers_weight_outside_its_forward_is_an_error_that_names_it(grad: bool) -> None:
    """FSDP2: an error of the dispatcher, that an operator got plain and distributed tensors mixed.

    Here it is an error that names the parameter and ``full_params()``, on every rank: on those
    that hold a part, those that hold nothing and those that happen to hold all.
    """

    def rank(comm: Comm, model: nn.Module) -> tuple[int, ...]:
        sw.shard(model, comm=comm)
        layer = model.get_submodule("blocks.1.mlp.up")
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        with torch.set_grad_enabled(grad):
            for use in (
                lambda: F.linear(torch.ones(2, 16), weight, bias),
                lambda: torch.ones(2, 16) @ weight.T,
                lambda: weight.sum(0),
                lambda: layer(torch.ones(2, 16)),
            ):
                text = error_text(sw.ShardUseError, use)
                assert text.startswith("parameter 'blocks.1.mlp.up.weight' is sharded")
                assert "`with sharded.full_params():`" in text
            assert "'blocks.1.mlp.up.bias'" in error_text(
                sw.ShardUseError, lambda: bias + torch.ones(2, 35)
            )
        return tuple(weight.shape)

    rows = [shape[0] for shape in on_ranks(3, nets.decoder, rank)]
    assert 0 in rows


# --- shapes and strides ----------------------------------------------------------------------


class Shapes(nn.Module):
    """A scalar, a transpose, a slice, and dims that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(5, 7).T)
        self.sliced = nn.Parameter(torch.randn(5, 14)[:, ::2])
        self.single = nn.Parameter(torch.randn(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * (x @ self.transposed @ self.sliced) + self.single
        return out


@pytest.mark.parametrize("bucketing", ["block", "layer", "none"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_scalars_strides_and_uneven_dims_are_trained(world: int, bucketing: str) -> None:
    """FSDP2: refuses scalars and uneven dims but the first (ValueError) and strides
    (NotImplementedError), each clearly.

    Here all of them are slots like any other.
    """
    recipe = Recipe(Shapes, pairs(7), SGD)
    in_order = recipe.model()  # as gathered: strides are not kept, and matrix products notice
    for param in in_order.parameters():
        param.data = param.data.contiguous()
    plain = one_by_one(recipe, world, in_order)
    for strategy in STRATEGIES:
        how = How(strategy, options={"bucketing": bucketing})
        assert_equal(on_threads(world, recipe, how), plain, strategy)


# --- a weight that two units share -----------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("net", [nets.tied_decoder, nets.encoder_decoder, nets.oddities])
def test_a_weight_may_be_tied_across_units(net: Callable[[], nn.Module], strategy: str) -> None:
    """FSDP2: a clear ValueError, new in 2.13: shared parameters must be in one group.

    Here the layers that share a weight become one unit, or the weight has a unit of its own, also
    where the rule of units would have parted them.
    """
    model = seeded(net)
    batch = getattr(nets, f"{net.__name__}_batch")
    assert_trains_as_plain(Net(net, batch), strategy)
    units = sw.shard(model).units
    members = [member for unit in units for member in unit.members]
    assert len(members) == len(list(model.parameters()))
    assert any(len(member.aliases) > 1 for member in members)


def test_a_rule_that_parts_tied_layers_is_no_misuse() -> None:
    recipe = Recipe(nets.tied_decoder, nets.tied_decoder_batch, SGD)
    plain = one_by_one(recipe, 2)
    for wrap in (sw.wrap.by_hand("embed", "lm_head"), sw.wrap.by_size(100)):
        assert_equal(on_threads(2, recipe, How(wrap=wrap)), plain, "full_shard")


# --- derivatives of derivatives --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(("strategy", "world"), [("no_shard", 1), *((s, 2) for s in STRATEGIES)])
def test_gradients_that_carry_a_graph_are_refused_and_forgotten(strategy: str, world: int) -> None:
    """FSDP2: keeps the graph of the whole gradient, and loses it when it reduces.

    Here the reduced gradient would have no graph either, so the error says so.
    """
    batches = [nets.decoder_batch(rank, 2) for rank in range(world)]
    truth = averaged(seeded(nets.decoder), train, batches)

    def rank(comm: Comm, model: nn.Module) -> str:
        sw.shard(model, strategy, comm=comm)
        value = nets.loss(model, batches[comm.rank])
        text = error_text(sw.ScheduleError, lambda: value.backward(create_graph=True))
        train(model, batches[comm.rank])
        assert_gradients(model, truth)
        return text

    for text in on_ranks(world, nets.decoder, rank):
        assert "carries a graph (create_graph=True), which averaging over the ranks" in text
        assert "inside `with sharded.full_params():`" in text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [sw.wrap.automatic(), sw.wrap.whole()], ids=str)
def test_autograd_grad_of_parameters_has_a_sentence_of_its_own(
    wrap: sw.wrap.Wrap, strategy: str
) -> None:
    """FSDP2: hands out each rank's own gradient, whole and never reduced, without a word.

    Here it is an error, the same in every strategy, whether or not the unit is whole just then.
    """

    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sw.shard(model, strategy, wrap, comm)
        batch = nets.decoder_batch(comm.rank, 2)
        texts = []
        for params in ([*model.parameters()], [model.get_parameter("embed.weight")]):
            value = nets.loss(model, batch)
            texts.append(error_text(sw.ShardUseError, lambda: torch.autograd.grad(value, params)))  # noqa: B023
        train(model, batch)
        return texts

    for texts in on_ranks(2, nets.decoder, rank):
        for text in texts:
            assert text == (
                "torch.autograd.grad was called for the gradient of parameter 'embed.weight', "
                "which is sharded: it would return this rank's gradient, not averaged over ranks. "
                "Call loss.backward() and read .grad (this rank's shard of the mean); or compute "
                "inside `with sharded.full_params():`, where parameters are gathered, and average "
                "it yourself."
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_alone_may_ask_for_no_gradient_that_many_may_not(strategy: str) -> None:
    model = seeded(nets.decoder)
    sw.shard(model, strategy)
    value, params = nets.loss(model, nets.decoder_batch(0, 2)), list(model.parameters())
    text = error_text(sw.ShardUseError, lambda: torch.autograd.grad(value, params))
    assert text.startswith("torch.autograd.grad was called for the gradient of parameter")
