"""Rows of published results, each read as a case that a data-parallel plan can express.

A row that is none names the reason. What a row leaves open is as its publisher's software does it.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.foresight.models import Adapters, Checkpointing, Logits, Variant
from benchmarks.foresight.shapes import Shape, gpt, is_mixture, shape_named
from shardwise.errors import ConfigError
from shardwise.plan.forecast.machine import Machine, known
from shardwise.plan.forecast.rates import AttentionKernel

PUBLISHED = Path(__file__).with_name("published.csv")
VOCABULARY = 32_000  # of a model that is known by its sizes alone
TOLERANCE = 0.07  # of the parameters, between a shape and its row
VENDORS = "nvidia|amd|intel|google|cloud|tesla|geforce|instinct|habana|data center gpu"
Row = Mapping[str, str]


class Inexpressible(Exception):
    """Why a row is no case."""


@dataclass(frozen=True)
class Software:
    """What a publisher's software does where a row does not say it.

    Attributes:
        compiled: elementwise kernels are fused by hand, or by default.
        attention: the kernels for attention.
        checkpointing: the policy.
        reduce: the dtype in which gradients are summed.
        adapters: where they are, if there are any, and their rank if no row says it.
        logits: what of them is alive at once.
        stored: the dtype of parameters and of the optimizer's state.
        offloads: inputs of recomputed blocks are in host memory.
        optimizer: its name.
        scans: all blocks are one loop, after which gradients are summed over copies of the model.
    """

    compiled: bool = True
    attention: AttentionKernel = "flash2"
    checkpointing: Checkpointing = "none"
    reduce: Literal["float32", "bfloat16"] = "float32"
    adapters: Adapters = field(default_factory=Adapters)
    logits: Logits = "whole"
    stored: Literal["float32", "bfloat16"] = "float32"
    offloads: bool = False
    optimizer: str = "adamw"
    scans: bool = False


SOFTWARE = {  # by the beginning of the framework's name
    "llm-foundry": Software(attention="flash1"),  # Triton's, of 2022
    "composer": Software(attention="flash1"),
    "megatron": Software(attention="fastest", reduce="bfloat16"),  # cuDNN's, TransformerEngine
    "nemo automodel": Software(attention="fastest", adapters=Adapters(on="all")),
    "nemo": Software(attention="fastest", reduce="bfloat16"),
    "maxtext": Software(attention="fastest", scans=True),  # jax.lax.scan
    "torchtune": Software(
        checkpointing="full", reduce="bfloat16", logits="tokens", stored="bfloat16"
    ),
    "fsdp_qlora": Software(  # its defaults of March 2024, around transformers and peft
        False, adapters=Adapters(64, "inputs", drops=True), logits="held", stored="bfloat16"
    ),
    "prime-rl": Software(adapters=Adapters(on="all"), logits="vocabulary"),
}
AROUND = "transformers|trl|accelerate|hugging ?face|llama-?factory|axolotl"  # around their models
EAGER = AROUND + "|pytorch|deepspeed"  # nothing is compiled unless a row says it
STAGES = ("packed", "compile", "chunked", "act ckpt", "fuse", "act offl", "8-bit", "lora")
"""Of a table in which each row adds one technique to those before."""
STRATEGIES = {  # by what is in it without spaces and dashes, the first that is
    "shardgradop|zero2|reshardafterforward=false": "shard_grad_op",
    "fsdp|zero3|fullshard|fullysharded": "full_shard",
    "distributedoptimizer|distopt|zero1": "zero1",
    "ddp|dataparallel|noshard|zero0": "no_shard",
}
OTHER_LAYOUTS = r"\b(tp|pp|cp|ep|sp) ?[=:x]? ?([2-9]|\d\d)|tensor|pipeline|\b[34]d\b|not stated"
UNSAID = ("", "none", "no", "false", "0", "-", "n/a")
CHECKPOINTING: Mapping[str, Checkpointing] = {  # by the beginning; else it is "full"
    "no": "none",
    "false": "none",
    "off": "none",
    "selective-op": "matmuls",
    "selective op": "matmuls",
    "selective": "second",
    "minimal": "moved",  # MaxText's
}


@dataclass(frozen=True)
class Case:
    """A row as a plan.

    Attributes:
        source: the folder of documents that it is from.
        tokens_per_second: of one rank; ``None``: not published.
        memory: bytes at most; ``None``: not published.
        allocated: it is what was allocated, and not what the allocator had reserved.
        shards: ranks that hold one copy of the model.
        rank: of the adapters; 0 for none.
    """

    number: str
    title: str
    source: str
    shape: Shape
    length: int
    micro_batch: int
    micro_batches: int
    ranks: int
    shards: int
    strategy: str
    machine: Machine
    precision: Literal["bf16", "fp8", "fp4"]
    wire: Literal["bf16", "fp8"]
    quantized: bool
    software: Software
    rank: int
    tokens_per_second: float | None
    memory: float | None
    allocated: bool

    @property
    def variant(self) -> Variant:
        """What is trained, and how."""
        adapters = replace(self.software.adapters, rank=self.rank)
        return Variant(self.length, adapters, self.software.checkpointing, self.software.logits)

    @property
    def group(self) -> tuple[str, str]:
        """The source and the accelerator, of which one row calibrates the others."""
        return self.source, self.machine.accelerator.name


def read(path: Path) -> tuple[list[Case], dict[str, list[str]]]:
    """Return the cases of a file, and the numbers of its other rows by reason."""
    cases: list[Case] = []
    others: dict[str, list[str]] = {}
    seen: set[str] = set()
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, cells in enumerate(csv.DictReader(file), start=1):
            row = _stripped(cells)
            if row["row_id"] in ("", *seen):
                row["row_id"] = f"row {number}"
            seen.add(row["row_id"])
            try:
                cases.append(case(row))
            except (Inexpressible, ConfigError) as reason:
                others.setdefault(str(reason), []).append(row["row_id"])
    return cases, others


def _stripped(cells: Mapping[str, Any]) -> defaultdict[str, str]:
    """The cells of a row; a column that a file lacks is an empty cell."""
    texts = {name: value.strip() for name, value in cells.items() if isinstance(value, str)}
    return defaultdict(str, texts)


def case(row: Row) -> Case:
    """The case of a row.

    Raises:
        Inexpressible, ConfigError: it is none.
    """
    row = _stripped(row)
    _check(row)
    shape, strategy = _shape(row), row["strategy"].lower()
    ranks = int(_number(row, "n_gpus", "the number of accelerators is not stated"))
    length = int(_number(row, "seq_len", "the sequence length is not stated"))
    micro_batch = int(_of_rows(row, ranks))
    micro_batches = _micro_batches(row, ranks, micro_batch)
    machine, software = _machine(row, ranks), _software(row)
    one = Case(
        number=row["row_id"],
        title=f"{row['framework']}, {row['model']}, {ranks} x {row['gpu']}",
        source=_source(row["source"]),
        shape=shape,
        length=length,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        ranks=ranks,
        shards=_shards(strategy, ranks, machine),
        strategy=_strategy(strategy, ranks, machine),
        machine=machine,
        precision=_precision(row["precision"].lower()),
        wire="fp8" if "fp8 all-gather" in row["precision"] else "bf16",
        quantized="nf4" in row["precision"] or "qlora" in row["task"].lower(),
        software=software,
        rank=_rank(row, software.adapters),
        tokens_per_second=_tokens_per_second(row, shape, length * micro_batch * micro_batches),
        memory=_memory(row),
        allocated="memory ACTIVE" in row["notes"] or row["framework"].startswith("torchtune"),
    )
    if one.tokens_per_second is None and one.memory is None:
        raise Inexpressible("neither throughput nor memory is stated")
    machine.accelerator.peak(one.precision)
    _check_possible(one)
    return one


def _check(row: Row) -> None:
    parallel = ("tp", "pp", "cp", "ep")
    several = [axis for axis in parallel if (_optional(row, axis) or 1) > 1]
    if several:
        raise Inexpressible("tensor, pipeline, context or expert parallel")
    told = row["strategy"].lower()
    if re.search(OTHER_LAYOUTS, told):
        raise Inexpressible("the layout is not stated, or not data-parallel alone")
    if row["offload"].lower() not in (*UNSAID, "activation") or "offload" in told.replace(
        "act offload", ""
    ):
        raise Inexpressible("parameters or the optimizer are in host memory")
    if "outlier" in row["quality"]:
        raise Inexpressible("an outlier in its own table")
    if "baseline" in row["strategy"].lower() and "unpacked" not in row["strategy"].lower():
        raise Inexpressible("sequences are not packed, so tokens are not known")


def _shape(row: Row) -> Shape:
    if is_mixture(row["model"]):
        raise Inexpressible("a mixture of experts")
    shape = shape_named(row["model"]) or _stated_shape(row)
    if shape is None:
        raise Inexpressible("the model's shape is not known")
    stated = (_optional(row, "params_b") or 0) * 1e9
    learnt = 0 if shape.gated else (_optional(row, "seq_len") or 0) * shape.width
    if stated and abs((shape.parameters + learnt) / stated - 1) > TOLERANCE:
        raise Inexpressible("the model has another number of parameters than its shape")
    return shape


def _stated_shape(row: Row) -> Shape | None:
    """A decoder of the sizes that are stated, of GPT's kind if it is called so.

    Another one is gated; its feed-forward network has what is left.
    """
    sizes = (_optional(row, name) for name in ("n_layers", "d_model", "n_heads", "params_b"))
    layers, width, heads, billions = sizes
    if not (layers and width and heads) or width % heads:
        return None
    if "gpt" in row["model"].lower():
        return gpt(int(layers), int(width), int(heads))
    if not billions:
        return None
    tables = 2 * VOCABULARY * width
    hidden = ((billions * 1e9 - tables) / layers - 4 * width**2) / 3 / width
    if hidden < width:
        return None
    whole = (int(layers), int(width), int(heads), int(heads), round(hidden), VOCABULARY)
    return Shape(*whole, int(width // heads))


def _number(row: Row, name: str, reason: str) -> float:
    number = _optional(row, name)
    if number is None or number < 1:
        raise Inexpressible(reason)
    return number


def _optional(row: Row, name: str) -> float | None:
    """A number above 0, such as ``8,192`` or ``~40``."""
    try:
        number = float(row[name].replace(",", "").lstrip("~≈ "))
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _of_rows(row: Row, ranks: int) -> float:
    """Rows of a micro-batch, as stated or from those of a step."""
    rows, times = _optional(row, "global_batch_seqs"), _optional(row, "grad_accum")
    if not row["micro_batch"] and rows and times:
        return max(1, rows / ranks / times)
    return _number(row, "micro_batch", "the micro-batch is not stated")


def _micro_batches(row: Row, ranks: int, micro_batch: int) -> int:
    stated, rows = _optional(row, "grad_accum"), _optional(row, "global_batch_seqs")
    if stated is not None:
        return max(1, round(stated))
    return max(1, round(rows / ranks / micro_batch)) if rows else 1


def _machine(row: Row, ranks: int) -> Machine:
    name = _accelerator(row)
    text, between, inside = row["interconnect"], None, None
    rate = re.search(r"(?:(\d+) ?[x×*] ?)?(\d[\d.]*) ?(G|T)b(?:ps|/s|it|E|\b)", text)
    if rate is not None and "per GPU" not in text:
        cards = int(rate[1] or 1) * (1000 if rate[3] == "T" else 1)
        between = f"{float(rate[2]) * cards:g} Gb/s"
    if "TCPX" in text:
        between = "GPUDirect-TCPX"
    pcie = text.startswith("PCIe") or "pcie" in row["gpu"].lower()
    if pcie and known().accelerator(name).inside.startswith("NVLink"):
        inside = "PCIe 4"
    machine = known().machine(name, inside=inside, between=between)
    return machine if machine.per_host <= ranks else known().machine(name, ranks, inside, between)


def _accelerator(row: Row) -> str:
    """A name that is known, if need be without its vendor's, its form and its memory."""
    name = re.sub(r"^\d+ ?x ?|\(.*\)", "", row["gpu"].replace("_", " ")).strip()
    if not name:
        raise Inexpressible("the accelerator is not stated")
    plain = re.sub(rf"\b({VENDORS})\b", " ", name, flags=re.IGNORECASE)
    plain = re.sub(r"(v\d[ep]?)(?:pod)?-\d+$", r"\1", plain)  # cores of a TPU's slice
    stated = re.search(r"(\d+) ?Gi?B?\b", name, re.IGNORECASE)
    memory = stated[1] if stated else f"{_optional(row, 'gpu_mem_gb') or 0:.0f}"
    forms = r"[- ]?\d+ ?Gi?B?\b|[- ](?:SXM|OAM|PCIe|HBM|HGX|NVL\d)"
    bare = re.split(forms, plain.strip(), maxsplit=1, flags=re.IGNORECASE)[0]
    card = [f"{bare} PCIe"] if "pcie" in name.lower() else []
    for spelled in (*card, f"{bare} {memory}GB", name, plain, bare):
        with suppress(ConfigError):
            return known().accelerator(spelled).name
    return known().accelerator(name).name


