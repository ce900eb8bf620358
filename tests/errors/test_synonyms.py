"""The field's words for what is called otherwise here."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardwise as sw
from shardwise.comm.transports.local import LocalComm
from shardwise.config.options import Options
from shardwise.config.strategies import placement_of
from shardwise.errors.synonyms import _OPTIONS, _STRATEGIES, option_hint
from shardwise.recipe.errors import known_keys
from shardwise.recipe.key_suggestions import suggestions
from tests.copies import error_text

OURS = {item.name for item in fields(Options)} | {"strategy", "wrap", "comm"}


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("limit_all_gathers", "that is prefetch=sw.Prefetch(limit=2) here. Options are "),
        ("mixed_precision", "that is precision= here, for example sw.Precision(param_dtype="),
        ("cpu_offload", 'that is offload="everything" here'),
        ("fsdp_transformer_layer_cls_to_wrap", "that is wrap= here, for example "),
        ("reshard_after_forward", 'that is strategy= here: "full_shard" for True, "shard_grad_op"'),
        ("find_unused_parameters", "leave it out: parameters without a gradient are found in"),
        ("overlap_comm", "leave it out: a unit's gradients are one buffer"),
        ("bucketting", "nearest is 'bucketing'. Options are "),
    ],
)
def test_an_option_of_another_library_is_answered_by_what_it_is_here(
    option: str, text: str
) -> None:
    anything: Any = True
    answered = error_text(sw.ConfigError, lambda: Options(**{option: anything}))
    assert answered.startswith(f"shard() has no option {option!r}; {text}")


def test_every_argument_of_fsdp_has_an_answer_or_is_ours() -> None:
    arguments = {
        name for f in (FullyShardedDataParallel, fully_shard) for name in signature(f).parameters
    }
    unknown = arguments - OURS - {"module"}
    assert [name for name in sorted(unknown) if not option_hint(name)] == []


def test_answers_name_arguments_that_exist() -> None:
    named = {word for text in _OPTIONS for word in re.findall(r"that is (\w+)=", text)}
    assert named
    assert named <= OURS


def test_no_word_has_two_meanings_and_none_is_ours_already() -> None:
    options = [word for words in _OPTIONS.values() for word in words.split()]
    assert len(options) == len(set(options))
    assert set(options) & OURS == set()
    strategies = [word for words in _STRATEGIES.values() for word in words.split()]
    assert len(strategies) == len(set(strategies))
    assert {placement_of(name).name for name in _STRATEGIES} == set(_STRATEGIES)


def test_an_optimizer_knows_what_others_call_its_options() -> None:
    sharded = sw.shard(torch.nn.Linear(2, 2), comm=LocalComm())
    text = error_text(sw.ConfigError, lambda: sw.optim.AdamW(sharded, learning_rate=0.1))  # type: ignore[call-arg]
    assert text.startswith("AdamW() has no option 'learning_rate'; that is lr= here. Options are ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stored", "stored_dtype"),
        ("compute", "param_dtype"),
        ("wire", "reduce_dtype"),
        ("sum", "sum_dtype"),
        ("buffers", "buffer_dtype"),
        ("output", "output_dtype"),
        ("keep", "keep_in_fp32_modules"),
    ],
)
def test_the_earlier_words_of_precision_are_answered_by_torch_s(old: str, new: str) -> None:
    anything: Any = torch.bfloat16
    answered = error_text(sw.ConfigError, lambda: sw.Precision(**{old: anything}))
    assert answered.startswith(f"Precision() has no option {old!r}; that is {new}= here. Options")
    assert suggestions(f"sharding.precision.{old}", known_keys()) == [f"sharding.precision.{new}"]
