"""4- and 8-bit bases: which layers are quantised, and each rank's own blocks of them.

The ordinary way loads whole weights on every rank, quantises all of them there, and shards codes
afterwards, if at all. Here the layers are made on the meta device, the model is sharded, and each
rank quantises the blocks that it will hold, to the bits that the whole weight would give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.mesh import gather_rows
from shardwise.comm.protocol import Label
from shardwise.errors import ConfigError, nearest
from shardwise.hf.preparation import (
    check_config,
    check_devices,
    check_order,
    packed_elements,
    quantized_layers,
)
from shardwise.memory.sharding import Sharding, sharding_of
from shardwise.plan.printed import size

CONV1D = "transformers.pytorch_utils.Conv1D"
"""GPT-2's linear layer, whose weight is ``[in, out]``."""

Read = Callable[[int, int], Tensor]
"""``read(first, last)``: elements ``[first, last)`` of a flattened weight, ``[out * in]``."""


@dataclass(frozen=True)
class Quantized:
    """A report of what was quantised; printing it gives bytes before and after.

    Attributes:
        form: ``"nf4"``, ``"fp4"`` or ``"int8"``, and what it computes in.
        layers: how many.
        packed: elements of their weights that are no elements of a parameter now.
        before: bytes of their weights in the dtype that was, or will be, quantised.
        codes: bytes of their weights now.
        scales: bytes of their scales.
        kept: names of linear layers that stay as they are.
        other: bytes of all other parameters.
        notes: what the configuration says without an effect, or by default.
    """

    form: str
    layers: int
    packed: int
    before: int
    codes: int
    scales: int
    kept: tuple[str, ...]
    other: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        after = self.codes + self.scales
        kept = f"linear layers kept as they are: {', '.join(self.kept) or 'none'}"
        parts = f"{size(self.codes)} codes, {size(self.scales)} scales"
        lines = [
            f"{self.layers} linear layers quantised: {self.form}, stored as bytes",
            f"their weights: {size(self.before)} before, {size(after)} after ({parts})",
            f"all other parameters: {size(self.other)}; {kept}",
        ]
        return "\n".join([*lines, *self.notes])


# --- before the model is sharded --------------------------------------------------------------


def quantize(model: nn.Module, config: Any) -> Quantized:
    """Replace a model's linear layers by quantised ones, in place.

    Their values are quantised at once, or, on the meta device, after ``shard()`` by
    ``quantize_codes`` and ``share_scales``. As in transformers the head and tied layers stay as
    they are, or else the layers that ``config.llm_int8_skip_modules`` names.

    Args:
        model: of transformers, or any other.
        config: a ``transformers.BitsAndBytesConfig``.

    Raises:
        ConfigError: the model is quantised, has adapters or is sharded already; or no layer is
            left to be quantised.
    """
    from shardwise.hf.quantized_layers import Linear4bit, Linear8bit

    check_config(config)
    if quantized_layers(model):
        raise ConfigError("quantize() was called, and the model is quantised. Call it once.")
    check_order(model, "quantize()")
    kind = Linear4bit if config.load_in_4bit else Linear8bit
    skipped, replaced = _skipped(model, config), 0
    for name, module in [*_linears(model)]:
        if name in skipped:
            continue
        like = _as_linear(module)
        layer: Any = kind(like, config, like.weight.device)
        layer.transposed = like is not module
        if not like.weight.is_meta:
            codes, absmax = layer.codes(like.weight.detach().reshape(-1))
            layer.weight.data = codes.view(layer.weight.shape)
            layer.scales.data = layer.packed(absmax)
        model.set_submodule(name, layer)
        replaced += 1
    if not replaced:
        raise ConfigError(
            f"no linear layer of {type(model).__name__} is left to be quantised: "
            f"{', '.join(sorted(skipped)) or 'it has none, and nothing'} stays as it is. Shorten "
            "llm_int8_skip_modules (model.quantization.skip), or leave the quantisation out."
        )
    _mark(model)
    return report(model, config)


def adopt(model: nn.Module) -> Quantized:
    """Take over the layers that bitsandbytes or transformers has quantised, in place.

    Codes and scales keep their bits. Without it ``shard()`` splits the codes, and every rank keeps
    all scales.

    Raises:
        ConfigError: there are no such layers, they are not quantised yet or in a packed form, or
            ``device_map`` has put the model on several devices.
    """
    import bitsandbytes as bnb

    from shardwise.hf.quantized_layers import adopted

    check_devices(model)
    check_order(model, "adopt()", adapters=True)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    layers = [(name, module) for name, module in model.named_modules() if type(module) in kinds]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layer that bitsandbytes has quantised. Call "
            "quantize(model, config), or load it with a quantization_config."
        )
    for name, module in layers:
        model.set_submodule(name, adopted(name, module))
    _mark(model)
    return report(model)


# --- after it is sharded ----------------------------------------------------------------------


