"""A step as programs: what is printed is what is scheduled and what is recorded, with autograd's
gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.errors import ScheduleError
from tests.copies import assert_near
from tests.fake import FakeComm
from tests.nets import NETS, Net, decoder, decoder_batch
from tests.ranks import run_processes, run_threads
from tests.tracing.runs import Step, assert_equal, by_engine, by_programs, printed

DECODER, TIED, CONVNET, FROZEN, SCALAR, EXPERT, *_ = NETS
WIDTH = 64


def two_layers() -> nn.Module:
    """The model of the tutorial."""
    torch.manual_seed(0)
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    return nn.Sequential(first, nn.Tanh(), last)


def hold(net: Net, world: int, strategy: str, **options: Any) -> None:
    """On every rank programs and engine do the same, which is what is printed and scheduled."""
    torch.manual_seed(0)
    model = net.build()
    inputs = [net.batch(10 * rank, 2)[:-1] for rank in range(world)]
    traces = [
        sw.trace(model, given, strategy, (rank, world), **options)
        for rank, given in enumerate(inputs)
    ]
    engine = run_threads(
        world, lambda comm: by_engine(comm, model, inputs[comm.rank], strategy, **options)
    )
    programs = run_threads(
        world, lambda comm: by_programs(comm, traces[comm.rank], model, inputs[comm.rank])
    )
    for traced, (step, events), ran in zip(traces, engine, programs, strict=True):
        assert traced.schedule.events == events
        assert printed(traced) == (ran.collectives, ran.sent)
        assert_equal(ran, step)


@pytest.mark.parametrize(
    ("net", "strategy"),
    [
        (SCALAR, "full_shard"),
        (CONVNET, "shard_grad_op"),
        (CONVNET, "zero1"),
        (SCALAR, "no_shard"),
        (TIED, "full_shard"),
    ],
    ids=str,
)
def test_programs_do_what_the_engine_does(net: Net, strategy: str) -> None:
    hold(net, 2, strategy)


prove = pytest.mark.prove
GRIDS = [(2, 2), pytest.param((3, 1), marks=prove), pytest.param((1, 2), marks=prove)]
HYBRIDS = [
    pytest.param("hybrid_shard", marks=prove),
    pytest.param("hybrid_shard_zero2", marks=prove),
    "hybrid_full",
]


@pytest.mark.parametrize("mesh", GRIDS, ids=str)
@pytest.mark.parametrize("strategy", HYBRIDS)
@pytest.mark.parametrize(
    ("net", "compute"),
    [
        pytest.param(SCALAR, None, marks=prove),
        pytest.param(TIED, None, marks=prove),
        (FROZEN, torch.bfloat16),
    ],
    ids=str,
)
def test_programs_of_a_grid_do_what_the_engine_does_on_each_axis(
    net: Net, compute: torch.dtype | None, strategy: str, mesh: tuple[int, int]
) -> None:
    precision = sw.Precision(param_dtype=compute)
    hold(net, mesh[0] * mesh[1], strategy, mesh=mesh, precision=precision)


@pytest.mark.parametrize("average", ["predivide", "sqrt", "avg"])
def test_each_way_to_average_divides_on_both_axes_where_the_engine_does(average: Any) -> None:
    hold(SCALAR, 6, "hybrid_full", mesh=(2, 3), precision=sw.Precision(average=average))


def test_each_collective_of_a_grid_names_its_axis_its_bytes_and_its_reason() -> None:
    traced = sw.trace(two_layers(), torch.ones(1, WIDTH), "hybrid_full", (3, 4), mesh=(2, 2))
    forward, backward = traced.forward.text, traced.backward.text
    assert "hybrid_full (replicate=2 × shard=2), rank 3 of 4" in forward
    assert "axes = axes_of(comm, 2, 2)\n    replicate = axes[0]\n    shard = axes[1]" in forward
    joins, gathers = (lines_of(traced.forward, f"all_gather_impl({a}") for a in ("rep", "shard"))
    assert joins[0] == "joining_0 = all_gather_impl(replicate, shard_0, '0', 'update')"
    assert gathers[0] == "gathering_0 = all_gather_impl(shard, joined_0, '0')"
    assert "over replicate: 8.0 KiB, sends 4.0 KiB: the optimizers of its copies" in forward
    assert "over shard: 16.0 KiB, sends 8.0 KiB: first use" in forward
    assert "over shard: sums 16.0 KiB, sends 8.0 KiB: its gradients are complete" in backward
    assert "over replicate: sums 8.0 KiB, sends 4.0 KiB: the copies' sums, too" in backward
    assert "0.weight[48:64]" in forward or "[3072:4096]" in forward
    assert [c.op for c in traced.backward.collectives].count("update") == 0  # once a step


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("net", [net for net in NETS if net is not EXPERT], ids=str)
def test_programs_of_every_model_do_what_the_engine_does(net: Net, strategy: str) -> None:
    hold(net, 3, strategy)


@pytest.mark.parametrize("average", ["predivide", "sqrt", "avg"])
def test_each_way_to_average_divides_where_the_engine_does(average: Any) -> None:
    hold(SCALAR, 3, "full_shard", precision=sw.Precision(average=average))


def test_a_narrow_dtype_a_limit_and_smaller_buckets_are_in_the_programs() -> None:
    narrow = sw.Precision(param_dtype=torch.bfloat16, sum_dtype=torch.float32)
    hold(SCALAR, 2, "zero1", precision=narrow)
    hold(SCALAR, 2, "full_shard", prefetch=sw.Prefetch(limit=1), bucketing="none")


def first_frozen() -> nn.Module:
    model = SCALAR.build()
    model.get_submodule("project").requires_grad_(requires_grad=False)
    return model


MIXED = Net(first_frozen, SCALAR.batch)
INT8, BF16 = torch.int8, torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"precision": sw.Precision(reduce_dtype=torch.float8_e4m3fn)},
        pytest.param({"precision": sw.Precision(param_dtype=BF16, reduce_dtype=INT8)}, marks=prove),
        pytest.param({"offload": "everything"}, marks=prove),
        {"offload": "optimizer", "precision": sw.Precision(param_dtype=BF16)},
        {"offload": "everything", "precision": sw.Precision(param_dtype=BF16, reduce_dtype=INT8)},
    ],
    ids=["8-bit", "8-bit, bf16", "offload", "optimizer in host memory", "all of them"],
)
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard", "hybrid_full"])
def test_blocks_of_8_bit_numbers_and_copies_to_host_memory_are_lines(
    strategy: str, options: dict[str, Any]
) -> None:
    grid = {"mesh": (2, 2)} if strategy == "hybrid_full" else {}
    hold(MIXED, 4 if grid else 2, strategy, **grid, **options)


def test_units_that_stay_gathered_have_no_line() -> None:
    hold(MIXED, 2, "zero1")
    hold(MIXED, 2, "full_shard", unsharded=1 << 11)
    traced = sw.trace(MIXED.build(), MIXED.batch(0, 2)[:-1], unsharded=1 << 11)
    assert "frozen, gathered in the first step" in traced.forward.text
    assert " less: some units stay unsharded" in str(traced.schedule)
    plain = sw.trace(MIXED.build(), MIXED.batch(0, 2)[:-1])
    assert "less" not in str(plain.schedule)


def test_lines_of_blocks_and_of_host_memory_say_what_they_copy_and_send() -> None:
    precision = sw.Precision(reduce_dtype=INT8)
    inputs = torch.ones(1, WIDTH)
    traced = sw.trace(two_layers(), inputs, precision=precision, offload="everything")
    forward, backward = (program.text for program in (traced.forward, traced.backward))
    assert "full_shard with everything in host memory, rank 0" in forward
    assert "0.weight[0:2048]; in host memory" in forward
    assert "load_impl(comm, shard_0, torch.float32)" in forward
    assert "to the device, 8.0 KiB: nothing of it is kept" in forward
    assert "16.0 KiB, sends 8.0 KiB: first use" in forward
    assert "reduce_scatter_impl(comm, grads_0, '0', torch.float32, torch.int8)" in backward
    assert "from the device, 8.0 KiB: the optimizer may run next" in backward


def gloo(comm: Comm) -> tuple[Step, Step]:
    model, inputs = two_layers(), (torch.ones(4, WIDTH) * (comm.rank + 1),)
    traced = sw.trace(model, inputs, "shard_grad_op", (comm.rank, comm.size))
    ran = by_programs(comm, traced, model, inputs)
    return ran, by_engine(comm, model, inputs, "shard_grad_op")[0]


@pytest.mark.spawn
def test_over_two_gloo_processes_too() -> None:
    for ran, step in run_processes(2, gloo):
        assert_equal(ran, step)


def test_the_programs_equal_autograd_of_one_process() -> None:
    model, batches = two_layers(), [torch.randn(4, WIDTH) for _ in range(2)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches:
        model(batch).sum().backward()

    def rank(comm: Comm) -> dict[str, Tensor | None]:
        traced = sw.trace(two_layers(), batches[0], "full_shard", (comm.rank, 2))
        return traced.run(comm, state, batches[comm.rank]).gradients

    ranks = run_threads(2, rank)
    for name, param in model.named_parameters():
        whole = torch.cat([grad for grads in ranks if (grad := grads[name]) is not None])
        assert param.grad is not None
        assert_near(whole, param.grad / 2)


def test_the_functional_stage_is_the_module() -> None:
    model, x = two_layers(), torch.randn(3, WIDTH)
    functional = sw.trace(model, x).stages[0].forward
    (output,) = functional(x, *model.parameters())
    assert torch.equal(output, model(x))


def test_no_group_no_device_no_memory_and_any_rank_of_many() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))
    traced = sw.trace(model, torch.ones(1, 4096), "full_shard", (7, 1024))
    assert "0.weight[114688:131072]" in traced.forward.text
    assert "float32[16777216]  64.0 MiB, sends 63.9 MiB: first use" in traced.forward.text
    assert all(param.is_meta for param in model.parameters())


def test_programs_of_a_large_world_run_without_peers() -> None:
    model, x = two_layers(), torch.randn(2, WIDTH)
    traced = sw.trace(model, x, "full_shard", (7, 64))
    comm = FakeComm(7, 64)
    ran = traced.run(comm, model.state_dict(), x)
    assert comm.counters.bytes_sent == printed(traced)[1]
    assert {tuple(g.shape) for g in ran.gradients.values() if g is not None} == {(1, WIDTH)}


class Borrows(nn.Module):
    """A module that uses the weight of a layer which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.lin.weight


