"""What a publisher's software does where a row of its results does not say it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.foresight.cells import UNSAID, Row
from benchmarks.foresight.models import Adapters, Checkpointing, Logits
from shardwise.plan.forecast.rates import AttentionKernel


@dataclass(frozen=True)
class Software:
    """What a publisher's software does where a row does not say it.

    Attributes:
        compiled: elementwise kernels are fused by hand, or by default.
        attention: the kernels for attention.
        fused: attention is one kernel; else its scores are in memory.
        checkpointing: the policy.
        reduce: the dtype in which gradients are summed, and wait for the step.
        adapters: where they are, if there are any, and their rank if no row says it.
        logits: what of them is alive at once.
        stored: the dtype of parameters and of the optimizer's state.
        offloads: inputs of recomputed blocks are in host memory.
        optimizer: its name.
        scans: all blocks are one loop, after which gradients are summed over copies of the model.
        whole: each tensor's state is on one rank, which sums its gradients and spreads it by
            collectives of its own.
        autocast: parameters are gathered in float32 and cast for each product.
        apart: the embedding is a unit of its own.
        summons: a checkpoint is read into the whole model, which each rank gathers beside its part.
        allocated: the peaks that it prints are of what was allocated, and not of what the allocator
            had reserved.
        device: they are of the whole device, with what a process has before any tensor.
        lists: the optimizer goes through lists of tensors, and makes a copy of all that it steps.
        hooks: the modules within a block that gather their own parameters: none, each half of an
            adapter, or all linear maps.
        keeps: linear maps in 4 bits keep their inputs, as bitsandbytes' did until 2024.
        buckets: gradients are copied to buckets of their size, torch's default.
        formula: GELU is no one kernel.
        pads: the vocabulary has a multiple of so many entries.
        waits: gradients are summed over ranks after the last micro-batch alone (``no_sync``), and
            stay whole until then.
    """

    compiled: bool = True
    attention: AttentionKernel = "flash2"
    fused: bool = True
    checkpointing: Checkpointing = "none"
    reduce: Literal["float32", "bfloat16"] = "float32"
    adapters: Adapters = field(default_factory=Adapters)
    logits: Logits = "whole"
    stored: Literal["float32", "bfloat16"] = "float32"
    offloads: bool = False
    optimizer: str = "adamw"
    scans: bool = False
    whole: bool = False
    autocast: bool = False
    apart: bool = False
    summons: bool = False
    allocated: bool = False
    device: bool = False
    lists: bool = False
    hooks: Literal["none", "adapters", "all"] = "none"
    keeps: bool = False
    buckets: bool = False
    formula: bool = False
    pads: int = 1
    waits: bool = False


PEFT = Adapters(drops=True, wide=True)  # of its documents, and of what is built on it
SOFTWARE = {  # by the beginning of the framework's name
    "llm-foundry": Software(attention="flash1"),  # Triton's, of 2022
    "composer": Software(attention="flash1"),
    "megatron": Software(attention="fastest", reduce="bfloat16"),  # cuDNN's, TransformerEngine
    "nemo automodel": Software(attention="fastest", adapters=Adapters(on="all")),
    "nemo": Software(attention="fastest", reduce="bfloat16"),
    "maxtext": Software(attention="fastest", checkpointing="full", scans=True),  # jax.lax.scan
    "pax": Software(attention="fastest", checkpointing="moved"),  # SAVE_DOT_WITH_NO_BATCH_DIM
    "internevo": Software(whole=True),
    "torchtune": Software(
        checkpointing="full", reduce="bfloat16", logits="tokens", stored="bfloat16", allocated=True
    ),
    "fsdp_qlora": Software(  # its defaults of March 2024, around transformers and peft
        False, adapters=Adapters(64, "inputs", drops=True), logits="held", stored="bfloat16"
    ),
    "prime-rl": Software(adapters=Adapters(on="all"), logits="vocabulary", apart=True),
    "atorch": Software(False, adapters=Adapters(drops=True), logits="held", autocast=True),
    "litgpt": Software(False, adapters=Adapters(drops=True), allocated=True),
    "lightning-thunder": Software(  # its benchmark of LitGPT
        reduce="bfloat16", logits="narrow", stored="bfloat16", apart=True
    ),
}
# They have transformers' models.
AROUND = "transformers|trl|accelerate|hugging ?face|llama-?factory|axolotl|atorch"
EARLY = r"\b(mar|apr|may|june?|july?|aug)\w* 2024"  # torchtune's loss of parts is of 28 August
PREPARED = r"^(?!llama-?factory).*(transformers|peft|trl)"
"""Where peft's ``prepare_model_for_kbit_training`` makes float32 of all that is not in 4 bits."""
SHARDED = r"fsdp|zero[- ]?3|full.?shard"
EAGER = AROUND + "|pytorch|deepspeed"  # nothing is compiled unless a row says it
GPT_2 = r"^(mini)?gpt-?(2|neo)"  # in transformers, with GELU by its formula, and a loss as it comes
STAGES = ("packed", "compile", "chunked", "act ckpt", "fuse", "act offl", "8-bit", "lora")
"""Of a table in which each row adds one technique to those before."""
OTHERWISE: Sequence[tuple[str, str, str, Mapping[str, Any]]] = (  # framework, column, what it says
    ("", "notes", "flash_attention_3", {"attention": "fastest"}),
    ("megatron|^nemo(?! auto)", "text", "", {"pads": 128}),  # make_vocab_size_divisible_by
    ("nanogpt", "text", "", {"pads": 64}),  # since February 2023
    ("transformers", "model", GPT_2, {"formula": True}),
    ("", "model", "mingpt", {"formula": True}),
    ("^litgpt", "text", "", {"keeps": True}),
    ("^(?!megatron|nemo|maxtext|pax|.*thunder)", "strategy", "ddp", {"buckets": True}),
    ("^flashattention", "text", "", {"pads": 8}),  # pad_vocab_size_multiple of its recipes
    ("", "compile", "xla", {"attention": "fastest"}),
    ("foundry", "precision", "^bf16$", {"reduce": "bfloat16"}),
    ("^prime-rl", "task", "sft", {"logits": "held"}),  # beside its own for reinforcement
    ("^torchtune", "source", EARLY, {"logits": "held"}),
    ("trainer", "strategy", "^ddp|single", {"autocast": True}),
    (PREPARED, "precision", "nf4", {"autocast": True, "checkpointing": "full"}),
    # trl leaves it out where what is quantised is sharded
    (PREPARED, "strategy", SHARDED, {"autocast": False, "checkpointing": "none"}),
    ("", "notes", "no float32 casts", {"autocast": False}),
    ("", "text", "fused kernels|fast.kernels", {"compiled": True, "logits": "fused"}),
    (AROUND, "text", "fused kernels|fast.kernels", {"logits": "cast"}),
    ("", "text", "liger", {"compiled": True, "logits": "once"}),
    ("", "text", "unsloth", {"compiled": True, "logits": "fused", "offloads": True}),
    ("unsloth", "source", "202[5-9]", {"logits": "tokens"}),  # cut cross-entropy, November 2024
    ("^internevo", "strategy", "within", {"whole": False}),
    ("^litgpt", "strategy", "fsdp", {"checkpointing": "full", "summons": True}),
    ("deepspeed", "precision", "bf16", {"reduce": "bfloat16"}),
    (AROUND, "strategy", "fsdp|full.?shard", {"hooks": "adapters"}),  # peft's policy to wrap
    ("", "notes", "no_sync", {"waits": True}),
    ("", "text", "deepspeed", {"hooks": "all"}),
    ("", "notes", "max_memory_allocated|memory active", {"allocated": True}),
    ("", "text", "nvidia-smi|nvml", {"device": True}),
)
UNFUSED = r"(without|no|non|w/o)[- ](flash|fused att)|(eager|naive|unfused|vanilla) att"
SINCE = {"transformers": (4, 36), "torch": (2, 0)}  # attention is one kernel
CHECKPOINTING: Mapping[str, Checkpointing] = {  # by the beginning; else it is "full"
    "n$|no|false|off|0$": "none",
    "selective[- ]op|sac|op": "matmuls",
    "selective|every (2|second|other)|half|1/2|0?\\.5|partial": "second",
    "minimal": "moved",  # MaxText's
}


