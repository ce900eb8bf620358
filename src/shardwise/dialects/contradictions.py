"""Contradictions: keys that exclude each other, and keys that others leave unread."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.dialects.policy import FILL_IN, TRACKERS, Policy
from shardwise.recipe.data_config import COLUMNS, HUB


class Rule(NamedTuple):
    """The field whose key is reported, the reason, and when."""

    field: str
    sentence: str
    broken: Callable[[Policy], object]


def _other_dtype(p: Policy) -> bool:
    word = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}.get(p.param_dtype or "")
    return None not in (word, p.mixed_precision) and word != p.mixed_precision


def _to_fill_in(field: str) -> Callable[[Policy], object]:
    return lambda p: getattr(p, field) == FILL_IN


CONTRADICTIONS = (
    Rule(
        *("wrap", "units by size need a min_num_params; without it there is one unit"),
        lambda p: p.wrap == "size" and not p.min_num_params,
    ),
    Rule(
        *("wrap_classes", "the wrap policy is not by class; keep one of them"),
        lambda p: p.wrap_classes and p.wrap in ("size", "none"),
    ),
    Rule(
        *("auto_wrap", "NO_WRAP makes everything one unit; keep one of them"),
        lambda p: p.wrap == "none",
    ),
    Rule(
        *("offload_word", "offload is no strategy; add full_shard or shard_grad_op, or auto_wrap"),
        lambda p: not (p.strategy or p.auto_wrap),
    ),
    Rule(*("offload_word", "cpu_offload is off; keep one of them"), lambda p: p.offload == "none"),
    Rule(
        *("cpu_ram_efficient_loading", "sync_module_states, which sends rank 0's weights, is off"),
        lambda p: p.cpu_ram_efficient_loading and p.sync_module_states is False,
    ),
    Rule(
        *("activation_offload", "it needs activation checkpointing, which is off"),
        lambda p: (
            p.activation_offload and not (p.activation_checkpointing or p.gradient_checkpointing)
        ),
    ),
    Rule(
        *("replicate", "this strategy has one axis; two need a strategy that shards"),
        lambda p: (p.replicate or 1) > 1 and p.strategy in ("no_shard", "zero1"),
    ),
    Rule(
        *("strategy", "a hybrid has copies, and the mesh's replicate axis has one rank"),
        lambda p: str(p.strategy).startswith("hybrid") and p.replicate == 1,
    ),
    Rule(
        *("processes", "it is not the product of the mesh's two sizes"),
        lambda p: p.processes and p.replicate and p.shard and p.processes != p.replicate * p.shard,
    ),
    Rule(
        *("processes", "it counts all machines, and is no multiple of their number"),
        lambda p: p.processes and p.machines and p.processes % p.machines,
    ),
    Rule(
        *("machine_rank", "machines are numbered from 0, so it is below their number"),
        lambda p: p.machines and (p.machine_rank or 0) >= p.machines,
    ),
    Rule(*("param_dtype", "mixed precision names another dtype"), _other_dtype),
    Rule(
        *("state_dict_rank0", "each rank has its own shards, so rank 0's are a part of the model"),
        lambda p: p.state_dict_rank0 and p.state_dict in ("sharded", "local"),
    ),
)
UNREAD = (
    Rule(
        *("min_num_params", "only SIZE_BASED_WRAP reads it"),
        lambda p: p.min_num_params and p.wrap in ("auto", "none"),
    ),
    Rule(
        *("warmup", "the schedule constant has no warm-up; constant_with_warmup has"),
        lambda p: p.warmup and p.schedule == "constant",
    ),
    Rule(
        *("mixed_precision", "4-bit products are computed in bfloat16, and so is the rest"),
        lambda p: p.mixed_precision == "fp16" and p.quantized_compute == "bfloat16",
    ),
    Rule(
        *("eval_delay", "there is no validation before the end"),
        lambda p: p.eval_delay and not p.eval_every and p.eval_strategy not in ("steps", "epoch"),
    ),
    Rule(
        *("trackers", f"a recipe has no others than {', '.join(TRACKERS)}; it has those of them"),
        lambda p: {*(p.trackers or ())} - {*TRACKERS},
    ),
    Rule(
        *("test_source", "validation has a file of its own, and a run has no test"),
        lambda p: p.validation_source,
    ),
    *(
        Rule(
            *(field, "documents have no such key; data.validation holds some of them out"),
            lambda p: p.data_format == "text" or str(p.dataset).endswith(".txt"),
        )
        for field in ("validation_source", "test_source")
    ),
)
NEEDED = {
    "model": "model.from",
    "dataset": "data.source",
    **dict.fromkeys(("validation_source", "test_source"), "data.validation_source"),
}
MISSING = (
    *(
        Rule(
            *(field, f"{place} needs a value: this is no file, and no OWNER/NAME of the hub"),
            _to_fill_in(field),
        )
        for field, place in NEEDED.items()
    ),
    Rule(
        "dataset",
        "text of the hub is read while it trains: set data.streaming.streams (such as batch.rows), "
        "data.max_bytes, and run.steps in place of run.epochs",
        lambda p: str(p.dataset).startswith(HUB) and p.data_format in (None, "text"),
    ),
    Rule(
        "dataset",
        f"data.format needs a value, since no column is shown: text, {', '.join(COLUMNS)}",
        lambda p: p.data_format == FILL_IN,
    ),
)
NOTES = (
    Rule(
        *("activation_checkpointing", "the model's own gradient checkpointing is on"),
        lambda p: p.gradient_checkpointing and p.activation_checkpointing is False,
    ),
    Rule(
        *("eval_delay", "the only validation is after the last epoch"),
        lambda p: p.eval_strategy == "epoch" and (p.eval_delay or 0) >= (p.epochs or 3),
    ),
    Rule(
        *("accumulation", "of one rank: times the ranks that you start"),
        lambda p: p.accumulation and not p.processes,
    ),
    Rule(
        *("quantized_bits", "the type is not set, so it is fp4; nf4 loses less"),
        lambda p: p.quantized_bits == 4 and not p.quantized_type,
    ),
    Rule(
        "adapter_rank",
        "without targets peft takes some by model (of a Llama q_proj, v_proj), a recipe takes all",
        lambda p: p.adapter_rank and not p.adapter_targets,
    ),
)
