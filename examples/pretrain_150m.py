"""The program of Prime Intellect's tutorial "Run Torch FSDP": a 150M Llama on C4.

    python examples/pretrain_150m.py                                    one device
    torchrun --nproc-per-node 8 examples/pretrain_150m.py               eight, fully sharded
    python examples/pretrain_150m.py --rehearse                         small, on two CPU ranks

The model is transformers' Llama, and the loop is written out. Shape, data and batch are those of
recipes/pretrain-150m-c4.yaml, which `shardwise train` trains in one line. The same command again
goes on where the last checkpoint was saved, on as many ranks or on others.

shardwise.recipe and shardwise.train are no public names, and may change: they give this loop the
numbers and the batches that `shardwise train` has. A program of yours has its own of both. Nor are
shardwise.comm and shardwise.launch, which tell `python` from a launcher and start two ranks.
"""

import argparse
import os
import time
from contextlib import closing, nullcontext
from pathlib import Path

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.comm.machine.environment import read_launch
from shardwise.launch.ports import free_port
from shardwise.recipe.read import flatten, read_recipe
from shardwise.train.data import prepare
from shardwise.train.folder import Folder
from shardwise.train.hf_config import llama_config
from shardwise.train.streams import StreamBatches
from shardwise.train.tokenizer import end_id

RECIPE = Path(__file__).parents[1] / "recipes" / "pretrain-150m-c4.yaml"
RANKS = 2  # of a rehearsal that no launcher has started

REHEARSAL = {
    "model": "{width: 64, layers: 2, heads: 4, kv_heads: 4, hidden: 176, tied: true}",
    "tokenizer.vocabulary": "512",
    "data.source": "stdlib",
    "data.max_bytes": "1_000_000",
    "data.validation": "0.2",
    "data.context": "64",
    "data.streaming.streams": "4",
    "data.streaming.shuffle": "4",
    "batch.rows": "32",
    "batch.micro": "4",
    "run.device": "cpu",
    "run.folder": "runs/pretrain-150m-rehearsal",
    "run.steps": "10",
    "checkpoint.save_every": "5",
}


def read_arguments(arguments=None):
    parser = argparse.ArgumentParser(description="Pre-train a 150M Llama on C4")
    parser.add_argument("--data", help="a file or folder of text, JSONL or parquet, instead of C4")
    parser.add_argument("--tokenizer", help="a tokenizer.json or its folder; else one is trained")
    parser.add_argument("--strategy", default="full_shard", help="default: full_shard")
    parser.add_argument("--steps", help="optimizer steps")
    parser.add_argument("--folder", help="of checkpoints; default: that of the recipe")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU, the same path")
    return parser.parse_args(arguments)


def recipe_of(args):
    """The recipe; a rehearsal's differences from it; what was asked for comes last."""
    options = {
        "data.source": args.data,
        "tokenizer.source": args.tokenizer,
        "sharding.strategy": args.strategy,
        "run.steps": args.steps,
        "run.folder": args.folder,
    }
    overrides = {"optimizer.warmup": "0"} | (REHEARSAL if args.rehearse else {})
    overrides |= {name: value for name, value in options.items() if value}
    return read_recipe(RECIPE, [f"{name}={value}" for name, value in overrides.items()])


def build_model(recipe, tokenizer):
    """Transformers' Llama on the meta device: shapes, and no values yet."""
    end = end_id(tokenizer, recipe.tokenizer.end)
    shape = llama_config(
        recipe.model, tokenizer.get_vocab_size(), recipe.data.context, end, torch.float32
    )
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig.from_dict(shape))


def describe_rehearsal(recipe):
    """What a rehearsal has smaller than the recipe."""
    full = flatten(read_recipe(RECIPE).model_dump())
    small = flatten(recipe.model_dump())
    print("rehearsal: the same path, with these keys of the recipe changed")
    for name, value in small.items():
        if value != full[name]:
            print(f"  {name:24} {full[name]} -> {value}")


