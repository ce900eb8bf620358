"""What a publisher's software does where a row of its results does not say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
        reduce: the dtype in which gradients are summed.
        adapters: where they are, if there are any, and their rank if no row says it.
        logits: what of them is alive at once.
        stored: the dtype of parameters and of the optimizer's state.
        offloads: inputs of recomputed blocks are in host memory.
        optimizer: its name.
        scans: all blocks are one loop, after which gradients are summed over copies of the model.
        whole: each tensor's state is on one rank, which sums its gradients and spreads it by
            collectives of its own.
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
        checkpointing="full", reduce="bfloat16", logits="tokens", stored="bfloat16"
    ),
    "fsdp_qlora": Software(  # its defaults of March 2024, around transformers and peft
        False, adapters=Adapters(64, "inputs", drops=True), logits="held", stored="bfloat16"
    ),
    "prime-rl": Software(adapters=Adapters(on="all"), logits="vocabulary"),
}
AROUND = (
    "transformers|trl|accelerate|hugging ?face|llama-?factory|axolotl|atorch"  # have their models
)
EAGER = AROUND + "|pytorch|deepspeed"  # nothing is compiled unless a row says it
STAGES = ("packed", "compile", "chunked", "act ckpt", "fuse", "act offl", "8-bit", "lora")
"""Of a table in which each row adds one technique to those before."""
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
    framework, told, dtype = (row[name].lower() for name in ("framework", "strategy", "precision"))
    usual = next((s for name, s in SOFTWARE.items() if framework.startswith(name)), None)
    if usual is None:
        around, eager = (re.search(names, framework) is not None for names in (AROUND, EAGER))
        usual = Software(compiled=not eager, logits="held" if around else "whole")
    notes, attention = row["notes"].lower(), usual.attention
    logits = usual.logits
    if framework.startswith("prime-rl") and "sft" in row["task"]:
        logits = "held"  # beside its own for reinforcement
    if "flash_attention_3" in notes or row["compile"] == "XLA":
        attention = "fastest"
    compiled = usual.compiled
    if row["compile"]:
        compiled = row["compile"].lower().split()[0] not in (*UNSAID, "eager")
    policy = row["act_ckpt"].lower()
    checkpointing = usual.checkpointing if not policy else _checkpointing(policy, layers)
    reduce = "bfloat16" if dtype == "bf16" and "foundry" in framework else usual.reduce
    stage = -1
    if "cumulative" in told:
        stage = next((n for n, name in enumerate(STAGES) if name in told), 0)
        compiled, checkpointing = stage >= 1, "full" if stage >= 3 else "none"
        logits = "tokens" if stage >= 2 else "whole"
    if compiled and framework.startswith("torchtitan") and _year(row) >= 2025:
        logits = "fused"  # the loss is compiled too
    if framework.startswith("prime-rl") and rank_of(row, usual.adapters):
        compiled = False  # each adapter's check of its input waits for the device
    alone = row["n_gpus"] == "1" and dtype == "bf16"  # all of it has to fit
    narrow = alone or re.search("bf16-true|pure", dtype)  # the former is Lightning's name for it
    return Software(
        compiled,
        attention,
        _fuses(row),
        checkpointing,
        reduce,
        usual.adapters,
        logits,
        stored="bfloat16" if narrow else usual.stored,
        offloads="offload" in policy or stage >= STAGES.index("act offl"),
        optimizer="adamw_8bit" if stage >= STAGES.index("8-bit") else "adamw",
        scans=usual.scans,
        whole=usual.whole and "within" not in told,
    )


def _fuses(row: Row) -> bool:
    """Is attention one kernel? FlashAttention is of June 2022, and later where code is eager."""
    told = " ".join(row[name] for name in ("framework", "strategy", "notes", "source")).lower()
    if re.search(UNFUSED, told):
        return False
    if re.search(r"flash|sdpa|xformers", told):
        return True
    written = re.search(r"arxiv\D{0,8}(\d{4})\.\d{4}", told)
    if written is not None and written[1] < "2206":
        return False
    version = re.search(r"(transformers|torch)[- v=(]*(\d+)\.(\d+)", row["framework"].lower())
    if version is not None:
        return (int(version[2]), int(version[3])) >= SINCE[version[1]]
    return "v100" not in row["gpu"].lower()  # where nothing dates a row, it is as old


def _checkpointing(policy: str, layers: int) -> Checkpointing:
    """The policy of this name; of a number of blocks, the nearest."""
    named = (kept for name, kept in CHECKPOINTING.items() if re.match(name, policy))
    blocks = re.match(r"\d+", policy)
    share = int(blocks[0]) / layers if blocks else 1.0
    return next(named, "none" if share < 0.25 else "second" if share < 0.75 else "full")


def rank_of(row: Row, usual: Adapters) -> int:
    """Of the adapters; 0 for none."""
    if "lora" not in row["task"].lower() and "LoRA on" not in row["strategy"]:
        return 0
    stated = re.search(r"\br(?:ank)? ?=? ?(\d+)", row["task"])
    return int(stated[1]) if stated else usual.rank


def _year(row: Row) -> int:
    """Of a document whose name has its month, or of Blackwell; 0 for others."""
    stated = re.search(r"_(20\d\d)(?:0\d|1[0-2])_", row["source"])
    return int(stated[1]) if stated else 2025 * bool(re.search(r"\bG?B[23]00", row["gpu"]))
