"""``shardwise export SOURCE DESTINATION``: the same weights in other files, dtypes or formats."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
import torch

from shardwise.checkpoint import training_state
from shardwise.checkpoint.reader import OF_TORCH, CheckpointReader
from shardwise.cli.format_names import escape
from shardwise.cli.other_libraries import without_their_noise
from shardwise.cli.runs import checkpoint_of
from shardwise.convert.export import CONFIG, TOKENIZER, ExportOptions, export, export_torch_file
from shardwise.convert.writer import Converted, Destination, workplace
from shardwise.errors import ConfigError
from shardwise.plan.printed import size
from shardwise.train.records import plural

FileFormat = Literal["hf", "dcp", "pt"]
MAX_SIZE = 1 << 62  # bytes
PEFT = "base_model.model."  # begins the names in a model with an adapter
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")  # as Hugging Face numbers files
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """``"5GB" → 5_000_000_000``, ``"64MiB" → 67_108_864``.

    Raises:
        ConfigError: it is not a size, or not between one byte and 4 EiB.
    """
    match = _SIZE.fullmatch(text.strip())
    power = " KMGT".index((match[2] or " ").upper()) if match else 0
    factor = 1024 if match and match[3] else 1000
    number = int(float(match[1]) * factor**power) if match else 0
    if not 1 <= number < MAX_SIZE:
        raise ConfigError(f"--max-file-size is {text!r}; pass a size such as 5GB or 512MiB.")
    return number


@dataclass(frozen=True)
class ExportArguments:
    """The options of ``shardwise export``; ``None`` where one was not given."""

    dtype: str | None = None
    max_file_size: str | None = None
    with_optimizer: bool = False
    file_format: FileFormat = "hf"
    trust_source: bool = False
    optimizer_file: Path | None = None
    optimizer_class: str | None = None
    overwrite: bool = False
    merge: Path | None = None  # an adapter's folder

    @property
    def options(self) -> ExportOptions:
        size = ExportOptions.max_file_size
        return ExportOptions(
            dtype=None if self.dtype is None else getattr(torch, self.dtype),
            max_file_size=parse_size(self.max_file_size) if self.max_file_size else size,
            with_optimizer=self.with_optimizer,
            overwrite=self.overwrite,
        )

    @property
    def torch_only(self) -> list[str]:
        """The given options that apply to a PyTorch source only."""
        options_of_torch = {
            "--trust-source": self.trust_source,
            "--optimizer-file": self.optimizer_file is not None,
            "--optimizer-class": self.optimizer_class is not None,
        }
        return [name for name, is_given in options_of_torch.items() if is_given]


def run_export(source: Path, destination: Path, arguments: ExportArguments) -> None:
    """``shardwise export``.

    Raises:
        ShardwiseError: the options do not go together, or reading or writing failed.
    """
    _check_options(arguments)
    source, destination = source.expanduser(), destination.expanduser()
    _check_destination(destination, arguments.options, arguments.file_format)
    _check_not_a_part(source)
    with without_their_noise(), _as_checkpoint(source, destination, arguments) as path:
        if arguments.file_format == "dcp":
            _to_dcp(path, destination, arguments.options)
        else:
            _to_files(path, source, destination, arguments)


def _check_options(arguments: ExportArguments) -> None:
    """Raises ``ConfigError`` for options that this format does not support."""
    file_format = arguments.file_format
    if file_format == "dcp" and (arguments.dtype is not None or arguments.overwrite):
        raise ConfigError(
            "--format dcp does not support --dtype and --overwrite: it writes the stored dtypes to "
            "a new folder. Export with --dtype first, then export the result as dcp."
        )
    if file_format != "hf" and arguments.merge is not None:
        raise ConfigError(f"--format {file_format} does not support --merge. Merge first.")
    if file_format != "hf" and arguments.max_file_size is not None:
        raise ConfigError(
            f"--format {file_format} does not support --max-file-size, which is for safetensors. "
            "Leave it out."
        )
    if file_format == "pt" and arguments.with_optimizer:
        raise ConfigError(
            "--format pt writes weights only. Leave --with-optimizer out, or choose another "
            "--format."
        )


def _check_destination(destination: Path, options: ExportOptions, file_format: FileFormat) -> None:
    """Check before anything is read: converting a PyTorch source may take an hour."""
    if file_format == "hf" and destination.suffix in OF_TORCH:
        raise ConfigError(
            f"{destination.name} has the suffix of a PyTorch file, and --format hf writes a folder "
            "of safetensors. Pass --format pt, or name a folder."
        )
    Destination(
        destination.absolute(), file_format, options.with_optimizer, options.overwrite
    ).check()


def _check_not_a_part(source: Path) -> None:
    """Raises ``ConfigError`` for one of several files that are one model."""
    match = _PART.fullmatch(source.name)
    others = int(match[3]) - 1 if match and source.is_file() else 0
    if not match or not others:
        return
    if source.suffix in OF_TORCH:
        files = f"sorted(glob({str(source.with_name(match[1]))!r} + '-*-of-{match[3]}{match[4]}'))"
        todo = (
            "Convert all in Python: from glob import glob; from shardwise.convert.dcp_import "
            f"import import_checkpoint; import_checkpoint({files}, DESTINATION)"
        )
    else:
        todo = f"Name their folder: shardwise export {source.parent} DESTINATION"
    raise ConfigError(
        f"{source} is file {int(match[2])} of {int(match[3])} of one model, so the tensors of "
        f"{plural(others, 'other file')} would be missing. Nothing was written. {todo}"
    )


def _is_torch_source(source: Path) -> bool:
    """Is it a PyTorch file or a DCP folder? A run's folder may be called run.ckpt."""
    return (source.suffix in OF_TORCH and source.is_file()) or (source / ".metadata").exists()


