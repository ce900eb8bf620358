"""Published rows as plans: how a row is read, what it asks of a machine, and how it is judged."""

from __future__ import annotations

import csv
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from benchmarks.foresight.cells import number
from benchmarks.foresight.fit import USUAL, Fit, judge, ordered
from benchmarks.foresight.memory import RESERVED, peak_of, settled
from benchmarks.foresight.models import Adapters, Checkpointing, Decoder, Variant
from benchmarks.foresight.plans import plan_of, work_of
from benchmarks.foresight.rows import PUBLISHED, Case, Inexpressible, case, read
from benchmarks.foresight.run import summary
from benchmarks.foresight.shapes import Shape, few, no_decoder, shape_named
from shardwise.config.precision import Precision
from shardwise.errors import ConfigError
from shardwise.plan.forecast.machine import known
from shardwise.plan.forecast.observe import observe
from shardwise.plan.units.units import choose_units
from shardwise.plan.units.wrap import by_class

OF_ANOTHER = dict.fromkeys(
    ("params_b", "n_layers", "d_model", "n_heads"), ""
)  # with a model's name
SMALL = Shape(4, 64, 4, 2, 128, 256, 16)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return {row["row_id"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def small() -> Case:
    return replace(read(PUBLISHED)[0][0], shape=SMALL, length=32, micro_batch=2, ranks=4, shards=4)


def test_a_row_is_read_as_it_says_and_as_its_software_does(rows: dict[str, dict[str, str]]) -> None:
    one = case(rows["217"])
    assert (one.shape, one.length, one.micro_batch, one.ranks) == (
        shape_named("Llama-3.1-8B"), 8192, 2, 8,
    )  # fmt: skip
    assert (one.strategy, one.precision, one.software.compiled) == ("full_shard", "bf16", False)
    assert one.machine.accelerator.name == "H100 500W"
    assert one.software.checkpointing == "matmuls"
    assert one.tokens_per_second == 5762
    assert one.memory == pytest.approx(82.4 * 2**30)


@pytest.mark.parametrize(
    ("gpu", "memory", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "", "H100 SXM"),
        ("8xH100-SXM5-80GB", "80", "H100 SXM"),
        ("A100-PCIe-40GB", "", "A100 40GB"),
        ("A100", "40", "A100 40GB"),
        ("A100", "", "A100 80GB"),
        ("AMD Instinct MI300X OAM", "192", "MI300X"),
        ("Intel Data Center GPU Max 1550", "", "Max 1550"),
        ("GB200 NVL72", "", "GB200"),
        ("Gaudi2", "", "Gaudi 2"),
        ("A100 80G SXM", "", "A100 80GB"),
        ("nvidia_a100-sxm4-80gb", "", "A100 80GB"),
        ("8 x A100-SXM4-40GB (p4d.24xlarge)", "", "A100 40GB"),
        ("H100 PCIe 80GB", "80", "H100 PCIe"),
        ("TPU v4-128", "", "TPU v4"),
        ("TPU v5litepod-256", "", "TPU v5e"),
        ("v5p-128", "", "TPU v5p"),
        ("Trillium", "", "TPU v6e"),
        ("TPU v7x (Ironwood)", "", "TPU v7x"),
        ("NVIDIA DGX A100 x8", "", "A100 80GB"),
        ("4090", "", "RTX 4090"),
        ("MI250X (GCD)", "64", "MI250X GCD"),
    ],
)
def test_an_accelerator_is_known_by_many_spellings(
    rows: dict[str, dict[str, str]], gpu: str, memory: str, name: str
) -> None:
    row = rows["217"] | {"gpu": gpu, "gpu_mem_gb": memory, "tok_s_gpu": "9", "model": "tinyllama"}
    assert case(row | OF_ANOTHER).machine.accelerator.name == name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8.0),
        ("CodeLlama-70B", 69.0),
        ("vicuna-13b-v1.5", 13.0),
        ("Mistral 7B v0.3", 7.2),
        ("Qwen1.5-14B-Chat", 14.2),
        ("Qwen2.5-Coder-7B", 7.6),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.6),
        ("deepseek-coder-33b", 33.3),
        ("gemma-3-27b-it", 27.0),
        ("Phi-3.5-mini-instruct", 3.8),
        ("phi-4", 14.7),
        ("GPT-NeoX 20B", 20.6),
        ("EleutherAI/pythia-160m", 0.16),
        ("bloomz-7b1", 7.1),
        ("Falcon3-7B", 7.5),
        ("OLMo-2-1124-7B", 7.3),
        ("internlm2_5-7b", 7.7),
        ("GPT-3 175B", 174.6),
        ("StarCoder2-15B", 16.0),
        ("StableLM Alpha 3B", 3.6),
        ("GPT-2 (124M)", 0.124),
        ("Llama-70B", 69.0),
        ("Nemotron-15B", 15.6),
    ],
)
def test_a_model_is_known_by_many_names(name: str, billions: float) -> None:
    assert no_decoder(name) is None
    shape = shape_named(name)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    "name", ["BERT-Large", "flan-t5-xl", "ViT-L/16", "Qwen2-VL-7B", "Mamba-2.8B"]
)
def test_a_model_of_another_kind_is_refused_by_its_name(name: str) -> None:
    assert no_decoder(name) == "no causal decoder of text alone"


