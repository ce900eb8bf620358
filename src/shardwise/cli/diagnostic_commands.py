"""Commands about programs, models and machines; they train nothing and change no checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardwise.cli.options import (
    COUNT,
    EXISTING_FILE,
    FILE,
    LENGTH,
    NUMBER,
    OVERRIDES,
    PATH,
    PICTURE,
    WITH_OVERRIDES,
)

# --- convert-config --------------------------------------------------------------------------


@click.command("convert-config", short_help="Convert another library's sharding options.")
@click.argument("words", nargs=-1, required=True, metavar="FILE | -- COMMAND")
@click.option("--from", "source", help="The dialect of FILE, if not by its keys.")
@click.option("--to", default="recipe", show_default=True, help="The dialect to write.")
@click.option("--output", type=PATH, help="The file to write.")
@click.option("--strict", is_flag=True, help="A key that is not used is an error.")
@click.option("--overwrite", is_flag=True, help="Replace the file to write.")
def convert_config(words: tuple[str, ...], **options: Any) -> None:
    """Say what each key of FILE means here, and write a recipe.

    FILE is Accelerate's YAML, fsdp_config.json of transformers or Gaudi, arguments of transformers'
    Trainer, lines such as FSDP_VERSION=2, a command line of a fine-tuning script, or a program
    (.py, which is not run). If keys contradict each other, nothing is written.

    \b
    Examples:
      shardwise convert-config fsdp_config.json --to accelerate
      shardwise convert-config run.sh --output recipe.yaml
      shardwise convert-config -- python run_clm.py --learning_rate 4e-4 --num_train_epochs 2
    """
    from shardwise.cli.convert_config import run_convert_config

    run_convert_config(words, **options)


# --- trace -----------------------------------------------------------------------------------

MESH = click.option("--mesh", nargs=2, type=COUNT, metavar="COPIES RANKS", help="Of a hybrid.")


@click.command("trace", short_help="Show one step as a program.")
@click.argument("model", required=False)
@click.option("--strategy", help="As for shard().  [default: full_shard]")
@click.option("--world", type=COUNT, help="Ranks.  [default: the mesh's, or 2]")
@MESH
@click.option("--rank", type=NUMBER, default=0, show_default=True, help="Whose.")
@click.option("--stage", help="Show this stage, such as functional or 'sort waits'.")
@click.option("--diff", nargs=2, metavar="STRATEGY STRATEGY", help="Compare two strategies.")
def trace(model: str | None, **options: Any) -> None:
    """Show one training step of MODEL as a program in which every collective is a line.

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
    from shardwise.cli.trace import run_trace

    for other in ("strategy", "stage"):
        if options["diff"] and options[other]:
            raise click.UsageError(f"--{other} and --diff exclude each other; pass one.")
    run_trace(model, **options)


# --- explain ---------------------------------------------------------------------------------

OFFLOADS = click.Choice(["none", "optimizer", "everything"])
OPTIMIZERS = click.Choice(["adamw", "adamw_8bit", "sgd", "momentum"])


@click.command("explain", short_help="Explain a word, with numbers.")
@click.argument("word", required=False)
@click.argument("model", required=False)
@click.option("--ranks", type=COUNT, help="Ranks.  [default: the mesh's, or 2]")
@MESH
@click.option("--strategy", help="Of `step`.  [default: a recipe's, or full_shard]")
@click.option("--optimizer", type=OPTIMIZERS, help="[default: a recipe's, or adamw]")
@click.option("--offload", type=OFFLOADS, help="What is in host memory.")
@click.option(
    "--accumulation",
    type=COUNT,
    metavar="N",
    help="Of `memory`: N micro-batches in a step, gradients reduced after each or once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the table of `memory` as JSON.")
