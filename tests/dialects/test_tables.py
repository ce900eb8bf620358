"""No key of the libraries is forgotten: their installed sources are compared with our rows."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard,
)

from shardwise.checkpoint.state_dict import StateDict
from shardwise.config.options import Options
from shardwise.dialects import DIALECTS, Policy, read
from shardwise.dialects.keys import flatten, nest
from shardwise.dialects.rows import Dialect
from shardwise.recipe.recipe import keys


def source(package: str, file: str) -> str:
    """A file of an installed package, which is not imported."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(file).read_text("utf-8")


def fields_of(text: str, name: str) -> set[str]:
    """The fields of a dataclass, and of those that it extends in the same file."""
    classes = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
    own = {
        item.target.id
        for item in classes[name].body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return own.union(*(fields_of(text, base) for base in bases if base in classes))


def unknown(dialect: Dialect, keys: set[str]) -> set[str]:
    """Keys that have no row; that of all other variables of accelerate is none."""
    assert keys
    sections = {key.rpartition(".")[0] for key in dialect.by_key}
    outside = {key: dialect.outside(key) for key in keys}
    known = {key for key, why in outside.items() if why is not None and why.key != "ACCELERATE_*"}
    return keys - known - set(dialect.by_key) - sections


def test_every_argument_of_fsdp1_has_a_row() -> None:
    keys = set(signature(FullyShardedDataParallel).parameters)
    keys |= {f"mixed_precision.{key}" for key, _ in flatten(MixedPrecision())}
    keys |= {f"cpu_offload.{key}" for key, _ in flatten(CPUOffload())}
    assert unknown(DIALECTS["fsdp1"], keys) == set()


def test_every_argument_of_fsdp2_has_a_row() -> None:
    keys = set(signature(fully_shard).parameters)
    keys |= {f"mp_policy.{key}" for key, _ in flatten(fsdp.MixedPrecisionPolicy())}
    keys |= {f"offload_policy.{key}" for key, _ in flatten(fsdp.CPUOffloadPolicy())}
    assert unknown(DIALECTS["fsdp2"], keys) == set()


def test_every_field_of_the_plug_in_has_a_row() -> None:
    keys = fields_of(source("accelerate", "utils/dataclasses.py"), "FullyShardedDataParallelPlugin")
    assert len(keys) > 20
    keys |= {f"state_dict_config.{key}" for key, _ in flatten(FullStateDictConfig())}
    keys |= {f"mixed_precision_policy.{key}" for key, _ in flatten(MixedPrecision())}
    assert unknown(DIALECTS["plugin"], keys) == set()


def test_every_variable_that_accelerate_sets_or_reads_for_fsdp_has_a_row() -> None:
    plugin = source("accelerate", "utils/dataclasses.py")
    plugin = plugin[plugin.index("class FullyShardedDataParallelPlugin") :]
    plugin = plugin[: plugin.index("\n@dataclass")]
    keys = {f"FSDP_{name}" for name in re.findall(r'env_prefix \+ "([A-Z_]+)"', plugin)}
    launch = source("accelerate", "utils/launch.py")
    keys |= set(
        re.findall(r'"((?:FSDP|ACCELERATE_(?:MIXED|USE|DYNAMO|GRADIENT))_[A-Z_]+)"', launch)
    )
    text = source("accelerate", "parallelism_config.py")
    keys |= set(re.findall(r'"(PARALLELISM_CONFIG_[A-Z_]+)"', text))
    assert len(keys) > 30
    assert unknown(DIALECTS["environment"], keys) == set()


def test_every_key_of_accelerates_file_has_a_row() -> None:
    keys = fields_of(source("accelerate", "commands/config/config_args.py"), "ClusterConfig")
    code = source("accelerate", "commands/config/cluster.py")
    keys |= {f"fsdp_config.{key}" for key in re.findall(r'fsdp_config\["(\w+)"\]', code)}
    prefixed = re.findall(r'parallelism_config\[prefix \+ "(\w+)"\]', code)
    keys |= {f"parallelism_config.parallelism_config_{key}" for key in prefixed}
    dynamo = re.findall(r'dynamo_config\[prefix \+ "(\w+)"\]', code)
    keys |= {f"dynamo_config.dynamo_{key}" for key in dynamo}
    convertible = re.findall(r'"(fsdp_\w+)": ', source("accelerate", "commands/to_fsdp2.py"))
    keys |= {f"fsdp_config.{key}" for key in convertible}
    assert len(keys) > 50
    assert unknown(DIALECTS["accelerate"], keys) == set()


def test_every_key_that_transformers_reads_has_a_row() -> None:
    text = source("transformers", "training_args.py")
    documented = text[text.index("Supported keys:") : text.index("> DeepSpeed")]
    keys = set(re.findall(r"^ +- (\w+) \(`", documented, re.MULTILINE))
    keys |= set(re.findall(r'\bfsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', text))
    assert len(keys) > 14
    assert unknown(DIALECTS["transformers"], {f"fsdp_config.{key}" for key in keys}) == set()
    assert unknown(DIALECTS["fsdp_config"], keys) == set()
    assert unknown(DIALECTS["fsdp_config"], {f"fsdp_{key}" for key in keys}) == set()
    options = source("transformers", "trainer_utils.py")
    words = re.findall(r'= "(\w+)"', options[options.index("class FSDPOption") :][:400])
    assert unknown(DIALECTS["transformers"], {f"fsdp.{word}" for word in words}) == set()


def test_every_argument_of_trainer_has_a_row() -> None:
    keys = fields_of(source("transformers", "training_args.py"), "TrainingArguments")
    assert len(keys) > 100
    assert unknown(DIALECTS["transformers"], keys) == set()
    assert unknown(DIALECTS["command"], keys) == set()
    assert unknown(DIALECTS["script"], {f"TrainingArguments.{key}" for key in keys}) == set()


DEEPSPEED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
managed_gradient_accumulation dump_state disable_python_gc disable_allgather prescale_gradients
communication_data_type seq_parallel_communication_data_type sequence_parallel_size vocabulary_size
gradient_predivide_factor gradient_allreduce_op gradient_clipping dataloader_drop_last log_level
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown
use_data_before_expert_parallelism datastates_ckpt optimizer.type optimizer.legacy_fusion
scheduler.type scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
scheduler.params.warmup_num_steps scheduler.params.warmup_type scheduler.params.total_num_steps
scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio optimizer.params.torch_adam
bf16.enabled bf16.immediate_grad_update fp16.enabled fp16.auto_cast fp16.loss_scale_window
torch_autocast.enabled torch_autocast.dtype torch_autocast.lower_precision_safe_modules
data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype
data_types.keep_in_fp32_modules compile.deepcompile pipeline.stages tensor_parallel.autotp_size
expert_parallel.enabled hybrid_engine.enabled weight_quantization.enabled timers.throughput
comet.enabled tensorboard.enabled wandb.enabled csv_monitor.enabled comms_logger.enabled
flops_profiler.enabled autotuning.enabled aio.block_size checkpoint.tag_validation
data_efficiency.enabled activation_checkpointing.partition_activations elasticity.enabled
amp.enabled
"""
ZERO = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
elastic_checkpoint sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold
use_all_reduce_for_fetch_params allgather_sequential stage3_prefetch_bucket_size
stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module.classes zenflow.topk_ratio
mics_shard_size mics_hierarchical_params_gather zeropp_loco_param.err_beta offload_param.device
offload_param.nvme_path offload_param.buffer_count offload_param.buffer_size
offload_param.max_in_cpu offload_param.pin_memory offload_optimizer.device
offload_optimizer.nvme_path offload_optimizer.buffer_count offload_optimizer.pin_memory
offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init
offload_optimizer.ratio offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc
"""


def test_every_key_of_deepspeed_has_a_row() -> None:
    """As of 0.19, from ``runtime/config.py``, ``constants.py`` and ``zero/*config.py``."""
    dialect, of_zero = DIALECTS["deepspeed"], {f"zero_optimization.{key}" for key in ZERO.split()}
    assert unknown(dialect, set(DEEPSPEED.split()) | of_zero) == set()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("stge3_gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
        ("stage_3", "stage"),
        ("overlap_com", "overlap_comm"),
        ("offload_optimiser.device", "offload_optimizer.device"),
        ("offload_param.pin_memry", "offload_param.pin_memory"),
    ],
)
def test_a_key_that_zero_has_not_is_answered_with_the_nearest(key: str, nearest: str) -> None:
    [entry, *_] = read(nest({f"zero_optimization.{key}": True}), "deepspeed").entries
    assert entry.status == "ignored"
    assert entry.text == f"there is no such key; did you mean zero_optimization.{nearest}?"


