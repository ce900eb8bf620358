"""Inside ``full_params()`` a sharded model is the plain one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.memory.shard_tensor.sharded_parameter import ShardedParameter
from shardwise.memory.sharding import sharding_of
from tests import nets
from tests.copies import clones, equal, error_text, local, on_ranks, seeded
from tests.nets import NETS, Net
from tests.steps import STRATEGIES, train


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 1 for name, value in state.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_full_params_are_the_plain_models(net: Net, strategy: str) -> None:
    plain = seeded(net.build)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        params = dict(model.named_parameters())
        with sharded.full_params():
            assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
            assert {type(p) for p in params.values()} == {nn.Parameter}
            assert all(p is params[name] for name, p in model.named_parameters())
        for param in params.values():
            assert (type(param) is ShardedParameter) == (strategy != "no_shard")

    on_ranks(3, net.build, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writes_are_kept_with_writeback(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        with sharded.full_params(writeback=True), torch.no_grad():
            model.get_parameter("project.weight").fill_(7)
            temperature = model.get_parameter("temperature")
            temperature.data = torch.tensor(3.0)
        state = model.state_dict()
        assert (state["project.weight"] == 7).all()
        assert state["temperature"] == 3
        assert model(torch.zeros(1, 6)).shape == (1, 2)

    on_ranks(3, nets.scalar_and_13_rows, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("through", ["in place", "data", "new data", "index"])
def test_writes_without_writeback_are_an_error_and_leave_no_trace(
    through: str, strategy: str
) -> None:
    def write(param: nn.Parameter) -> None:
        if through == "in place":
            param.add_(1)
        elif through == "data":  # torch does not count such a write
            param.data.add_(1)
        elif through == "new data":
            param.data = param.data + 1
        else:
            param.data[-1] = 7

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, strategy, comm=comm)
        before = clones(model.state_dict())

        def block() -> None:
            with sharded.full_params(), torch.no_grad():
                write(model.get_parameter("blocks.1.rows"))

        text = error_text(sw.ShardUseError, block) if comm.size == 1 or writes_here(model) else ""
        if not text:
            block()
        assert equal(model.state_dict(), before)
        return text

    def writes_here(model: nn.Module) -> bool:
        """Where only the values tell, a rank sees those that it stores."""
        sharding = sharding_of(model.get_parameter("blocks.1.rows"))
        assert sharding is not None
        whole = through in ("in place", "new data")
        last = sharding.stop == sharding.shape.numel() and sharding.start < sharding.stop
        return whole or (last if through == "index" else sharding.start < sharding.stop)

    texts = list(filter(None, on_ranks(3, nets.scalar_and_13_rows, rank)))
    assert texts
    for text in texts:
        assert text == (
            "'blocks.1.rows' was written inside full_params(), and the values are lost. Use "
            "full_params(writeback=True) to keep them."
        )


def test_a_write_of_another_shape_is_an_error() -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        before = clones(model.state_dict())

        def block() -> None:
            with sharded.full_params(writeback=True):
                model.get_parameter("norm.weight").data = torch.zeros(3)

        text = error_text(sw.ConfigError, block)
        assert equal(model.state_dict(), before)
        return text

    for text in on_ranks(2, nets.decoder, rank):
        assert text.startswith("parameter 'norm.weight' was replaced by a tensor of shape (3,)")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_whole_for_the_length_of_the_block(strategy: str) -> None:
    batches = [nets.decoder_batch(rank, 2) for rank in range(3)]
    plain = seeded(nets.decoder)
    for batch in batches:
        (nets.loss(plain, batch) / 3).backward()

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, strategy, comm=comm)
        model.get_parameter("norm.weight").requires_grad_(False)
        train(model, batches[comm.rank])
        before = clones(gradients(model))
        with sharded.full_params():
            whole = gradients(model)
            assert whole.keys() == before.keys()
            for name, gradient in whole.items():
                torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        assert equal(gradients(model), before)

    on_ranks(3, nets.decoder, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_to_gradients_is_kept_with_writeback_only(strategy: str) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, strategy, comm=comm)
        train(model, nets.decoder_batch(comm.rank, 2))
        norm, bias = model.get_parameter("norm.weight"), model.get_parameter("norm.bias")

        def write(writeback: bool) -> None:
            with sharded.full_params(writeback):
                assert norm.grad is not None
                norm.grad.copy_(torch.arange(16))
                bias.grad = None

        before = clones(gradients(model))
        text = error_text(sw.ShardUseError, lambda: write(writeback=False))
        assert equal(gradients(model), before)
        write(writeback=True)
        assert "norm.bias" not in gradients(model)
        own = local(norm.grad)
        assert own.untyped_storage().nbytes() == own.nbytes  # not of the whole one
        with sharded.full_params():
            assert torch.equal(gradients(model)["norm.weight"], torch.arange(16.0))
        return text

    for text in on_ranks(2, nets.decoder, rank):
        assert text == (
            "'norm.weight.grad' (and 1 more) was written inside full_params(), and the values "
            "are lost. Use full_params(writeback=True) to keep them."
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nan_that_was_there_before_is_no_write(dtype: torch.dtype) -> None:
    """Packed quantised weights, read as floats, are full of them."""

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model.to(dtype), comm=comm)
        with sharded.full_params(writeback=True), torch.no_grad():
            model.get_parameter("norm.weight").fill_(float("nan"))
        with sharded.full_params():
            assert model.get_parameter("norm.weight").isnan().all()

    on_ranks(2, nets.decoder, rank)


def test_an_exception_inside_full_params_is_what_comes_out() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        before = clones(model.state_dict())

        def block() -> None:
            with sharded.full_params(), torch.no_grad():
                model.get_parameter("norm.weight").zero_()
                raise KeyError("mine")

        assert error_text(KeyError, block) == "'mine'"
        assert equal(model.state_dict(), before)
        train(model, nets.decoder_batch(comm.rank, 2))

    on_ranks(2, nets.decoder, rank)


def test_full_params_is_not_nested_and_not_trained_in() -> None:
    batch = nets.decoder_batch(0, 2)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, batch)

        def nested() -> None:
            with sharded.full_params():
                pass

        def trained() -> None:
            with sharded.full_params():
                nets.loss(model, batch).backward()

        with sharded.full_params():
            for do in (nested, lambda: copy.deepcopy(model), sharded.unshard, optimizer.step):
                text = error_text(sw.ScheduleError, do)
                assert "inside full_params(), where every parameter is unsharded" in text
        text = error_text(sw.ScheduleError, trained)
        assert text.startswith("backward() inside full_params() would leave unsharded gradients")
        train(model, batch)
        optimizer.step()

    on_ranks(2, nets.decoder, rank)
