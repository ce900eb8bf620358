"""Rows of published results, each read as a case that a data-parallel plan can express.

A row that is none names the reason. What a row leaves open is as its publisher's software does it.
"""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.foresight.cells import UNSAID, Row, number, stripped
from benchmarks.foresight.models import Variant
from benchmarks.foresight.shapes import Shape, gpt, no_decoder, plain_name, shape_named
from benchmarks.foresight.software import Software, quantized, rank_of, software_of
from shardwise.errors import ConfigError
from shardwise.plan.forecast.machine import Machine, known

PUBLISHED = Path(__file__).with_name("published.csv")
VOCABULARY = 32_000  # of a model that is known by its sizes alone
TOLERANCE = 0.07  # of the parameters, between a shape and its row
COUNT = r"^\d+ ?[x×] ?|( |(?<=\d))[x×] ?\d+$|\(.*\)"  # of accelerators, and what is in brackets
VENDORS = "nvidia|amd|intel|google|cloud|tesla|geforce|instinct|habana|data center gpu|hgx|dgx"


class Inexpressible(Exception):
    """Why a row is no case."""


STRATEGIES = {  # by what is in it without spaces and dashes, the first that is
    "shardgradop|(zero|sharding)2|reshardafterforward=false": "shard_grad_op",
    "[fh]sdp|(zero|sharding)3|fullshard|fullysharded|hybrid|mics|dpshard": "full_shard",
    "distributedoptimizer|distopt|(zero|sharding)1": "zero1",
    r"ddp|dataparallel|noshard|zero0|dp=?\d*$": "no_shard",
}
OTHER_LAYOUTS = (
    r"\b(tp|pp|cp|ep|sp) ?[=:x]? ?([2-9]|\d\d)|tensor|pipeline|\b[34]d\b|not stated"
    r"|sequence par|ulysses|ring att"
)