def explain(word: str | None, model: str | None, **options: Any) -> None:
    """Explain WORD of the field in a few sentences, with numbers of two ranks where they help.

    Without a word: all words. `memory` and `step` are about a MODEL, which is named as for
    `shardwise trace`: what each strategy keeps on a rank and sends, and the events of one step.

    \b
    Examples:
      shardwise explain all-gather
      shardwise explain memory demo --ranks 8
      shardwise explain step --strategy shard_grad_op
    """
    from shardwise.cli.explain import About, run_explain

    run_explain(word, model, About(**options))


# --- lint ------------------------------------------------------------------------------------


@click.command("lint", short_help="Find known defects of FSDP programs and options.")
@click.argument("files", nargs=-1, type=EXISTING_FILE, metavar="FILE...")
@click.option("--rules", is_flag=True, help="List what is looked for.")
def lint(files: tuple[Path, ...], rules: bool) -> int:
    """Find known defects in FILE: a configuration, a command line, or a program, which is not run.

    Each line of the output has file, line, the defect's number (docs/lint.md) and the fact; the
    next one says what to write instead. The last line counts defects, rules and files. A program
    has the suffix .py, a configuration .json or .yaml; any other file is read as a shell script.

    \b
    Examples:
      shardwise lint train.py run.sh fsdp_config.json
      shardwise lint --rules

    \b
    Exit status: 0 if nothing is found; 1 if there is a defect, or a file cannot be read.
    """
    from shardwise.cli.lint import run_lint, run_rules

    if rules:
        run_rules()
        return 0
    if not files:
        raise click.UsageError("Missing argument 'FILE...'.")
    return run_lint(files)


# --- data ------------------------------------------------------------------------------------


@click.group("data", short_help="Show what a recipe trains on.")
def data() -> None:
    """Look at the data of a recipe."""


@data.command("show", short_help="Show a row, token by token.", context_settings=WITH_OVERRIDES)
@click.argument("recipe", type=click.Path())
@click.argument("number", type=NUMBER, metavar="N")
@click.option("--rehearse", is_flag=True, help="Of `shardwise train --rehearse`; needs no network.")
@OVERRIDES
def data_show(recipe: str, number: int, rehearse: bool, overrides: tuple[str, ...]) -> None:
    """Show row N of the training split of RECIPE, counted from 0, token by token.

    What is trained on is within ⟦ ⟧, and green in a terminal; the rest is only read. For each
    token: its text, its place in the row, the sample of the row it belongs to, its position in that
    sample, its id, and whether it is trained on or is the end token. Nothing is written.

    \b
    Examples:
      shardwise data show demo 0
      shardwise data show recipe.yaml 7 --data.loss_on all
      shardwise data show llama2-70b-lora 0 --rehearse
    """
    from shardwise.cli.show_data import run_data_show
    from shardwise.recipe.read import read_recipe

    run_data_show(read_recipe(recipe, overrides), number, rehearse)


# --- plan ------------------------------------------------------------------------------------


