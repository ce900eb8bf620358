"""What becomes of each key, and what a dialect can say."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from shardwise.dialects import DIALECTS, Policy, Report, guess, read, write
from shardwise.dialects.keys import flatten
from shardwise.dialects.policy import FILL_IN
from shardwise.dialects.settings import Setting, of_command, of_program
from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from tests.copies import error_text

GAUDI = """{
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": false,
    "fsdp_offload_params": false,
    "fsdp_sharding_strategy": 1,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_sync_module_states": true,
    "fsdp_use_orig_params": true,
    "transformer_layer_cls_to_wrap": "GaudiLlamaDecoderLayer",
    "fsdp_activation_checkpointing": false
}"""  # as printed in the article on FSDP for Gaudi
ASKED_V1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_min_num_params: 100000000
  fsdp_offload_params: false
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""  # as `accelerate config` writes it


def status(report: Report, key: str) -> tuple[str, str]:
    entry = next(entry for entry in report.entries if entry.key == key)
    return entry.status, entry.text


# --- reports ---------------------------------------------------------------------------------


def test_the_file_of_the_article_on_gaudi_as_it_is_printed() -> None:
    report = read(json.loads(GAUDI), strict=True)
    assert report.dialect.name == "fsdp_config"
    words = "(optimum-habana reads the words after --fsdp instead)"
    wrap = "sharding.wrap: ['LlamaDecoderLayer']"
    gaudi = "(a class Gaudi… is optimum-habana's, and transformers' own has the rest of its name)"
    assert [
        (key.removeprefix("fsdp_"), status, text) for key, _, status, text in report.entries
    ] == [
        ("auto_wrap_policy", "translated", wrap),
        ("backward_prefetch", "translated", "sharding.prefetch.when: pre"),
        ("forward_prefetch", "translated", "sharding.prefetch.forward: 0"),
        ("offload_params", "translated", f"sharding.offload: none {words}"),
        ("sharding_strategy", "translated", f"sharding.strategy: full_shard {words}"),
        (
            *("state_dict_type", "translated"),
            "state_dict.kind: full (optimum-habana does not read it)",
        ),
        ("sync_module_states", "used", "sharding.sync_module_states: True"),
        ("use_orig_params", "used", "parameters always keep their names and objects"),
        ("transformer_layer_cls_to_wrap", "translated", f"{wrap} {gaudi}"),
        ("activation_checkpointing", "used", "sharding.activation_checkpointing: False"),
    ]
    recipe, elsewhere = report.places()
    sharding = Recipe.model_validate(recipe).sharding
    assert (sharding.strategy, sharding.wrap) == ("full_shard", ["LlamaDecoderLayer"])
    assert (sharding.prefetch.when, sharding.prefetch.forward) == ("pre", 0)
    assert elsewhere == {"sharding.sync_module_states": True, "state_dict.kind": "full"}


@pytest.mark.parametrize("key", json.loads(GAUDI))
def test_each_of_its_keys_has_two_spellings(key: str) -> None:
    value, bare = json.loads(GAUDI)[key], key.removeprefix("fsdp_")
    one, other = (read({spelt: value}, "fsdp_config") for spelt in (bare, f"fsdp_{bare}"))
    assert one.policy == other.policy != Policy()
    assert one.entries[0][1:] == other.entries[0][1:]


@pytest.mark.parametrize("value", [True, "true", 1, "yes", "On"])
def test_a_switch_is_on_in_all_spellings(value: object) -> None:
    assert read({"fsdp_forward_prefetch": value}).policy.prefetch_forward is True


NAMES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES, 1)))
def test_a_strategy_is_a_number_or_a_word_in_any_case(number: int, name: str) -> None:
    enum = ShardingStrategy(number)
    for value in (number, str(number), name, name.upper(), f"_{name.upper()}", str(enum), enum):
        assert read({"fsdp_sharding_strategy": value}).policy.strategy == name


@pytest.mark.parametrize("tree", [[], {}, ["full_shard"], "full_shard", None])
def test_what_has_no_keys_is_refused_with_what_to_pass(tree: object) -> None:
    text = error_text(ConfigError, lambda: read(tree))
    assert f"this is the {type(tree).__name__} {tree!r}. Pass what json.load()" in text


@pytest.mark.parametrize(
    ("key", "value", "what_to_do"),
    [
        ("fsdp_version", 3, "choose one of 1, 2"),
        (
            *("transformer_layer_cls_to_wrap", ["A", "B,C"]),
            "'B,C' has a comma; write each name as an element of its own",
        ),
        ("sharding.mesh", "no", "could not convert string to float: 'n'"),
    ],
)
def test_a_value_that_is_none_of_a_keys_says_what_to_write(
    key: str, value: object, what_to_do: str
) -> None:
    report = read({key: value})
    assert status(report, key) == ("contradictory", f"not a value of this key; {what_to_do}")
    assert what_to_do in error_text(ConfigError, report.check)


def test_an_unknown_strategy_lists_those_there_are() -> None:
    report = read({"fsdp_sharding_strategy": "FULL_SHRAD"})
    assert "choose one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, " in error_text(
        ConfigError, report.check
    )
    assert report.policy == Policy()


def test_a_misspelt_key_is_ignored_with_the_nearest_and_fatal_on_request() -> None:
    tree = {"fsdp_sharding_stratgy": 2, "fsdp_use_orig_params": True}
    text = "there is no such key; did you mean fsdp_sharding_strategy?"
    report = read(tree)
    assert status(report, "fsdp_sharding_stratgy") == ("ignored", text)
    report.check()
    error = error_text(ConfigError, lambda: read(tree, strict=True))
    assert error.endswith(f"cannot be followed:\nfsdp_sharding_stratgy: 2 is ignored: {text}")


@pytest.mark.parametrize(
    ("tree", "field"),
    [
        ({"fsdp_use_orig_params": False}, "parameters always keep"),
        ({"fsdp_cpu_ram_efficient_loading": "false"}, "each rank reads its own"),
        ({"fsdp_ignored_modules": ".*router"}, "give ignored= to sw.shard()"),
        ({"xla": True}, "PyTorch/XLA has an FSDP of its own"),
    ],
)
def test_what_cannot_be_followed_says_why(tree: Mapping[str, object], field: str) -> None:
    how, why = read(tree, "fsdp_config").entries[0][2:]
    assert how == "ignored"
    assert why.startswith(field)


KEYS = sorted({key for dialect in DIALECTS.values() for key in dialect.by_key})
STATUSES = {"used", "translated", "ignored", "contradictory", "fill in", "default"}
VALUES = st.sampled_from([True, False, None, 1, 7, "1e8", "no", "bf16", "Block,Head", "FULL_SHARD"])


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from([*KEYS, "fsdp_shrad", "xyz"]), VALUES), st.data())
def test_every_key_is_in_the_report_once_and_in_its_order(
    tree: dict[str, Any], data: st.DataObject
) -> None:
    dialect = data.draw(st.sampled_from(sorted(DIALECTS)))
    report = read(tree, dialect)
    only = DIALECTS[dialect].only or ["*"]
    keys = [key for key in tree if any(fnmatchcase(key, pattern) for pattern in only)]
    assert [entry.key for entry in report.entries if entry.key in keys] == keys
    unused = [entry for entry in report.entries if entry.key not in (*keys, "-")]
    assert len({entry.key for entry in unused}) == len(unused)
    assert {e.status for e in report.entries} <= STATUSES
    assert report.policy == report.policy.settled()


def test_a_dtype_beside_another_word_for_it_is_settled_at_once() -> None:
    settled = Policy(mixed_precision="no", param_dtype="bfloat16").settled()
    assert settled == settled.settled()


# --- the dialects ----------------------------------------------------------------------------


def test_the_file_of_accelerate_is_read_explained_and_converted() -> None:
    report = read(yaml.safe_load(ASKED_V1), strict=True)
    assert report.dialect.name == "accelerate"
    recipe, elsewhere = report.places()
    assert recipe["sharding"] == {
        "strategy": "shard_grad_op",
        "wrap": 100_000_000,
        "prefetch": {"backward": 0, "forward": None},
        "precision": {"param_dtype": "bfloat16"},
        "activation_checkpointing": True,
        "offload": "none",
    }
    assert Recipe.model_validate(recipe).sharding.wrap == 100_000_000
    launch = {key: value for key, value in elsewhere.items() if key.startswith("launch.")}
    assert list(launch.values()) == [8, 1]  # ranks, and this machine's number
    assert recipe["launch"] == {"nodes": 2, "address": "10.0.0.1", "port": 29500}


def test_two_sizes_make_fsdp2_hybrid_and_an_environment_says_the_same() -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4}
    tree = {
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
        "parallelism_config": {f"parallelism_config_{key}": n for key, n in sizes.items()},
    }
    policy = read(tree, "accelerate").policy
    assert (policy.strategy, policy.mesh) == ("hybrid_shard_zero2", (2, 4))
    written = write(policy, "environment")
    assert (written.tree, written.lost) == (
        {
            "FSDP_VERSION": 2,
            "FSDP_RESHARD_AFTER_FORWARD": False,
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": 2,
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": 4,
        },
        {},
    )
    text = {name: str(value) for name, value in written.tree.items()}
    assert read(text, "environment").policy == policy
    assert write(policy, "accelerate").tree == tree


def test_other_variables_of_an_environment_are_none_of_its_keys() -> None:
    report = read({"PATH": "/bin", "FSDP_VERSION": "2", "FSDP_VERSOIN": "1"}, "environment")
    assert [entry.key for entry in report.entries] == ["FSDP_VERSION", "FSDP_VERSOIN"]
    assert report.entries[1].text.endswith("did you mean FSDP_VERSION?")


def test_what_a_dialect_has_no_words_for_is_lost_and_said() -> None:
    hybrid = Policy(strategy="hybrid_shard", fsdp_version=2)
    assert write(hybrid, "accelerate").lost == {"strategy": ("hybrid_shard", "full_shard")}
    assert write(Policy(strategy="zero1"), "plugin").lost == {"strategy": ("zero1", None)}
    assert write(Policy(prefetch_backward="post"), "fsdp2").lost == {
        "prefetch_backward": ("post", None)
    }


def test_a_key_of_the_other_version_gives_way() -> None:
    both = {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    assert read({**both, "FSDP_VERSION": "1"}).policy.strategy == "shard_grad_op"
    report = read({**both, "FSDP_VERSION": "2"})
    assert report.policy.strategy == "full_shard"
    text = "it is a key of FSDP1, and FSDP_RESHARD_AFTER_FORWARD is given"
    assert status(report, "FSDP_SHARDING_STRATEGY") == ("ignored", text)


@pytest.mark.parametrize(
    "words", ["full_shard auto_wrap offload", ["full_shard", "auto_wrap", "offload"]]
)
def test_the_words_of_transformers(words: object) -> None:
    report = read({"fsdp": words, "fsdp_config": {"min_num_params": 2000}}, "transformers")
    report.check()
    policy = report.policy
    assert (policy.strategy, policy.wrap, policy.min_num_params) == ("full_shard", "size", 2000)
    assert policy.offload == "everything"
    keys = ["fsdp.full_shard", "fsdp.auto_wrap", "fsdp.offload", "fsdp_config.min_num_params"]
    assert [entry.key for entry in report.entries] == keys


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("offload", "fsdp.offload: True is contradictory: offload is no strategy; add full_shard"),
        ("full_shard shard_grad_op", "fsdp.shard_grad_op: True is contradictory: fsdp.full_shard"),
        ("full_shrad", "fsdp.full_shrad: True is ignored: there is no such key; did you mean "),
    ],
)
def test_words_that_cannot_be_followed(words: str, sentence: str) -> None:
    error = error_text(ConfigError, lambda: read({"fsdp": words}, "transformers", strict=True))
    assert sentence in error


def test_the_arguments_of_fsdp1_are_torchs_objects() -> None:
    arguments = {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": CPUOffload(offload_params=True),
        "auto_wrap_policy": partial(
            transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear}
        ),
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "limit_all_gathers": True,
        "param_init_fn": None,
    }
    report = read(arguments, "fsdp1")
    assert {e.status for e in report.entries if e.key != "cpu_offload.offload_params"} <= {
        "used",
        "translated",
    }
    policy = report.policy
    assert (policy.strategy, policy.offload) == ("shard_grad_op", "everything")
    assert (policy.wrap, policy.wrap_classes) == ("auto", ("Linear",))
    assert (policy.param_dtype, policy.reduce_dtype, policy.prefetch_backward) == (
        "bfloat16",
        "float32",
        "post",
    )
    by_module = {"auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear})}
    assert read(by_module, "fsdp1").policy.wrap_classes == ("Linear",)


def test_the_arguments_of_fsdp2_are_torchs_objects() -> None:
    report = read(
        {
            "reshard_after_forward": False,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(),
            "mesh": None,
        },
        "fsdp2",
    )
    policy = report.policy
    assert (policy.strategy, policy.offload) == ("shard_grad_op", "everything")
    assert policy.mixed_precision == "bf16"
    text = status(report, "mp_policy.param_dtype")[1]
    assert "torch 2.15 sends them in the parameters' own dtype" in text
    assert read({"offload_policy": OffloadPolicy()}, "fsdp2", strict=True).policy.offload == "none"
    assert status(read({"reshard_after_forward": 4}, "fsdp2"), "reshard_after_forward") == (
        "contradictory",
        "not a value of this key; choose one of True, False",
    )


@pytest.mark.parametrize(
    ("command", "key", "recipe"),
    [
        ("run_lora_clm.py --lora_alpha 32", "lora_rank", {"rank": 8, "alpha": 32, "dropout": 0.05}),
        ("run_lora_clm.py --do_train", "lora_alpha", {"rank": 8, "alpha": 16, "dropout": 0.05}),
        ("other.py --lora_alpha 32", "lora_rank", {"rank": 8, "alpha": 32}),
        ("other.py --lora_rank 4", "lora_alpha", {"rank": 4, "alpha": 8}),
    ],
)
def test_an_absent_option_is_as_in_the_script(
    command: str, key: str, recipe: dict[str, float]
) -> None:
    report = read({one.key: one.value for one in of_command(command)}, "command", strict=True)
    assert report.places()[0]["adapter"] == recipe
    whose = "the script's" if "run_lora_clm" in command else "peft's"
    assert status(report, key)[0] == "default"
    assert status(report, key)[1].endswith(f"({whose} default)")


def test_a_program_without_a_rank_has_that_of_its_library() -> None:
    program = read({"LoraConfig.lora_alpha": 16, "LoraConfig.target_modules": ["q"]}, "script")
    assert program.places()[0]["adapter"] == {"rank": 8, "alpha": 16, "targets": ["q"]}
    assert status(program, "LoraConfig.r") == ("default", "adapter.rank: 8 (LoraConfig's default)")


def test_the_file_for_validation_is_used_or_the_report_says_why_not() -> None:
    options = "--train_file a.json --validation_file b.json --output_dir out"
    samples, text = (
        read({one.key: one.value for one in of_command(f"{script} {options}")}, "command")
        for script in ("sft.py", "run_clm.py")
    )
    assert samples.places()[0]["data"]["validation_source"] == "b.json"
    assert "validation_source" not in text.places()[0]["data"]
    assert status(text, "validation_file") == (
        *("ignored", "documents have no such key; data.validation holds some of them out"),
    )


def test_trainer_keeps_all_checkpoints_and_has_a_seed_of_its_own() -> None:
    settings = of_command("run_lora_clm.py --output_dir out")
    report = read({one.key: one.value for one in settings}, "command")
    recipe = Recipe.model_validate(report.places()[0] | {"model": {"from": "m"}})
    assert (recipe.checkpoint.save_total_limit, recipe.run.seed) == (None, 42)
    for key in ("save_total_limit", "seed"):
        assert status(report, key)[1].endswith("(Trainer's default)")
    own = read({"save_total_limit": 3, "adam_beta2": 0, "learning_rate": 1}, "transformers")
    assert own.places()[0]["checkpoint"]["save_total_limit"] == 3
    assert own.places()[0]["optimizer"]["betas"] == [0.9, 0]


@pytest.mark.parametrize(
    ("dialect", "settings"),
    [
        ("command", of_command("run_clm.py --train_file d.txt --do_train --output_dir out")),
        ("script", of_program(ast.parse('TrainingArguments("out", seed=7)'))),
    ],
)
def test_a_training_without_a_learning_rate_has_trainers(
    dialect: str, settings: Iterator[Setting]
) -> None:
    recipe = read({one.key: one.value for one in settings}, dialect).places()[0]
    decay = {"lr": 5e-5, "schedule": "linear", "warmup": 0, "weight_decay": 0.0}
    assert recipe["optimizer"].items() >= decay.items()
    assert recipe["run"]["epochs"] == 3


def test_only_a_scripts_own_command_has_its_defaults() -> None:
    settings = {one.key: one.value for one in of_command("sft.py --lora_r 32 --lora_alpha 16")}
    report = read(settings, "command", strict=True)
    assert report.places()[0]["adapter"] == {"rank": 32, "alpha": 16}
    assert "run_lora_clm.py" not in "".join(entry.text for entry in report.entries)


@pytest.mark.parametrize(
    ("value", "how", "trackers"),
    [
        ("tensorboard", "translated", ["tensorboard"]),
        (["wandb", "mlflow", "trackio"], "translated", ["wandb", "mlflow", "trackio"]),
        ("none", "translated", []),
        (["wandb", "comet_ml"], "ignored", ["wandb"]),
        ("comet_ml", "ignored", None),
        ("all", "ignored", None),
    ],
)
def test_trackers_that_a_recipe_has_are_used_and_others_are_named(
    value: object, how: str, trackers: list[str] | None
) -> None:
    report = read({"report_to": value, "run_name": "night"}, "transformers")
    assert status(report, "report_to")[0] == how
    assert ("tensorboard, trackio" in status(report, "report_to")[1]) == (how == "ignored")
    logging = Recipe.model_validate(report.places()[0]).logging
    assert (list(logging.trackers), logging.name) == (trackers or [], "night")


MODEL = "AutoModelForCausalLM.from_pretrained"


@pytest.mark.parametrize(
    ("program", "data"),
    [
        ('load_dataset("hf_dataset")', {"source": FILL_IN, "format": FILL_IN}),
        ('load_dataset("me/mine")', {"source": "hf://datasets/me/mine", "format": FILL_IN}),
        (
            'load_dataset("me/mine").map(lambda row: f(row["instruction"], row["text"]))',
            {"source": "hf://datasets/me/mine", "format": "alpaca"},
        ),
        (
            'load_dataset("json", data_files="a.jsonl").map(lambda row: f(row["messages"]))',
            {"source": "a.jsonl", "format": "messages"},
        ),
        (
            'load_dataset("me/alpaca-de")',
            {"source": "hf://datasets/me/alpaca-de", "format": "alpaca"},
        ),
        ('load_dataset("./notes.txt")', {"source": "./notes.txt"}),
        ('from_pretrained("m"); Dataset.from_list(rows)', {"source": FILL_IN, "format": FILL_IN}),
        (
            'load_dataset("json", data_files=["a.jsonl", "b.jsonl"])',
            {"source": FILL_IN, "format": FILL_IN},
        ),
        (
            'load_dataset("me/mine", data_files="data/x.jsonl")',
            {"source": "hf://datasets/me/mine/data/x.jsonl", "format": FILL_IN},
        ),
        (
            'load_dataset("me/mine", data_files={"validation": "b.jsonl", "train": "a.jsonl"})',
            {
                "source": "hf://datasets/me/mine/a.jsonl",
                "format": FILL_IN,
                "validation_source": "hf://datasets/me/mine/b.jsonl",
            },
        ),
        ('load_dataset("mine", data_files="x.jsonl")', {"source": FILL_IN, "format": FILL_IN}),
        (
            'load_dataset("me/mine", data_files="data/part-*")',
            {"source": FILL_IN, "format": FILL_IN},
        ),
        (
            'load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})',
            {"source": "a.jsonl", "format": FILL_IN, "validation_source": "b.jsonl"},
        ),
        (
            'load_dataset("text", data_files={"train": "a.txt", "test": "b.txt"})',
            {"source": "a.txt"},
        ),
    ],
)
def test_a_data_set_has_the_format_that_the_program_shows_or_one_to_be_filled_in(
    program: str, data: dict[str, str]
) -> None:
    program = program.replace("from_pretrained", MODEL)
    settings = {one.key: one.value for one in of_program(ast.parse(program))}
    report = read(settings, "script")
    report.check()
    assert report.places()[0]["data"] == data
    missing = [entry.text for entry in report.entries if entry.status == "fill in"]
    assert [f"data.{name} needs a value" in "".join(missing) for name in ("source", "format")] == [
        data.get(name) == FILL_IN for name in ("source", "format")
    ]
    if missing:
        with pytest.raises(ConfigError, match="is fill in: data"):
            report.check(strict=True)


@pytest.mark.parametrize(
    ("program", "how", "dtype"),
    [
        ('from_pretrained("m", torch_dtype="auto")', "used", None),
        ("from_pretrained('m', dtype=compute_dtype)", "ignored", None),
        ("from_pretrained('m', torch_dtype=torch.bfloat16)", "translated", "bfloat16"),
        ("from_pretrained('m', dtype=DTYPE)", "used", "float16"),
    ],
)
def test_a_models_dtype_may_be_that_of_its_files_or_a_name(
    program: str, how: str, dtype: str | None
) -> None:
    tree = ast.parse(f"DTYPE = torch.float16\nAutoModelForCausalLM.{program}")
    report = read({one.key: one.value for one in of_program(tree)}, "script")
    report.check()
    (entry,) = (entry for entry in report.entries if "dtype" in entry.key)
    assert entry.status == how, entry
    assert ("it is computed when this runs" in entry.text) == (how == "ignored")
    assert report.places()[0]["model"].get("dtype") == dtype
    read({"torch_dtype": "auto"}, "command", strict=True)


def test_the_file_of_a_test_is_for_validation_where_that_has_none() -> None:
    files: dict[str, object] = {"train": "a.jsonl", "validation": "b.jsonl", "test": "c.jsonl"}
    report = read({"load_dataset.data_files": files}, "script")
    assert report.places()[0]["data"]["validation_source"] == "b.jsonl"
    assert status(report, "load_dataset.data_files.test") == (
        "ignored",
        "validation has a file of its own, and a run has no test",
    )
    several = read({"load_dataset.data_files": files | {"validation": ["b", "c"]}}, "script")
    assert several.places()[0]["data"]["validation_source"] == FILL_IN
    assert status(several, "load_dataset.data_files.validation")[0] == "fill in"


def test_what_a_program_computes_is_never_its_text() -> None:
    text = """