def train(recipe, comm):
    say = print if comm.rank == 0 else lambda *_, **__: None
    folder = Path(recipe.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare(recipe, comm, Folder(folder) if comm.rank == 0 else None)

    torch.manual_seed(recipe.run.seed)
    model = build_model(recipe, data.tokenizer)
    sharded = sw.shard(
        model,
        strategy=recipe.sharding.strategy,
        comm=comm,
        mesh=recipe.sharding.mesh,
        init=model._init_weights,  # noqa: SLF001 - the name that transformers gives it
        precision=sw.Precision(param_dtype=torch.bfloat16),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optimizer.lr)

    with closing(StreamBatches(data.training, comm.rank, comm.size)) as batches:
        loaded = sharded.resume(folder, optimizer, sw.Training())
        start = {"step": 0, "data": data.fingerprint}
        position = loaded.document.position if loaded else start
        if position["data"] != data.fingerprint:
            raise SystemExit(f"{folder} was trained on other text: name another with --folder")
        # Each rank saved the positions of its own streams; now they may be shared out otherwise.
        ranks = loaded.document.local if loaded else []
        batches.start([stream for streams in ranks for stream in streams])
        first, steps, rows = position["step"], recipe.run.steps, recipe.batch.rows
        say(f"model: {sharded.numel():,} parameters, {sharded.placement.name}, {comm.size} ranks")
        say(
            f"global batch {rows} = micro-batch {recipe.batch.micro} x "
            f"{batches.accumulation} accumulation steps x {comm.size} ranks"
        )
        own = data.training.streams // comm.size
        print(f"rank {comm.rank} reads streams {comm.rank * own} to {(comm.rank + 1) * own - 1}")
        if loaded:
            say(f"resumed at sample {first * rows:,}")

        files = {
            "tokenizer.json": data.tokenizer.to_str(),
            "config.json": model.config.to_json_string(),
        }
        begin = time.perf_counter()
        for step in range(first + 1, steps + 1):
            # Every rank must have a batch, or none may begin: the others would wait for it.
            if comm.mean(float(batches.ended())):
                say(f"the text ends after step {step - 1}")
                break
            loss = train_step(sharded, batches.step(step), comm.device)
            norm = sharded.clip_grad_norm_(recipe.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()
            mean = comm.mean(loss)
            speed = (step - first) * rows * recipe.data.context / (time.perf_counter() - begin)
            say(f"step: {step}  loss {mean:.4f}  grad norm {norm:.3f}  {speed:,.0f} tokens/s")
            if step % recipe.checkpoint.save_every == 0 or step == steps:
                position = {"step": step, "data": data.fingerprint}
                training = sw.Training(step, position=position, local=batches.positions())
                saved = sharded.save(folder / f"step-{step}", optimizer, training, files=files)
                say(f"saved {saved.path}")
    say("All done")


def train_step(sharded, micro_batches, device):
    """Forward and backward of all micro-batches; only the last one communicates gradients."""
    total = torch.zeros((), device=device)
    for number, batch in enumerate(micro_batches, start=1):
        is_accumulating = number < len(micro_batches)
        batch = batch.to(device)
        with sharded.no_sync() if is_accumulating else nullcontext():
            logits = sharded.model(input_ids=batch.ids).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
            loss = loss / len(micro_batches)
            loss.backward()
        total += loss.detach()
    return total.item()


def main(rank, world_size, args):
    if world_size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # all ranks are on this machine
    recipe = recipe_of(args)
    launch = read_launch(os.environ)
    if args.rehearse and (launch is None or launch.rank == 0):
        describe_rehearsal(recipe)
    with sw.connect(recipe.run.device) as comm:
        train(recipe, comm)


if __name__ == "__main__":
    args = read_arguments()
    if args.rehearse and read_launch(os.environ) is None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port(12365)))
        mp.spawn(main, args=(RANKS, args), nprocs=RANKS, join=True)
    else:
        main(0, 1, args)
