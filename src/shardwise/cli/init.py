"""``shardwise init FILE``: a few questions, and a recipe that is the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, get_args

import click
import yaml

from shardwise.cli.convert_config import read_text, recipe_of, tree_of
from shardwise.comm.machine.devices import device_count
from shardwise.comm.machine.interfaces import interfaces, reachable
from shardwise.config.strategies import PRESETS
from shardwise.dialects import read
from shardwise.errors import ConfigError
from shardwise.recipe.launch_config import Launcher
from shardwise.recipe.read import flatten, parse, read_recipe, set_key
from shardwise.recipe.section import SHORT
from shardwise.recipe.shipped import check_suffix, path_of


class Question(NamedTuple):
    """A question, the key of a recipe that it answers, and the answer that is offered."""

    key: str
    text: str
    offered: Any
    kind: Any = int


def run_init(file: Path, recipe: str, accelerate: Path | None, yes: bool) -> None:
    """Ask, unless ``yes``, and write the answers into a copy of ``recipe``.

    Raises:
        ConfigError: ``file`` exists, or the recipe would be refused; then it is not there.
    """
    check_suffix(file)
    if file.exists():
        raise ConfigError(f"{file} exists and is not replaced; name another file.")
    tree, _ = parse(path_of(recipe))
    if accelerate:
        for key, value in flatten(_imported(accelerate)).items():
            set_key(tree, key, value)
    address = next((one.address for one in reachable(interfaces())), "")
    for one in questions(flatten(tree), max(1, device_count()), address):
        if one.key in ("launch.address", "launch.port") and not _meets_by_address(tree):
            continue
        answer = one.offered if yes else click.prompt(one.text, one.offered, type=one.kind)
        if one.key.startswith("launch.") or answer != one.offered:
            set_key(tree, one.key, answer)
    command = f"{_command(tree)} {quote(str(file))}"
    head = f"# From {recipe}. The same file on every machine: {command}\n"
    file.write_text(head + yaml.safe_dump(tree, sort_keys=False), "utf-8")
    try:
        read_recipe(file)
    except ConfigError:
        file.unlink()
        raise
    click.echo(f"wrote     {file}: {command}")


def _imported(accelerate: Path) -> dict[str, Any]:
    """The part of a recipe that ``accelerate config`` has written."""
    report = read(tree_of(accelerate, read_text(accelerate)), "accelerate")
    given = {entry.key: entry.status for entry in report.entries if entry.status != "default"}
    if given and {*given.values()} == {"ignored"}:
        raise ConfigError(
            f"{accelerate} is not what `accelerate config` wrote, which knows none of "
            f"{', '.join([*given][:6])}. `shardwise convert-config {quote(str(accelerate))}` "
            "reads other forms."
        )
    report.check()
    return recipe_of(report)[0]


def questions(known: Mapping[str, Any], devices: int, address: str) -> list[Question]:
    """The questions in their order. Pure.

    Args:
        known: what a recipe says, by key.
        devices, address: of this machine.
    """
    dtype = known.get("sharding.precision.param_dtype") or "float32"
    word = {name: short for short, name in SHORT.items()}.get(dtype, dtype)
    precision = known.get("sharding.precision", word)
    strategy = known.get("sharding.strategy", "full_shard")
    launchers = click.Choice(get_args(Launcher))
    return [
        Question(
            "launch.by", "What starts the ranks", known.get("launch.by", "torchrun"), launchers
        ),
        Question("launch.nodes", "Machines", known.get("launch.nodes", 1)),
        Question("launch.nproc", "Ranks of each machine", known.get("launch.nproc", devices)),
        Question(
            "launch.address", "Address of the first", known.get("launch.address", address), str
        ),
        Question("launch.port", "A port that is free there", known.get("launch.port", 29500)),
        Question("sharding.strategy", "Strategy", strategy, click.Choice([*PRESETS])),
        Question(
            "sharding.precision", "Precision", precision, click.Choice(["fp32", "bf16", "fp16"])
        ),
    ]


def _meets_by_address(tree: Mapping[str, Any]) -> bool:
    """Do the ranks need an address? SLURM and others find it by themselves."""
    return tree["launch"]["nodes"] > 1 and tree["launch"]["by"] in ("torchrun", "mpi")


def _command(tree: Mapping[str, Any]) -> str:
    launch = tree["launch"]
    alone = launch["nodes"] == 1 and launch["by"] == "torchrun"
    return "shardwise train" if alone else "shardwise launch"