@contextmanager
def _as_checkpoint(source: Path, destination: Path, arguments: ExportArguments) -> Iterator[Path]:
    """The checkpoint at ``source``; a PyTorch source is converted to a temporary one first."""
    if not _is_torch_source(source):
        if arguments.torch_only:
            raise ConfigError(
                f"{arguments.torch_only[0]} is for PyTorch files, and {source} is not one. Leave "
                "it out."
            )
        yield checkpoint_of(source)
        return
    from shardwise.convert.dcp_import import import_checkpoint

    with workplace(destination.absolute()) as folder:
        sources = [source, *filter(None, [arguments.optimizer_file])]
        imported = folder / "imported"
        left_out = None if arguments.with_optimizer else ""
        of_class = arguments.optimizer_class or left_out
        converted = import_checkpoint(sources, imported, arguments.trust_source, of_class)
        if arguments.with_optimizer and not (imported / training_state.NAME).exists():
            raise ConfigError(
                f"{source} holds weights, and no optimizer state. Export it without "
                "--with-optimizer, or name the file that has it with --optimizer-file."
            )
        _print_left_out(converted.left_out)
        yield imported


def _to_dcp(path: Path, destination: Path, options: ExportOptions) -> None:
    from shardwise.convert.dcp_export import export_dcp

    result = export_dcp(path, destination, options.with_optimizer)
    _print_left_out(result.left_out)
    tensors = plural(result.tensors, "tensor")
    click.echo(f"wrote    {escape(result.path)}: {tensors}, {size(result.nbytes)}")


def _to_files(path: Path, given: Path, destination: Path, arguments: ExportArguments) -> None:
    options, to = arguments.options, arguments.file_format
    write: Any = export_torch_file if to == "pt" else export
    hidden, label = not sys.stderr.isatty(), f"writing {escape(destination.name)}"
    with CheckpointReader.open(path) as source:
        if to == "hf" and not options.with_optimizer:
            _check_whole(source)
        if arguments.merge is not None:
            from shardwise.hf.merge import merged_weights

            adapter = arguments.merge
            tokenizer = {
                n: (adapter / n).read_bytes() for n in TOKENIZER if (adapter / n).is_file()
            }
            changed = merged_weights(source, adapter)
            write = partial(export, changed=changed, tokenizer=tokenizer)
        with click.progressbar(length=1, label=label, file=sys.stderr, hidden=hidden) as bar:

            def progress(more: int, total: int) -> None:
                bar.length = total
                bar.update(more)

            result = write(source, destination, options, progress)
        about = _source_line(source, given), *_tie_warning(source, to)
        click.echo("\n".join(_format_result(result, to, *about)))


def _check_whole(source: CheckpointReader) -> None:
    """Raises ``ConfigError`` for an adapter, whose weights alone are no model."""
    names = [name for name in source.weights() if name.startswith(PEFT)]
    if names and (source.has(CONFIG) or source.has("adapter_config.json")):
        raise ConfigError(
            f"{source.folder} holds an adapter and not a whole model: "
            f"{len(names):,} tensors such as {names[0]}. For peft, take adapter/ in the run's "
            "folder; for plain weights, run shardwise export BASE DESTINATION --merge RUN/adapter."
        )


def _source_line(source: CheckpointReader, given: Path) -> str:
    """The resolved path of the source, and whether its bytes were verified."""
    if _is_torch_source(given):
        return f"from     {escape(given)}, a PyTorch source without checksums: nothing was verified"
    name = given.absolute() if given.is_file() else source.folder
    if source.manifest is None:
        return f"from     {escape(name)}, which has no manifest, so nothing was verified"
    return f"from     {escape(name)}, all bytes read match their checksums"


def _tie_warning(source: CheckpointReader, file_format: FileFormat) -> Iterator[str]:
    """A Hugging Face folder does not list the names of tied weights, as a manifest does."""
    if file_format == "pt" and source.manifest is None and source.has(CONFIG):
        config = source.json(CONFIG)
        if isinstance(config, dict) and config.get("tie_word_embeddings"):
            yield (
                "tied     config.json has tie_word_embeddings: like the source, the file has tied "
                "weights under one name; call model.tie_weights() after loading"
            )


def _format_result(result: Converted, file_format: str, *source: str) -> Iterator[str]:
    tensors, files = plural(result.tensors, "tensor"), plural(len(result.files), "file")
    yield f"wrote    {escape(result.path)}: {tensors}, {size(result.nbytes)} in {files}"
    yield from source
    if result.cast:
        yield f"cast     {plural(len(result.cast), 'tensor')}"
    if result.small:
        yield f"beside   {', '.join(map(escape, result.small))}"
    if result.left_out:
        yield f"left out {', '.join(map(escape, result.left_out))}"
    if file_format == "hf" and CONFIG not in result.small:
        yield "missing  config.json: without it transformers does not know the model's class"


def _print_left_out(names: tuple[str, ...]) -> None:
    if names:
        first = ", ".join(map(escape, names[:8])) + (", …" if len(names) > 8 else "")
        click.echo(f"left out {len(names):,} that the target format cannot hold: {first}")
