"""Jobs of ``test_transformers.py``: a Trainer on each rank; rank 0 leaves the result in a file."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.handover import handle
from shardwise.integrations.transformers import Trainer

RANK, WORLD = (
    int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
)
BATCH = 12  # of all ranks, in two micro-batches

Result = dict[str, Any]


def llama(width: int = 32, **options: Any) -> Any:
    torch.manual_seed(0)
    shape: Result = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes: Result = {"vocab_size": 61, "hidden_size": width, "intermediate_size": 48}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, **sizes, **options))


def with_lora() -> Any:
    parts: Result = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", **parts)
    model: Any = peft.get_peft_model(llama(), config)
    model.base_model.model.name_or_path = ""
    return model


def rows(count: int = 36) -> list[dict[str, Tensor]]:
    """Rows of nine tokens, of which up to four are not trained on: means differ from sums."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 61, (9,), generator=generator) for _ in range(count)]
    labels = [one.clone() for one in ids]
    for number, one in enumerate(labels):
        one[: number % 5] = -100
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]


def arguments(folder: Path, **changed: Any) -> hf.TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH // WORLD // 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "per_device_eval_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return hf.TrainingArguments(str(folder), **{**options, **changed})


def trainer(folder: Path, model: Any, **changed: Any) -> Any:
    AcceleratorState._reset_state()  # of the job before, with another precision
    kind = hf.Trainer if changed.pop("plain", False) else Trainer
    args = arguments(folder, **changed)
    return kind(model=model, args=args, train_dataset=rows(), eval_dataset=rows(10))


def result(trained: Any, folder: Path) -> Result:
    """What was logged, and the whole parameters, which go through ``save_model``."""
    trained.save_model(str(folder / "final"))
    names = "loss", "grad_norm", "learning_rate", "eval_loss", "total_flos"
    history = trained.state.log_history
    log = [{name: line[name] for name in names if name in line} for line in history]
    if RANK:
        return {}
    (file,) = (folder / "final").glob("*.safetensors")
    return {
        "log": log,
        "params": dict(sorted(load_file(file).items())),  # in any order
        "files": sorted(path.name for path in folder.iterdir()),
    }


# --- the jobs --------------------------------------------------------------------------------


def train(folder: Path, model: Any = None, resume: Any = None, **changed: Any) -> Result:
    one = trainer(folder, llama() if model is None else model, **changed)
    one.train(resume_from_checkpoint=resume)
    return result(one, folder)


def plain(folder: Path) -> Result:
    """transformers' own, to compare with; and its checkpoints, to go on from."""
    return train(folder, plain=True)


def full(folder: Path) -> Result:
    return train(folder, save_total_limit=1, eval_strategy="steps", eval_steps=2)


def resumed(folder: Path) -> Result:
    """With dropout, resumed in the middle of an epoch: what two runs have drawn is the same."""
    dropout: Result = {"attention_dropout": 0.2}
    whole = train(folder / "whole", llama(**dropout), max_steps=4)
    again = train(folder / "again", llama(**dropout), str(folder / "whole/checkpoint-2"))
    return {"whole": whole, "again": again}


def from_plain(folder: Path) -> Result:
    return train(folder, resume=str(folder.parent / "plain-1/checkpoint-2"))


def to_plain(folder: Path) -> Result:
    return train(folder, resume=str(folder.parent / "full-2/checkpoint-4"), max_steps=6, plain=True)


def further(folder: Path) -> Result:
    """A run as ``to_plain``, on several ranks."""
    return train(folder, resume=str(folder.parent / "full-2/checkpoint-4"), max_steps=6)


def paged(folder: Path) -> Result:
    again = folder / "whole/checkpoint-2"
    options = {"optim": "paged_adamw_8bit"}
    whole = train(folder / "whole", llama(128), **options)
    return {"whole": whole, "again": train(folder / "again", llama(128), str(again), **options)}


def lora(folder: Path) -> Result:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    whole = train(folder / "whole", with_lora(), **best)
    again = train(folder / "again", with_lora(), str(folder / "whole/checkpoint-2"))
    return {"whole": whole, "again": again}


def bf16(folder: Path) -> Result:
    """A run with transformers' own checkpointing of activations, and settings of FSDP."""
    settings = {"reshard_after_forward": False, "state_dict_type": "SHARDED_STATE_DICT"}
    one = trainer(
        folder, llama(), bf16=True, gradient_checkpointing=True, fsdp=True, fsdp_config=settings
    )
    one.train()
    sharded = handle(one.model)
    facts = {
        "strategy": sharded.placement.name,
        "compute": str(sharded.options.precision.param_dtype),
    }
    return result(one, folder) | facts


def evaluated(folder: Path) -> Result:
    """Losses before and after training, and of a model trained twice."""
    one = trainer(folder, llama(tie_word_embeddings=True), save_strategy="no", max_steps=2)
    first = one.evaluate()["eval_loss"]
    one.train()
    one.train()
    return {"losses": [first, one.evaluate()["eval_loss"]], **result(one, folder)}


def loop(folder: Path) -> Result:
    """A loop of one's own over accelerate; then again from the state that it saved."""
    AcceleratorState._reset_state()
    accelerator = Accelerator({"strategy": "zero1"}, cpu=True, gradient_accumulation_steps=2)
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples: Any = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=BATCH // WORLD // 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> dict[str, Tensor]:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    epoch()
    accelerator.save_state(str(folder))
    once = epoch()
    accelerator.load_state(str(folder))
    return {"params": once, "again": epoch(), "strategy": handle(model).placement.name}


def main(job: str, root: str) -> None:
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    jobs: dict[str, Callable[[Path], Result]] = {one.__name__: one for one in JOBS}
    for name in job.split(","):
        results = jobs[name](Path(root) / f"{name}-{WORLD}")
        if RANK == 0:
            torch.save(results, Path(root) / f"{name}-{WORLD}.pt")


JOBS = (plain, full, resumed, from_plain, to_plain, further, paged, lora, bf16, evaluated, loop)

if __name__ == "__main__":
    main(*sys.argv[1:])
