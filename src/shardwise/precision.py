"""Which dtype is stored, computed in, sent, and summed in. One frozen policy for a model.

``torch.autocast`` casts at every operation and keeps the parameters wide in memory and on
the wire. Here the cast happens once per gather, on the rank's own 1/W slice, so a bf16 model
gathers half the bytes while the optimizer goes on seeing fp32 masters.

    stored ──cast own slice──▶ compute ──grad──▶ wire ──send──▶ sum ──mean──▶ stored
    (shard)                    (bucket)          (bucket)       (shard)       (shard.grad)

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

from shardwise.accelerators import row
from shardwise.arguments import checked
from shardwise.comm.codec import QUANTISED
from shardwise.comm.reduction import Reduction
from shardwise.errors import ConfigError, nearest


@checked
@dataclass(frozen=True)
class Precision:
    """The dtypes of a model. ``None`` leaves each tensor as it is.

    Attributes:
        stored: shards, gradients of shards and optimizer state; ``None`` = as the model has them.
        compute: gathered parameters and floating-point inputs (see ``cast_forward_inputs``).
        wire: gradients on their way to the rank that sums them; ``None`` = as computed.
            ``torch.int8`` and ``torch.float8_e4m3fn`` travel in blocks (see ``comm.codec``).
        sum: the dtype sums are formed in; ``None`` = as stored.
        buffers: floating-point buffers, cast once at the start.
        output: floating-point outputs of the model.
        average: how the mean over ranks is formed: ``"postdivide"`` (sum, then divide),
            ``"predivide"`` (divide, then sum), ``"sqrt"`` (the power of two from √W up before, the
            rest after, which neither overflows nor underflows fp16), ``"avg"`` (the backend's own,
            after a self-test). ``None`` = ``"sqrt"`` where fp16 travels, else ``"postdivide"``.
        cast_forward_inputs: cast the floating-point inputs of the model and of each unit to
            ``compute``, as torch's ``fully_shard`` does; ``False``: none.
        keep: modules that stay in float32: patterns with ``*`` and ``?`` for their names, whole
            (``"blocks.0.norm"``) or the last part (``"norm*"``). Their inputs are cast, and their
            outputs are cast to ``compute``.
    """

    stored: torch.dtype | None = None
    compute: torch.dtype | None = None
    wire: torch.dtype | None = None
    sum: torch.dtype | None = None
    buffers: torch.dtype | None = None
    output: torch.dtype | None = None
    average: Literal["postdivide", "predivide", "sqrt", "avg"] | None = None
    cast_forward_inputs: bool = True
    keep: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            raise ConfigError(f"precision.keep is a string; write ({self.keep!r},), a tuple.")
        if self.keep and self.compute is None:
            raise ConfigError(
                "precision.keep names modules that stay in float32, and precision.compute is None, "
                "so all modules stay as they are. Add compute=torch.bfloat16, or leave keep out."
            )

    def check(self, device: torch.device, model: nn.Module) -> None:
        """Raises ``ConfigError`` for a dtype in which not every device of this kind computes.

        And for a pattern of ``keep`` that matches no module, or one of two that share a parameter.
        """
        known = row(device).dtypes
        for name, dtype in vars(self).items():
            if name == "wire" and dtype in QUANTISED:
                continue
            if isinstance(dtype, torch.dtype) and dtype not in known:
                raise ConfigError(
                    f"precision.{name} is {dtype}, in which not every {device.type} device "
                    f"computes. Choose one of {', '.join(map(str, known))}."
                )

        names = {name for name, _ in model.named_modules() if name}
        for pattern in self.keep:
            if not any(_matches(name, pattern) for name in names):
                known_names = names | {name.rpartition(".")[2] for name in names}
                near = ", ".join(map(repr, nearest(pattern.strip("*?."), known_names)))
                raise ConfigError(
                    f"precision.keep: {pattern!r} matches no module of {type(model).__name__}; "
                    f"nearest are {near}."
                )
        self._check_ties(model)

    def _check_ties(self, model: nn.Module) -> None:
        seen: dict[nn.Parameter, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            first = seen.setdefault(param, name)
            if self.keeps(first) is not self.keeps(name):
                raise ConfigError(
                    f"{first} and {name} are one parameter, and precision.keep names one of their "
                    "modules, so it would need two dtypes. Name both, or neither."
                )

    def keeps(self, name: str) -> bool:
        """Is the parameter of this full name in a module that ``keep`` names?"""
        parts = name.split(".")[:-1]
        around = [".".join(parts[: end + 1]) for end in range(len(parts))]
        return any(_matches(module, pattern) for module in around for pattern in self.keep)

    def of_inputs(self, name: str) -> torch.dtype | None:
        """The dtype to which the inputs of the unit with a module of this name are cast."""
        return self.compute if self.cast_forward_inputs and not self.keeps(f"{name}.") else None

    def of(self, dtype: torch.dtype, trainable: bool, kept: bool = False) -> Dtypes:
        """The dtypes of a parameter that the model holds in ``dtype``; ``kept``: by ``keep``."""
        if not dtype.is_floating_point:  # quantised bytes travel as they are
            return Dtypes(dtype, dtype, dtype, dtype)
        if kept:
            return Dtypes(*[torch.float32] * 4)
        stored = self.stored if self.stored is not None and trainable else dtype
        compute = self.compute or stored
        wire, summed = self.wire or compute, self.sum or stored
        return Dtypes(stored, compute, wire, summed)

    def reduction(self, dtypes: Dtypes, world: int) -> Reduction:
        """How gradients of these dtypes are averaged over ``world`` ranks."""
        how = self.average or ("sqrt" if dtypes.wire is torch.float16 else "postdivide")
        before, after = 1.0, 1.0
        if how == "sqrt":
            doublings = (world - 1).bit_length()  # W <= 2 ** doublings
            before = float(2 ** ((doublings + 1) // 2))
            after = world / before
        elif how == "predivide":
            before = float(world)
        elif how == "postdivide":
            after = float(world)
        return Reduction(dtypes.wire, dtypes.sum, how, before, after)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one bucket; its key, together with trainability."""

    stored: torch.dtype
    compute: torch.dtype
    wire: torch.dtype
    sum: torch.dtype

    @property
    def collected(self) -> torch.dtype:
        """Of gradients in their bucket, which blocks of 8-bit numbers are encoded from."""
        return self.compute if self.wire in QUANTISED else self.wire


def _matches(name: str, pattern: str) -> bool:
    """Does the pattern match the whole name of a module, or its last part?"""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32 → "float32"``."""
    return str(dtype).removeprefix("torch.")