@dataclass(frozen=True)
class Case:
    """A row as a plan.

    Attributes:
        source: the folder of documents that it is from.
        tokens_per_second: of one rank; ``None``: not published.
        memory: bytes at most; ``None``: not published.
        tells: the row says what is recomputed.
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
    tells: bool

    @property
    def variant(self) -> Variant:
        """What is trained, and how."""
        used = self.software
        return Variant(
            self.length,
            replace(used.adapters, rank=self.rank),
            used.checkpointing,
            used.logits,
            used.fused,
            used.autocast,
            used.compiled,
            returns=used.autocast and self.quantized,
            keeps=used.keeps and self.quantized,
            formula=used.formula,
        )

    @property
    def sums_once(self) -> bool:
        """Are gradients summed over ranks after the last micro-batch alone?

        torch's FSDP sums those of each micro-batch, if it is not told to wait.
        """
        whole = self.ranks == 1 or self.strategy in ("zero1", "no_shard")
        return whole or self.software.waits

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
            row = stripped(cells)
            if row["row_id"] in ("", *seen):
                row["row_id"] = f"row {number}"
            seen.add(row["row_id"])
            try:
                cases.append(case(row))
            except (Inexpressible, ConfigError) as reason:
                others.setdefault(str(reason), []).append(row["row_id"])
    return cases, others


def case(row: Row) -> Case:
    """The case of a row.

    Raises:
        Inexpressible, ConfigError: it is none.
    """
    row = stripped(row)
    _check(row)
    shape, strategy = _shape(row), row["strategy"].lower()
    ranks = _ranks(row)
    length = int(_required(row, "seq_len", "the sequence length is not stated"))
    micro_batch = int(_of_rows(row, ranks))
    micro_batches = _micro_batches(row, ranks, micro_batch)
    machine, software = _machine(row, ranks), software_of(row, shape.layers)
    shape = replace(shape, vocabulary=-(-shape.vocabulary // software.pads) * software.pads)
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
        quantized=quantized(row),
        software=software,
        rank=rank_of(row, software.adapters),
        tokens_per_second=_tokens_per_second(
            row, shape, length * micro_batch * micro_batches, machine
        ),
        memory=_memory(row),
        tells=bool(row["act_ckpt"]),
    )
    if one.tokens_per_second is None and one.memory is None:
        raise Inexpressible("neither throughput nor memory is stated")
    machine.accelerator.peak(one.precision)
    _check_possible(one)
    return one


def _check(row: Row) -> None:
    parallel = ("tp", "pp", "cp", "ep")
    several = [axis for axis in parallel if (number(row, axis) or 1) > 1]
    if several:
        raise Inexpressible("tensor, pipeline, context or expert parallel")
    strategy = row["strategy"].lower()
    if re.match("inference|eval|generat|prefill|decod|serv", row["task"].lower()):
        raise Inexpressible("nothing is trained")
    if re.search(OTHER_LAYOUTS, strategy):
        raise Inexpressible("the layout is not stated, or not data-parallel alone")
    held = row["offload"].lower()
    if not (
        held in UNSAID or re.fullmatch("act(ivations?)?", held)
    ) or "offload" in strategy.replace("act offload", ""):
        raise Inexpressible("parameters or the optimizer are in host memory")
    if "outlier" in row["quality"]:
        raise Inexpressible("an outlier in its own table")
    if "baseline" in row["strategy"].lower() and "unpacked" not in row["strategy"].lower():
        raise Inexpressible("sequences are not packed, so tokens are not known")


def _shape(row: Row) -> Shape:
    """The shape as named or stated, with what the notes say of its vocabulary and its head."""
    shape, notes = _plain_shape(row), row["notes"]
    other = re.search(r"vocabulary of ([\d,]*\d|[A-Z][\w.]* \d[\d.]*)", notes)
    if other is not None:
        named = shape_named(f"{other[1]}-8B")
        entries = named.vocabulary if named else int(other[1].replace(",", ""))
        shape = replace(shape, vocabulary=entries)
    return replace(shape, tied=shape.tied and "head has weights of its own" not in notes)


def _plain_shape(row: Row) -> Shape:
    reason = no_decoder(row["model"])
    if reason is not None:
        raise Inexpressible(reason)
    shape = shape_named(row["model"])
    if shape is None or not _has_sizes(shape, row):
        shape = _stated_shape(row)
    if shape is None:
        raise Inexpressible("the model's shape is not known")
    billions = number(row, "params_b")
    learnt = 0 if shape.gated else (number(row, "seq_len") or 0) * shape.width
    if billions is None or f"{billions:g}b" in plain_name(row["model"]):  # in round numbers
        return shape
    if abs((shape.parameters + learnt) / billions / 1e9 - 1) > TOLERANCE:
        raise Inexpressible("the model has another number of parameters than its shape")
    return shape


def _has_sizes(shape: Shape, row: Row) -> bool:
    """Is what the row says of its model's sizes true of the shape?"""
    sizes = {"n_layers": shape.layers, "d_model": shape.width, "vocab": shape.vocabulary}
    return all((number(row, name) or size) == size for name, size in sizes.items())


