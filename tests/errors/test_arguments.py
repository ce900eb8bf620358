"""Options are visible where they are written, and a wrong one is answered in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.options import LoadOptions, SaveOptions
from shardwise.config.options import Options
from shardwise.optim.fused import AdamWPolicy
from shardwise.optim.muon import MuonPolicy
from tests.copies import error_text

SAVED, GIVEN = {"self", "path", "optimizer", "training"}, {"self", "sharded", "groups"}
READ = {"self", "path", "run", "optimizer", "optimizers"}
FOUND = {"revision", "cache_dir", "dtype", "lora", "new_tokens", "quantization"}
OF_FILES = {"init", "load_later"}  # which sw.hf.load() sets, and a trace has no use for
ENTRY_POINTS: list[tuple[Callable[..., Any], type, set[str]]] = [
    (sw.shard, Options, {"model", "strategy", "wrap", "comm", "use_orig_params"}),
    (sw.hf.load, Options, FOUND | {"source", "comm", "strategy", "wrap"} | OF_FILES),
    (sw.trace, Options, {"model", "inputs", "strategy", "ranks", "wrap"} | OF_FILES),
    (sw.Sharded.save, SaveOptions, SAVED),
    (sw.Sharded.save_async, SaveOptions, SAVED),
    (sw.Sharded.load, LoadOptions, READ),
    (sw.Sharded.resume, LoadOptions, READ),
    (sw.Sharded.state_dict, sw.StateDict, {"self", "kind"}),
    (sw.Sharded.optimizer_state_dict, sw.StateDict, {"self", "kind", "optimizer"}),
    (sw.optim.AdamW.__init__, AdamWPolicy, GIVEN),
    (sw.optim.Muon.__init__, MuonPolicy, GIVEN | {"adamw"}),
]
NOT_MADE_BY_USERS = {"Loaded", "Recording", "Saved", "SavedFile", "Sharded", "Trace"}
POLICIES = [
    kind
    for name in sw.__all__
    if is_dataclass(kind := getattr(sw, name)) and name not in NOT_MADE_BY_USERS
]


@pytest.mark.parametrize(("entry_point", "kind", "others"), ENTRY_POINTS)
def test_an_entry_point_lists_the_fields_of_its_options(
    entry_point: Callable[..., Any], kind: type, others: set[str]
) -> None:
    listed = {p.name: (p.annotation, p.default) for p in signature(entry_point).parameters.values()}
    hidden = {name for name, (_, default) in listed.items() if name in ("kwargs", "options")}
    assert not hidden
    options = {item.name: (item.type, item.default) for item in fields(kind)}
    assert {name: listed[name] for name in listed.keys() - others} == {
        name: options[name] for name in options.keys() - others
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_public_constructor_answers_wrong_names_and_types(policy: Callable[..., Any]) -> None:
    assert "has no option 'colour'; " in error_text(sw.ConfigError, lambda: policy(colour=1))
    required: dict[str, Any] = {"name": "mine"} if policy is sw.Placement else {}
    if policy is sw.Training:  # its values are looked at where all ranks meet
        return
    for name in {item.name for item in fields(policy)}:  # type: ignore[arg-type]
        text = error_text(sw.ConfigError, partial(policy, **required | {name: object()}))
        assert f"{name} is a object" in text


MODEL = nn.Linear(2, 2)
ANSWERS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: sw.shard(list(MODEL.parameters())),  # type: ignore[arg-type]
        "model is a list, and not a Module. Pass one, for example the model in sw.shard(model), ",
    ),
    (
        lambda: sw.shard(MODEL, comm="gloo"),  # type: ignore[arg-type]
        "comm is 'gloo', and not a Comm. Pass one, for example sw.connect().",
    ),
    (
        lambda: sw.shard(MODEL, compile=3),  # type: ignore[arg-type]
        "compile is 3, and not a bool or string.",
    ),
    (
        lambda: sw.shard(MODEL, param_dtype=torch.bfloat16),  # type: ignore[call-arg]
        "shard() has no option 'param_dtype'; that is precision=sw.Precision(param_dtype=…) here",
    ),
    (
        lambda: sw.Precision(param_dtype="half"),  # type: ignore[arg-type]
        "precision.param_dtype is 'half', and not a torch.dtype. Pass one, for example torch.fl",
    ),
    (
        lambda: sw.wrap.by_size("1e6"),  # type: ignore[arg-type]
        "min_num_params is '1e6', and not a whole number.",
    ),
    (
        lambda: sw.record(MODEL),  # type: ignore[arg-type]
        "sharded is a Linear, and not a Sharded. Pass one, for example sharded = sw.shard(model).",
    ),
    (
        lambda: sw.optim.AdamW(sw.shard(nn.Linear(2, 2)), fused=True),  # type: ignore[call-arg]
        "AdamW() has no option 'fused'; leave it out: the step is one fused kernel. Options are",
    ),
    (
        lambda: sw.hf.load("folder", presicion=sw.Precision()),  # type: ignore[call-arg]
        "load() has no option 'presicion'; nearest is 'precision'. Options are activation_ch",
    ),
    (
        lambda: sw.trace(MODEL, torch.ones(1, 2), prefetch=0),  # type: ignore[arg-type]
        "prefetch is 0, and not a Prefetch. Pass one, for example sw.Prefetch(backward=0).",
    ),
    (
        lambda: sw.connect(backend="gloo"),  # type: ignore[call-arg]
        "connect() has no option 'backend'; leave it out: the launcher's environment says it",
    ),
    (
        lambda: sw.shard(nn.Linear(2, 2)).save("run/step-1", max_shard_size=1),  # type: ignore[call-arg]
        "save() has no option 'max_shard_size'; nearest is 'max_file_size'. Options are files",
    ),
    (
        lambda: sw.optim.AdamW(sw.shard(nn.Linear(2, 2)), lr="1e-3"),  # type: ignore[arg-type]
        "lr is '1e-3', and not a number or Tensor.",
    ),
]


@pytest.mark.parametrize(("call", "text"), ANSWERS)
def test_a_wrong_option_is_answered_in_words(call: Callable[[], object], text: str) -> None:
    assert error_text(sw.ConfigError, call).startswith(text)
