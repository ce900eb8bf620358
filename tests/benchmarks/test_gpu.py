"""The GPU benchmark: its pieces on made-up timelines, and all of it on the CPU with a toy.

Where there is a CUDA device, the cases that need one run on it, too.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import Tensor

import benchmarks
import shardwise
from benchmarks.__main__ import main
from benchmarks.gpu import copies, run
from benchmarks.gpu.copies import FILES, CopyRecorder, file_in_package, side_of
from benchmarks.gpu.engines import ENGINES, Setup
from benchmarks.gpu.measure import Alone, Lap, Memory, copies_of
from benchmarks.gpu.run import STEP, Case, Config, alone_row, compare, times_row
from benchmarks.gpu.simulated import EchoStore, Link, SimulatedGroup, link_of
from benchmarks.harness.report import MIB, Cell, Row, Table, read, verdict
from benchmarks.harness.workers import Worker, on_ranks
from benchmarks.models import ON_GPU
from tests.devices import DEVICES

CPU = torch.device("cpu")

# ---- copies --------------------------------------------------------------------------------

PACKAGES = (benchmarks, shardwise, torch)
FSDP = "torch/distributed/fsdp/_fully_shard"


@pytest.mark.parametrize(
    ("side", "frames"),
    [
        (
            "parameters",
            [("shardwise/memory/parameters.py", "gather"), ("shardwise/runtime/forward.py", "f")],
        ),
        ("gradients", [("torch/_ops.py", "__call__"), ("shardwise/memory/gradients.py", "write")]),
        ("gradients", [("shardwise/comm/reduction.py", "use")]),
        ("engine", [("shardwise/runtime/runtime.py", "_deliver")]),
        ("engine", [(f"{FSDP}/_fsdp_state.py", "_root_pre_forward")]),
        ("update", [("torch/optim/adamw.py", "step")]),
        ("update", [("shardwise/optim/flat.py", "step")]),
        (
            "model",
            [("shardwise/train/decoder.py", "forward"), ("shardwise/runtime/forward.py", "")],
        ),
        ("model", [("torch/nn/modules/linear.py", "forward")]),
        (
            "collectives",
            [("benchmarks/gpu/simulated.py", "arrive"), ("shardwise/memory/parameters.py", "")],
        ),
        ("parameters", [(f"{FSDP}/_fsdp_collectives.py", "foreach_all_gather_copy_out")]),
        ("parameters", [(f"{FSDP}/_fsdp_param.py", "init_unsharded_param")]),
        (
            "gradients",
            [
                (f"{FSDP}/_fsdp_collectives.py", "chunk_cat"),
                (f"{FSDP}/_fsdp_collectives.py", "foreach_reduce_scatter_copy_in"),
                (f"{FSDP}/_fsdp_param_group.py", "post_backward"),
            ],
        ),
    ],
)
def test_a_copy_is_put_down_to_the_innermost_code_of_an_engine(
    side: str, frames: list[tuple[str, str]]
) -> None:
    assert side_of(frames) == side


def test_the_files_whose_copies_are_known_exist() -> None:
    folders = {package.__name__: Path(str(package.__file__)).parents[1] for package in PACKAGES}
    assert [file for file in FILES if not (folders[file.split("/")[0]] / file).is_file()] == []


def test_a_checkout_called_like_a_package_is_not_that_package() -> None:
    installed = copies.__file__, torch.nn.__file__
    assert [*map(file_in_package, installed)] == [
        "benchmarks/gpu/copies.py",
        "torch/nn/__init__.py",
    ]
    assert file_in_package("/home/me/shardwise/train/mine.py") == ""
    assert file_in_package("/home/me/torch/optim/mine.py") == ""


@pytest.mark.prove
def test_a_copy_is_noted_with_what_it_writes() -> None:
    wide = torch.ones(3, 4)
    with CopyRecorder(slice_numel=0) as mode:
        wide.clone()
        torch.empty(2, 4, dtype=torch.bfloat16).copy_(wide[:2])
        torch._foreach_copy_([torch.empty(2), torch.empty(3)], [wide[0, :2], wide[0, :3]])
        torch.cat([wide, wide])
        wide + wide
        wide.to(torch.float32)  # is that already
        wide.to(torch.float64)
    assert [(copied.op, copied.nbytes) for copied in mode.copies] == [
        ("clone", 48),
        ("copy_", 16),
        ("_foreach_copy_", 20),
        ("cat", 96),
        ("_to_copy", 96),
    ]
    assert {copied.side for copied in mode.copies} == {"model"}


def test_copies_are_summed_by_side_and_step() -> None:
    with CopyRecorder(slice_numel=8) as mode:
        torch.ones(8).clone()
        torch.ones(4).clone()
    assert copies_of(mode, steps=2) == {"model": (1.0, 24.0)}


# ---- collectives ------------------------------------------------------------------------------


def test_peers_hold_what_this_rank_holds() -> None:
    others = SimulatedGroup(4, CPU, Link(0))
    full = torch.tensor([1.0, 2.0, 0, 0, 0, 0, 0, 0])
    others.all_gather(full, full[:2])
    assert full.tolist() == [1.0, 2.0] * 4
    elsewhere = torch.zeros(8)
    others.all_gather(elsewhere, torch.tensor([3.0, 4.0]))
    assert elsewhere.tolist() == [3.0, 4.0] * 4
    out, addends = torch.empty(2), torch.arange(8.0) + 1
    others.reduce_scatter(out, addends)
    assert out.tolist() == [4.0, 8.0]
    others.reduce_scatter(out, addends, op=dist.ReduceOp.AVG)
    assert out.tolist() == [1.0, 2.0]
    others.all_to_all(elsewhere, addends)
    assert elsewhere.tolist() == [1.0, 2.0] * 4
    assert others.calls == 5
    assert others.nbytes == 5 * 3 * 8
    assert others.seconds == 0


def test_a_collective_that_is_asked_for_asynchronously_can_be_waited_for() -> None:
    others = SimulatedGroup(2, CPU, Link(0))
    full = torch.tensor([1.0, 0.0])
    work = others.all_gather(full, full[:1], async_op=True, group=None)
    assert isinstance(work, dist.Work)
    assert work.wait()
    assert work.is_completed()
    assert others.all_gather(full, full[:1]) is None


def test_every_collective_of_both_engines_is_answered_and_given_back() -> None:
    before = dict(vars(dist))
    others = SimulatedGroup(2, CPU, Link(0))
    with others.installed():
        changed = {name for name in before if vars(dist)[name] is not before[name]}
        dist.all_gather_into_tensor(torch.zeros(2), torch.zeros(1))
    assert {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"} <= changed
    assert others.calls == 1
    assert dict(vars(dist)) == before


def test_a_link_takes_its_latency_and_then_time_for_each_byte() -> None:
    assert Link(1e9, 1e-3).seconds(2_000_000) == pytest.approx(3e-3)
    assert Link(0, 0).seconds(10**12) == 0
    assert link_of(8).bandwidth > link_of(64).bandwidth
    assert link_of(64, 1e9) == Link(1e9, link_of(64).latency)
    assert link_of(8, 0) == Link(0, 0)


def test_a_store_echoes_what_ranks_share_and_nothing_else() -> None:
    store = EchoStore()
    keys = [f"texts/3/{rank}" for rank in range(4)]
    assert not store.check(keys)
    store.set("texts/3/0", "mine")
    store.set("cursor/0", "{}")
    assert store.check(keys)
    assert store.multi_get(keys) == [b"mine"] * 4
    assert not store.check(["cursor/1"])
    assert not store.check(["texts/4/0"])
    assert store.compare_set("verdict", "", "first") == b"first"
    assert store.compare_set("verdict", "", "second") == b"first"


def trained(worker: Worker, device: str, engine: str, bandwidth: float) -> None:
    """Losses of four steps."""
    from benchmarks.gpu.engines import start

    setup = Setup("tinyblocks", 4, device, link_of(4, bandwidth))
    start(setup)
    with SimulatedGroup(4, setup.place, setup.link).installed():
        engine_of = ENGINES[engine](setup)
        losses = []
        for step in range(4):
            losses.append(engine_of.compute(setup.batch(step)))
            engine_of.update()
    worker.send([loss.item() for loss in losses])


@pytest.mark.spawn
@pytest.mark.prove
@pytest.mark.parametrize("device", DEVICES)
def test_slow_peers_change_no_number(device: str) -> None:
    """On a GPU each takes milliseconds: a read or a reuse that did not wait would show."""
    fast, slow = (on_ranks(1, trained, device, "full_shard", each)[0] for each in (0.0, 1e6))
    assert fast == slow
    assert fast[0] != fast[-1]


# ---- models --------------------------------------------------------------------------------


def numel(name: str) -> int:
    model = Setup(name, 4, "cpu", Link(0)).new_model(torch.device("meta"))
    return sum(param.numel() for param in model.parameters())


def test_the_models_have_the_size_that_their_names_say() -> None:
    assert numel("blocks8b") == 8 * 218_112_000
    assert numel("small125m") == pytest.approx(125e6, rel=0.02)


@pytest.mark.parametrize("name", ["tiny", "tinyblocks"])
def test_a_model_computes_in_bf16_and_its_loss_can_be_trained(name: str) -> None:
    setup = Setup(name, 4, "cpu", Link(0))
    model = setup.new_model().bfloat16()
    loss: Tensor = ON_GPU[name].loss(model, setup.batch(1))
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16}


# ---- numbers and verdicts ------------------------------------------------------------------


def test_laps_are_compared_within_their_round() -> None:
    mine = [Lap(2.0, 0.5, 0.4, 0.1), Lap(6.0, 0.7, 0.4, 0.1), Lap(4.0, 0.6, 0.4, 0.3)]
    rival = [Lap(1.0, 0.5, 0, 0), Lap(4.0, 0.5, 0, 0), Lap(2.0, 0.5, 0, 0)]
    row = times_row(mine, rival)
    assert (row["step ÷"], row["q1"], row["q3"]) == (2.0, 1.75, 2.0)
    assert (row["ms"], row["min ms"], row["host"]) == (4e3, 2e3, 600.0)
    assert (row["collectives ms"], row["exposed ms"], row["hidden"]) == (400.0, 100.0, 0.75)
    assert times_row(rival, None) == {"ms": 2e3, "min ms": 1e3, "host": 500.0}


def row_of(peak: int, ratio: float | None, whole: float = 0) -> Row:
    memory = Memory(10 * MIB, peak * MIB, 2 * peak * MIB)
    return {**alone_row(Alone(memory, {"parameters, whole": (whole, 1e6)}, 1e6)), "step ÷": ratio}


def rows() -> dict[str, Row]:
    return {
        "full_shard": row_of(80, 0.9),
        "fsdp2": row_of(100, None, 4),
        "shard_grad_op": row_of(81, 0.901, 4),
        "fsdp2_keep": row_of(100, None),
    }


def test_each_of_ours_is_held_against_the_rival_that_holds_the_same() -> None:
    measured = rows()
    compare(measured)
    good, bad = (verdict(name, measured[name], STEP) for name in ("full_shard", "shard_grad_op"))
    assert good == "full_shard: all targets reached"
    assert bad.split(": ")[1].split("; ") == [
        "step ÷ 0.901, at most 0.900 wanted",
        "peak ÷ 0.810, at most 0.800 wanted",
        "whole copies 4, at most 0 wanted",
    ]


def test_a_number_that_is_missing_reaches_no_target() -> None:
    assert verdict("full_shard", {}, STEP).count("–, at most") == 3


def test_the_tables_name_every_engine_what_was_missed_and_what_failed() -> None:
    setup = Setup("tiny", 8, "cpu", link_of(8))
    case = Case(setup, Config(), print, rows(), errors={"plain": "CUDA out of memory"})
    step, _ = case.tables()
    assert [row[0] for row in step.rows] == list(rows())
    assert step.remarks[0] == "full_shard: all targets reached"
    assert step.remarks[-1] == "plain: failed, CUDA out of memory"
    assert "350 GB/s and 20 µs assumed" in step.title
    free = Case(replace(setup, link=Link(0)), Config(), print)
    assert "no time" in free.tables()[0].title


# ---- which processes run -------------------------------------------------------------------


def test_without_a_device_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run_command()
    assert result.exit_code == 1
    assert "there is no CUDA device here" in result.output
    assert "--device cpu --model tiny" in result.output


def run_command(*arguments: str) -> Result:
    """The command, as a shell would run it."""
    with pytest.MonkeyPatch.context() as patch:  # the children import what they run
        paths = [str(Path(run.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        return CliRunner().invoke(main, ["gpu", *arguments])


def test_an_engine_that_does_not_exist_is_refused() -> None:
    result = run_command("--engines", "full_shard,fsdp3", "--device", "cpu")
    assert result.exit_code == 2
    assert "'fsdp3' is not one of 'full_shard', 'fsdp2'," in result.output


@pytest.fixture(scope="module", params=DEVICES)
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    """The whole command on a toy, at rank 0 of 4."""
    folder = tmp_path_factory.mktemp("gpu")
    result = run_command(
        *("--device", request.param, "--model", "tinyblocks", "--world", "4", "--rounds", "2"),
        *("--engines", "full_shard,fsdp2"),
        *("--json", str(folder / "report.json"), "--plot", str(folder / "report.png")),
    )
    assert result.exit_code == 0, result.output
    assert (folder / "report.png").exists()
    report = read(folder / "report.json")
    assert "\n".join(report.lines()) in result.output
    return list(report.tables)


def cells(table: Table, engine: str, column: str) -> float:
    """A number of one engine."""
    index = [each.name for each in table.columns].index(column)
    (cell,) = (row[index] for row in table.rows if row[0] == engine)
    return number(cell)


def number(cell: Cell) -> float:
    assert isinstance(cell, int | float)
    return cell


@pytest.mark.spawn
def test_the_whole_command_has_all_numbers_of_both_engines(tables: list[Table]) -> None:
    step = tables[0]
    memory = ("peak ÷", "MiB rest", "MiB peak", "reserved")
    device_alone = (*memory, "collectives ms", "hidden", "exposed ms")
    on_cpu = step.columns == tuple(c for c in STEP if c.name not in device_alone)
    assert on_cpu or step.columns == STEP
    for engine in ("full_shard", "fsdp2"):
        assert cells(step, engine, "ms") >= cells(step, engine, "min ms") > 0
        if not on_cpu:
            assert cells(step, engine, "collectives ms") > 0
            assert cells(step, engine, "MiB peak") > cells(step, engine, "MiB rest") > 0
    assert cells(step, "full_shard", "step ÷") > 0


@pytest.mark.spawn
def test_ours_copies_no_parameter_beyond_its_own_slice_and_the_rival_does(
    tables: list[Table],
) -> None:
    copied = {(row[0], row[1]): (number(row[2]), 1e6 * number(row[3])) for row in tables[1].rows}
    assert ("full_shard", "parameters, whole") not in copied
    assert cells(tables[0], "full_shard", "whole copies") == 0
    # Three units, two uses each; the last one stays gathered in between. Slices are cast to bf16.
    layer = numel("tinyblocks") / 3
    calls, nbytes = copied["full_shard", "parameters, own slice"]
    assert calls == 5
    assert nbytes == pytest.approx(5 * 2 * layer / 4, rel=0.02)
    calls, nbytes = copied["fsdp2", "parameters, whole"]
    assert calls == 5
    assert nbytes == pytest.approx(5 * 2 * layer, rel=0.05)


@pytest.mark.spawn
def test_the_link_carries_fewer_bytes_for_ours(tables: list[Table]) -> None:
    """The same gathers, and gradients in bf16 where the rival sends fp32."""
    ours, rival = (cells(tables[0], name, "MB received") for name in ("full_shard", "fsdp2"))
    assert ours / rival == pytest.approx((5 * 2 + 3 * 2) / (5 * 2 + 3 * 4), rel=0.05)


@pytest.mark.spawn
def test_an_engine_that_fails_has_a_line_that_says_why_and_the_others_go_on() -> None:
    logged = list[str]()
    config = Config((2,), ("tinyblocks",), ("fsdp2",), device="cpu", wire="by pigeon")
    (report,) = run.run(config, logged.append)
    assert "fsdp2: failed, KeyError: 'by pigeon'" in report.lines()
    assert "Traceback" in logged[1]