@pytest.mark.parametrize(
    ("column", "text", "value"),
    [
        ("tok_s_gpu", "1,234.5 tok/s", 1234.5),
        ("tok_s_gpu", "12.5k", 12_500),
        ("tok_s_gpu", "1200-1300", None),
        ("seq_len", "4k", 4096),
        ("seq_len", "2048 (packed)", 2048),
        ("global_batch_seqs", "4M tokens", None),
        ("step_time_s", "1500 ms", 1.5),
        ("peak_mem_gib", "~40.5 GiB", 40.5),
        ("tp", "TP2", 2),
        ("pp", "-1", None),
    ],
)
def test_numbers_are_read_as_people_write_them(column: str, text: str, value: float | None) -> None:
    assert number({column: text}, column) == value


def test_throughput_follows_from_what_a_row_states_of_it(rows: dict[str, dict[str, str]]) -> None:
    silent = rows["217"] | {"tok_s_gpu": "", "peak_mem_gib": "", "grad_accum": ""}
    silent |= dict.fromkeys(("tflops_gpu", "mfu_pct", "step_time_s"), "")
    peak = known().accelerator("H100 500W").bf16
    flops = case(silent | {"tflops_gpu": f"{0.4 * peak / 1e12}"}).tokens_per_second
    for mfu in ("40", "40%", "0.4"):
        assert case(silent | {"mfu_pct": mfu}).tokens_per_second == pytest.approx(flops)
    assert case(silent | {"step_time_s": "4 s"}).tokens_per_second == 2 * 8192 / 4
    with pytest.raises(Inexpressible, match="neither"):
        case(silent)


@pytest.mark.parametrize(
    ("column", "text", "fuses"),
    [
        ("notes", "126M without flash attention", False),
        ("notes", "FlashAttention-2", True),
        ("source", "arXiv:2104.04473 table 1", False),
        ("source", "arXiv 2304.11277", True),
        ("framework", "transformers 4.12 Trainer", False),
        ("framework", "transformers 4.40", True),
        ("framework", "PyTorch FSDP (torch 1.13)", False),
        ("gpu", "V100-32GB", False),
    ],
)
def test_attention_is_one_kernel_since_there_is_one(
    rows: dict[str, dict[str, str]], column: str, text: str, fuses: bool
) -> None:
    row = rows["217"] | OF_ANOTHER | {"model": "tinyllama", "tok_s_gpu": "9"}
    assert case(row | {column: text}).software.fused is fuses


def test_scores_that_are_in_memory_are_moved_and_kept(small: Case) -> None:
    whole = replace(small.software, checkpointing="none")
    one, scores = (
        work_of(replace(small, software=replace(whole, fused=fused))) for fused in (True, False)
    )
    assert scores.saved > one.saved
    first, second = (work.units["blocks.1"].forward.moved for work in (one, scores))
    heads, length = SMALL.heads, small.length
    assert second - first >= 10 * small.micro_batch * heads * length**2