def quantize_codes(layer: Any, read: Read) -> Tensor:
    """Quantise the blocks of a layer's weight that this rank holds. No communication.

    Args:
        layer: a ``Linear4bit`` or ``Linear8bit`` of a sharded model.
        read: gives this rank's values, in the dtype that is quantised, on the layer's device.

    Returns:
        The blocks' absmax, for ``share_scales``; of a block that is cut, on the first rank alone.
    """
    weight, per = _sharding(layer.weight), layer.nbytes_of(layer.block)
    first = weight.start // per
    last = -(-weight.stop // per) if weight.stop > weight.start else first
    values = read(first * layer.block, min(last * layer.block, layer.values))
    codes, absmax = layer.codes(values)
    begin = weight.start - first * per
    _put(layer.weight, codes[begin : begin + weight.stop - weight.start])
    start, stop = _blocks_begun(weight, weight.position, per)
    own: Tensor = absmax[start - first : stop - first]
    return own


def share_scales(layer: Any, absmax: Tensor) -> None:
    """Fill a layer's scales from what ``quantize_codes`` gave on each rank. A collective.

    All ranks get all absmax, a 64th of the elements, for a moment: bitsandbytes subtracts the mean
    of all of them before it quantises them, too.
    """
    weight, scales = _sharding(layer.weight), _sharding(layer.scales)
    per, shards = layer.nbytes_of(layer.block), range(weight.layout.world)
    blocks = [_blocks_begun(weight, shard, per) for shard in shards]
    sizes = [stop - start for start, stop in blocks]
    padded = absmax.new_empty(max(sizes), device=weight.axes[0].device)
    padded[: absmax.numel()] = absmax
    rows = gather_rows(padded, weight.axes, Label("scales", weight.name))
    whole = torch.cat([row[:n] for row, n in zip(rows.unbind(), sizes, strict=True)])
    _put(layer.scales, layer.packed(whole)[scales.start : scales.stop])


def _sharding(param: nn.Parameter) -> Sharding:
    sharding = sharding_of(param)
    assert sharding is not None, "shard() comes before"
    return sharding


@torch.no_grad()
def _put(param: nn.Parameter, part: Tensor) -> None:
    param.copy_(part.view(param.shape))


def _blocks_begun(weight: Sharding, shard: int, per: int) -> tuple[int, int]:
    """The blocks ``[first, last)`` whose first byte is in a shard."""
    start, stop = weight.layout.owned(weight.slot, shard)
    return -(-start // per), -(-stop // per)


# --- what a model has -------------------------------------------------------------------------


def report(model: nn.Module, config: Any = None) -> Quantized:
    """Report what is quantised in a model that is not sharded yet; ``config`` for its notes."""
    layers = quantized_layers(model)
    codes = sum(layer.weight.nbytes for layer in layers.values())
    scales = sum(layer.scales.nbytes for layer in layers.values())
    return Quantized(
        ", ".join(dict.fromkeys(layer.kind for layer in layers.values())),
        len(layers),
        packed_elements(model),
        sum(layer.values * layer.values_dtype.itemsize for layer in layers.values()),
        codes,
        scales,
        tuple(name for name, _ in _linears(model)),
        sum(param.nbytes for param in model.parameters()) - codes - scales,
        _notes(config) if config is not None else (),
    )


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and their names, GPT-2's too, but no subclasses; as in transformers."""
    for name, module in model.named_modules():
        is_conv = f"{type(module).__module__}.{type(module).__name__}" == CONV1D
        if name and (type(module) is nn.Linear or is_conv):
            yield name, module


def _as_linear(module: Any) -> nn.Linear:
    """The same layer with a weight ``[out, in]``."""
    if isinstance(module, nn.Linear):
        return module
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _skipped(model: nn.Module, config: Any) -> set[str]:
    """The linear layers that stay as they are."""
    from transformers import PreTrainedModel
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    patterns = config.llm_int8_skip_modules
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns or ():
        if all(should_convert_module(name, [pattern]) for name in names):
            own = dict.fromkeys(name.rpartition(".")[2] for name, _ in _linears(model))
            raise ConfigError(
                f"llm_int8_skip_modules (model.quantization.skip) names {pattern!r}, and no module "
                f"of {type(model).__name__} has this name, so the layer that was meant would be "
                f"quantised. Nearest are {', '.join(nearest(pattern, own))}."
            )
    if isinstance(model, PreTrainedModel):
        fp32 = model._keep_in_fp32_modules
        patterns = HfQuantizer.get_modules_to_not_convert(model, patterns, [*(fp32 or ())])
    return {
        name
        for name, module in _linears(model)
        if uses[id(module.weight)] > 1 or not should_convert_module(name, patterns)
    }


def _mark(model: nn.Module) -> None:
    """Set the marks by which peft chooses the adapters of quantised layers."""
    kinds = {type(layer).__name__ for layer in quantized_layers(model).values()}
    model.is_loaded_in_4bit = "Linear4bit" in kinds  # type: ignore[assignment]
    model.is_loaded_in_8bit = "Linear8bit" in kinds  # type: ignore[assignment]


def _notes(config: Any) -> tuple[str, ...]:
    notes = []
    if config.load_in_4bit and config.bnb_4bit_quant_type == "fp4":
        notes.append(
            "fp4 is bitsandbytes' default; nf4 has less error for normally distributed weights: "
            'bnb_4bit_quant_type="nf4" (model.quantization.type)'
        )
    if config.load_in_4bit and config.bnb_4bit_quant_storage is not torch.uint8:
        notes.append(
            f"bnb_4bit_quant_storage={config.bnb_4bit_quant_storage} has no effect: FSDP shards "
            "bytes only if they look like the other weights, here bytes are sharded as bytes"
        )
    return tuple(notes)
