"""Which parameters are Muon's: a table of models, parameters and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.transports.local import LocalComm
from tests import nets


def rules(model: nn.Module, **options: Any) -> dict[str, str]:
    """Parameter → its line of the table, without name and shape."""
    table = sw.optim.Muon(sw.shard(model, comm=LocalComm()), **options).table.splitlines()
    lines = [line.split("  ") for line in table[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {name: f"{algorithm}: {rule}" for name, _, algorithm, rule in cells}


OUTPUT, EMBEDDING = "adamw: output layer: the model's last matrix", "adamw: embedding"
HIDDEN = "muon: matrix of a hidden layer"
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "decoder": (
        nets.decoder,
        {
            "embed.weight": EMBEDDING,
            "blocks.0.attention.query.weight": HIDDEN,
            "blocks.2.mlp.down.weight": HIDDEN,
            "blocks.2.mlp.down.bias": "adamw: 1-dimensional, no matrix",
            "norm.weight": "adamw: 1-dimensional, no matrix",
            "lm_head.weight": OUTPUT,
        },
    ),
    # The head is the embedding; the last hidden matrix is none.
    "tied": (nets.tied_decoder, {"embed.weight": EMBEDDING, "blocks.2.mlp.down.weight": HIDDEN}),
    # A frozen head is still the head: all low-rank factors are hidden.
    "adapters": (
        nets.mostly_frozen,
        {
            "blocks.2.attention.value.down.weight": HIDDEN,
            "blocks.2.attention.value.up.weight": HIDDEN,
        },
    ),
    "convolutions": (
        nets.odd_convnet,
        {"stem.weight": "adamw: 4-dimensional, no matrix", "classifier.weight": OUTPUT},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_has_one_rule(case: str) -> None:
    build, expected = CASES[case]
    by_name = rules(build())
    assert {name: by_name[name] for name in expected} == expected
    assert len(by_name) == sum(param.requires_grad for param in build().parameters())


def test_what_the_user_names_is_adamws() -> None:
    by_name = rules(nets.decoder(), adamw={"params": [r".*\.query\.weight"], "lr": 0.1})
    named = {name for name, rule in by_name.items() if rule == "adamw: named in adamw"}
    assert named == {f"blocks.{k}.attention.query.weight" for k in range(3)}


def test_the_table_of_groups_of_the_users_own_says_so() -> None:
    torch.manual_seed(0)
    sharded = sw.shard(nets.decoder(), comm=LocalComm())
    groups = [{"params": r"blocks.*\.query\.weight"}, {"params": ".*", "algorithm": "adamw"}]
    lines = sw.optim.Muon(sharded, groups).table.splitlines()
    assert lines[0].split() == ["parameter", "shape", "algorithm", "rule"]
    assert lines[1].split() == [
        *("blocks.0.attention.query.weight", "16", "×", "16"),
        *("muon", "its", "group"),
    ]
    assert sum(" muon " in line for line in lines) == 3
