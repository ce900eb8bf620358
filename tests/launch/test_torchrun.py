from __future__ import annotations

from torch.distributed.run import get_args_parser

from shardwise.launch.plan import LaunchPlan
from shardwise.launch.torchrun import environment, line, words

PLAN = LaunchPlan(
    ("my.yaml", "--run.steps", "10"),
    "my",
    nodes=2,
    nproc=8,
    address="10.0.0.2",
    restarts=3,
    token="secret",
    variables={"NCCL_SOCKET_IFNAME": "eth1"},
)


def test_the_line_of_a_node() -> None:
    assert line(PLAN, 1) == (
        "SHARDWISE_RUN_TOKEN=secret NCCL_SOCKET_IFNAME=eth1 torchrun --nnodes=2 --node-rank=1 "
        "--nproc-per-node=8 --master-addr=10.0.0.2 --master-port=29500 --rdzv-id=2bb80d53 "
        "--max-restarts=3 -m shardwise.cli train my.yaml --run.steps 10"
    )


def test_torchrun_reads_it_and_meets_without_pickles() -> None:
    parsed = get_args_parser().parse_args(words(PLAN, 1)[1:])
    assert (parsed.rdzv_backend, parsed.nnodes, parsed.node_rank) == ("static", "2", 1)
    assert parsed.module
    assert parsed.training_script_args == ["train", "my.yaml", "--run.steps", "10"]


def test_the_token_is_no_word_of_the_command_which_others_can_list() -> None:
    assert "secret" not in " ".join(words(PLAN, 0))
    assert environment(PLAN)["SHARDWISE_RUN_TOKEN"] == "secret"
