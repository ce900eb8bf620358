"""The commands, their options and their help, without importing torch.

A command imports its implementation when it is called, so that ``--version``, ``--help``, a
misspelt option and completion answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.diagnostic_commands import COMMANDS
from shardwise.cli.doctor_command import doctor
from shardwise.cli.launch_commands import init, launch
from shardwise.cli.options import (
    COUNT,
    EXISTING_FILE,
    FILE,
    NUMBER,
    OVERRIDES,
    PATH,
    WITH_OVERRIDES,
)
from shardwise.cli.run_commands import report, watch
from shardwise.config.version import __version__

if TYPE_CHECKING:
    from shardwise.recipe.recipe import Recipe

DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="shardwise %(version)s")
def commands() -> None:
    """Fully sharded data-parallel training that can be planned, read and trusted."""


for _command in (*COMMANDS, doctor, launch, init, report, watch):
    commands.add_command(_command)


# --- train -----------------------------------------------------------------------------------

_INDENT: dict[str, Any] = {"subsequent_indent": " " * 38, "break_on_hyphens": False}


class _TrainCommand(click.Command):
    """A command whose help ends with every key of a recipe and its default, by section."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from shardwise.recipe.recipe import keys

        sections: dict[str, list[str]] = {}
        for key in keys():
            line = f"  {key.name}: {json.dumps(key.default)}"
            listed = all(word in key.sentence or word == key.default for word in key.values)
            text = key.sentence if listed else f"{key.sentence}; one of {', '.join(key.values)}"
            lines = wrap(text, formatter.width, initial_indent=f"{line:<36}  ", **_INDENT)
            sections.setdefault(key.name.split(".")[0], []).extend(lines)
        blocks = ("\b\n" + "\n".join(block) for block in sections.values())  # click keeps the lines
        self.epilog = "\b\nKeys of a recipe, and their defaults:\n\n" + "\n\n".join(blocks)
        super().format_epilog(ctx, formatter)