def _stated_shape(row: Row) -> Shape | None:
    """A decoder of the sizes that are stated, of GPT's kind if it is called so.

    Another one is gated; its feed-forward network has what is left.
    """
    sizes = (number(row, name) for name in ("n_layers", "d_model", "n_heads", "params_b"))
    layers, width, heads, billions = sizes
    if not (layers and width and heads) or width % heads:
        return None
    vocabulary, shared = number(row, "vocab"), number(row, "n_kv_heads") or heads
    if "gpt" in row["model"].lower():
        stated = [int(vocabulary)] if vocabulary else []
        return gpt(int(layers), int(width), int(heads), *stated)
    vocabulary = vocabulary or VOCABULARY
    if not billions:
        return None
    tables = 2 * vocabulary * width
    attention = 2 * width**2 * (1 + shared / heads)
    hidden = ((billions * 1e9 - tables) / layers - attention) / 3 / width
    if not width <= hidden <= 8 * width:
        return None
    hidden = 8 * round(hidden / 8)  # nobody takes another multiple
    whole = (int(layers), int(width), int(heads), int(shared), hidden, int(vocabulary))
    return Shape(*whole, int(width // heads))


def _required(row: Row, name: str, reason: str) -> float:
    stated = number(row, name)
    if stated is None or stated < 1:
        raise Inexpressible(reason)
    return stated


def _hosts(row: Row) -> re.Match[str] | None:
    """The numbers of hosts and of devices in each, where a row states both."""
    return re.match(r"(\d+)(?: nodes?)? ?[x×*] ?(\d+)", row["n_gpus"])


def _ranks(row: Row) -> int:
    """The number of ranks: a number, or hosts times devices."""
    hosts = _hosts(row)
    if hosts is not None:
        return int(hosts[1]) * int(hosts[2])
    return int(_required(row, "n_gpus", "the number of accelerators is not stated"))


def _of_rows(row: Row, ranks: int) -> float:
    """Rows of a micro-batch, as stated or from those of a step."""
    rows, times = number(row, "global_batch_seqs"), number(row, "grad_accum")
    if not row["micro_batch"] and rows and times:
        return max(1, rows / ranks / times)
    return _required(row, "micro_batch", "the micro-batch is not stated")


def _micro_batches(row: Row, ranks: int, micro_batch: int) -> int:
    stated, rows = number(row, "grad_accum"), number(row, "global_batch_seqs")
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
    hosts = _hosts(row)
    return replace(machine, per_host=min(ranks, int(hosts[2]) if hosts else machine.per_host))


def _accelerator(row: Row) -> str:
    """A name that is known, if need be without its vendor's, its form and its memory."""
    name = re.sub(COUNT, "", row["gpu"].replace("_", " ")).strip()
    if not name:
        raise Inexpressible("the accelerator is not stated")
    plain = re.sub(rf"\b({VENDORS})\b", " ", name, flags=re.IGNORECASE)
    plain = plain.replace("v5litepod", "v5e")
    plain = re.sub(r"(?:TPU[- ]?)?(v\d[ep]?)(?:pod)?-\d+$", r"TPU \1", plain)  # a slice
    stated = re.search(r"(\d+) ?Gi?B?\b", name, re.IGNORECASE)
    memory = stated[1] if stated else f"{number(row, 'gpu_mem_gb') or 0:.0f}"
    forms = r"[- ]?\d+ ?Gi?B?\b|[- ](?:SXM|OAM|PCIe|HBM|HGX|NVL\d)"
    bare = re.split(forms, plain.strip(), maxsplit=1, flags=re.IGNORECASE)[0]
    card = [f"{bare} PCIe"] if "pcie" in name.lower() else []
    for spelled in (*card, f"{bare} {memory}GB", name, plain, bare):
        with suppress(ConfigError):
            return known().accelerator(spelled).name
    return known().accelerator(name).name


def _shards(strategy: str, ranks: int, machine: Machine) -> int:
    copies = re.search(r"(?:x dp|dcn_dp=|x dp=|replicate[= ])(\d+)", strategy)
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
    if re.search("int8|8-?bit", text):
        raise Inexpressible("products or weights in 8-bit integers")
    if "fp4" in text:
        return "fp4"
    return "fp8" if "fp8" in text or "float8" in text else "bf16"


def _tokens_per_second(row: Row, shape: Shape, tokens: int, machine: Machine) -> float | None:
    """Of one rank: as stated, from a step's time, or from FLOP/s or MFU over all pairs."""
    seconds, stated, rate, share = (
        number(row, name) for name in ("step_time_s", "tok_s_gpu", "tflops_gpu", "mfu_pct")
    )
    if seconds and (row["grad_accum"] or not (stated or rate)):
        return tokens / seconds
    if stated:
        return stated
    if not rate and share and _precision(row["precision"].lower()) == "bf16":
        rate = share / (100 if share > 1 else 1) * machine.accelerator.bf16 / 1e12
    if not rate:
        return None
    attended = 12 * shape.layers * shape.heads * shape.head_size * _required(row, "seq_len", "")
    return rate * 1e12 / (6 * shape.parameters + attended)


def _memory(row: Row) -> float | None:
    gib, gb = number(row, "peak_mem_gib"), number(row, "peak_mem_gb")
    if row["framework"].startswith(("torchtitan", "torchtune")):
        gib = gib or gb  # they print GiB, which some call GB
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