def test_what_does_not_fit_is_recomputed_unless_the_row_tells(small: Case) -> None:
    tiny = replace(small.machine.accelerator, memory=1e6, reserved=0)
    full = replace(small, machine=replace(small.machine, accelerator=tiny))
    plain = replace(full, software=replace(small.software, checkpointing="none"))
    assert settled(replace(plain, tells=False)).software.checkpointing == "full"
    assert settled(replace(plain, tells=True)) == replace(plain, tells=True)
    fits = replace(plain, machine=small.machine, tells=False)
    assert settled(fits) is fits


def test_state_of_whole_tensors_takes_a_collective_for_each(small: Case) -> None:
    many = replace(small, ranks=1024, shards=1024, strategy="zero1")
    whole = replace(many, software=replace(small.software, whole=True))
    machine = small.machine.accelerator
    one, each = (plan_of(c).forecast(machine, known().constants).seconds for c in (many, whole))
    assert each > 3 * one


def test_cells_and_columns_may_be_missing_or_odd(rows: dict[str, dict[str, str]]) -> None:
    for column in rows["217"]:
        for value in ("", "n/a", "-1", "nan", "inf", "8,192"):
            with suppress(Inexpressible, ConfigError):
                case(rows["217"] | {column: value})
        with suppress(Inexpressible, ConfigError):
            case({name: cell for name, cell in rows["217"].items() if name != column})


def test_a_model_without_a_name_is_one_of_its_sizes(rows: dict[str, dict[str, str]]) -> None:
    sizes = {"params_b": "6.74", "n_layers": "32", "d_model": "4096", "n_heads": "32"}
    shape = case(rows["217"] | sizes | {"model": "Nobody-7B"}).shape
    assert shape.parameters == pytest.approx(6.74e9, rel=1e-3)
    assert shape.hidden == pytest.approx(11008, rel=0.01)


def test_a_row_can_state_a_vocabulary_and_heads_of_keys_and_values(
    rows: dict[str, dict[str, str]],
) -> None:
    changes = {"model": "Nobody-8B", "params_b": "8.05332992", "n_layers": "32", "d_model": "4096"}
    changes |= {"n_heads": "32", "n_kv_heads": "8", "vocab": "131072"}
    shape = case(rows["217"] | changes).shape
    assert (shape.kv_heads, shape.vocabulary) == (8, 131072)
    assert shape.hidden == pytest.approx(14336, abs=1)
    letters = {"model": "gpt2-xl", "params_b": "1.4", "vocab": "128"}
    assert case(rows["217"] | OF_ANOTHER | letters | {"n_layers": "48", "d_model": "1600",
        "n_heads": "25"}).shape.vocabulary == 128  # fmt: skip


def test_notes_and_software_may_have_another_vocabulary_than_the_model_s_own(
    rows: dict[str, dict[str, str]],
) -> None:
    plain = {
        **rows["217"],
        **OF_ANOTHER,
        "model": "GPT-2 124M",
        "framework": "PyTorch",
        "notes": "",
    }

    def shape(**cells: str) -> Shape:
        return case(plain | cells).shape

    assert (shape().vocabulary, shape().tied) == (50_257, True)
    assert shape(notes="vocabulary of 50,304; more").vocabulary == 50_304
    assert shape(notes="vocabulary of Llama 3").vocabulary == 128_256
    assert shape(framework="Megatron-LM").vocabulary == 50_304
    assert not shape(notes="the head has weights of its own").tied


def test_a_model_that_is_called_a_gpt_has_blocks_as_gpt_has_them(
    rows: dict[str, dict[str, str]],
) -> None:
    sizes = {"params_b": "", "n_layers": "24", "d_model": "2304", "n_heads": "24"}
    shape = case(rows["217"] | sizes | {"model": "SomeGPT-1.6B"}).shape
    assert (shape.gated, shape.hidden) == (False, 4 * 2304)


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "gpt-oss-20b", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_a_mixture_of_experts_is_known_by_its_name(name: str) -> None:
    assert no_decoder(name) == "a mixture of experts"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("FSDP2", "full_shard"),
        ("DeepSpeed ZeRO stage 3", "full_shard"),
        ("ZeRO-2", "shard_grad_op"),
        ("FSDP1 SHARD_GRAD_OP", "shard_grad_op"),
        ("DDP + ZeRO-1", "zero1"),
        ("DDP", "no_shard"),
        ("Data parallel", "no_shard"),
        ("HSDP", "hybrid_shard"),
        ("dp_replicate 2 dp_shard 8", "hybrid_shard"),
        ("DP=16", "no_shard"),
        ("sharding stage 2", "shard_grad_op"),
    ],
)
def test_a_strategy_is_known_by_many_spellings(
    rows: dict[str, dict[str, str]], spelling: str, name: str
) -> None:
    row = rows["217"] | {"strategy": spelling, "n_gpus": "16", "model": "Llama-3.2-1B"}
    assert case(row | OF_ANOTHER).strategy == name


