from __future__ import annotations

from collections.abc import Mapping

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.plan import LaunchPlan, cleaned, node_rank, preset, resolved, shell

HERE = {"10.0.0.3", "b"}


def plan(nodes: int = 2, hosts: tuple[str, ...] = (), address: str = "10.0.0.2") -> LaunchPlan:
    return LaunchPlan(("my.yaml",), "my", nodes, 8, address=address, hosts=hosts)


@pytest.mark.parametrize(
    ("of", "environ", "rank"),
    [
        (plan(1), {}, 0),
        (plan(2), {}, 1),  # the address is the other one's
        (plan(2, address="10.0.0.3"), {}, 0),
        (plan(3, ("a", "b", "c")), {}, 1),
        (plan(3, ("10.0.0.2", "10.0.0.4", "10.0.0.3")), {}, 2),
        (plan(4), {"SLURM_NODEID": "3"}, 3),
        (plan(4, ("a", "b", "c", "d")), {"NODE_RANK": "2"}, 2),  # what is said comes first
    ],
)
def test_a_node_finds_its_rank(of: LaunchPlan, environ: Mapping[str, str], rank: int) -> None:
    assert node_rank(of, HERE, environ) == rank


def test_a_node_that_cannot_know_its_rank_is_told_what_to_pass() -> None:
    with pytest.raises(ConfigError, match=r"Pass --node-rank 0 to 2, or name all nodes on each"):
        node_rank(plan(3), HERE, {})
    with pytest.raises(ConfigError, match=r"which of the 2 nodes this host is \(10\.0\.0\.3, b\)"):
        node_rank(plan(2, ("x", "y")), HERE, {})
    with pytest.raises(ConfigError, match="NODE_RANK is '2', and the 2 nodes are numbered"):
        node_rank(plan(2), HERE, {"NODE_RANK": "2"})


def test_names_of_this_host_are_its_addresses_too() -> None:
    names = resolved({"localhost", "no.such.name.invalid", "192.0.2.77"}, {"127.0.0.1"})
    assert names == {"127.0.0.1", "localhost"}


def test_each_node_has_one_name() -> None:
    with pytest.raises(ConfigError, match=r"2 hosts are needed and 1 named \(a\): name"):
        plan(2, ("a",))
    with pytest.raises(ConfigError, match="host a is named 2 times, and a host is one node"):
        plan(3, ("a", "b", "a"))


def test_a_rank_that_the_shell_has_set_is_explained_and_not_passed_on() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "HOME": "/"}
    assert preset(environ) == (
        "this shell has set RANK=1, WORLD_SIZE=2, which launchers set for each rank: unset RANK "
        "WORLD_SIZE. The number of a machine is NODE_RANK."
    )
    assert preset({"HOME": "/"}) == ""
    assert cleaned(environ) == {"HOME": "/"}


def test_words_and_variables_are_quoted_for_a_shell() -> None:
    assert shell("echo", "a b", "$HOME", NAME="x y") == "NAME='x y' echo 'a b' '$HOME'"