TrainingArguments(args.folder, output_dir=args.folder, learning_rate=args.lr, run_name=name())
LoraConfig(r=args.r, target_modules=find_all(model))
AutoModelForCausalLM.from_pretrained(args.model)
load_dataset(args.dataset_name, split=args.split)
"""
    report = read({one.key: one.value for one in of_program(ast.parse(text))}, "script")
    report.check()
    recipe = report.places()[0]
    assert recipe["model"] == {"from": FILL_IN}
    assert recipe["data"] == {"source": FILL_IN, "format": FILL_IN}
    assert "args" not in str(recipe)
    assert {"folder", "name"} & recipe["run"].keys() == set()
    assert "targets" not in recipe["adapter"]
    assert status(report, f"{MODEL}.0") == (
        "fill in",
        "model.from needs a value: this is no file, and no OWNER/NAME of the hub",
    )
    assert recipe["optimizer"]["lr"] == FILL_IN
    assert status(report, "TrainingArguments.learning_rate") == (
        *("fill in", "optimizer.lr needs a value: it is computed when this runs"),
    )
    assert status(report, "TrainingArguments.run_name")[0] == "ignored"
    assert report.policy.lr is None  # for other dialects, which have no such mark


def test_an_option_of_a_program_has_the_default_that_argparse_has() -> None:
    text = """