def software_of(row: Row, layers: int) -> Software:
    """What computes a row, of a model with so many layers."""
    used, framework = _stage(row, _stated(row, layers, _usual(row))), row["framework"].lower()
    if framework.startswith("torchtitan") and _year(row) >= 2025:  # the loss is compiled too
        return replace(used, apart=True, logits="fused" if used.compiled else used.logits)
    if framework.startswith("prime-rl") and rank_of(row, used.adapters):
        return replace(used, compiled=False)  # each adapter's check of its input waits
    return used


def _usual(row: Row) -> Software:
    """The defaults of the framework, with what it does otherwise for such rows."""
    framework = row["framework"].lower()
    usual = next((s for name, s in SOFTWARE.items() if framework.startswith(name)), None)
    if usual is None:
        usual = Software(compiled=re.search(EAGER, framework) is None)
        if re.search(AROUND, framework):
            usual = replace(usual, logits="held", adapters=PEFT, lists="deepspeed" not in framework)
    for name, column, pattern, other in OTHERWISE:
        if re.search(name, framework) and re.search(pattern, _cells(row, column)):
            usual = replace(usual, **other)
    return usual


def _cells(row: Row, column: str) -> str:
    """A cell in small letters; ``"text"``: all that say what computes."""
    columns = ("framework", "strategy", "notes") if column == "text" else (column,)
    return " ".join(row[name] for name in columns).lower()


