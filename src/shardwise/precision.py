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

from dataclasses import dataclass

import torch

from shardwise.accelerators import row
from shardwise.comm.reduction import Reduction
from shardwise.errors import ConfigError

AVERAGES = ("postdivide", "predivide", "sqrt", "avg")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a model. ``None`` leaves each tensor as it is.

    Attributes:
        stored: shards, gradients of shards and optimizer state; ``None`` = as the model has them.
        compute: gathered parameters and the floating-point inputs of the model.
        wire: gradients on their way to the rank that sums them; ``None`` = as computed.
        sum: the dtype sums are formed in; ``None`` = as stored.
        buffers: floating-point buffers, cast once at the start.
        output: floating-point outputs of the model.
        average: how the mean over ranks is formed: ``"postdivide"`` (sum, then divide),
            ``"predivide"`` (divide, then sum), ``"sqrt"`` (the power of two from √W up before, the
            rest after, which neither overflows nor underflows fp16), ``"avg"`` (the backend's own,
            after a self-test). ``None`` = ``"sqrt"`` where fp16 travels, else ``"postdivide"``.
    """

    stored: torch.dtype | None = None
    compute: torch.dtype | None = None
    wire: torch.dtype | None = None
    sum: torch.dtype | None = None
    buffers: torch.dtype | None = None
    output: torch.dtype | None = None
    average: str | None = None

    def __post_init__(self) -> None:
        if self.average is not None and self.average not in AVERAGES:
            raise ConfigError(
                f"precision.average is {self.average!r}; choose one of {', '.join(AVERAGES)}."
            )

    def check(self, device: torch.device) -> None:
        """Raises ``ConfigError`` for a dtype in which not every device of this kind computes."""
        known = row(device).dtypes
        for name, dtype in vars(self).items():
            if isinstance(dtype, torch.dtype) and dtype not in known:
                raise ConfigError(
                    f"precision.{name} is {dtype}, in which not every {device.type} device "
                    f"computes. Choose one of {', '.join(map(str, known))}."
                )

    def of(self, dtype: torch.dtype, trainable: bool) -> Dtypes:
        """The dtypes of a parameter that the model holds in ``dtype``."""
        if not dtype.is_floating_point:  # quantised bytes travel as they are
            return Dtypes(dtype, dtype, dtype, dtype)
        stored = self.stored if self.stored is not None and trainable else dtype
        compute = self.compute or stored
        return Dtypes(stored, compute, self.wire or compute, self.sum or stored)

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


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32 → "float32"``."""
    return str(dtype).removeprefix("torch.")
