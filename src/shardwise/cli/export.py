"""``shardwise export SOURCE DESTINATION``: the same weights in other files, dtypes or formats."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import torch

from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.run_folder import checkpoint_of
from shardwise.cli.folded import shown
from shardwise.convert.catalogue import OF_TORCH
from shardwise.convert.companions import CONFIG
from shardwise.convert.destination import Destination, workplace
from shardwise.convert.export import ExportOptions, export, export_torch_file
from shardwise.convert.writer import Converted
from shardwise.errors import ConfigError
from shardwise.listing import size

__all__ = ["Wanted", "nbytes_of", "run_export"]

Form = Literal["hf", "dcp", "pt"]
UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
LARGEST = 1 << 62  # bytes; more is in no file
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)


def nbytes_of(text: str) -> int:
    """``"5GB" → 5_000_000_000``, ``"64MiB" → 67_108_864``.

    Raises:
        ConfigError: it is no size, less than one byte, or more than any file has.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = (match[2] or "").upper() if match else ""
    factor = 1024 ** " KMGT".index(unit) if match and match[3] else UNITS[unit]
    number = int(float(match[1]) * factor) if match else 0
    if not 1 <= number < LARGEST:
        raise ConfigError(f"--max-file-size is {text!r}; say a size such as 5GB or 512MiB.")
    return number


@dataclass(frozen=True)
class Wanted:
    """The options of ``shardwise export``; ``None`` where one was not given."""

    dtype: str | None = None
    max_file_size: str | None = None
    with_optimizer: bool = False
    form: Form = "hf"
    trust_source: bool = False
    optimizer_file: Path | None = None
    optimizer_class: str | None = None
    overwrite: bool = False

    @property
    def options(self) -> ExportOptions:
        size = ExportOptions.max_file_size
        return ExportOptions(
            dtype=None if self.dtype is None else getattr(torch, self.dtype),
            max_file_size=nbytes_of(self.max_file_size) if self.max_file_size else size,
            with_optimizer=self.with_optimizer,
            overwrite=self.overwrite,
        )

    @property
    def for_torch(self) -> list[str]:
        """Those that were given and that only a PyTorch source knows."""
        given = {
            "--trust-source": self.trust_source,
            "--optimizer-file": self.optimizer_file is not None,
            "--optimizer-class": self.optimizer_class is not None,
        }
        return [name for name, is_given in given.items() if is_given]


def run_export(source: Path, destination: Path, wanted: Wanted) -> None:
    """``shardwise export``; raises what the parts of it raise."""
    options, form = wanted.options, wanted.form
    _check_options(options, form, wanted.max_file_size is not None)
    source, destination = source.expanduser(), destination.expanduser()
    _check_destination(destination, options, form)
    with _ours(source, destination, wanted) as path:
        if form == "dcp":
            _to_dcp(path, destination, options)
        else:
            _to_files(path, source, destination, options, form)


def _check_options(options: ExportOptions, form: str, sized: bool) -> None:
    """Raises ``ConfigError`` for options that this format has no use for."""
    if form == "dcp" and (options.dtype is not None or options.overwrite):
        raise ConfigError(
            "--format dcp writes what is stored, to a folder that is not there yet: it knows no "
            "--dtype and no --overwrite. Export with --dtype first, and that result as dcp."
        )
    if form != "hf" and sized:
        raise ConfigError(
            f"--format {form} knows no --max-file-size: it is for safetensors. Leave it out."
        )
    if form == "pt" and options.with_optimizer:
        raise ConfigError(
            "a single file holds weights alone. Leave --with-optimizer out, or choose another "
            "--format."
        )


def _check_destination(destination: Path, options: ExportOptions, form: Form) -> None:
    """Before anything is read: a source of torch may take an hour."""
    if form == "hf" and destination.suffix in OF_TORCH:
        raise ConfigError(
            f"{destination.name} is called as a file of torch is, and a folder of safetensors "
            "would be written. Pass --format pt, or name a folder."
        )
    Destination(destination.absolute(), form, options.with_optimizer, options.overwrite).check()