def _software(row: Row) -> Software:
    framework, told = row["framework"].lower(), row["strategy"].lower()
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
    compiled = usual.compiled if not row["compile"] else row["compile"] != "no"
    policy = row["act_ckpt"].lower()
    checkpointing = usual.checkpointing if not policy else _checkpointing(policy, row)
    reduce = "bfloat16" if row["precision"] == "bf16" and "foundry" in framework else usual.reduce
    stage = -1
    if "cumulative" in told:
        stage = next((n for n, name in enumerate(STAGES) if name in told), 0)
        compiled, checkpointing = stage >= 1, "full" if stage >= 3 else "none"
        logits = "tokens" if stage >= 2 else "whole"
    if compiled and framework.startswith("torchtitan") and _year(row) >= 2025:
        logits = "fused"  # the loss is compiled too
    if framework.startswith("prime-rl") and _rank(row, usual.adapters):
        compiled = False  # each adapter's check of its input waits for the device
    alone = row["n_gpus"] == "1" and row["precision"] == "bf16"  # all of it has to fit
    narrow = alone or "bf16-true" in row["precision"].lower()  # Lightning's name for all of it
    return Software(
        compiled,
        attention,
        checkpointing,
        reduce,
        usual.adapters,
        logits,
        stored="bfloat16" if narrow else usual.stored,
        offloads="offload" in policy or stage >= STAGES.index("act offl"),
        optimizer="adamw_8bit" if stage >= STAGES.index("8-bit") else "adamw",
        scans=usual.scans,
    )