@click.command("plan", short_help="Say what fits, how fast, and what to change.")
@click.argument("model", required=False)
@click.option("--gpus", default="8xH100", show_default=True, help="Devices of a node.")
@click.option("--nodes", type=COUNT, default=1, show_default=True, help="Nodes.")
@click.option("--link", help="Between nodes: a name, or a rate: 400Gb/s, 50GB/s.")
@click.option("--seq", type=LENGTH, help="Tokens of a row.")
@click.option("--global-batch", help="Tokens of a step, such as 1Mtok.")
@click.option("--micro-batch", type=COUNT, help="Rows of a rank at a time.")
@click.option("--strategy", help="Only plans of this one.")
@click.option("--lora", metavar="r=RANK", help="Train adapters of this rank.")
@click.option("--quantize", type=click.Choice(["nf4", "fp4", "int8"]), help="The frozen base.")
@click.option("--tokens", help="Of the whole run, such as 15B: how long it will take.")
@click.option("--why", type=click.Choice(["peak"]), help="What is alive at the peak.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option("--write", type=FILE, help="Write a recipe of the choice.")
@click.option(
    "--machines",
    type=EXISTING_FILE,
    help="Further machines and links, such as --calibrate or `doctor --nodes` writes.",
)
@click.option(
    "--calibrate",
    type=FILE,
    help="Measure this machine, and write its entry, named here, to this file.",
)
@click.option("--nproc", type=COUNT, default=2, help="Ranks of --calibrate.")
def plan(
    model: str | None,
    why: str | None,
    as_json: bool,
    write: Path | None,
    calibrate: Path | None,
    nproc: int,
    **options: Any,
) -> int:
    """Say whether MODEL can be trained on a machine, how fast, and what to change, before it runs.

    Nothing is downloaded but a config.json, nothing is allocated, and the machine need not be
    there. The first line is the verdict, with the error that such forecasts have: docs/planning.md.

    \b
    MODEL may be
      recipe.yaml         what `shardwise train` would do; its own settings are judged
      config.json         of transformers, or its folder, or a name on the hub
      file.py:function    a function that returns a module and its input

    \b
    Examples:
      shardwise plan recipe.yaml --gpus 8xH100
      shardwise plan folder --gpus 8xA100 --nodes 4 --link 400Gb/s --seq 4096 --global-batch 1Mtok
      shardwise plan meta-llama/Llama-2-70b-hf --gpus "4xRTX 4090" --lora r=16 --quantize nf4
      shardwise plan --calibrate here.toml && shardwise plan demo --machines here.toml --gpus 2xhere

    \b
    Exit status: 0 it fits, 2 it does not, or an option is wrong, 3 the error decides; 1 the
    question cannot be answered.
    """
    from shardwise.cli.plan import PlanOptions, run_calibrate, run_plan

    if calibrate is not None and model is not None:
        raise click.UsageError("--calibrate takes no MODEL: plan with --machines afterwards.")
    if calibrate is not None:
        return run_calibrate(calibrate, nproc)
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    return run_plan(model, PlanOptions(**options), why, as_json, write)


# --- bench -----------------------------------------------------------------------------------


@click.command("bench", short_help="Measure a model beside DDP and FSDP2.")
@click.argument("model")
@click.option("--nproc", type=COUNT, default=2, show_default=True, help="Ranks.")
@click.option("--rounds", type=COUNT, default=10, show_default=True, help="Turns.")
@click.option("--rows", type=COUNT, default=1, show_default=True, help="Of a rank.")
@click.option("--seq", type=LENGTH, help="Tokens of a row.")
@click.option(
    "--machines",
    type=EXISTING_FILE,
    help="What `shardwise plan --calibrate` wrote: for planned times.",
)
@click.option("--engine", "engines", multiple=True, help="Only these; may be given again.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option("--plot", type=PICTURE, help="Draw it as PNG.")
@click.option("--memory", hidden=True)
@click.option("--result", type=PATH, hidden=True)
def bench(
    engines: tuple[str, ...],
    memory: str | None,
    result: Path | None,
    as_json: bool,
    plot: Path | None,
    **options: Any,
) -> None:
    """Measure MODEL here under each strategy, beside torch's DDP and FSDP2: time, memory, bytes.

    MODEL is named as for `shardwise plan`. Its values are random; steps of all engines take turns
    in the same processes, and memory is measured in processes of each engine's own.

    \b
    Examples:
      shardwise bench demo --nproc 2
      shardwise bench model.py:build --engine full_shard --engine fsdp2 --rounds 20
    """
    from shardwise.cli.bench import Bench, run_bench
    from shardwise.integrations.side_by_side import ENGINES

    rows = run_bench(Bench(engines=engines or ENGINES, **options), memory, result, as_json)
    if plot is not None and rows:
        from shardwise.train.plot import plot_engines

        bars = {row.engine: (row.milliseconds, row.peak or 0) for row in rows}
        plot_engines(bars, options["model"], plot)


COMMANDS = (convert_config, trace, explain, lint, data, plan, bench)