class Reentrant(nn.Module):
    """Layers in a reentrant checkpoint, whose graph no trace would see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True)
        return out


def test_units_in_a_reentrant_checkpoint_are_reduced() -> None:
    traced = sw.trace(Reentrant(), torch.ones(2, WIDTH), wrap=sw.wrap.by_class(nn.Linear))
    reduced = [call.unit for call in traced.backward.collectives if call.op == "reduce"]
    assert reduced == ["inner.2", "inner.0"]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_gradient_of_a_unit_that_is_never_called_is_refused(strategy: str) -> None:
    wrap = sw.wrap.by_class(nn.Linear)
    with pytest.raises(
        ScheduleError, match=r"lin\.weight is used, and its unit lin is never called"
    ):
        sw.trace(Borrows(), torch.ones(2, WIDTH), strategy, wrap=wrap)


# ---- stages ------------------------------------------------------------------------------------


def lines_of(program: sw.tracing.program.Program, word: str) -> list[str]:
    return [line for line in program.statements if word in line]


def test_each_stage_says_what_its_pass_did() -> None:
    traced = sw.trace(two_layers(), torch.randn(WIDTH, WIDTH), "shard_grad_op")
    names = [stage.name for stage in traced.stages]
    assert names[:3] == ["functional", "synchronize", "split"]
    assert names[3:] == ["sort waits", "limit in flight", "execution"]
    assert all(stage.does for stage in traced.stages)
    assert traced.last_traces[-1] is traced.forward
    assert traced.last_backward_traces[-1] is traced.backward
    assert len(traced.last_traces) == 6
    assert len(traced.last_backward_traces) == 4


def test_each_sharded_parameter_is_synchronized_to_its_whole_shape() -> None:
    traced = sw.trace(two_layers(), torch.randn(WIDTH, WIDTH))
    assert traced.blueprint.parameters["0.weight"].shape == (WIDTH / 2, WIDTH)
    text = traced.stages[1].forward.text
    assert "shard_0_weight,  " in text
    assert "# float32[32, 64]  this rank's part of 0.weight" in text
    assert "p_0_weight = synchronize(shard_0_weight, '0.weight')" in text
    assert text.count("synchronize(") == 2


def test_synchronize_becomes_gather_and_wait_and_its_backward_divides_and_scatters() -> None:
    split = sw.trace(two_layers(), torch.randn(WIDTH, WIDTH), "shard_grad_op").stages[2]
    assert split.backward is not None
    assert split.forward.statements[:2] == (
        "gathering_0 = all_gather(shard_0, '0')",
        "full_0 = wait(gathering_0)",
    )
    start = split.backward.statements.index(
        "reducing_2 = reduce_scatter(grads_2, '2', torch.float32)"
    )
    assert split.backward.statements[start + 1 : start + 3] == (
        "summed_2 = wait(reducing_2)",
        "mean_2 = aten.div_.Scalar(summed_2, 2.0)",
    )


def test_waits_are_sorted_and_gathers_in_flight_are_limited() -> None:
    x = torch.randn(WIDTH, WIDTH)
    traced = sw.trace(two_layers(), x, prefetch=sw.Prefetch(forward=1 << 20, limit=1))
    _, _, split, sort, limited, _ = [stage.forward.statements for stage in traced.stages]
    assert [line.split(" = ")[0] for line in sort[:3]] == ["gathering_0", "gathering_2", "full_0"]
    assert split[0] == sort[0]
    assert split[1].startswith("full_0")
    assert sorted(limited) == sorted(sort)


def test_fp16_is_divided_before_and_after_the_sum() -> None:
    precision = sw.Precision(param_dtype=torch.float16)
    traced = sw.trace(two_layers(), torch.randn(2, WIDTH), ranks=(0, 8), precision=precision)
    assert lines_of(traced.backward, "div_") == [
        "scaled_2 = aten.div_.Scalar(grads_2, 4.0)",
        "scaled_0 = aten.div_.Scalar(grads_0, 4.0)",
        "mean_2 = aten.div_.Scalar(summed_2, 2.0)",
        "mean_0 = aten.div_.Scalar(summed_0, 2.0)",
    ]


@pytest.mark.parametrize(
    ("strategy", "counts"),
    [("no_shard", (0, 0, 2)), ("shard_grad_op", (2, 0, 2)), ("full_shard", (2, 1, 2))],
)
def test_zero_2_gathers_nothing_in_backward_and_zero_3_does(
    strategy: str, counts: tuple[int, int, int]
) -> None:
    """The unit that backward begins with is kept, so ZeRO-3 gathers all others again."""
    traced = sw.trace(two_layers(), torch.randn(WIDTH, WIDTH), strategy)
    forward, backward = (
        [c.op for c in program.collectives] for program in (traced.forward, traced.backward)
    )
    assert (forward.count("gather"), backward.count("gather"), backward.count("reduce")) == counts


def test_primitives_are_not_run() -> None:
    traced = sw.trace(two_layers(), torch.randn(2, WIDTH))
    with pytest.raises(ScheduleError, match="all_gather is a primitive"):
        traced.stages[2].forward(*[torch.ones(1)] * 3)


# ---- what cannot be traced, and what is left as it was ------------------------------------------


def test_a_model_that_looks_at_values_is_refused_with_the_reason() -> None:
    with pytest.raises(ScheduleError, match=r"torch could not trace ExpertDecoder: .*no values"):
        sw.trace(EXPERT.build(), EXPERT.batch(0, 2)[:-1])


def test_the_line_of_the_model_at_which_torch_stopped_is_named() -> None:
    class Chooses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(ScheduleError, match=r"test_stages.py:\d+ \(return .* if x.sum\(\) > 0"):
        sw.trace(Chooses(8, 8), torch.ones(2, 8))


def test_inputs_that_do_not_fit_are_refused_without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ScheduleError, match=r"same reduction dim.* The inputs must be those with"):
        sw.trace(nn.Linear(8, 8), torch.ones(2, 9))
    with pytest.raises(ScheduleError, match=r"unexpected keyword argument 'ids'"):
        sw.trace(nn.Linear(8, 8), {"ids": torch.ones(2, 8)})
    assert not caplog.records


def test_keyword_arguments_are_named_beside_the_programs_arguments() -> None:
    text = sw.trace(nn.Linear(8, 8), {"input": torch.ones(2, 8)}).forward.text
    assert [line.split("# ")[1] for line in text.splitlines() if "input_0, " in line][:1] == [
        "float32[2, 8]  input"
    ]


def test_the_model_is_left_as_it_was() -> None:
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    sw.trace(model, decoder_batch(0, 1)[:-1])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(param.grad is None for param in model.parameters())


class Reads(nn.Module):
    """Reads a layer's weight beside its call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x)) @ self.first.weight
        return out


def test_a_parameter_that_is_read_beside_its_unit_is_gathered_on_demand_and_kept() -> None:
    traced = sw.trace(Reads(), torch.ones(2, 8), wrap=sw.wrap.by_class(nn.Linear))
    assert [c.unit for c in traced.forward.collectives] == ["first", "last", "first"]
    assert [c.op for c in traced.backward.collectives] == ["reduce", "reduce"]
    assert "on demand" in traced.forward.text


def test_a_model_without_trained_parameters_has_an_empty_backward_program() -> None:
    traced = sw.trace(two_layers().requires_grad_(requires_grad=False), torch.ones(2, WIDTH))
    assert traced.backward.statements == ("return ()",)
    assert traced.joint.gradients == {}