def _rank_and_step(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    if text is None:
        return None
    rank, separator, step = text.partition("@")
    if not (separator and rank.isdecimal() and step.isdecimal()):
        raise click.BadParameter(f"{text!r} does not have the form RANK@STEP, such as 1@80.")
    return int(rank), int(step)


@commands.command(
    "train",
    cls=_TrainCommand,
    short_help="Train a language model, sharded.",
    context_settings=WITH_OVERRIDES,
)
@click.argument("recipe", type=click.Path())
@click.option(
    "--nproc", type=COUNT, help="Processes to start on this machine, one per rank.  [default: 1]"
)
@click.option(
    "--restarts",
    type=NUMBER,
    help="How often to start all ranks again after one of them died.  [default: launch.restarts]",
)
@click.option(
    "--kill-rank",
    callback=_rank_and_step,
    metavar="RANK@STEP",
    help="Rehearse a crash: this rank kills itself at this step, once.",
)
@click.option(
    "--rehearse",
    is_flag=True,
    help="Run a small copy on two CPU ranks and on one, and compare; needs no other machine.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print each rank's local rank, device and host, and what shard() did.",
)
@click.option("--force", is_flag=True, help="Train, though the plan says that it cannot fit.")
@click.option(
    "--machines",
    type=EXISTING_FILE,
    help="What `shardwise plan --calibrate` wrote: for planned times beside measured ones.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    help="Seconds for which a rank waits for the others, at the start and in a step. "
    " [default: 1800]",
)
@OVERRIDES
def train(recipe: str, overrides: tuple[str, ...], rehearse: bool, **processes: Any) -> None:
    """Train the language model that RECIPE (YAML or TOML) describes.

    Any value of the recipe can be overridden: --optimizer.lr 3e-4 or optimizer.lr=3e-4.

    \b
    Examples:
      shardwise train demo --nproc 2         one of `shardwise recipe`
      shardwise train my.yaml --run.steps 50 --sharding.precision bf16
      shardwise train llama2-70b-lora --rehearse
      torchrun --nproc-per-node 2 -m shardwise.cli train my.yaml

    The run's folder then holds metrics.jsonl, loss.png, the recipe with every default filled in,
    checkpoints, and the model as safetensors with the tokenizer, which transformers loads as it is.

    \b
    The same command resumes a run that was stopped or killed, on any number of
    ranks. While it runs:
      kill -USR1 PID, or touch RUN/save      save and continue
      Ctrl-C, kill PID, or touch RUN/stop    save and exit with status 75
      Ctrl-C again                           exit immediately
    """
    parsed = _recipe(recipe, overrides)
    if rehearse:
        from shardwise.cli.rehearse import run_rehearsal

        run_rehearsal(parsed)
        return
    from shardwise.cli.train import run_train
    from shardwise.cli.train_options import TrainOptions

    run_train(parsed, (recipe, *overrides), TrainOptions(**processes))


def _recipe(path: str, overrides: tuple[str, ...]) -> Recipe:
    """The recipe; under a launcher its errors are printed once, not by every rank."""
    from shardwise.launch.error_files import told_by_launcher
    from shardwise.recipe.read import read_recipe

    processes = ("--nproc", "--restarts", "--kill-rank", "--rehearse")
    others = ("--verbose", "--force", "--machines", "--timeout", "--help")
    with told_by_launcher():
        return read_recipe(path, overrides, (*processes, *others))


# --- recipe ----------------------------------------------------------------------------------


@commands.command("recipe", short_help="Write a copy of a shipped recipe to start from.")
@click.argument("name", required=False)
@click.argument("file", required=False, type=FILE)
def recipe(name: str | None, file: Path | None) -> None:
    """Write a copy of the shipped recipe NAME to FILE, or list the recipes.

    FILE is NAME.yaml if it is left out; an existing file is not replaced.
    """
    from shardwise.recipe.shipped import shipped, write_copy

    if name is None:
        for each, path in shipped().items():
            click.echo(f"{each:<20} {path.read_text('utf-8').splitlines()[0].lstrip('# ')}")
        return
    file = file or Path(f"{name}.yaml")
    write_copy(name, file)
    click.echo(f"wrote {file}: shardwise train {quote(str(file))} --nproc 2")


# --- inspect ---------------------------------------------------------------------------------


@commands.command("inspect", short_help="Show the contents of a run or checkpoint.")
@click.argument("path", type=PATH)
@click.option("--verify", is_flag=True, help="Read every byte and compare it with its checksum.")
@click.option("--all", "list_all", is_flag=True, help="List every tensor; do not group layers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: Path, **options: bool) -> None:
    """Show the contents of a run, a checkpoint, a Hugging Face folder or a .safetensors file.

    \b
    Examples:
      shardwise inspect run                      the checkpoints of a run
      shardwise inspect run/step-100 --verify    one of them, every byte checked

    A run's checkpoints may lie in run or in run/checkpoints, where `shardwise train` puts them.

    \b
    Exit status: 0 if everything is complete;
                 1 if something is not complete, damaged or cannot be read, or a run has no complete
                   checkpoint;
                 2 if the path or an option is invalid.
    """
    from shardwise.cli.inspect import run_inspect

    run_inspect(path, **options)


# --- export ----------------------------------------------------------------------------------


@commands.command("export", short_help="Write a checkpoint as other files, dtypes or formats.")
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Cast floating-point weights to this dtype."
)
@click.option("--max-file-size", help="Most bytes in one file.  [default: 5GB]")
@click.option(
    "--with-optimizer/--weights-only",
    default=False,
    help="Include optimizer and training state.  [default: --weights-only]",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["hf", "dcp", "pt"]),
    default="hf",
    show_default=True,
    help="hf: safetensors; dcp: torch.distributed.checkpoint; pt: one file of torch.save.",
)
@click.option(
    "--trust-source",
    is_flag=True,
    help="Unpickle SOURCE without restrictions, which can run any code.",
)
@click.option(
    "--optimizer-file",
    type=PATH,
    help="PyTorch file with the optimizer's state, if SOURCE has none.",
)
@click.option("--optimizer-class", help="Such as AdamW, if a PyTorch SOURCE does not name it.")
@click.option(
    "--merge",
    type=PATH,
    help="Folder of a peft adapter, which is merged into SOURCE, its base model.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export at DESTINATION.")
def export(source: Path, destination: Path, **options: Any) -> None:
    """Convert SOURCE to DESTINATION, with a few megabytes of memory whatever its size.

    SOURCE is a checkpoint, a run (its newest complete checkpoint), a Hugging Face folder or a
    .safetensors file. The result is a folder that transformers loads directly, with a manifest;
    bytes that have a checksum are verified while they are read.

    SOURCE may also be a PyTorch file (.pt, .pth, .bin) or a torch.distributed.checkpoint folder.
    They hold pickles, which restricted unpicklers read. A pickle that these refuse can run
    arbitrary code: pass --trust-source only if you trust its author.

    \b
    Examples:
      shardwise export run model                          the weights, merged
      shardwise export run/step-100 model --dtype bfloat16 --max-file-size 2GB
      shardwise export run/step-100 other --with-optimizer
      shardwise export run/step-100 model.pt --format pt
      shardwise export base model --merge run/adapter     a LoRA adapter merged into its base
      shardwise export dcp-folder model --with-optimizer
      shardwise export fsdp.pt model --optimizer-file o.pt --optimizer-class AdamW --with-optimizer
    """
    from shardwise.cli.export import ExportArguments, run_export

    run_export(source, destination, ExportArguments(**options))