def _is_of_torch(source: Path) -> bool:
    """By its name, and by what it is: a run's folder may be called run.ckpt."""
    return (source.suffix in OF_TORCH and source.is_file()) or (source / ".metadata").exists()


@contextmanager
def _ours(source: Path, destination: Path, wanted: Wanted) -> Iterator[Path]:
    """The checkpoint that ``source`` means; a PyTorch one is converted first, and goes later."""
    if not _is_of_torch(source):
        if wanted.for_torch:
            raise ConfigError(
                f"{' and '.join(wanted.for_torch)} is for PyTorch files, and {source} is none. "
                "Leave it out."
            )
        yield checkpoint_of(source)
        return
    from shardwise.convert.dcp_import import import_checkpoint

    with workplace(destination.absolute()) as folder:
        sources = [source, *filter(None, [wanted.optimizer_file])]
        between = folder / "imported"
        made = import_checkpoint(sources, between, wanted.trust_source, wanted.optimizer_class)
        _say_left_out(made.left_out)
        yield between


def _to_dcp(path: Path, destination: Path, options: ExportOptions) -> None:
    from shardwise.convert.dcp_export import export_dcp

    made = export_dcp(path, destination, options.with_optimizer)
    _say_left_out(made.left_out)
    click.echo(f"wrote    {shown(made.path)}: {made.tensors:,} tensors, {size(made.nbytes)}")


def _to_files(
    path: Path, given: Path, destination: Path, options: ExportOptions, form: Form
) -> None:
    write = export_torch_file if form == "pt" else export
    hidden, label = not sys.stderr.isatty(), f"writing {shown(destination.name)}"
    with CheckpointReader.open(path) as source:
        with click.progressbar(length=1, label=label, file=sys.stderr, hidden=hidden) as bar:

            def progress(more: int, total: int) -> None:
                bar.length = total
                bar.update(more)

            made = write(source, destination, options, progress)
        for line in _lines(made, form, _origin(source, given), *_ties(source, form)):
            click.echo(line)


def _origin(source: CheckpointReader, given: Path) -> str:
    """Where it came from, by a name that lasts, and what vouched for its bytes."""
    if _is_of_torch(given):
        return f"from     {shown(given)}, of torch, which has no checksums: nothing was checked"
    name = given.absolute() if given.is_file() else source.folder
    if source.manifest is None:
        return f"from     {shown(name)}, which has no manifest, so nothing was checked"
    return f"from     {shown(name)}, what was read compared with its checksums"


def _ties(source: CheckpointReader, form: Form) -> Iterator[str]:
    """A manifest tells further names of tied weights; a Hugging Face folder leaves it to code."""
    if form == "pt" and source.manifest is None and source.has(CONFIG):
        config = source.json(CONFIG)
        if isinstance(config, dict) and config.get("tie_word_embeddings"):
            yield (
                "tied     config.json says tie_word_embeddings: the file has such weights under "
                "one name, as its source; call model.tie_weights() after loading"
            )


def _lines(made: Converted, form: str, *source: str) -> Iterator[str]:
    files = f"{len(made.files):,} file{'s' * (len(made.files) != 1)}"
    yield f"wrote    {shown(made.path)}: {made.tensors:,} tensors, {size(made.nbytes)} in {files}"
    yield from source
    if made.cast:
        yield f"cast     {len(made.cast):,} tensors"
    if made.small:
        yield f"beside   {', '.join(map(shown, made.small))}"
    if made.left_out:
        yield f"left out {', '.join(map(shown, made.left_out))}"
    if form == "hf" and CONFIG not in made.small:
        yield "missing  config.json, without which transformers does not know the model's class"


def _say_left_out(names: tuple[str, ...]) -> None:
    if names:
        some = ", ".join(map(shown, names[:8])) + (", …" if len(names) > 8 else "")
        click.echo(f"left out {len(names):,} that have no place in the result: {some}")
