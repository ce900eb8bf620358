"""``shardwise inspect PATH``: the contents of a run or checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from shardwise.checkpoint.reader import OF_TORCH
from shardwise.cli.format_checkpoint import format_checkpoint, format_damage, format_run
from shardwise.cli.format_names import escape, escape_lines
from shardwise.cli.runs import Listed, Run, folder_of_run, meant, survey
from shardwise.convert.catalogue import SUFFIX, Catalogue, Damage, damage_of
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.train.records import plural

EXIT_OK, EXIT_PROBLEM, EXIT_ERROR = 0, 1, 2


def run_inspect(path: Path, *, verify: bool, list_all: bool, as_json: bool) -> None:
    """``shardwise inspect``; exits with ``EXIT_OK``, ``EXIT_PROBLEM`` or ``EXIT_ERROR``."""
    try:
        path = meant(path.expanduser())
        if (folder := folder_of_run(path)) is None:
            status = _show_checkpoint(path, verify, list_all, as_json)
        elif list_all:
            raise ConfigError(
                "--all lists the tensors of a checkpoint, and this is a run. Pass one of its "
                "checkpoints, such as RUN/latest."
            )
        else:
            status = _show_run(survey(folder), verify, as_json)
    except ShardwiseError as error:
        click.echo(f"error: {escape_lines(str(error))}", err=True)
        sys.exit(EXIT_ERROR)
    except RecursionError:
        click.echo(f"error: JSON in a file of {path} is nested too deeply to be shown", err=True)
        sys.exit(EXIT_ERROR)
    sys.exit(status)


def _print_json(value: object) -> None:
    """Print ASCII, so that names are escaped; JSON has no infinity, so it is printed as text."""
    click.echo(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- a run -----------------------------------------------------------------------------------


def _show_run(run: Run, verify: bool, as_json: bool) -> int:
    broken = {listed.name: listed.problem for listed in run.checkpoints if listed.problem}
    damage = {listed.name: _damage_of(listed) for listed in run.checkpoints if verify}
    if as_json:
        _print_json(_run_json(run, damage if verify else None))
    else:
        click.echo("\n".join(format_run(run)))
        for name, damaged in damage.items():
            if name not in broken:
                click.echo(_verdict(damaged, f"bytes of {escape(name)}"))
            for line in format_damage(damaged):
                click.echo(line)
    return EXIT_PROBLEM if broken or any(damage.values()) or not run.checkpoints else EXIT_OK


def _damage_of(listed: Listed) -> list[Damage]:
    """The damage of a run's checkpoint; none if it cannot be read, which is its ``problem``."""
    try:
        return _verified(Catalogue.read(listed.path))
    except CheckpointError:
        if listed.problem:
            return []
        raise


def _run_json(run: Run, damage: dict[str, list[Damage]] | None) -> dict[str, Any]:
    checkpoints = []
    for listed in run.checkpoints:
        manifest, name = listed.manifest, listed.name
        entry: dict[str, Any] = {
            "name": name,
            "step": listed.step,
            "bytes": listed.nbytes,
            "complete": not listed.problem,
            "problem": listed.problem,
            "latest": name == run.latest,
            "written": manifest and manifest.model_dump(exclude={"files", "aliases"}),
        }
        if damage is not None:
            entry["damage"] = [dataclasses.asdict(leftover) for leftover in damage[name]]
        checkpoints.append(entry)
    leftovers = [
        {"name": leftover.path.name, "kind": leftover.kind, "being_written": written}
        for leftover, written in run.leftovers
    ]
    return {
        "folder": str(run.folder),
        "latest": run.latest,
        "checkpoints": checkpoints,
        "left": leftovers,
    }


# --- a checkpoint ----------------------------------------------------------------------------


def _show_checkpoint(path: Path, verify: bool, list_all: bool, as_json: bool) -> int:
    catalogue = Catalogue.read(path)
    if catalogue.problems and path.is_file() and path.suffix not in (SUFFIX, *OF_TORCH):
        raise ConfigError(
            f"{path} is not a checkpoint. Pass a run, a checkpoint, a Hugging Face folder or a "
            ".safetensors file."
        )
    damage = _verified(catalogue) if verify else []
    if as_json:
        _print_json(_catalogue_json(catalogue, damage if verify else None))
    else:
        lines = [*format_checkpoint(catalogue, list_all), "", *format_damage(damage)]
        click.echo("\n".join(lines))
        if catalogue.manifest is None:
            click.echo("bytes: no manifest, so no checksums: integrity unknown")
        else:
            click.echo(_verdict(damage if verify else None, "bytes"))
    return EXIT_PROBLEM if catalogue.problems or damage else EXIT_OK


def _verdict(damage: list[Damage] | None, subject: str) -> str:
    if damage is None:
        return f"{subject}: not verified; --verify compares all of them with their checksums"
    if damage:
        unread = sum(bool(file.unreadable) for file in damage)
        wrong = len(damage) - unread
        parts = [f"{plural(wrong, 'file')} {'is' if wrong == 1 else 'are'} damaged"] * (wrong > 0)
        parts += [f"{plural(unread, 'file')} could not be read"] * (unread > 0)
        return f"{subject}: {', '.join(parts)}"
    return f"{subject}: all present ones match their checksums"


def _verified(catalogue: Catalogue) -> list[Damage]:
    """Read and verify every block, with a progress bar on stderr if that is a terminal."""
    total = sum(file.expected or 0 for file in catalogue.files if file.size is not None)
    label = f"verifying {escape(catalogue.path.name)}"
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=total, label=label, file=sys.stderr, hidden=hidden) as bar:

        def damaged() -> Iterator[Damage]:
            for nbytes, damage in damage_of(catalogue):
                bar.update(nbytes)
                if damage is not None:
                    yield damage

        return list(damaged())


def _catalogue_json(catalogue: Catalogue, damage: list[Damage] | None) -> dict[str, Any]:
    manifest = catalogue.manifest
    fields: dict[str, Any] = {
        "path": str(catalogue.path),
        "complete": not catalogue.problems,
        "problems": catalogue.problems,
        "written": manifest and manifest.model_dump(exclude={"files", "aliases"}),
        "files": [dataclasses.asdict(file) for file in catalogue.files],
        "not_of_the_checkpoint": catalogue.strangers,
        "aliases": dict(catalogue.aliases),
        "tensors": {
            stem: {
                name: {"file": file, **stored._asdict()} for name, (file, stored) in tensors.items()
            }
            for stem, tensors in catalogue.groups.items()
        },
        "training": catalogue.training,
        "scalars": {
            stem: {name: str(v) if isinstance(v, complex) else v for name, v in tensors.items()}
            for stem, tensors in catalogue.scalars.items()
        },
    }
    if damage is not None:
        fields["damage"] = [dataclasses.asdict(block) for block in damage]
    return fields