def _stated(row: Row, layers: int, usual: Software) -> Software:
    """The same with what the row says."""
    policy = row["act_ckpt"].lower()
    changes: dict[str, Any] = {"fused": _fuses(row)}
    if "offload" in policy:
        changes["offloads"] = True
    if row["compile"]:
        changes["compiled"] = row["compile"].lower().split()[0] not in (*UNSAID, "eager")
    if policy:
        changes["checkpointing"] = _checkpointing(policy, layers)
    if _narrow(row, usual.adapters) and not (usual.autocast and quantized(row)):
        changes |= {"stored": "bfloat16", "autocast": False}
    if "mixed" in row["precision"] and re.match("ddp|single", row["strategy"].lower()):
        changes["autocast"] = re.search(EAGER, row["framework"].lower()) is not None
    if "all linear" in row["notes"].lower():
        changes["adapters"] = replace(usual.adapters, on="all")
    used = replace(usual, **changes)
    return replace(used, logits=_of_loss(row, used))


def _of_loss(row: Row, used: Software) -> Logits:
    """Logits, which are in 16 bits where all is and neither the model nor autocast makes float32.

    Transformers' models did it from 2023 on, but not GPT-2, and leave it to their own loss since
    4.45; a loop of torch's own takes what comes.
    """
    framework = row["framework"].lower()
    if used.autocast or not (used.stored == "bfloat16" or "deepspeed" in _cells(row, "text")):
        return used.logits
    left = "loop" in framework or re.match(GPT_2, row["model"].lower())
    if used.logits == "held" and left:
        return "kept"
    own = re.fullmatch(r"pytorch( ddp)?( [\d.]+)?", framework)
    return "narrow" if used.logits == "whole" and own else used.logits


def _narrow(row: Row, adapters: Adapters) -> bool:
    """Are all weights, or all that are frozen, in 16 bits? Alone on a GPU all of it has to fit."""
    dtype = row["precision"].lower()
    named = quantized(row) or re.search("bf16-true|pure", dtype)  # the former is Lightning's name
    beside = adapters.wide and rank_of(row, adapters) > 0
    return bool(named) or beside or (row["n_gpus"] == "1" and dtype == "bf16")


def _stage(row: Row, used: Software) -> Software:
    """The same, where a row adds a technique to those before."""
    strategy = row["strategy"].lower()
    if "cumulative" not in strategy:
        return used
    stage = next((n for n, name in enumerate(STAGES) if name in strategy), 0)
    return replace(
        used,
        compiled=stage >= 1,
        checkpointing="full" if stage >= 3 else "none",
        logits="tokens" if stage >= 2 else "whole",
        offloads=stage >= STAGES.index("act offl"),
        optimizer="adamw_8bit" if stage >= STAGES.index("8-bit") else "adamw",
    )


def _fuses(row: Row) -> bool:
    """Is attention one kernel? FlashAttention is of June 2022, and later where code is eager."""
    text = f"{_cells(row, 'text')} {_cells(row, 'source')}"
    if re.search(UNFUSED, text):
        return False
    if re.search(r"flash|sdpa|xformers", text):
        return True
    written = re.search(r"arxiv\D{0,8}(\d{4})\.\d{4}", text)
    if written is not None and written[1] < "2206":
        return False
    framework = row["framework"].lower()
    version = re.search(r"(transformers|torch)[- v=(]*(\d+)\.(\d+)", framework)
    if version is not None:
        return (int(version[2]), int(version[3])) >= SINCE[version[1]]
    year = re.search(r"\b20[12]\d\b", row["notes"])
    if year is not None and "transformers" in framework:  # 4.36 is of December 2023
        return int(year[0]) > 2023
    return "v100" not in row["gpu"].lower()  # where nothing dates a row, it is as old


def _checkpointing(policy: str, layers: int) -> Checkpointing:
    """The policy of this name; of a number of blocks, the nearest."""
    named = (kept for name, kept in CHECKPOINTING.items() if re.match(name, policy))
    blocks = re.match(r"\d+", policy)
    share = int(blocks[0]) / layers if blocks else 1.0
    return next(named, "none" if share < 0.25 else "second" if share < 0.75 else "full")


def rank_of(row: Row, usual: Adapters) -> int:
    """The rank of the adapters; 0 for none."""
    if "lora" not in row["task"].lower() and "LoRA on" not in row["strategy"]:
        return 0
    stated = re.search(r"\br(?:ank)? ?=? ?(\d+)", row["task"])
    return int(stated[1]) if stated else usual.rank


def quantized(row: Row) -> bool:
    """Are frozen weights in 4 bits?"""
    precision = row["precision"].lower()
    return "qlora" in row["task"].lower() or re.search(r"\bnf4|int4|4-?bit", precision) is not None


def _year(row: Row) -> int:
    """The year of a document whose name has its month, or of Blackwell; 0 for others."""
    stated = re.search(r"_(20\d\d)(?:0\d|1[0-2])_", row["source"])
    return int(stated[1]) if stated else 2025 * bool(re.search(r"\bG?B[23]00", row["gpu"]))
