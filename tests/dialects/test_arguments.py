"""FSDP1's arguments as those of ``shard()``."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardwise as sw
from shardwise.comm.transports.local import LocalComm
from shardwise.dialects import read, shard_arguments
from shardwise.errors import ConfigError


def test_a_model_is_sharded_as_fsdp1_was_told() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    report = read(
        {
            "sharding_strategy": "SHARD_GRAD_OP",
            "auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear}),
            "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
            "forward_prefetch": False,
            "sync_module_states": True,
        },
        "fsdp1",
        strict=True,
    )
    arguments = shard_arguments(report)
    assert arguments["precision"] == sw.Precision(param_dtype=torch.bfloat16)
    assert arguments["prefetch"] == sw.Prefetch(forward=0)
    assert arguments["sync_module_states"] is True
    sharded = sw.shard(model, comm=LocalComm(), **arguments)
    assert "by_class(Linear)" in str(arguments["wrap"])
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert len(str(sharded.units).splitlines()) > 2


def test_inputs_stay_as_they_are_where_fsdp2_was_told_so() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    arguments = shard_arguments(read({"mp_policy": policy}, "fsdp2", strict=True))
    assert arguments["precision"] == sw.Precision(
        param_dtype=torch.bfloat16, cast_forward_inputs=False
    )


def test_activations_on_the_host_and_compiled_units() -> None:
    keys = ("activation_checkpointing", "activation_checkpointing_offload")
    arguments = shard_arguments(read(dict.fromkeys(keys, True), "plugin"))
    assert arguments == {"activation_checkpointing": sw.ActivationCheckpointing(offload=True)}
    report = read({"torch_compile": True, "torch_compile_backend": "hpu_backend"}, "transformers")
    assert shard_arguments(report) == {"compile": "hpu_backend"}


def test_no_shard_may_be_offloaded() -> None:
    report = read({"sharding_strategy": "NO_SHARD", "cpu_offload": True}, "fsdp1", strict=True)
    arguments = shard_arguments(report)
    assert arguments == {"strategy": "no_shard", "offload": "everything"}
    sharded = sw.shard(torch.nn.Linear(2, 2), comm=LocalComm(), **arguments)
    assert all(bucket.spec.in_host for bucket in sharded.buckets)


def test_contradictory_arguments_shard_nothing() -> None:
    report = read({"fsdp": "offload"}, "transformers")
    with pytest.raises(ConfigError, match="offload is no strategy"):
        shard_arguments(report)
