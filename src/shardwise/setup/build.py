"""This rank's shards of a model's unsharded parameters, and back.

Unit by unit: values are made or received, each rank copies its own part, and the whole unit
is let go before the next one, so that beyond the model as it was given no more than one unit
is whole at any time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.host_memory import HostMemory
from shardwise.comm.malloc import trim
from shardwise.comm.mesh import Mesh
from shardwise.comm.protocol import Comm
from shardwise.config.options import Options
from shardwise.config.placement import Placement
from shardwise.config.version import __version__
from shardwise.errors import ConfigError
from shardwise.memory.parameters import Bucket
from shardwise.memory.shard_tensor.adapter_order import check_adapters
from shardwise.memory.shard_tensor.unseen_calls import intercept_calls
from shardwise.memory.sharding import sharding_of
from shardwise.memory.whole import gather_whole
from shardwise.plan.blueprint import Blueprint
from shardwise.plan.spec import BucketSpec
from shardwise.plan.units import wrap
from shardwise.plan.units.structure import holds_parameters
from shardwise.plan.units.units import Unit, Units
from shardwise.runtime.other_engines import check_unwrapped
from shardwise.runtime.unit import UnitState
from shardwise.setup.materialise import checksums, give_memory, give_values, sync
from shardwise.setup.overlaps import check_overlaps, is_expanded
from shardwise.torch_internals import buffers_of

log = logging.getLogger("shardwise")

GIVEN_BACK = 1 << 18
"""Elements of a unit whose memory goes back at once; for smaller ones it is not worth the call."""
LARGE = 10**9
"""Parameters of a model of which a copy on each rank is worth a warning."""

Specs = Mapping[str, Sequence[BucketSpec]]
"""The buckets of each unit, by its name."""


def check_unsharded(model: nn.Module) -> None:
    """Raises ``ConfigError`` where ``shard()`` would cut what is sharded or wrapped already."""
    check_unwrapped(model)
    check_adapters(model)
    for name, param in model.named_parameters():
        if sharding_of(param) is not None:
            raise ConfigError(
                f"parameter {name!r} is sharded already, so sharding this model again would cut "
                "shards of shards. Call shard() once, on the outermost model; to shard anew, "
                "call sharded.unshard() first."
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and holds_parameters(module):
            raise ConfigError(
                f"{name!r} is scripted or traced by torch.jit, whose modules take no hooks, so its "
                "parameters cannot be gathered. Shard the model as it was before; shard(model, "
                "compile=True) compiles its units."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name!r} is {tensor.layout}, and ranks exchange and store dense tensors. Make it "
                "dense and call to_sparse() in forward(), or make it a plain attribute."
            )
    check_overlaps(model)


def facts(model: nn.Module, placement: Placement, options: Options, specs: Specs) -> dict[str, str]:
    """Return what every rank must have alike, as short texts to compare."""
    own = ("init", "load_later", "mesh", "ignored")  # may differ by rank
    alike = {
        "versions": f"shardwise {__version__}, torch {torch.__version__}",
        "strategy": placement.name,
        "options": ", ".join(f"{k}={v}" for k, v in vars(options).items() if k not in own),
    }
    for name, buckets in specs.items():
        numel = sum(spec.layout.used for spec in buckets)
        alike[f"unit {name or '(root)'}"] = f"{numel:,} elements, layout {_digest(buckets)}"
        for bucket in buckets:
            dtype = f"{bucket.dtypes.stored}{'' if bucket.trainable else ', frozen'}"
            alike |= {f"weights {s.name!r}": f"{list(s.shape)} {dtype}" for s in bucket.slots}
    if not options.sync_module_states:
        tensors = (*model.named_parameters(), *model.named_buffers())
        alike |= checksums((name, tensor) for name, tensor in tensors if not tensor.is_meta)
    return alike


def _digest(specs: Iterable[BucketSpec]) -> str:
    text = repr([(b.layout, b.placement, b.dtypes, [m.aliases for m in b.members]) for b in specs])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def warn_of_copies(specs: Specs, world: int) -> None:
    """Warn where each of ``world`` ranks will hold all of a large model."""
    every = [spec for of_unit in specs.values() for spec in of_unit]
    numel = sum(spec.layout.used for spec in every)
    if world > 1 and numel >= LARGE and {spec.replicate.size for spec in every} == {world}:
        log.warning(
            "no_shard holds all %.1f billion parameters, their gradients and optimizer state on "
            'every rank; strategy="full_shard" holds 1/%d of them',
            numel / 1e9,
            world,
        )


def warn_of_one_unit(model: nn.Module, blueprint: Blueprint) -> None:
    """Warn where a model of several layers has one unit, which is gathered whole and freed."""
    units, frees = blueprint.units, any(spec.placement.frees for spec in blueprint.buckets)
    layers = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    is_small = sum(unit.nbytes for unit in units) <= wrap.JOINED_NBYTES
    if len(units) == 1 and len(layers) > 1 and frees and not is_small:
        log.warning(
            "%s is one unit, since no blocks repeat in it: all %s parameters are gathered at once, "
            "and %s saves their memory only between steps. Pass wrap=sw.wrap.by_size("
            "min_num_params=100), or by_class(…) with the classes of its layers",
            type(model).__name__,
            f"{units[0].numel:,}",
            blueprint.placement.name,
        )


def cut(
    model: nn.Module, units: Units, specs: Specs, options: Options, comm: Comm, mesh: Mesh
) -> dict[str, UnitState]:
    """Give every parameter its value and cut it; afterwards each rank holds its shards alone."""
    intercept_calls()
    warn_of_copies(specs, comm.size)  # before memory for them is taken
    states, host = dict[str, UnitState](), HostMemory(comm.device)
    sends = options.sync_module_states and comm.size > 1

    def finished(unit: Unit) -> None:
        ranks = comm if sends else None
        buckets = (_cut_bucket(spec, mesh, host, ranks) for spec in specs[unit.name])
        states[unit.name] = UnitState(unit.name, tuple(buckets))
        if comm.device.type == "cpu" and unit.numel >= GIVEN_BACK:
            trim()

    given = [
        member.param.numel() * member.param.element_size()
        for unit in units
        for member in unit.members
        if member.param not in options.load_later
    ]
    give_values(model, units, comm.device, options.init, options.load_later, finished)
    for param in model.parameters():
        if param.is_meta:  # ``ignored=``, and read later
            give_memory(param, torch.empty_like(param, device=comm.device))
    given += _place_buffers(model, options.precision.buffer_dtype, comm, sends)
    if sends:
        text = "states synchronised from rank 0 (%d tensors, %d bytes)"
        log.info(text, len(given), sum(given))
    return {unit.name: states[unit.name] for unit in units}


def _cut_bucket(spec: BucketSpec, mesh: Mesh, host: HostMemory, ranks: Comm | None) -> Bucket:
    """Cut whole parameters into this rank's shards, and let each go before the next one.

    Rank 0 sends its values to the other ``ranks``; ``None``: each rank has them.
    """
    later = {index for index, param in enumerate(spec.params) if param.is_meta}
    for param in (spec.params[index] for index in later):  # an empty one can show any memory
        give_memory(param, torch.empty(0, dtype=param.dtype, device=mesh.shard.device))
    bucket = Bucket(spec, mesh, host)
    for index, param in enumerate(spec.params):
        sharding, value = bucket.sharding(index), param.data
        if index not in later:
            bucket.take(index, sync(value, ranks, sharding.name) if ranks else value)
        gradient, param.grad = param.grad, None
        bucket.rest_one(index)
        param.sharding = sharding  # type: ignore[attr-defined]
        if gradient is not None:
            local = sharding.cut(gradient, param.shape)
            param.grad = local.to(param.device, bucket.dtypes.stored, copy=True)
    return bucket


def _place_buffers(
    model: nn.Module, dtype: torch.dtype | None, comm: Comm, sends: bool
) -> Iterable[int]:
    """Buffers stay whole on each rank: moved, cast, and sent by rank 0 once. Yields their bytes."""
    placed = dict[Tensor, Tensor]()  # one object in several modules stays one
    for prefix, module in model.named_modules():
        for name, buffer in buffers_of(module).items():
            if buffer is None:
                continue
            cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            if buffer.is_meta:  # it is read later, by who knows this object
                zeros = torch.zeros_like(buffer, dtype=cast, device=comm.device)
                torch.utils.swap_tensors(buffer, zeros)
                continue
            if buffer not in placed:
                moved = buffer.to(comm.device, cast)
                if is_expanded(moved):  # else nothing could be written to it
                    moved = moved.contiguous()
                full_name = f"{prefix}.{name}".lstrip(".")
                placed[buffer] = _received(moved, comm, full_name) if sends else moved
                yield moved.nbytes
            buffers_of(module)[name] = placed[buffer]


def _received(buffer: Tensor, comm: Comm, name: str) -> Tensor:
    """A buffer with rank 0's values, the same object where it can be written to. A collective."""
    values = sync(buffer, comm, name)
    if values is buffer:
        return values
    with torch.no_grad():
        return buffer.copy_(values)


def uncut(buckets: Iterable[Bucket]) -> None:
    """Make every parameter plain and whole again. A collective; gradients are dropped."""
    for bucket in buckets:
        bucket.gradients.drop()
        for param, whole in zip(bucket.params, gather_whole(bucket), strict=True):
            param.grad = None
            param.__class__ = nn.Parameter
            param.data = whole.clone()
            del param.sharding  # type: ignore[attr-defined]
        bucket.close()
