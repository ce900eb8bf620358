from __future__ import annotations

import ast

from shardwise.launch.plan import LaunchPlan
from shardwise.launch.ray import program

PLAN = LaunchPlan(
    ("my.yaml", "--sample.prompt", 'a "word" {x}'),
    "my",
    nodes=2,
    nproc=8,
    device="cuda",
    restarts=3,
    token="secret",
    variables={"NCCL_SOCKET_IFNAME": "eth1"},
)


def test_each_worker_is_a_rank() -> None:
    text = program(PLAN)
    assert "ScalingConfig(num_workers=16, use_gpu=True)" in text
    assert "FailureConfig(max_failures=3)" in text
    assert '{"NCCL_SOCKET_IFNAME": "eth1"} | {"SHARDWISE_RUN_TOKEN": secrets.token_hex(16)' in text
    assert "secret," not in text  # each start has a token of its own


def test_words_are_as_they_were() -> None:
    [arguments] = [
        ast.literal_eval(node.value)
        for node in ast.parse(program(PLAN)).body
        if isinstance(node, ast.Assign)
    ]
    assert tuple(arguments) == PLAN.arguments
