"""``shard(model)``: all options of the engine, each by its name, with its type and its default."""

from __future__ import annotations

from contextlib import nullcontext
from enum import Enum
from typing import Literal

import torch
from torch import Tensor, nn

from shardwise.api.sharded import Sharded
from shardwise.comm.machine.connect import comm_for
from shardwise.comm.mesh import Ranks
from shardwise.comm.protocol import Comm
from shardwise.config.checkpointing import ActivationCheckpointing, NamedUnits
from shardwise.config.ignored import Ignored
from shardwise.config.options import Init, Options, default_init
from shardwise.config.placement import Placement
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.config.strategies import placement_of
from shardwise.errors.arguments import checked, taken
from shardwise.plan.units.wrap import Wrap
from shardwise.runtime.buffers import check_batch_norm
from shardwise.setup.build import check_unsharded


@checked
def shard(
    model: nn.Module,
    strategy: str | int | Enum | Placement = "full_shard",
    wrap: Wrap | None = None,
    comm: Comm | None = None,
    *,
    precision: Precision = Precision(),
    prefetch: Prefetch = Prefetch(),
    offload: Literal["none", "optimizer", "everything"] = "none",
    bucketing: Literal["block", "layer", "none"] = "block",
    uneven: Literal["pad", "error"] = "pad",
    blocksize: int = 0,
    unsharded: int | NamedUnits | None = None,
    sync_module_states: bool = True,
    init: Init = default_init,
    load_later: frozenset[Tensor] = frozenset(),
    ignored: Ignored = (),
    buffers: Literal["local", "broadcast", "average"] = "local",
    activation_checkpointing: bool | ActivationCheckpointing = False,
    compile: bool | str = False,  # noqa: A002
    mesh: Ranks | tuple[int, int] | None = None,
    use_orig_params: Literal[True] = True,
) -> Sharded:
    """Shard ``model`` in place over the ranks of ``comm``. A collective.

    Args:
        model: any module; parameters may be frozen, tied, scalar, of several dtypes, or on the
            meta device.
        strategy: ``"full_shard"`` (ZeRO-3), ``"shard_grad_op"`` (ZeRO-2), ``"zero1"`` or
            ``"no_shard"`` (DDP); ``"hybrid_shard"``, ``"hybrid_shard_zero2"`` and ``"hybrid_full"``
            with copies on other hosts; also torch's ``ShardingStrategy``, its numbers, and a
            ``Placement``.
        wrap: the wrap policy; ``None`` = ``sw.wrap.automatic()``.
        comm: the communicator; ``None`` = from the launcher's environment, or of one rank.
        precision, …, mesh: see ``shardwise.config.options.Options``, field by field.
        use_orig_params: FSDP1's; parameters keep their names and objects, and none is flat.

    Returns:
        A handle: ``accumulate``, ``clip_grad_norm_``, ``full_params``, ``units``, ``schedule`` …

    Raises:
        ConfigError: an argument is invalid, or the model is sharded already.
        RanksDisagree: the ranks were given different models or arguments.
    """
    options, placement = taken(Options, locals()), placement_of(strategy)
    check_unsharded(model)
    comm = comm_for(comm, mesh)
    precision.check(comm.device, model)
    check_batch_norm(model, comm)
    # Not the device of a `with torch.device("meta"):` around this call; where there is none, no
    # context, which makes each operation a call of Python.
    with nullcontext() if torch.get_default_device() == comm.device else comm.device:
        return Sharded(model, placement, wrap, comm, options)
