"""What a program and a command line set, key by key."""

from __future__ import annotations

import ast
from inspect import signature

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap

from shardwise.dialects import Report, read
from shardwise.dialects.settings import POSITIONAL, of_command, of_program

FSDP1 = """
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, MixedPrecision
half = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={blocks.Block})
options = {"limit_all_gathers": True, "forward_prefetch": is_long()}
model = FSDP(Net(), None, ShardingStrategy.SHARD_GRAD_OP, cpu_offload=CPUOffload(True),
             auto_wrap_policy=policy, mixed_precision=half, device_id=rank, **options)
"""
FSDP2 = """
import torch.distributed.fsdp as fsdp
options = {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16)}
for block in model.blocks:
    fsdp.fully_shard(block, **options)
fsdp.fully_shard(model, reshard_after_forward=False, offload_policy=fsdp.CPUOffloadPolicy(),
                 **options)
"""
PLUG_IN = """
plug_in = FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD", cpu_offload=CPUOffload(True))
accelerator = Accelerator(fsdp_plugin=plug_in, mixed_precision="bf16")
"""


def report_of(text: str) -> Report:
    return read({one.key: one.value for one in of_program(ast.parse(text))}, "script")


@pytest.mark.parametrize(
    ("text", "sharding", "ignored"),
    [
        (
            FSDP1,
            {
                "strategy": "shard_grad_op",
                "wrap": ["Block"],
                "prefetch": {"limit": 2},
                "precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
                "offload": "everything",
            },
            ["forward_prefetch"],
        ),
        (
            FSDP2,
            {
                "strategy": "shard_grad_op",
                "precision": {"param_dtype": "bfloat16"},
                "offload": "everything",
            },
            [],
        ),
        (
            PLUG_IN,
            {
                "strategy": "no_shard",
                "precision": {"param_dtype": "bfloat16"},
                "offload": "everything",
            },
            [],
        ),
    ],
)
def test_every_argument_of_a_sharding_call_is_in_the_report(
    text: str, sharding: dict[str, object], ignored: list[str]
) -> None:
    report = report_of(text)
    assert report.places()[0] == {"sharding": sharding}
    passed = {e.key.partition(".")[2].partition(".")[0] for e in report.entries}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for call in calls:
        if "ully" in ast.unparse(call.func) or "FSDP" in ast.unparse(call.func):
            assert passed >= {k.arg for k in call.keywords if k.arg}
    names = [e.key.rpartition(".")[2] for e in report.entries if e.status == "ignored"]
    assert names == ignored


def test_a_dictionary_that_is_changed_is_not_followed_and_says_so() -> None:
    text = "options = {}\noptions['mp_policy'] = half\nfully_shard(model, **options)\n"
    entry = next(e for e in report_of(text).entries if e.key == "fully_shard.kwargs")
    assert entry.status == "ignored"
    assert "write these arguments into the call" in entry.text


def test_arguments_that_are_passed_by_their_place_have_torchs_names() -> None:
    for name, places in POSITIONAL.items():
        if name != "partial":
            function = getattr(wrap if name == "ModuleWrapPolicy" else fsdp, name)
            assert [*signature(function).parameters][: len(places)] == [*places], name


@pytest.mark.parametrize(
    ("launcher", "launch"),
    [
        (
            "torchrun --nnodes 2 --nproc-per-node=8 --node_rank 1 --rdzv_endpoint a:1",
            {"ranks": 16, "nodes": 2, "node_rank": 1},
        ),
        (
            "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --main_process_ip a",
            {"ranks": 16, "nodes": 2, "address": "a"},
        ),
        ("srun -N 2 --ntasks-per-node=4 --gpus-per-task 1 python -u", {"ranks": 8, "nodes": 2}),
        ("mpirun -np 4 --bind-to core python", {"ranks": 4}),
    ],
)
def test_the_flags_of_launchers_are_known(launcher: str, launch: dict[str, object]) -> None:
    text = f"{launcher} run_clm.py --learning_rate 1e-4"
    report = read({one.key: one.value for one in of_command(text)}, "command")
    recipe, elsewhere = report.places()
    places = {k.partition(".")[2]: v for k, v in elsewhere.items()}
    assert places | recipe.get("launch", {}) == launch
    assert recipe["batch"]["rows"] == 8 * launch["ranks"]  # type: ignore[operator]
    assert not [e.text for e in report.entries if "did you mean" in e.text]


def test_a_report_is_printed_as_a_line_for_each_key() -> None:
    lines = repr(report_of(PLUG_IN)).splitlines()
    assert len(lines) == 1 + 4
    assert all(len(line) < 160 for line in lines)