def test_links_between_hosts_are_as_many_as_the_row_says(rows: dict[str, dict[str, str]]) -> None:
    for text in ("4 * 100Gb RoCE", "4x100 Gbps", "400 Gb/s"):
        rate = case(rows["217"] | {"interconnect": text}).machine.between.bandwidth
        assert rate == pytest.approx(400e9 / 8 * 0.9)
    hosts = [case(rows["217"] | {"n_gpus": text}).machine.per_host for text in ("2x4", "16", "4")]
    assert hosts == [4, 8, 4]
    card = rows["217"] | {"gpu": "A100-PCIe-80GB", "tok_s_gpu": "99"}
    assert case(card).machine.inside.name == "PCIe 4"


def test_software_of_which_a_row_says_nothing_is_eager_where_it_is_torch_s_own(
    rows: dict[str, dict[str, str]],
) -> None:
    silent = rows["217"] | {"compile": "", "precision": "bf16-true"}
    assert not case(silent | {"framework": "PyTorch FSDP"}).software.compiled
    assert case(silent | {"framework": "Nobody's"}).software.compiled
    assert case(silent | {"framework": "Lightning"}).software.stored == "bfloat16"
    assert case(silent | {"framework": "HF transformers + TRL"}).software.logits == "held"


def test_torchtune_before_its_loss_of_parts_holds_all_logits(
    rows: dict[str, dict[str, str]],
) -> None:
    early = rows["217"] | {"framework": "torchtune", "source": "github README.md (May 2024)"}
    assert case(early).software.logits == "held"
    assert case(early | {"source": "github README.md"}).software.logits == "tokens"


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({"framework": "transformers + peft", "task": "LoRA r16"}, "bfloat16"),
        ({"framework": "transformers + DeepSpeed", "task": "SFT"}, "float32"),
        ({"framework": "Nobody's", "precision": "nf4 weights, bf16"}, "bfloat16"),
        ({"framework": "Nobody's", "task": "LoRA r16"}, "float32"),
    ],
)
def test_weights_that_are_frozen_are_in_16_bits(
    rows: dict[str, dict[str, str]], changes: dict[str, str], stored: str
) -> None:
    assert case(rows["217"] | changes).software.stored == stored


def test_notes_say_where_adapters_are_and_what_a_peak_is_of(
    rows: dict[str, dict[str, str]],
) -> None:
    row = rows["217"] | {"framework": "transformers", "task": "LoRA r16"}
    plain, noted = (
        case(row | {"notes": notes}).software
        for notes in ("", "max_memory_allocated; all linear maps have adapters")
    )
    assert (plain.adapters.on, plain.allocated) == ("attention", False)
    assert (noted.adapters.on, noted.allocated) == ("all", True)


