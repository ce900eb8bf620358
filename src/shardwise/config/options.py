"""Options of ``shard()`` beyond strategy and units: a frozen dataclass, checked on creation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from shardwise.comm.mesh import Ranks
from shardwise.config.checkpointing import ActivationCheckpointing, NamedUnits
from shardwise.config.ignored import Ignored
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked

Init = Callable[[nn.Module], Any]
"""Gives a module's own parameters and buffers (not its children's) their values."""


BLOCK = 256  # elements for each scale of an 8-bit optimizer, in all versions of bitsandbytes


def blocks(numel: int) -> int:
    """Return the blocks of so many elements; the last may be shorter."""
    return -(-numel // BLOCK)


def default_init(module: nn.Module) -> None:
    """``module.reset_parameters()`` where there is one."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


@checked
@dataclass(frozen=True)
class Options:
    """Options of ``shard()`` beyond strategy and units.

    Attributes:
        precision: the dtypes of shards, parameters, reductions, sums, buffers and outputs.
        prefetch: how far ahead units are gathered.
        offload: what is kept in host memory, pinned where there is a device: ``"optimizer"``: its
            state, gradients and the parameters that it sees; it steps there. ``"everything"``: the
            device keeps no shards between the uses of a unit either.
        bucketing: ``"block"``: one collective per unit; ``"layer"``: per module that owns
            parameters; ``"none"``: per parameter, sharded along dim 0 like ``torch.chunk``.
        uneven: with ``bucketing="none"``: ``"pad"`` a dim 0 that is not divisible by the world
            size, or ``"error"``.
        blocksize: cut trainable parameters at multiples of so many elements only: 256 for the 8-bit
            optimizers of bitsandbytes. 0: between rows, where that costs little.
        unsharded: units that stay gathered, their frozen buckets for good and trained ones from
            their first use in a step to the last: named as in ``ActivationCheckpointing.units``,
            or bytes of full buckets: first frozen ones, of each kind the largest that fits.
            ``None``: 16 MiB of them where a gather moves bytes, so not in shared memory.
        sync_module_states: broadcast rank 0's parameters and buffers. When off, differing values
            raise.
        init: initialises a module that was built on the meta device.
        load_later: parameters and buffers on the meta device that are read from files afterwards:
            none of them is made whole or initialised, and until then they hold zeros.
        ignored: modules, parameters, or their names, that are left alone: whole and plain on each
            rank, in no unit, with this rank's gradients.
        buffers: ``"local"``, ``"broadcast"`` or ``"average"`` (see ``runtime.buffers``).
        activation_checkpointing: recompute units in the backward pass: ``True``: those of repeated
            classes, or an ``ActivationCheckpointing``.
        compile: compile each unit's forward: ``True``: by the backend of the device's row, or a
            backend of ``torch.compile``.
        mesh: a ``DeviceMesh`` or process group to shard over, instead of ``comm``; for a hybrid
            strategy a mesh of two axes, or ``(replicate, shard)``: over how many ranks parameters
            are sharded, and how many copies there are. ``None`` = the ranks of a host, from the
            launcher, and a copy on each host.
    """

    precision: Precision = Precision()
    prefetch: Prefetch = Prefetch()
    offload: Literal["none", "optimizer", "everything"] = "none"
    bucketing: Literal["block", "layer", "none"] = "block"
    uneven: Literal["pad", "error"] = "pad"
    blocksize: int = 0
    unsharded: int | NamedUnits | None = None
    sync_module_states: bool = True
    init: Init = default_init
    load_later: frozenset[Tensor] = frozenset()
    ignored: Ignored = ()
    buffers: Literal["local", "broadcast", "average"] = "local"
    activation_checkpointing: bool | ActivationCheckpointing = False
    compile: bool | str = False
    mesh: Ranks | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.unsharded, int) and self.unsharded < 0:
            raise ConfigError(f"unsharded is {self.unsharded}; it is a number of bytes, or 0.")
        if self.blocksize < 0:
            raise ConfigError(f"blocksize is {self.blocksize}; set 256, or 0 to cut between rows.")
        if self.uneven == "error" and self.bucketing != "none":
            raise ConfigError(
                f'uneven="error" needs dim-0 shards, and bucketing={self.bucketing!r} shards '
                'buckets, not parameters. Add bucketing="none", or leave uneven out.'
            )

    @property
    def offload_words(self) -> str:
        """`` with optimizer state in host memory``, or ``""``."""
        kept = {"optimizer": "optimizer state"}.get(self.offload, self.offload)
        return "" if self.offload == "none" else f" with {kept} in host memory"