@pytest.mark.parametrize("section", ["fp16", "bf16", "optimizer.params", "scheduler.params"])
def test_a_key_that_a_section_of_deepspeed_has_not_is_answered(section: str) -> None:
    report = read(nest({f"{section}.enbled": True}), "deepspeed")
    assert report.entries[0].text.startswith("there is no such key; did you mean ")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_rows_have_fields_that_a_policy_has(dialect: Dialect) -> None:
    assert {row.field for row in dialect.rows} <= {item.name for item in fields(Policy)}


def test_each_place_is_a_key_of_a_recipe_or_an_option() -> None:
    options = {item.name for item in fields(Options)}
    state_dict = {item.name for item in fields(StateDict)}
    for row in DIALECTS["recipe"].rows:
        section, _, name = row.key.partition(".")
        known = {"sharding": options, "state_dict": state_dict}.get(section, set())
        is_key = row.key in {key.name for key in keys()}
        assert is_key or name in known or section in ("launch", "connect"), row.key


def test_each_field_has_a_place_here_or_is_always_so() -> None:
    ours = DIALECTS["recipe"]
    placed = {row.field for row in ours.rows} | {outside.key for outside in ours.outsiders}
    assert {item.name for item in fields(Policy)} - placed == set()


def test_betas_that_trainer_fills_in_are_no_letters() -> None:
    tree = {"zero_optimization": {"stage": 3}, "optimizer": {"params": {"betas": "auto"}}}
    report = read(tree, "deepspeed")
    assert report.policy.betas is None
    assert report.entries[1].text == "Trainer fills it in; set optimizer.betas"


def test_what_no_whole_number_holds_is_not_taken() -> None:
    report = read(
        {"train_batch_size": float("inf"), "zero_optimization": {"stage": 1}}, "deepspeed"
    )
    assert report.entries[0].status in ("ignored", "contradictory")
    assert report.policy.rows is None
