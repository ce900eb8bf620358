from __future__ import annotations

import pytest

from shardwise.launch.mpi import Topology, binding, environment, words
from shardwise.launch.plan import LaunchPlan

GAUDI = """\
Architecture:            x86_64
CPU(s):                  160
Thread(s) per core:      2
Core(s) per socket:      40
Socket(s):               2
"""
VIRTUAL = "Core(s) per socket:  1\nSocket(s):           16\n"
PLAN = LaunchPlan(("my recipe.yaml",), "my", nodes=1, nproc=8, token="secret")


def test_cores_are_read_from_lscpu() -> None:
    assert Topology.parse(GAUDI) == Topology(sockets=2, cores=40)
    assert Topology.parse("Socket(s): -\n") is None  # as on some ARM machines


@pytest.mark.parametrize(
    ("text", "nproc", "options"),
    [
        (GAUDI, 8, "--bind-to core --map-by socket:PE=10 --rank-by slot"),
        (GAUDI, 80, "--bind-to core --map-by socket:PE=1 --rank-by slot"),
        (VIRTUAL, 8, "--bind-to core --map-by slot:PE=2 --rank-by slot"),
        (VIRTUAL, 17, "--bind-to none --oversubscribe"),
        ("", 2, "--bind-to none --oversubscribe"),
    ],
)
def test_each_rank_has_its_share_of_the_cores(text: str, nproc: int, options: str) -> None:
    assert " ".join(binding(Topology.parse(text), nproc)) == options


def test_the_command_on_one_host() -> None:
    command = words(PLAN, "python", Topology.parse(GAUDI), root=True)
    assert command[-5:] == ["python", "-m", "shardwise.cli", "train", "my recipe.yaml"]
    assert " ".join(command[:-5]) == (
        "mpirun -n 8 --bind-to core --map-by socket:PE=10 --rank-by slot --report-bindings "
        "--allow-run-as-root -x SHARDWISE_RUN_TOKEN"
    )


def test_the_command_on_several_hosts() -> None:
    hosts = ("gpu01", "gpu02")
    plan = LaunchPlan(("my.yaml",), "my", 2, 8, token="secret", address="gpu01", hosts=hosts)
    command = " ".join(words(plan, "python", Topology(2, 40)))
    assert command.startswith("mpirun -n 16 --host gpu01:8,gpu02:8 --bind-to core")
    assert "-x SHARDWISE_RUN_TOKEN -x MASTER_ADDR -x MASTER_PORT python" in command
    assert "secret" not in command
    assert environment(plan)["MASTER_ADDR"] == "gpu01"
