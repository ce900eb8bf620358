"""The step between quantising and adapters, and what is refused before a model is changed.

Out of order nothing would fail at once: prepared adapters would be frozen, and a sharded weight
would be quantised as if it were whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.config.precision import dtype_name
from shardwise.errors import ConfigError
from shardwise.memory.shard_tensor.adapter_order import ORDER, has_adapter
from shardwise.memory.sharding import sharding_of


@dataclass(frozen=True)
class Prepared:
    """Elements of a model's parameters by dtype, before and after ``prepare``."""

    before: Counter[str]
    after: Counter[str]

    def __str__(self) -> str:
        names = sorted(self.before | self.after)
        rows = [f"{n:<9} {self.before[n]:>15,} {self.after[n]:>15,}" for n in names]
        return "\n".join([f"{'dtype':<9} {'before':>15} {'after':>15}", *rows])


def prepare(model: nn.Module, **options: Any) -> Prepared:
    """Freeze a quantised model and cast what is left of half precision to float32, as peft does.

    Args:
        model: quantised, without adapters.
        options: of ``peft.prepare_model_for_kbit_training``. By default without transformers'
            gradient checkpointing, which makes the inputs require gradients; shard()'s
            ``activation_checkpointing`` needs no such thing.

    Raises:
        ConfigError: the model is not quantised, has adapters or is sharded already.
    """
    from peft import prepare_model_for_kbit_training

    if not quantized_layers(model):
        raise ConfigError(
            f"prepare() was called, and {type(model).__name__} has no quantised layer. {ORDER}"
        )
    check_order(model, "prepare()")
    before = _elements(model)
    prepare_model_for_kbit_training(model, **{"use_gradient_checkpointing": False, **options})
    return Prepared(before, _elements(model))


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that ``quantize`` or ``adopt`` has made, by name."""
    named = model.named_modules()  # by name, since they need bitsandbytes
    return {n: m for n, m in named if type(m).__module__ == "shardwise.hf.quantized_layers"}


def packed_elements(model: nn.Module) -> int:
    """Elements of quantised weights that are no elements of a parameter, which holds bytes.

    With the elements of all parameters they are those of the model that was quantised: scales are
    none of them.
    """
    layers = quantized_layers(model).values()
    return sum(layer.values - _numel(layer.weight) - _numel(layer.scales) for layer in layers)


def whole_weights(model: nn.Module) -> int:
    """Bytes of the memory in which 4-bit weights are made whole on a CPU, one at a time."""
    layers = [m for m in quantized_layers(model).values() if type(m).__name__ == "Linear4bit"]
    dtypes = {dtype for m in layers for dtype in (m.values_dtype, m.compute_dtype) if dtype}
    nbytes: int = sum(dtype.itemsize for dtype in dtypes)
    return nbytes * max((int(layer.values) for layer in layers), default=0)


def _numel(param: nn.Parameter) -> int:
    """Number of elements of the unsharded parameter."""
    sharding = sharding_of(param)
    return param.numel() if sharding is None else sharding.shape.numel()


def check_compute(config: Any, computed: torch.dtype | None) -> None:
    """Raises ``ConfigError`` where half of a step computes in fp16 and the other in bf16.

    Args:
        config: a ``transformers.BitsAndBytesConfig``.
        computed: what all but the quantised layers compute in, if not in the dtype of the weights.
    """
    inside, halves = config.bnb_4bit_compute_dtype, {torch.float16, torch.bfloat16}
    if computed is not None and config.load_in_4bit and {inside, computed} == halves:
        raise ConfigError(
            f"training computes in {dtype_name(computed)}, and 4-bit layers in "
            f"{dtype_name(inside)}: each layer would cast its input and its output, and lose the "
            "range of the one and the precision of the other. Choose one: "
            f"bnb_4bit_compute_dtype=torch.{dtype_name(computed)} (model.quantization.compute), or "
            f"train in {dtype_name(inside)} (bf16=True in place of fp16=True)."
        )


def check_config(config: Any) -> None:
    """Raises ``ConfigError`` for what bitsandbytes or sharding cannot do."""
    if config.quantization_method() not in ("nf4", "fp4", "llm_int8"):
        raise ConfigError(
            f"the quantisation config asks for no 4 and no 8 bits (type "
            f"{config.bnb_4bit_quant_type!r}). Pass BitsAndBytesConfig(load_in_4bit=True, "
            'bnb_4bit_quant_type="nf4"), or load_in_8bit=True.'
        )
    if config.load_in_8bit and config.llm_int8_has_fp16_weight:
        raise ConfigError(
            "llm_int8_has_fp16_weight=True keeps and trains 16-bit weights, and quantises them in "
            "each step: nothing is smaller, and a frozen base does not need it. Leave it out."
        )


def check_order(model: nn.Module, call: str, *, adapters: bool = False) -> None:
    """Raises ``ConfigError`` if a model is sharded or, unless these may be, has ``adapters``."""
    named = dict(model.named_parameters())
    if any(sharding_of(param) is not None for param in named.values()):
        state = "is sharded, so each rank would change its own shards alone"
    elif not adapters and has_adapter(named):
        state = "has adapters of peft, which would be replaced or frozen"
    else:
        return
    raise ConfigError(f"{call} was called on a model that {state}. {ORDER}")


def check_devices(model: nn.Module) -> None:
    """Raises ``ConfigError`` if ``device_map`` has divided the model."""
    devices = sorted({str(device) for device in getattr(model, "hf_device_map", {}).values()})
    if len(devices) > 1:
        raise ConfigError(
            f"device_map has put layers on {', '.join(devices)}: one process uses all of them, one "
            "after the other, and with several processes each would do so. Load with "
            'device_map={"": LOCAL_RANK}, or with sw.hf.load(), which needs none.'
        )


def _elements(model: nn.Module) -> Counter[str]:
    counts: Counter[str] = Counter()
    for param in model.parameters():
        counts[dtype_name(param.dtype)] += param.numel()
    return counts
