"""A folder of peft: its tensors, their names, and the text of its configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.local_shards import ignored_params
from shardwise.checkpoint.wrappers import bare_names

if TYPE_CHECKING:
    from peft import LoraConfig

    from shardwise.api.sharded import Sharded


def on_meta(sharded: Sharded) -> dict[str, Tensor]:
    """A tensor of the whole shape for each name of a parameter, each its own object."""
    members = [member for bucket in sharded.buckets for member in bucket.members]
    shapes = {alias: member.shape for member in members for alias in member.aliases}
    shapes |= {name: param.shape for name, param in ignored_params(sharded.model).items()}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def peft_names(
    model: nn.Module, shapes: Mapping[str, Tensor], adapter: str, embeddings: bool = False
) -> dict[str, Tensor]:
    """Return those of the ``shapes`` that peft stores, by the names that it gives them.

    With ``embeddings`` also those of the base, which peft stores where they are targets.
    """
    from peft.utils import get_peft_model_state_dict

    named: dict[str, Tensor] = get_peft_model_state_dict(
        model, dict(shapes), adapter_name=adapter, save_embedding_layers=embeddings
    )
    return named


def stored_names(sharded: Sharded, adapter: str) -> dict[str, str]:
    """Name of a checkpoint of ours → peft's, of each tensor that peft stores."""
    shapes, bare = on_meta(sharded), bare_names(sharded.model)
    names = {id(tensor): bare(name) for name, tensor in shapes.items()}
    named = peft_names(sharded.model, shapes, adapter)
    return {names[id(tensor)]: name for name, tensor in named.items()}


def config_text(model: Any, of_adapter: LoraConfig) -> bytes:
    """``adapter_config.json`` as ``save_pretrained`` writes it."""
    config, base = copy.deepcopy(of_adapter), model.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None)
    if config.task_type is None:
        kind = type(base)
        config.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    fields = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"
