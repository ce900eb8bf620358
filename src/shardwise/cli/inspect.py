"""``shardwise inspect PATH``: what is in a run or a checkpoint; with two, where they differ."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardwise.checkpoint.run_folder import Listed, Run, checkpoint_of, folder_of_run, meant, survey
from shardwise.cli.catalogues import damage_lines, lines_of, run_lines
from shardwise.cli.differences import difference_lines
from shardwise.cli.folded import counted, shown, shown_lines
from shardwise.convert.catalogue import OF_TORCH, SUFFIX, Catalogue, Damage, damage_of
from shardwise.convert.difference import ABSENT, Change, Difference, compare
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError

__all__ = ["Look", "run_inspect"]

FINE, WRONG, FAILED = 0, 1, 2


@dataclass(frozen=True)
class Look:
    """The options of ``shardwise inspect``."""

    verify: bool = False
    every: bool = False
    weights_only: bool = False
    as_json: bool = False


def run_inspect(path: Path, other: Path | None, look: Look) -> None:
    """``shardwise inspect``; ends the process with one of the three statuses."""
    try:
        status = _status(meant(path.expanduser()), other, look)
    except ShardwiseError as error:
        click.echo(f"error: {shown_lines(str(error))}", err=True)
        sys.exit(FAILED)
    except RecursionError:
        click.echo("error: JSON in a file there is nested too deep to be shown", err=True)
        sys.exit(FAILED)
    sys.exit(status)


def _status(path: Path, other: Path | None, look: Look) -> int:
    folder = folder_of_run(path) if other is None else None
    _check_options(other is None and look.weights_only, folder is not None and look.every)
    if other is not None:
        paths = checkpoint_of(path), checkpoint_of(other.expanduser())
        broken = _compare_bytes(paths, look.as_json) if look.verify else FINE
        return broken or _compare(paths, look)
    if folder is not None:
        return _show_run(survey(folder), look.verify, look.as_json)
    return _show(path, look.verify, look.every, look.as_json)


def _check_options(weights_only_of_one: bool, all_of_a_run: bool) -> None:
    if weights_only_of_one:
        raise ConfigError(
            "--weights-only is for two paths, and there is one. Leave it out, or name a second."
        )
    if all_of_a_run:
        raise ConfigError(
            "--all lists the tensors of a checkpoint, and this is a run. Name one of its "
            "checkpoints, such as RUN/latest."
        )


def _print_json(value: object) -> None:
    """In ASCII, so that no name reaches a terminal as it is; JSON has no infinity, so as text."""
    click.echo(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- a run -----------------------------------------------------------------------------------


def _show_run(run: Run, verify: bool, as_json: bool) -> int:
    broken = {listed.name: listed.problem for listed in run.checkpoints if listed.problem}
    damage = {listed.name: _damage_of(listed) for listed in run.checkpoints if verify}
    if as_json:
        _print_json(_run_json(run, damage if verify else None))
    else:
        for line in run_lines(run):
            click.echo(line)
        for name, damaged in damage.items():
            if name not in broken:
                click.echo(_verdict(damaged, f"bytes of {shown(name)}"))
            for line in damage_lines(damaged):
                click.echo(line)
    return WRONG if broken or any(damage.values()) or not run.checkpoints else FINE


def _damage_of(listed: Listed) -> list[Damage]:
    """None is found in a folder that may not be looked at; that is its problem already."""
    try:
        return _verified(Catalogue.read(listed.path))
    except CheckpointError:
        if listed.problem:
            return []
        raise


def _run_json(run: Run, damage: dict[str, list[Damage]] | None) -> dict[str, Any]:
    checkpoints = []
    for listed in run.checkpoints:
        made, name = listed.manifest, listed.name
        entry: dict[str, Any] = {
            "name": name,
            "step": listed.step,
            "bytes": listed.nbytes,
            "complete": not listed.problem,
            "problem": listed.problem,
            "latest": name == run.latest,
            "written": made and made.model_dump(exclude={"files", "aliases"}),
        }
        if damage is not None:
            entry["damage"] = [dataclasses.asdict(one) for one in damage[name]]
        checkpoints.append(entry)
    left = [
        {"name": one.path.name, "kind": one.kind, "being_written": written}
        for one, written in run.leftovers
    ]
    return {
        "folder": str(run.folder),
        "latest": run.latest,
        "checkpoints": checkpoints,
        "left": left,
    }


# --- a checkpoint ----------------------------------------------------------------------------


def _show(path: Path, verify: bool, every: bool, as_json: bool) -> int:
    catalogue = Catalogue.read(path)
    if catalogue.problems and path.is_file() and path.suffix not in (SUFFIX, *OF_TORCH):
        raise ConfigError(
            f"{path} is no checkpoint. Name a run, a checkpoint, a Hugging Face folder or a "
            ".safetensors file."
        )
    damage = _verified(catalogue) if verify else []
    if as_json:
        _print_json(_catalogue_json(catalogue, damage if verify else None))
    else:
        for line in lines_of(catalogue, every):
            click.echo(line)
        click.echo("")
        for line in damage_lines(damage):
            click.echo(line)
        if catalogue.manifest is None:
            click.echo("bytes: no manifest, so no checksums: integrity unknown")
        else:
            click.echo(_verdict(damage if verify else None, "bytes"))
    return WRONG if catalogue.problems or damage else FINE


def _verdict(damage: list[Damage] | None, what: str) -> str:
    if damage is None:
        return f"{what}: not compared with their checksums; --verify reads all of them"
    if damage:
        unread = sum(bool(one.unreadable) for one in damage)
        hit = len(damage) - unread
        parts = [f"{counted(hit, 'block')} {'is' if hit == 1 else 'are'} damaged"] * (hit > 0)
        parts += [f"{counted(unread, 'part')} could not be read"] * (unread > 0)
        return f"{what}: {', '.join(parts)}"
    return f"{what}: all present ones match their checksums"


def _verified(catalogue: Catalogue) -> list[Damage]:
    """Every block is read; a bar on stderr shows how far, if that is a terminal."""
    total = sum(file.expected or 0 for file in catalogue.files if file.size is not None)
    label = f"verifying {shown(catalogue.path.name)}"
    with click.progressbar(length=total, label=label, file=sys.stderr, hidden=_no_bar()) as bar:

        def damaged() -> Iterator[Damage]:
            for nbytes, damage in damage_of(catalogue):
                bar.update(nbytes)
                if damage is not None:
                    yield damage

        return list(damaged())


def _no_bar() -> bool:
    return not sys.stderr.isatty()


def _catalogue_json(catalogue: Catalogue, damage: list[Damage] | None) -> dict[str, Any]:
    made = catalogue.manifest
    fields: dict[str, Any] = {
        "path": str(catalogue.path),
        "complete": not catalogue.problems,
        "problems": catalogue.problems,
        "written": made and made.model_dump(exclude={"files", "aliases"}),
        "files": [dataclasses.asdict(file) for file in catalogue.files],
        "not_of_the_checkpoint": catalogue.strangers,
        "aliases": dict(catalogue.aliases),
        "tensors": {
            stem: {
                name: {"file": file, **stored._asdict()} for name, (file, stored) in some.items()
            }
            for stem, some in catalogue.groups.items()
        },
        "training": catalogue.training,
        "scalars": {
            stem: {name: str(v) if isinstance(v, complex) else v for name, v in some.items()}
            for stem, some in catalogue.scalars.items()
        },
    }
    if damage is not None:
        fields["damage"] = [dataclasses.asdict(one) for one in damage]
    return fields


# --- two -------------------------------------------------------------------------------------


def _compare_bytes(paths: tuple[Path, Path], as_json: bool) -> int:
    """``WRONG`` and what is damaged, if bytes of either are: no word on whether they are equal."""
    catalogues = [Catalogue.read(path) for path in paths]
    damage = [_verified(catalogue) for catalogue in catalogues]
    if any(damage) and as_json:
        fields = [[dataclasses.asdict(one) for one in some] for some in damage]
        _print_json({"paths": list(map(str, paths)), "equal": None, "damage": fields})
    if as_json:
        return WRONG if any(damage) else FINE
    for catalogue, some in zip(catalogues, damage, strict=True):
        title = f"bytes of {shown(catalogue.path)}"
        if catalogue.manifest is None:
            click.echo(f"{title}: no manifest, so no checksums: integrity unknown")
        else:
            click.echo(_verdict(some, title))
        for line in damage_lines(some):
            click.echo(line)
    return WRONG if any(damage) else FINE


def _compare(paths: tuple[Path, Path], look: Look) -> int:
    a, b = paths
    difference = compare(Catalogue.read(a), Catalogue.read(b), look.weights_only)
    if look.as_json:
        _print_json(_difference_json(difference, (str(a), str(b))))
    else:
        for line in difference_lines(difference, (str(a), str(b)), look.every):
            click.echo(line)
    return FINE if difference.is_empty else WRONG


def _difference_json(difference: Difference, names: tuple[str, str]) -> dict[str, Any]:
    def changes(some: Iterable[Change]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in change._asdict().items() if value is not ABSENT}
            for change in some
        ]

    return {
        "paths": names,
        "equal": difference.is_empty,
        "only": difference.only,
        "tensors": [one._asdict() for one in difference.tensors],
        "equal_tensors": difference.equal,
        "training": changes(difference.training),
        "files": changes(difference.files),
        "ties": changes(difference.ties),
        "only_tensors": difference.only_tensors,
    }
