"""Activation checkpointing of whole units, inside the hooks that gather them.

Where checkpointing is wrapped *around* a unit, the backward pass may gather it once for the
recomputation and once more for the gradients (huggingface/transformers#30404). Here a unit's own
forward is replaced by a checkpointed one, so the unit is entered once in the backward pass,
and both happen inside. Always the non-reentrant kind: it needs no input that requires a
gradient, so frozen embeddings and LoRA work too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.torch_internals import disable_torch_function, storage_key

Forward = Callable[..., Any]


def check_own_checkpointing(model: nn.Module) -> None:
    """Raises ``ConfigError`` where the model's own gradient checkpointing is on."""
    own = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    own += [m for m in model.modules() if type(m).__name__ == "CheckpointWrapper"]
    if own:
        raise ConfigError(
            f"activation_checkpointing=True, and {type(own[0]).__name__} has its own gradient "
            "checkpointing on: everything would be recomputed twice, and gathered once more. "
            "Turn one off: model.activation_checkpointing_disable() (before transformers 6 also "
            "gradient_checkpointing_disable()), or leave activation_checkpointing out."
        )


def recompute(module: nn.Module) -> Forward:
    """A ``forward`` of ``module`` that keeps its inputs only, and runs again in backward."""
    forward = module.forward

    # A function of this file: torch.compile would not look into a partial() of torch's function.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def offload(module: nn.Module, device: torch.device) -> Forward:
    """A ``forward`` whose saved tensors lie in host memory, except parameters and buffers."""
    forward = module.forward
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    host = save_on_cpu(pin_memory=True, **kind)

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        # Parameters are gathered again for the backward pass: copies of them would be whole units.
        # Those of units inside are shards here, which to read would gather.
        with disable_torch_function():
            held = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}

        def pack(tensor: Tensor) -> Any:
            return tensor if storage_key(tensor) in held else host.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else host.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return offloaded
