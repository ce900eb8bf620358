"""bitsandbytes' quantised layers, whose scales are bytes of a parameter, as their weight is.

bitsandbytes keeps a layer's scales in an object beside the parameter, where no engine that shards
parameters sees them: every rank holds all of them, an eighth of the codes. Here a layer has two
frozen parameters of raw bytes, so both are sharded, gathered in one collective, offloaded and saved
as any others, and no policy of dtypes casts them. In each forward pass bitsandbytes gets views of
the gathered bytes; the arithmetic, forward and backward, is its own. On a CPU a 4-bit weight is
made whole in memory that all layers of a thread share (``_Product``), by the function of its C
library, since its operator makes each result anew: half a gigabyte of holes in a rank's heap.

               weight                    scales
    4 bits     [⌈n/2⌉, 1]  two codes     absmax of each 64 values, float32
      double                             offset, absmax of each 256 absmax, float32; codes of absmax
    8 bits     [out, in]   int8          absmax of each row, float32

This file imports bitsandbytes, so it is imported where a model is quantised.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from functools import cache
from typing import Any, cast

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from bitsandbytes.cextension import lib
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig

from shardwise.comm.malloc import map_blocks
from shardwise.config.precision import dtype_name
from shardwise.errors import ConfigError

BLOCK = 64  # values for each absmax: bitsandbytes' default, which transformers cannot change
NESTED = 256  # absmax for each nested one
PART = 1 << 20  # values that are quantised at once
KERNELS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Linear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
    """A linear layer of ``nf4`` or ``fp4`` codes. Final.

    Args:
        like: the linear layer that it replaces; its bias is taken over, its values are not.
        config: a ``transformers.BitsAndBytesConfig``.
        device: of its bytes.

    Attributes:
        block: values that have a scale.
        values: elements of the weight that was quantised.
        values_dtype: their dtype.
        maps_from: bytes from which a CPU's blocks are mapped each for itself, activations of 64
            tokens, say. The base is so small in memory that the holes they leave in the heap are a
            seventh of all of it. Forecasts read it.
        transposed: whether the file has the weight as ``[in, out]``.
    """

    block = BLOCK
    maps_from = 384 << 10
    transposed = False
    weight: Any
    bias: nn.Parameter | None

    def __init__(self, like: nn.Linear, config: Any, device: torch.device) -> None:
        super().__init__(
            like.in_features,
            like.out_features,
            bias=False,
            compute_dtype=config.bnb_4bit_compute_dtype,
            device="meta",
        )
        map_blocks(self.maps_from)
        self.form, self.double = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
        self.values, self.values_dtype = like.weight.numel(), like.weight.dtype
        self.blocks = -(-self.values // BLOCK)
        nested = 1 + -(-self.blocks // NESTED)
        nbytes = 4 * nested + self.blocks if self.double else 4 * self.blocks
        self.weight = _bytes(device, self.nbytes_of(self.values), 1)
        self.scales = _bytes(device, nbytes)
        self.bias = like.bias
        # What peft reads of a weight to choose its adapter.
        self.weight.compress_statistics, self.weight.quant_type = self.double, self.form

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] → [..., out]``, in the dtype of ``x``."""
        inside = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(inside.dtype)
        state = self.quantisation()
        trains = (self.training or torch.is_grad_enabled()) and x.is_cpu and x.numel()
        whole_blocks = self.in_features % BLOCK == 0  # else its kernel for a CPU has other values
        if trains and whole_blocks and not is_compiling() and _kernel(self.form, inside.dtype):
            out: Tensor = cast("Any", _Product).apply(inside, self.weight, state, bias)
        else:
            out = bnb.matmul_4bit(inside, self.weight, state, bias=bias)
        return out.to(x.dtype)

    def quantisation(self) -> functional.QuantState:
        """The scales as bitsandbytes takes them: views of the bytes as they are now."""
        common = {
            "shape": torch.Size([self.out_features, self.in_features]),
            "dtype": self.values_dtype,
            "blocksize": BLOCK,
            "quant_type": self.form,
        }
        if not self.double:
            return functional.QuantState(self.scales.view(torch.float32), **common)
        floats, codes = self.scales[: -self.blocks], self.scales[-self.blocks :]
        offset, nested = floats.view(torch.float32).split([1, floats.numel() // 4 - 1])
        code = _nested_code(nested.device)
        of_absmax = functional.QuantState(nested, None, code, NESTED, dtype=torch.float32)
        return functional.QuantState(codes, offset=offset[0], state2=of_absmax, **common)

    @staticmethod
    def nbytes_of(values: int) -> int:
        """Bytes of the weight for so many values."""
        return -(-values // 2)

    def codes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise some blocks: their bytes of the weight, and their absmax, ``[k]``, float32.

        Args:
            values: ``[k * block]``; the weight's last block may be shorter.
        """
        # In parts: for each value its kernel for a CPU takes 20 bytes besides.
        parts = (
            functional.quantize_4bit(part, blocksize=BLOCK, quant_type=self.form)
            for part in values.split(PART)
        )
        codes, states = zip(*parts, strict=True)
        return torch.cat(codes).view(-1), torch.cat([state.absmax for state in states])

    def packed(self, absmax: Tensor) -> Tensor:
        """The bytes of ``scales`` of the absmax of all blocks, ``[blocks]``."""
        if not self.double:
            return absmax.view(torch.uint8)
        # As in its quantize_4bit: the last bits of a mean depend on the order of the sum.
        offset = absmax.mean()
        codes, nested = functional.quantize_blockwise(absmax - offset, blocksize=NESTED)
        return _joined(offset, nested.absmax, codes)

    @staticmethod
    def packed_of(state: functional.QuantState) -> Tensor:
        """The bytes of ``scales`` of a whole weight that bitsandbytes has quantised."""
        if not state.nested:
            plain: Tensor = state.absmax.view(torch.uint8)
            return plain
        return _joined(state.offset, state.state2.absmax, state.absmax)

    @property
    def kind(self) -> str:
        """Name the kind in a table: ``nf4 with scales in 8 bits, computed in bfloat16``."""
        double = " with scales in 8 bits" if self.double else ""
        computed = self.compute_dtype and dtype_name(self.compute_dtype)
        return f"{self.form}{double}, computed in {computed or 'the dtype of the input'}"


class _Product(torch.autograd.Function):
    """bitsandbytes' ``MatMul4Bit``, to the bit, with one whole weight for all layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, state: Any, bias: Tensor | None) -> Tensor:
        ctx.codes, ctx.state = codes.view(-1), state
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear(x, _whole(ctx.codes, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        to_x, _, _, to_bias = ctx.needs_input_grad
        bias = grad.sum(0, dtype=ctx.bias_dtype) if to_bias else None  # autograd sums the rest
        if not to_x:
            return None, None, None, bias
        whole = _whole(ctx.codes, ctx.state, ctx.state.dtype).to(grad.dtype)
        return grad.matmul(whole), None, None, bias


class _Whole(threading.local):
    """The memory of this thread's whole weights, by dtype: as large as the largest of them."""

    def __init__(self) -> None:
        self.memory = dict[torch.dtype, Tensor]()


_thread = _Whole()


def _whole(codes: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The weight of ``codes``, ``[out, in]``; it is there until the next one is made."""
    if torch.is_grad_enabled():  # of a derivative of a derivative, whose graph keeps it
        whole: Tensor = functional.dequantize_4bit(codes.view(-1, 1), state)
        return whole
    absmax, numel = state.absmax, state.shape.numel()
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    memory = _thread.memory.get(dtype)
    if memory is None or memory.numel() < numel:
        with torch.inference_mode(False):
            memory = _thread.memory[dtype] = torch.empty(numel, dtype=dtype)
    addresses = (tensor.data_ptr() for tensor in (codes, absmax, memory))
    sizes = map(ctypes.c_longlong, (BLOCK, *state.shape))
    _kernel(state.quant_type, dtype)(*map(ctypes.c_void_p, addresses), *sizes)
    return memory[:numel].view(state.shape)


@cache
def _kernel(form: str, dtype: torch.dtype) -> Any:
    """The C function that writes a weight of ``form`` to an address; None where there is none."""
    return getattr(lib._lib, f"cdequantize_blockwise_cpu_{form}_{KERNELS.get(dtype)}", None)


class Linear8bit(bnb.nn.Linear8bitLt):  # type: ignore[misc]
    """A linear layer of LLM.int8() codes. Final; arguments as ``Linear4bit``."""

    kind = "int8"
    transposed = False
    bias: nn.Parameter | None

    def __init__(self, like: nn.Linear, config: Any, device: torch.device) -> None:
        super().__init__(
            like.in_features,
            like.out_features,
            bias=False,
            has_fp16_weights=False,
            threshold=config.llm_int8_threshold,
            device="meta",
        )
        self.block, self.values = like.in_features, like.weight.numel()
        self.values_dtype = like.weight.dtype
        self.weight = _bytes(device, like.out_features, like.in_features)
        self.scales = _bytes(device, 4 * like.out_features)
        self.bias = like.bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] → [..., out]``, in the dtype of ``x``."""
        state = copy.copy(self.state)  # its own, for the backward pass keeps it
        state.CB, state.SCB = self.weight.view(torch.int8), self.scales.view(torch.float32)
        state.is_training = self.training
        if x.is_meta:
            state.threshold = 0.0  # which columns are outliers is a matter of values
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = x.reshape(-1, x.shape[-1])  # bitsandbytes flattens three dimensions, and not four
        output: Tensor = bnb.matmul(rows, state.CB, bias=bias, state=state)
        return output.view(*x.shape[:-1], output.shape[-1])

    @staticmethod
    def nbytes_of(values: int) -> int:
        """Bytes of the weight for so many values."""
        return values

    def codes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Same as ``Linear4bit.codes``; blocks are rows."""
        rows = values.view(-1, self.block).to(torch.float16)
        codes, absmax, _ = functional.int8_vectorwise_quant(rows)
        return codes.view(torch.uint8).view(-1), absmax

    def packed(self, absmax: Tensor) -> Tensor:
        """Same as ``Linear4bit.packed``."""
        return absmax.view(torch.uint8)


def _bytes(device: torch.device, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)


def _joined(offset: Tensor, nested: Tensor, codes: Tensor) -> Tensor:
    """``[] float32, [n] float32, [blocks] uint8 → [4 + 4n + blocks]`` bytes."""
    return torch.cat([torch.cat([offset.view(1), nested]).view(torch.uint8), codes])


@cache
def _nested_code(device: torch.device) -> Tensor:
    """The values of the 256 codes of an absmax, the same in all layers."""
    code: Tensor = functional.create_dynamic_map()
    return code.to(device)


def adopted(name: str, module: Any) -> Linear4bit | Linear8bit:
    """A layer that bitsandbytes has quantised, as ours, with the same bits.

    Raises:
        ConfigError: it is not quantised yet, or packed for inference.
    """
    of_8_bits, weight = isinstance(module, bnb.nn.Linear8bitLt), module.weight
    if of_8_bits:
        state = module.state.SCB if weight.SCB is None else weight.SCB
    else:
        state = getattr(weight, "quant_state", None) or module.quant_state
    if state is None or getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(
            f"{name!r} is a {type(module).__name__} whose weight is "
            f"{'not quantised yet' if state is None else 'packed for inference'}. Quantise it by "
            "model.to(device), and adopt it before it is evaluated."
        )
    config = BitsAndBytesConfig(
        load_in_8bit=of_8_bits,
        load_in_4bit=not of_8_bits,
        llm_int8_threshold=module.state.threshold if of_8_bits else 0.0,
        bnb_4bit_quant_type="" if of_8_bits else state.quant_type,
        bnb_4bit_use_double_quant=not of_8_bits and state.nested,
    )
    dtype = torch.float16 if of_8_bits else state.dtype
    like = nn.Linear(module.in_features, module.out_features, False, "meta", dtype)
    layer: Any = (Linear8bit if of_8_bits else Linear4bit)(like, config, weight.device)
    layer.bias = module.bias
    layer.weight.data = weight.detach().view(torch.uint8).view(layer.weight.shape)
    layer.scales.data = layer.packed(state) if of_8_bits else layer.packed_of(state)
    if not of_8_bits:
        layer.compute_dtype = module.compute_dtype
    return layer  # type: ignore[no-any-return]
