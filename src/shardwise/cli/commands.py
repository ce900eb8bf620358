"""The commands, their options and their help, without importing torch.

A command imports its implementation when it is called, so that ``--version``, ``--help``, a
misspelt option and completion answer at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.train.config import Recipe

__all__ = ["commands"]

DTYPES = ("float32", "bfloat16", "float16", "float64")
CONTEXT_SETTINGS = {"max_content_width": 100}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardwise", message="%(package)s %(version)s")
def commands() -> None:
    """Fully sharded data-parallel training that can be planned, read and trusted."""


# --- train -----------------------------------------------------------------------------------

TRAIN = """\
Train the language model that RECIPE (YAML or TOML) describes.

Any value of the recipe can be overridden: --optimizer.lr 3e-4 or optimizer.lr=3e-4.

\b
Examples:
  shardwise train recipes/demo.yaml --nproc 2
  shardwise train recipes/demo.yaml --run.steps 50 --sharding.precision bf16
  torchrun --nproc-per-node 2 -m shardwise.cli train recipes/demo.yaml

\b
The run's folder then holds metrics.jsonl, loss.png, the recipe with every default filled in,
checkpoints, and the model as safetensors with the tokenizer, which transformers loads as it is.

\b
The same command resumes a run that was stopped or killed, on any number of ranks. While it runs:
  kill -USR1 PID, or touch RUN/save             save and continue
  Ctrl-C, kill PID, or touch RUN/stop           save and exit with status 75
  Ctrl-C again                                  exit immediately
"""


class _TrainCommand(click.Command):
    """A command whose help ends with every key of a recipe and its default, by section."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from shardwise.train.config import keys

        sections: dict[str, list[str]] = {}
        for key in keys():
            line = f"  {key.name}: {json.dumps(key.default)}"
            sections.setdefault(key.name.split(".")[0], []).append(f"{line:<36}  {key.sentence}")
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
    help=TRAIN,
    short_help="Train a language model, sharded.",
    context_settings={"ignore_unknown_options": True, **CONTEXT_SETTINGS},
)
@click.argument("recipe", type=click.Path())
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes to start on this machine, one per rank.  [default: 1]",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start all ranks again after one of them died.",
)
@click.option(
    "--kill-rank",
    callback=_rank_and_step,
    metavar="RANK@STEP",
    help="Rehearse a crash: this rank kills itself at this step, once.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Print each rank's local rank, device and host."
)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
def train(recipe: str, overrides: tuple[str, ...], **processes: Any) -> None:
    """The command; its help is ``TRAIN``."""
    parsed = _recipe(recipe, overrides)
    from shardwise.cli.train import LaunchOptions, run_train

    run_train(parsed, (recipe, *overrides), LaunchOptions(**processes))


def _recipe(path: str, overrides: tuple[str, ...]) -> Recipe:
    """The recipe; under a launcher its errors are printed once, not by every rank."""
    from shardwise.launch.error_files import write_error_file
    from shardwise.train.recipe import read_recipe

    try:
        return read_recipe(
            path, overrides, ("--nproc", "--restarts", "--kill-rank", "--verbose", "--help")
        )
    except ConfigError as error:
        if write_error_file(error):
            sys.exit(1)
        raise


# --- inspect ---------------------------------------------------------------------------------

INSPECT = """\
Show the contents of a run, a checkpoint, a Hugging Face folder or a .safetensors file.

With a second path, show where the two differ: names, shapes, values and training state. For a run
its newest complete checkpoint is compared.

\b
Examples:
  shardwise inspect run                      the checkpoints of a run
  shardwise inspect run/step-100 --verify    one of them, every byte checked
  shardwise inspect run/step-100 run/step-200 [--verify]

A run's checkpoints may lie in run or in run/checkpoints, where `shardwise train` puts them.

\b
Exit status: 0 if everything is complete, or the two are equal;
             1 if something is not complete, damaged or cannot be read, a run has no complete
               checkpoint, or the two differ;
             2 if the path or an option is invalid.
"""