@pytest.mark.parametrize(
    ("cells", "changes"),
    [
        ({"notes": "fused kernels, Liger"}, {"compiled": True, "logits": "once"}),
        (
            {"framework": "trl", "source": "unslothai/unsloth"},
            {"compiled": False, "logits": "held"},
        ),
        ({"framework": "Unsloth", "source": "README of 2025"}, {"logits": "tokens"}),
        ({"framework": "trl + Unsloth"}, {"logits": "fused", "offloads": True}),
        ({"notes": "memory as nvidia-smi shows it"}, {"device": True}),
        ({"framework": "transformers + trl"}, {"lists": True, "reduce": "float32"}),
        ({"framework": "transformers + DeepSpeed"}, {"lists": False, "reduce": "bfloat16"}),
        ({"framework": "trl", "precision": "nf4", "strategy": "DDP"}, {"autocast": True}),
        ({"framework": "trl", "precision": "nf4", "strategy": "FSDP"}, {"autocast": False}),
        (
            {"framework": "trl", "precision": "nf4", "strategy": "DDP", "act_ckpt": ""},
            {"checkpointing": "full"},
        ),
        (
            {
                "framework": "trl",
                "precision": "nf4",
                "strategy": "DDP",
                "notes": "no float32 casts",
            },
            {"autocast": False},
        ),
        ({"framework": "trl", "notes": "fused kernels"}, {"compiled": True, "logits": "cast"}),
        ({"framework": "transformers", "notes": "2023"}, {"fused": False}),
        ({"framework": "transformers", "notes": "2024"}, {"fused": True}),
        ({"framework": "trl", "strategy": "FSDP"}, {"hooks": "adapters"}),
        ({"framework": "PyTorch", "notes": "no_sync"}, {"waits": True}),
        ({"framework": "trl, DeepSpeed", "strategy": "ZeRO-3"}, {"hooks": "all"}),
    ],
)
def test_what_fuses_keeps_or_copies_is_known_by_its_name(
    rows: dict[str, dict[str, str]], cells: dict[str, str], changes: dict[str, Any]
) -> None:
    software = case(rows["217"] | {"compile": "", "act_ckpt": "full"} | cells).software
    assert software == replace(software, **changes)


def test_an_optimizer_over_lists_copies_what_it_steps(small: Case) -> None:
    """``foreach`` of torch.optim: parameters, gradients, two moments, and a list of roots."""
    lists = replace(small, software=replace(small.software, lists=True, allocated=True))
    state = SMALL.parameters / small.shards * 4
    few_tokens = replace(lists, length=2, micro_batch=1)
    assert peak_of(few_tokens) >= 5 * state
    adapted = replace(few_tokens, rank=4)
    assert peak_of(adapted) < 5 * state


def test_where_only_state_is_split_gradients_stay_whole_in_their_dtype(small: Case) -> None:
    software = replace(small.software, allocated=True)
    wide = replace(small, strategy="zero1", software=software)
    narrow = replace(wide, software=replace(software, reduce="bfloat16"))
    assert peak_of(wide) - peak_of(narrow) >= 2 * SMALL.parameters
    assert peak_of(narrow) > peak_of(replace(narrow, strategy="shard_grad_op"))


def test_gradients_of_earlier_micro_batches_are_there_whole_or_each_rank_s_part(
    small: Case,
) -> None:
    one = replace(small, software=replace(small.software, allocated=True), strategy="full_shard")
    several = replace(one, micro_batches=4)
    part, whole = SMALL.parameters / small.shards * 4, SMALL.parameters * 4
    assert 0 <= peak_of(several) - peak_of(one) <= part
    waiting = replace(several, software=replace(several.software, waits=True))
    assert peak_of(waiting) - peak_of(several) > 0.5 * (whole - part)
    assert peak_of(replace(waiting, micro_batches=1)) == peak_of(one)


def test_a_peak_of_the_device_has_what_a_process_has_without_tensors(small: Case) -> None:
    whole = replace(small, software=replace(small.software, device=True))
    reserved = small.machine.accelerator.reserved
    assert peak_of(whole) == pytest.approx(peak_of(small) + reserved)


def test_software_of_2025_has_its_embedding_apart_which_takes_less_memory(small: Case) -> None:
    wide = replace(small, shape=replace(SMALL, vocabulary=16384))
    apart = replace(wide, software=replace(small.software, apart=True))
    assert "embed" in plan_of(apart).work.units
    assert peak_of(apart) < peak_of(wide)


def test_autocast_keeps_what_passes_between_blocks_in_float32(small: Case) -> None:
    plain = replace(small, software=replace(small.software, checkpointing="full"))
    cast = replace(plain, software=replace(plain.software, autocast=True))
    inputs = small.shape.layers * small.micro_batch * small.length * small.shape.width
    assert work_of(cast).saved - work_of(plain).saved >= 2 * inputs
    narrow, wide = (plan_of(one).nbytes["blocks.1"].gather_sent for one in (plain, cast))
    assert wide == 2 * narrow