def _checkpointing(policy: str, row: Row) -> Checkpointing:
    """The policy of this name; of a number of blocks, the nearest."""
    blocks = re.match(r"\d+", policy)
    if blocks is None:
        named = (kept for name, kept in CHECKPOINTING.items() if policy.startswith(name))
        return next(named, "full")
    share = int(blocks[0]) / (_optional(row, "n_layers") or 1)
    return "none" if share < 0.25 else "second" if share < 0.75 else "full"


def _shards(strategy: str, ranks: int, machine: Machine) -> int:
    copies = re.search(r"(?:x dp|dcn_dp=|x dp=|replicate=)(\d+)", strategy)
    shards = min(ranks, machine.per_host) if re.search("hsdp|hybrid|mics", strategy) else ranks
    if copies is not None:
        shards = max(1, ranks // int(copies[1]))
    if ranks % shards:
        raise Inexpressible("copies of the model differ in their number of ranks")
    return shards


def _strategy(strategy: str, ranks: int, machine: Machine) -> str:
    if _shards(strategy, ranks, machine) < ranks:
        return "hybrid_shard"
    plain = re.sub(r"[-_ ]|stage", "", strategy)
    for pattern, name in STRATEGIES.items():
        if re.search(pattern, plain):
            return name
    if ranks == 1:
        return "full_shard"
    raise Inexpressible("the strategy is not known")


def _precision(text: str) -> Literal["bf16", "fp8", "fp4"]:
    if re.fullmatch("(fp|float|tf)?32(-true)?", text):
        raise Inexpressible("products in float32")
    if "fp4" in text:
        return "fp4"
    return "fp8" if "fp8" in text or "float8" in text else "bf16"


def _rank(row: Row, usual: Adapters) -> int:
    if "lora" not in row["task"].lower() and "LoRA on" not in row["strategy"]:
        return 0
    stated = re.search(r"\br(?:ank)? ?=? ?(\d+)", row["task"])
    return int(stated[1]) if stated else usual.rank


def _year(row: Row) -> int:
    """Of a document whose name has its month, or of Blackwell; 0 for others."""
    stated = re.search(r"_(20\d\d)(?:0\d|1[0-2])_", row["source"])
    return int(stated[1]) if stated else 2025 * bool(re.search(r"\bG?B[23]00", row["gpu"]))


def _tokens_per_second(row: Row, shape: Shape, tokens: int) -> float | None:
    """Of one rank: from a step's time, as stated, or from FLOP/s over all pairs of tokens."""
    seconds, stated, rate = (
        _optional(row, name) for name in ("step_time_s", "tok_s_gpu", "tflops_gpu")
    )
    if seconds and (row["grad_accum"] or not (stated or rate)):
        return tokens / seconds
    if stated or not rate:
        return stated
    attended = 12 * shape.layers * shape.heads * shape.head_size * _number(row, "seq_len", "")
    return rate * 1e12 / (6 * shape.parameters + attended)


def _memory(row: Row) -> float | None:
    gib, gb = _optional(row, "peak_mem_gib"), _optional(row, "peak_mem_gb")
    return gib * 2**30 if gib else gb * 1e9 if gb else None


def _source(text: str) -> str:
    """Documents of one folder are one source."""
    folder = re.match(r"(.*\S+/\S*)/[^/ ]+\.(json|md|svg|rst|sh)\b", text)
    return folder[1] if folder else text


def _check_possible(one: Case) -> None:
    """Some rows need more than the accelerator has, so something is not as they say."""
    accelerator, adapted = one.machine.accelerator, one.rank > 0
    itemsize = 2 if one.software.stored == "bfloat16" else 4
    moments = 2 if one.software.optimizer == "adamw_8bit" else 2 * itemsize
    state = one.shape.parameters / one.shards * (itemsize + moments)
    if not adapted and state > accelerator.memory:
        raise Inexpressible("parameters and the optimizer's state alone do not fit")
    if one.tokens_per_second is None:
        return
    passes = 2 + (not adapted) + 0.7 * (one.software.checkpointing == "full")
    needed = 2 * passes * one.shape.layers * one.shape.block_parameters * one.tokens_per_second
    if needed > 0.85 * accelerator.peak(one.precision):
        raise Inexpressible("it would need more than 85 % of the accelerator's peak")
