"""Dtypes of parameters, computation, messages and sums. One frozen policy for a model.

``torch.autocast`` casts at every operation and keeps the parameters wide in memory and on
the wire. Here the cast happens once per gather, on the rank's own 1/W slice, so a bf16 model
gathers half the bytes while the optimizer goes on seeing fp32 masters.

    stored ──cast own slice──▶ param ──grad──▶ reduce ──send──▶ sum ──mean──▶ stored
    (shard)                    (bucket)        (bucket)         (shard)       (shard.grad)

The fields are those of PyTorch's ``MixedPrecision`` (param, reduce and buffer dtype), with the
reduce dtype split in two: a narrow dtype may travel while sums are formed in a wide one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from shardwise.comm.codec import QUANTISED
from shardwise.comm.machine.accelerators import row
from shardwise.comm.reduction import Reduction
from shardwise.errors import ConfigError, nearest
from shardwise.errors.arguments import checked


@checked
@dataclass(frozen=True)
class Precision:
    """The dtypes of a model. ``None`` leaves each tensor as it is.

    Attributes:
        stored_dtype: shards, gradients of shards and optimizer state; ``None`` = the model's.
        param_dtype: gathered parameters and floating-point inputs (see ``cast_forward_inputs``).
        reduce_dtype: gradients on their way to the rank that sums them; ``None`` = as computed.
            ``torch.int8`` and ``torch.float8_e4m3fn`` travel in blocks (see ``comm.codec``).
        sum_dtype: the dtype sums are formed in; ``None`` = as stored.
        buffer_dtype: floating-point buffers, cast once at the start.
        output_dtype: floating-point outputs of the model, in tuples, lists, dicts and dataclasses;
            those in attributes of other objects stay as they are.
        average: how the mean over ranks is formed: ``"postdivide"`` (sum, then divide),
            ``"predivide"`` (divide, then sum), ``"sqrt"`` (the power of two from √W up before, the
            rest after, which neither overflows nor underflows fp16), ``"avg"`` (the backend's own,
            after a self-test). ``None`` = ``"sqrt"`` where fp16 travels, else ``"postdivide"``.
        cast_forward_inputs: cast the floating-point inputs of the model and of each unit to
            ``param_dtype``, as torch's ``fully_shard`` does; ``False``: none.
        keep_in_fp32_modules: patterns with ``*`` and ``?`` for the names of modules that stay in
            float32, whole (``"blocks.0.norm"``) or the last part (``"norm*"``). Their inputs are
            cast, and their outputs are cast to ``param_dtype``.
    """

    stored_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    average: Literal["postdivide", "predivide", "sqrt", "avg"] | None = None
    cast_forward_inputs: bool = True
    keep_in_fp32_modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.keep_in_fp32_modules, str):
            raise ConfigError(
                "precision.keep_in_fp32_modules is a string; write "
                f"({self.keep_in_fp32_modules!r},), a tuple."
            )
        if self.keep_in_fp32_modules and self.param_dtype is None:
            raise ConfigError(
                "precision.keep_in_fp32_modules names modules, and param_dtype is None, so all "
                "modules stay as they are. Add param_dtype=torch.bfloat16, or leave "
                "keep_in_fp32_modules out."
            )

    def check(self, device: torch.device, model: nn.Module) -> None:
        """Raises ``ConfigError`` for a dtype in which not every device of this kind computes.

        And for a pattern of ``keep_in_fp32_modules`` that matches no module, or one of two that
        share a parameter.
        """
        known = row(device).dtypes
        for name, dtype in vars(self).items():
            if name == "reduce_dtype" and dtype in QUANTISED:
                continue
            if isinstance(dtype, torch.dtype) and dtype not in known:
                raise ConfigError(
                    f"precision.{name} is {dtype}, in which not every {device.type} device "
                    f"computes. Choose one of {', '.join(map(str, known))}."
                )

        names = {name for name, _ in model.named_modules() if name}
        for pattern in self.keep_in_fp32_modules:
            if not any(_matches(name, pattern) for name in names):
                known_names = names | {name.rpartition(".")[2] for name in names}
                near = ", ".join(map(repr, nearest(pattern.strip("*?."), known_names)))
                raise ConfigError(
                    f"precision.keep_in_fp32_modules: {pattern!r} matches no module of "
                    f"{type(model).__name__}; nearest are {near}."
                )
        self._check_ties(model)

    def _check_ties(self, model: nn.Module) -> None:
        seen: dict[nn.Parameter, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            first = seen.setdefault(param, name)
            if self.keeps(first) is not self.keeps(name):
                raise ConfigError(
                    f"{first} and {name} are one parameter, and precision.keep_in_fp32_modules "
                    "names the module of one only; it would need two dtypes. Name both, or neither."
                )

    def keeps(self, name: str) -> bool:
        """Is the parameter of this full name in a module that ``keep_in_fp32_modules`` names?"""
        parts = name.split(".")[:-1]
        kept = self.keep_in_fp32_modules
        around = [".".join(parts[: end + 1]) for end in range(len(parts))]
        return any(_matches(module, pattern) for module in around for pattern in kept)

    def of_inputs(self, name: str) -> torch.dtype | None:
        """The dtype to which the inputs of the unit with a module of this name are cast."""
        return self.param_dtype if self.cast_forward_inputs and not self.keeps(f"{name}.") else None

    def of(self, dtype: torch.dtype, trainable: bool, kept: bool = False) -> Dtypes:
        """The dtypes of a parameter that the model holds in ``dtype``; ``kept``: in float32."""
        if not dtype.is_floating_point:  # quantised bytes travel as they are
            return Dtypes(dtype, dtype, dtype, dtype)
        if kept:
            return Dtypes(*[torch.float32] * 4)
        stored = self.stored_dtype if self.stored_dtype is not None and trainable else dtype
        param = self.param_dtype or stored
        reduce, summed = self.reduce_dtype or param, self.sum_dtype or stored
        return Dtypes(stored, param, reduce, summed)

    def reduction(self, dtypes: Dtypes, world: int) -> Reduction:
        """Return how gradients of these dtypes are averaged over ``world`` ranks."""
        how = self.average or ("sqrt" if dtypes.reduce is torch.float16 else "postdivide")
        before, after = 1.0, 1.0
        if how == "sqrt":
            doublings = (world - 1).bit_length()  # W <= 2 ** doublings
            before = float(2 ** ((doublings + 1) // 2))
            after = world / before
        elif how == "predivide":
            before = float(world)
        elif how == "postdivide":
            after = float(world)
        return Reduction(dtypes.reduce, dtypes.sum, how, before, after)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one bucket; its key, together with trainability."""

    stored: torch.dtype
    param: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype

    @property
    def collected(self) -> torch.dtype:
        """Return from which gradients of their bucket blocks of 8-bit numbers are encoded."""
        return self.param if self.reduce in QUANTISED else self.reduce

    @property
    def lent(self) -> torch.dtype | None:
        """The dtype in which gradients may be computed in a new bucket; ``None``: in none."""
        return self.collected if self.sum is self.collected else None


def _matches(name: str, pattern: str) -> bool:
    """Does the pattern match the whole name of a module, or its last part?"""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32 → "float32"``."""
    return str(dtype).removeprefix("torch.")