def test_a_model_that_is_gathered_whole_to_be_read_has_to_fit(small: Case) -> None:
    reads = replace(small, software=replace(small.software, summons=True))
    least = SMALL.parameters * 4 * (1 + 1 / small.shards)
    assert peak_of(reads) >= max(least, peak_of(small))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("False", "none"),
        ("No AC", "none"),
        ("minimal_flash", "moved"),
        ("yes", "full"),
        ("every 2 layers", "second"),
        ("30 layers", "full"),
    ],
)
def test_a_policy_of_checkpointing_is_known_by_its_beginning(
    rows: dict[str, dict[str, str]], text: str, policy: str
) -> None:
    assert case(rows["217"] | {"act_ckpt": text}).software.checkpointing == policy


def test_rows_of_a_micro_batch_follow_from_those_of_a_step(rows: dict[str, dict[str, str]]) -> None:
    stated = {"micro_batch": "", "global_batch_seqs": "64", "grad_accum": "2"}
    assert case(rows["217"] | stated).micro_batch == 4


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("tp", "8", "tensor, pipeline"),
        ("seq_len", "", "sequence length"),
        ("model", "Qwen3-30B-A3B (MoE)", "a mixture"),
        ("params_b", "70", "another number of parameters"),
        ("strategy", "3D/4D (not stated)", "layout"),
        ("offload", "cpu", "host memory"),
        ("strategy", "ZeRO-3 Offload", "host memory"),
        ("strategy", "FSDP x TP=8", "layout"),
        ("strategy", "Ulysses", "layout"),
        ("task", "inference", "nothing is trained"),
        ("precision", "int8", "8-bit"),
        ("n_layers", "4", "shape is not known"),
        ("tok_s_gpu", "90000", "more than 85 %"),
    ],
)
def test_a_row_that_no_plan_expresses_says_why(
    rows: dict[str, dict[str, str]], column: str, value: str, reason: str
) -> None:
    with pytest.raises(Inexpressible, match=reason):
        case(rows["217"] | {column: value})


def test_two_blocks_stand_for_all(small: Case) -> None:
    with torch.device("meta"):
        model = Decoder(SMALL, Variant(32))
    ids = torch.zeros(2, 32, dtype=torch.long)
    units = choose_units(model, by_class("Block"))
    precision = Precision(param_dtype=torch.bfloat16)
    whole = observe(model, units, (ids,), {}, None, precision, lambda loss: loss)
    software = replace(small.software, checkpointing="none")
    repeated = work_of(replace(small, software=software))
    assert repeated.order == whole.order
    assert repeated.flops == whole.flops
    assert [*repeated.units] == [*whole.units]
    assert [s.grown for s in repeated.forward] == [s.grown for s in whole.forward]
    assert [s.grown for s in repeated.backward] == [s.grown for s in whole.backward]
    assert repeated.first_gradients == whole.first_gradients


@pytest.mark.parametrize("policy", ["full", "second", "matmuls", "moved"])
def test_what_is_recomputed_is_not_kept(small: Case, policy: Checkpointing) -> None:
    software = replace(small.software, checkpointing="none")
    plain = replace(small, software=software)
    saving = replace(small, software=replace(software, checkpointing=policy))
    assert work_of(saving).saved < work_of(plain).saved
    assert peak_of(saving) <= peak_of(plain)
    assert few(SMALL, 2).layers == 2


def test_a_row_whose_state_cannot_fit_is_another_run(rows: dict[str, dict[str, str]]) -> None:
    with pytest.raises(Inexpressible, match="do not fit"):
        case(rows["561"])  # 8 B on 24 GB


def test_compiled_blocks_keep_what_products_need_and_no_more(small: Case) -> None:
    software = replace(small.software, checkpointing="none", compiled=False)
    eager, compiled = (
        replace(small, software=replace(software, compiled=c)) for c in (False, True)
    )
    of = SMALL
    columns = 4 * of.width + of.heads * of.head_size * 4 + 3 * of.hidden  # inputs of products
    span = work_of(compiled).forward[2]
    tokens = small.micro_batch * small.length
    assert span.grown == pytest.approx(2 * columns * tokens, rel=0.05)
    assert peak_of(compiled) < peak_of(eager)