@commands.command(
    "inspect",
    help=INSPECT,
    short_help="Show the contents of a checkpoint, or where two differ.",
    context_settings=CONTEXT_SETTINGS,
)
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("--verify", is_flag=True, help="Read every byte and compare it with its checksum.")
@click.option("--all", "list_all", is_flag=True, help="List every tensor; do not group layers.")
@click.option("--weights-only", is_flag=True, help="Compare parameters and buffers only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: Path, other: Path | None, **options: bool) -> None:
    """The command; its help is ``INSPECT``."""
    from shardwise.cli.inspect import InspectOptions, run_inspect

    run_inspect(path, other, InspectOptions(**options))


# --- convert-config --------------------------------------------------------------------------

CONVERT_CONFIG = """\
Say what each key of FILE means here, and write a recipe.

FILE is Accelerate's YAML, fsdp_config.json of transformers or Gaudi, arguments of transformers'
Trainer, or lines such as FSDP_VERSION=2. If keys contradict each other, nothing is written.
"""


@commands.command(
    "convert-config",
    help=CONVERT_CONFIG,
    short_help="Convert another library's sharding options.",
    context_settings=CONTEXT_SETTINGS,
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--from", "source", help="The dialect of FILE, if not by its keys.")
@click.option("--to", default="recipe", show_default=True, help="The dialect to write.")
@click.option("--output", type=click.Path(path_type=Path), help="The file to write.")
@click.option("--strict", is_flag=True, help="A key that is not used is an error.")
@click.option("--overwrite", is_flag=True, help="Replace the file to write.")
def convert_config(file: Path, **options: Any) -> None:
    """The command; its help is ``CONVERT_CONFIG``."""
    from shardwise.cli.convert_config import ConvertOptions, run_convert_config

    run_convert_config(file, ConvertOptions(**options))


# --- export ----------------------------------------------------------------------------------

EXPORT = """\
Convert SOURCE to DESTINATION, with a few megabytes of memory whatever its size.

SOURCE is a checkpoint, a run (its newest complete checkpoint), a Hugging Face folder or a
.safetensors file. The result is a folder that transformers loads directly, with a manifest; bytes
that have a checksum are verified while they are read.

SOURCE may also be a PyTorch file (.pt, .pth, .bin) or a torch.distributed.checkpoint folder. They
hold pickles, which restricted unpicklers read. A pickle that these refuse can run arbitrary code:
pass --trust-source only if you trust its author.

\b
Examples:
  shardwise export run model                          the weights, merged
  shardwise export run/step-100 model --dtype bfloat16 --max-file-size 2GB
  shardwise export run/step-100 other --with-optimizer
  shardwise export run/step-100 model.pt --format pt
  shardwise export dcp-folder model --with-optimizer
  shardwise export fsdp.pt model --optimizer-file optim.pt --optimizer-class AdamW --with-optimizer
"""


@commands.command(
    "export",
    help=EXPORT,
    short_help="Write a checkpoint as other files, dtypes or formats.",
    context_settings=CONTEXT_SETTINGS,
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
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
    type=click.Path(path_type=Path),
    help="PyTorch file with the optimizer's state, if SOURCE has none.",
)
@click.option("--optimizer-class", help="Such as AdamW, if a PyTorch SOURCE does not name it.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export at DESTINATION.")
def export(source: Path, destination: Path, **options: Any) -> None:
    """The command; its help is ``EXPORT``."""
    from shardwise.cli.export import ExportArguments, run_export

    run_export(source, destination, ExportArguments(**options))


# --- doctor ----------------------------------------------------------------------------------

DOCTOR = """\
Show what this machine has: versions, devices, backends, environment.

With --conformance: run the engine on its devices and compare with one process. One line for each
check: collectives, sums, dtypes, training under every strategy, saving and loading.

\b
Examples:
  shardwise doctor
  shardwise doctor --conformance --json result.json
  torchrun --nnodes 2 … -m shardwise.cli doctor --conformance

\b
Exit status: 0 if all is well; 1 if something is missing, or a check did not pass.
"""


@commands.command(
    "doctor",
    help=DOCTOR,
    short_help="Show what this machine has, and check the engine on it.",
    context_settings=CONTEXT_SETTINGS,
)
@click.option("--conformance", is_flag=True, help="Check the engine on the devices that are here.")
@click.option("--device", help="Such as cpu.  [default: what torch sees]")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Ranks of --conformance.  [default: one for each device, two on a CPU]",
)
@click.option(
    "--json", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here, too."
)
def doctor(**wanted: Any) -> None:
    """The command; ``DOCTOR`` is what people read."""
    from shardwise.cli.doctor import Examination, run_doctor

    run_doctor(Examination(**wanted))


# --- trace -----------------------------------------------------------------------------------

MESH = click.option("--mesh", nargs=2, type=int, metavar="COPIES RANKS", help="Of a hybrid.")
TRACE = """\
Show one training step of MODEL as a program in which every collective is a line.

No process group, no device and no memory for the model are needed: torch traces the module, and
collectives stand where the schedule has them, which is the one that runs.

\b
MODEL may be
  recipe.yaml         the decoder that `shardwise train` would build
  folder              one with a config.json of transformers
  file.py:function    a function that returns a module and its input
  (nothing)           Linear(Tanh(Linear(x))), the model of the tutorial on ZeRO-2

\b
Examples:
  shardwise trace --strategy shard_grad_op
  shardwise trace --stage synchronize
  shardwise trace model.py:build --world 1024 --rank 7
  shardwise trace --diff hybrid_full full_shard --mesh 2 4
"""


@commands.command(
    "trace", help=TRACE, short_help="Show one step as a program.", context_settings=CONTEXT_SETTINGS
)
@click.argument("model", required=False)
@click.option("--strategy", default="full_shard", show_default=True, help="As for shard().")
@click.option("--world", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks.")
@MESH
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose.")
@click.option("--stage", help="Show this stage, such as functional or 'sort waits'.")
@click.option("--diff", nargs=2, metavar="STRATEGY STRATEGY", help="Compare two strategies.")
def trace(model: str | None, **options: Any) -> None:
    """The command; its help is ``TRACE``."""
    from shardwise.cli.trace import Asked, run_trace

    run_trace(model, Asked(**options))


# --- explain ---------------------------------------------------------------------------------

OFFLOADS = click.Choice(["parameters", "gradients", "optimizer"])
OPTIMIZERS = click.Choice(["adamw", "sgd", "momentum"])
EXPLAIN = """\
Explain WORD of the field in a few sentences, with numbers of two ranks where they help.

Without a word: all words. `memory` and `step` are about a MODEL, which is named as for
`shardwise trace`: what each strategy keeps on a rank and sends, and the events of one step.

\b
Examples:
  shardwise explain all-gather
  shardwise explain memory recipes/demo.yaml --ranks 8
  shardwise explain step --strategy shard_grad_op
"""


@commands.command(
    "explain",
    help=EXPLAIN,
    short_help="Explain a word, with numbers.",
    context_settings=CONTEXT_SETTINGS,
)
@click.argument("word", required=False)
@click.argument("model", required=False)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks.")
@MESH
@click.option("--strategy", default="full_shard", show_default=True, help="Of `step`.")
@click.option("--optimizer", type=OPTIMIZERS, default="adamw", help="[default: adamw]")
@click.option("--offload", type=OFFLOADS, multiple=True, help="What is in host memory.")
@click.option("--json", "as_json", is_flag=True, help="Print the table of `memory` as JSON.")
def explain(word: str | None, model: str | None, **options: Any) -> None:
    """The command; its help is ``EXPLAIN``."""
    from shardwise.cli.explain import About, run_explain

    run_explain(word, model, About(**options))