parser.add_argument("-l", "--learning-rate", default=3e-4)
parser.add_argument("--steps", default=-1)
parser.add_argument("--decay", default=None)
rate = args.learning_rate
TrainingArguments("out", learning_rate=rate, max_steps=args.steps, weight_decay=args.decay,
    gradient_accumulation_steps=args.several)
"""
    report = read({one.key: one.value for one in of_program(ast.parse(text))}, "script")
    recipe = report.places()[0]
    assert (recipe["optimizer"]["lr"], recipe["optimizer"]["weight_decay"]) == (3e-4, FILL_IN)
    assert recipe["run"] == {"folder": "out", "epochs": 3, "seed": 42}
    assert recipe["batch"] == {"rows": FILL_IN, "micro": 8}
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay.*\n.*batch\.rows"):
        report.check(strict=True)


def test_a_variable_of_the_shell_is_never_its_text() -> None:
    command = "python run_lora_clm.py --learning_rate $LR --lora_rank ${R} --output_dir $OUT/a"
    command += " --lora_target_modules '.*q_proj$' --model_name_or_path `cat name` --fsdp $WORDS"
    report = read({one.key: one.value for one in of_command(command)}, "command")
    report.check()
    recipe = report.places()[0]
    assert recipe["model"] == {"from": FILL_IN}
    assert recipe["optimizer"]["lr"] == recipe["adapter"]["rank"] == FILL_IN
    assert recipe["adapter"]["targets"] == [".*q_proj$"]
    assert "folder" not in recipe["run"]
    text = "it is computed when this runs; set "
    assert status(report, "output_dir") == ("ignored", f"{text}it in the recipe")
    assert status(report, "fsdp") == ("ignored", f"{text}sharding.strategy in the recipe")


def test_the_fields_of_the_plug_in() -> None:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    report = read({"state_dict_config": config, "optim_state_dict_config": config}, "plugin")
    recipe, elsewhere = report.places()
    assert recipe == {}
    assert elsewhere == {"state_dict.offload_to_cpu": True, "state_dict.rank0_only": False}


def test_a_file_is_of_the_dialect_that_knows_most_of_its_keys() -> None:
    assert guess({"FSDP_VERSION": "2"}).name == "environment"
    assert guess({"fsdp": "full_shard", "fsdp_config": {"version": 1}}).name == "transformers"
    assert guess({"sharding": {"strategy": "zero1"}}).name == "recipe"
    assert guess({"sharding_strategy": 1}).name == "fsdp_config"
    assert guess({"learning_rate": 1}).name == "transformers"
    with pytest.raises(ConfigError, match="has any of the keys learning"):
        guess({"learning": 1})


# --- round trips -----------------------------------------------------------------------------

FLAGS = st.none() | st.booleans()
COMMON = {
    "offload": st.sampled_from([None, "none", "everything"]),
    "wrap": st.sampled_from([None, "auto", "size", "none"]),
    "wrap_classes": st.sampled_from([None, ("Block",), ("Block", "Head")]),
    "min_num_params": st.sampled_from([None, 1, 10**8]),
    "prefetch_backward": st.sampled_from([None, "pre", "post", "off"]),
    "mixed_precision": st.sampled_from([None, "bf16", "fp16"]),
    "state_dict": st.sampled_from([None, "full", "sharded"]),
    **dict.fromkeys(("prefetch_forward", "limit_all_gathers", "activation_checkpointing"), FLAGS),
    **dict.fromkeys(("sync_module_states", "use_orig_params"), FLAGS),
}
FSDP1_SAYS = st.fixed_dictionaries({"strategy": st.sampled_from([None, *NAMES]), **COMMON})
FSDP2_SAYS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["full_shard", "shard_grad_op"]),
        "replicate": st.sampled_from([1, 2, 3]),
        "shard": st.sampled_from([2, 4]),
        **COMMON,
    }
)
PAIRS = [("accelerate", "environment"), ("environment", "plugin"), ("fsdp_config", "transformers")]
PAIRS += [("transformers", "accelerate"), ("plugin", "fsdp1"), ("fsdp_config", "recipe")]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@settings(deadline=None, max_examples=8)
@given(fields=FSDP1_SAYS | FSDP2_SAYS)
def test_what_both_dialects_have_keys_for_survives_the_way_there_and_back(
    one: str, other: str, fields: dict[str, Any]
) -> None:
    policy = Policy(**fields).settled()
    assume(policy.wrap != "size" or policy.min_num_params)  # which is refused
    version = 2 if policy.replicate else 1
    translated = write(read(write(policy, one).tree, one).policy, other)
    back = read(write(read(translated.tree, other).policy, one).tree, one).policy
    both = written_fields(one, version) & written_fields(other, version)
    changed = {name for name in both if getattr(policy, name) != getattr(back, name)}
    assert changed - {"fsdp_version"} == set()
    assert {"strategy"} <= both or version == 2


def written_fields(dialect: str, version: int) -> set[str]:
    """Without what ends in another field, and without a hybrid where no sizes can be said."""
    rows = [row for row in DIALECTS[dialect].rows if row.writes]
    names = {row.field for row in rows if row.version in (0, version) or dialect == "recipe"}
    if version == 2 and "replicate" not in names and dialect != "recipe":
        names -= {"strategy", "mesh"}  # sizes cannot be said
    if "wrap" not in names:
        names -= {"wrap_classes", "min_num_params"}
    return names - {"param_dtype"}


DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e7,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 9, "total_num_steps": 90},
    },
    "zero_optimisation": {},
}


def test_deepspeeds_json_is_guessed_and_every_key_is_accounted_for() -> None:
    report = read(DEEPSPEED)
    assert report.dialect.name == "deepspeed"
    entries = [e for e in report.entries if e.status != "default"]
    assert [e.key for e in entries] == [key for key, _ in flatten(DEEPSPEED)]
    assert {e.key for e in entries if e.status == "ignored"} == {
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimisation",
    }
    assert report.places()[0] == {
        "sharding": {
            "strategy": "full_shard",
            "precision": {"param_dtype": "bfloat16"},
            "offload": "optimizer",
        },
        "optimizer": {
            "clip": 0.5,
            "name": "adamw",
            "lr": 1e-4,
            "schedule": "linear",
            "warmup": 9,
            "floor": 0.0,  # the demo's is 0.1, and DeepSpeed's decays to nothing
            "betas": [0.9, 0.95],
            "weight_decay": 0.0,
        },
        "batch": {"rows": 64},
        "run": {"steps": 90},
    }


@pytest.mark.parametrize(
    ("stage", "strategy"), [(0, "no_shard"), (1, "zero1"), (2, "shard_grad_op"), (3, "full_shard")]
)
def test_deepspeeds_stages_are_strategies(stage: int, strategy: str) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    assert read(zero).policy.strategy == strategy
    assert write(Policy(strategy=strategy), "deepspeed").tree == zero


def test_an_offload_to_a_disk_is_refused() -> None:
    offload = {"offload_param": {"device": "nvme"}}
    (entry,) = read({"zero_optimization": offload}).entries
    assert entry.status == "contradictory"
    assert "choose one of none, cpu" in entry.text


def test_deepspeed_without_a_stage_shards_nothing() -> None:
    report = read({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}, "deepspeed")
    assert report.places()[0]["sharding"] == {"strategy": "no_shard"}
    title, *lines = repr(report).splitlines()
    assert title == "Report of DeepSpeed's JSON:"
    assert "translated    gradient_clipping: 0.5 → optimizer.clip: 0.5" in map(str.strip, lines)
    assert any("sharding.strategy: no_shard (DeepSpeed's default)" in line for line in lines)


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("dialect", ["fsdp1", "fsdp2", "recipe"])
def test_whether_inputs_are_cast_goes_both_ways(dialect: str, inputs: bool) -> None:
    written = write(Policy(param_dtype="bfloat16", cast_inputs=inputs), dialect)
    assert written.lost.keys() <= {"mixed_precision"}
    report = read(written.tree, dialect, strict=True)
    assert report.places()[0]["sharding"]["precision"]["cast_forward_inputs"] is inputs


def test_fsdp1_casts_the_models_inputs_unless_the_root_is_told_otherwise() -> None:
    def cast(**options: Any) -> Any:
        arguments = {"mixed_precision": MixedPrecision(torch.bfloat16, **options)}
        return read(arguments, "fsdp1", strict=True).policy.cast_inputs

    assert cast() is cast(cast_forward_inputs=True) is True
    assert cast(cast_root_forward_inputs=False) is False
    with pytest.raises(ConfigError, match="both mean one thing"):
        cast(cast_forward_inputs=True, cast_root_forward_inputs=False)