@pytest.mark.prove
def test_logits_that_a_loop_holds_are_alive_until_the_step_ends(small: Case) -> None:
    peaks = {}
    wide = replace(small, shape=replace(SMALL, vocabulary=16384), length=512)
    for kind in ("held", "whole", "fused", "tokens", "vocabulary", "once"):
        peaks[kind] = peak_of(replace(wide, software=replace(small.software, logits=kind)))
    logits = 4 * 16384 * wide.micro_batch * wide.length  # float32
    assert peaks["held"] - peaks["whole"] == pytest.approx(1.1 * logits, rel=0.3)
    assert peaks["vocabulary"] < peaks["whole"]
    assert peaks["tokens"] < peaks["fused"] < peaks["whole"]
    assert peaks["once"] < peaks["fused"]


def test_liger_makes_logits_once_and_a_chunk_of_tokens_twice(small: Case) -> None:
    whole, once, tokens = (
        work_of(replace(small, software=replace(small.software, logits=kind))).flops
        for kind in ("whole", "once", "tokens")
    )
    assert once == whole
    assert tokens - once == 2 * SMALL.vocabulary * SMALL.width * small.micro_batch * small.length


def test_a_fused_loss_of_float32_logits_keeps_what_the_model_returned_and_one_copy(
    small: Case,
) -> None:
    wide = replace(small, shape=replace(SMALL, vocabulary=16384))
    narrow, cast = (
        peak_of(replace(wide, software=replace(small.software, logits=kind, allocated=True)))
        for kind in ("fused", "cast")
    )
    logits = 4 * 16384 * small.micro_batch * small.length
    assert cast - narrow == pytest.approx(logits, rel=0.01)


@pytest.mark.parametrize(
    ("cells", "logits", "autocast", "formula"),
    [
        ({"framework": "PyTorch 2.6", "precision": "bf16-true"}, "narrow", False, False),
        ({"framework": "PyTorch 2.6", "precision": "bf16 mixed"}, "whole", True, False),
        ({"framework": "transformers 4.49 loop", "precision": "bf16"}, "kept", False, False),
        ({"framework": "transformers 4.49", "precision": "bf16"}, "held", False, False),
        (
            {"framework": "transformers + DeepSpeed", "precision": "fp16", "model": "gpt2-xl",
             "strategy": "ZeRO-3"}, "kept", False, True,
        ),
        (
            {"framework": "transformers", "precision": "fp16 mixed", "model": "gpt2-xl",
             "strategy": "DDP"}, "held", True, True,
        ),
    ],
)  # fmt: skip
def test_a_loss_is_in_16_bits_where_neither_the_model_nor_autocast_makes_it_wide(
    rows: dict[str, dict[str, str]], cells: dict[str, str], logits: str, autocast: bool,
    formula: bool,
) -> None:  # fmt: skip
    plain = {**rows["217"], **OF_ANOTHER, "notes": "", "n_gpus": "1", "strategy": "single GPU"}
    used = case(plain | cells).software
    assert (used.logits, used.autocast, used.formula) == (logits, autocast, formula)


def test_gelu_by_its_formula_and_frozen_maps_that_keep_inputs_hold_more(small: Case) -> None:
    shape = replace(SMALL, gated=False)
    saved = partial(_saved, small, shape)
    wide = 2 * small.length * shape.hidden  # elements of a block's widest tensor
    assert saved(formula=True) - saved() >= shape.layers * 3 * wide * 2
    adapted = Adapters(8, "attention")
    more = saved(adapters=adapted, keeps=True) - saved(adapters=adapted)
    assert more >= shape.layers * wide * 2  # the input of the last map, at least


def _saved(small: Case, shape: Shape, adapters: Adapters | None = None, **changes: Any) -> int:
    adapters = adapters or Adapters(0)
    rank = adapters.rank
    software = replace(
        small.software, compiled=False, adapters=adapters, checkpointing="none", **changes
    )
    one = replace(small, shape=shape, software=software, rank=rank, quantized=rank > 0)
    return work_of(one).saved


def test_torch_s_own_data_parallel_copies_gradients_to_buckets(small: Case) -> None:
    one = replace(small, strategy="no_shard", shards=1)
    copied = replace(one, software=replace(one.software, buckets=True))
    itemsize = 2 if one.software.stored == "bfloat16" else 4
    more = one.shape.parameters * itemsize * (1 if one.software.allocated else RESERVED)
    assert peak_of(copied) - peak_of(one) == pytest.approx(more)


