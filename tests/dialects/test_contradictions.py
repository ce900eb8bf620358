"""Keys that cannot hold together, each with its sentence; and that are read together with none."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.dialects import read
from shardwise.dialects.contradictions import CONTRADICTIONS, NOTES, UNREAD

SIZES = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": 2, "PARALLELISM_CONFIG_DP_SHARD_SIZE": 2}
YAML_SIZES = {"parallelism_config": {f"{key}".lower(): size for key, size in SIZES.items()}}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fsdp_config", "fsdp_auto_wrap_policy", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
    (
        *("fsdp_config", "transformer_layer_cls_to_wrap"),
        {"fsdp_auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "Block"},
    ),
    (
        *("transformers", "fsdp.auto_wrap"),
        {"fsdp": "auto_wrap", "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
    ),
    ("transformers", "fsdp.offload", {"fsdp": "offload"}),
    (
        *("transformers", "fsdp.offload"),
        {"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": False}},
    ),
    (
        *("fsdp_config", "fsdp_cpu_ram_efficient_loading"),
        {"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": False},
    ),
    (
        *("plugin", "activation_checkpointing_offload"),
        {"activation_checkpointing_offload": True, "activation_checkpointing": False},
    ),
    (
        *("environment", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE"),
        {**SIZES, "FSDP_SHARDING_STRATEGY": "NO_SHARD"},
    ),
    (
        *("environment", "FSDP_SHARDING_STRATEGY"),
        {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"},
    ),
    ("accelerate", "num_processes", {"num_processes": 6, **YAML_SIZES}),
    ("accelerate", "num_processes", {"num_processes": 6, "num_machines": 4}),
    ("accelerate", "machine_rank", {"machine_rank": 2, "num_machines": 2}),
    (
        *("plugin", "mixed_precision_policy.param_dtype"),
        {"mixed_precision_policy": {"": "bf16", "param_dtype": "float16"}},
    ),
    (
        *("plugin", "state_dict_config.rank0_only"),
        {"state_dict_type": "SHARDED_STATE_DICT", "state_dict_config": {"rank0_only": True}},
    ),
]


@pytest.mark.parametrize(("case", "rule"), list(zip(CASES, CONTRADICTIONS, strict=True)))
def test_each_rule_has_its_case(case: tuple[str, str, dict[str, Any]], rule: Any) -> None:
    dialect, key, tree = case
    entry = next(entry for entry in read(tree, dialect).entries if entry.key == key)
    assert (entry.status, entry.text) == ("contradictory", rule.sentence)


def test_a_size_that_no_policy_reads_is_ignored() -> None:
    tree = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_min_num_params": 10**8}
    entry = read(tree).entries[1]
    assert (entry.status, entry.text) == ("ignored", UNREAD[0].sentence)


FOUR_BITS = "BitsAndBytesConfig.load_in_4bit"
TRAINING: list[tuple[Any, str, str, dict[str, Any]]] = [
    (UNREAD[1], "ignored", "warmup_ratio", {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}),
    (
        *(UNREAD[2], "ignored", "TrainingArguments.fp16"),
        {"BitsAndBytesConfig.bnb_4bit_compute_dtype": "bf16", "TrainingArguments.fp16": True},
    ),
    (UNREAD[3], "ignored", "eval_delay", {"eval_delay": 2}),
    (
        *(NOTES[0], "translated", "fsdp_config.activation_checkpointing"),
        {"fsdp_config.activation_checkpointing": False, "gradient_checkpointing": True},
    ),
    (NOTES[1], "used", "eval_delay", {"eval_delay": 3, "eval_strategy": "epoch"}),
    (NOTES[2], "translated", "gradient_accumulation_steps", {"gradient_accumulation_steps": 4}),
    (NOTES[3], "translated", FOUR_BITS, {FOUR_BITS: True}),
    (NOTES[4], "translated", "lora_rank", {"lora_rank": 4}),
    (UNREAD[4], "ignored", "report_to", {"report_to": ["wandb", "neptune"]}),
]


@pytest.mark.parametrize(("rule", "status", "key", "tree"), TRAINING)
def test_what_training_leaves_unread_or_surprises_is_said(
    rule: Any, status: str, key: str, tree: dict[str, Any]
) -> None:
    dialect = "script" if key[0].isupper() else "command"
    epochs = "TrainingArguments." * key[0].isupper() + "num_train_epochs"
    report = read({epochs: 3, **tree}, dialect)
    (entry,) = (entry for entry in report.entries if entry.key == key)
    assert rule.sentence in entry.text
    assert entry.status == status


def test_what_is_only_of_gaudi_is_off_elsewhere_too_or_is_said() -> None:
    names = ("use_lazy_mode", "pipelining_fwd_bwd", "use_fused_rope", "use_habana")
    as_here = read(dict.fromkeys(names[:3], "False") | {"use_habana": True}, "command")
    assert {entry.status for entry in as_here.entries} == {"used"}
    other = read(dict.fromkeys(names[:3], "True"), "command")
    assert {entry.status for entry in other.entries} == {"ignored"}
    assert all("Gaudi" in entry.text for entry in other.entries)


def test_keys_of_one_meaning_may_say_the_same_only() -> None:
    spellings = ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
    same = read(dict.fromkeys(spellings, "BACKWARD_POST"))
    assert [entry.status for entry in same.entries] == ["translated", "translated"]
    other = read(dict(zip(spellings, ("BACKWARD_POST", "BACKWARD_PRE"), strict=True)))
    assert [entry.status for entry in other.entries] == ["translated", "contradictory"]
    assert other.policy.prefetch_backward == "post"