def test_what_gathers_its_own_parameters_within_a_block_takes_python_time(small: Case) -> None:
    peft = Adapters(drops=True, wide=True)
    adapted = replace(small, rank=4, software=replace(small.software, adapters=peft))
    constants, accelerator = known().constants, small.machine.accelerator

    def seconds(hooks: Literal["none", "adapters", "all"], **changes: Any) -> float:
        software = replace(adapted.software, hooks=hooks)
        one = replace(adapted, software=software, **changes)
        return plan_of(one).forecast(accelerator, constants).seconds

    assert seconds("none") < seconds("adapters") < seconds("all")
    alone = {"ranks": 1, "shards": 1}
    assert seconds("all", **alone) == seconds("none", **alone)


def test_adapters_and_weights_of_4_bits_make_float32_of_what_comes(small: Case) -> None:
    narrow, wide = (
        work_of(replace(small, rank=4, software=replace(small.software, adapters=adapters)))
        for adapters in (Adapters(), Adapters(wide=True))
    )
    assert wide.units["blocks.0"].forward.moved > narrow.units["blocks.0"].forward.moved
    cast = replace(small, rank=4, software=replace(small.software, autocast=True))
    assert replace(cast, quantized=True).variant.returns
    assert not cast.variant.returns


def test_more_micro_batches_take_longer_and_more_tokens(small: Case) -> None:
    constants, a100 = known().constants, small.machine.accelerator
    one = plan_of(small).forecast(a100, constants)
    four = plan_of(replace(small, micro_batches=4)).forecast(a100, constants)
    once = plan_of(replace(small, micro_batches=4, strategy="zero1")).forecast(a100, constants)
    assert 3 * one.seconds < four.seconds < 4 * one.seconds
    assert once.seconds < four.seconds  # its gradients travel once
    waiting = replace(small, micro_batches=4, software=replace(small.software, waits=True))
    assert plan_of(waiting).forecast(a100, constants).seconds < four.seconds


@pytest.mark.prove
def test_a_fit_finds_constants_of_rows_that_they_made(small: Case) -> None:
    accelerator = replace(small.machine.accelerator, products=0.5)
    plans = []
    for row, length in enumerate((256, 512, 1024, 2048)):
        shape = replace(SMALL, width=1024, hidden=4096, head_size=64, heads=16, kv_heads=16)
        plan = plan_of(replace(small, number=str(row), length=length, shape=shape))
        rate = plan.forecast(accelerator, USUAL).tokens_per_second
        plans.append(replace(plan, case=replace(plan.case, tokens_per_second=rate)))
    fit = Fit.of(plans)
    assert max(abs(fit.fitted.error(plan)) for plan in plans) < 0.05
    judgement = judge(plans, fit)
    assert [*judgement.seen] == ["0", "3", "1", "2"]
    assert max(map(abs, judgement.calibrated.values())) < 0.2
    assert judgement.right == judgement.pairs
    lines = [*summary(judgement, [])]
    assert [line.split(":")[0] for line in lines] == [
        f"foresight {name}" for name in ("seen", "calibrated", "unseen", "memory")
    ]
    assert lines[-1] == "foresight memory: 0 rows"
    near = replace(plans[0].case, number="new")
    far = replace(near, number="elsewhere", source="another source")
    judgement = judge([replace(plans[0], case=one) for one in (near, far)], fit)
    assert [*judgement.seen] == ["new"]
    assert [*judgement.unseen] == ["new", "elsewhere"]
    worse = {plans[0]: 0.0, plans[-1]: -9.0}
    assert ordered(worse) == (1, 0)


def test_a_file_of_rows_is_read_whatever_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    head, *lines = PUBLISHED.read_text("utf-8").splitlines()
    file.write_text("\n".join([head, lines[0], "1,,,", lines[1].replace("H100", "Z9")]), "utf-8")
    cases, others = read(file)
    assert len(cases) == 1
    assert sum(map(len, others.values())) == 2
    file.write_text("\n".join([head, lines[0], lines[0]]), "utf-8")
    assert [one.number for one in read(file)[0]] == [lines[0].split(",")[0], "row 2"]
