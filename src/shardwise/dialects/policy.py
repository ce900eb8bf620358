"""What a sharding configuration says, whoever wrote it: one frozen record between all dialects.

Every dialect is read into these fields and written from them, so n dialects need n tables and not
n² converters. Values are plain, so that they compare and print; only ``mesh``, ``init``,
``device`` and ``ignored`` may hold what was passed in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["OFFLOADED", "Policy"]

OFFLOADED = ("parameters", "gradients", "optimizer")
_HYBRID = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
_SHORT = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Policy:
    """A configuration; ``None`` where it says nothing, and a library's default counts."""

    strategy: str | None = None  # our name
    mesh: Any = None  # (replicate, shard), a DeviceMesh or a process group
    replicate: int | None = None  # sizes of the mesh's axes
    shard: int | None = None
    offload: tuple[str, ...] | None = None  # of OFFLOADED, what is kept in host memory
    offload_word: bool | None = None  # the word of --fsdp
    wrap: str | None = None  # "auto" (by class or structure), "size" or "none" (one unit)
    auto_wrap: bool | None = None  # the word of --fsdp
    wrap_classes: tuple[str, ...] | None = None
    min_num_params: int | None = None
    ignored: Any = None  # modules or parameters that are not sharded
    prefetch_backward: str | None = None  # "pre", "post" or "off"
    prefetch_forward: bool | None = None
    limit_all_gathers: bool | None = None
    mixed_precision: str | None = None  # "bf16", "fp16" or "fp8"
    compute: str | None = None  # dtypes by their names
    wire: str | None = None
    buffer_dtype: str | None = None
    output: str | None = None
    buffers: str | None = None  # "local" or "broadcast"
    sync_module_states: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    use_orig_params: bool | None = None
    init: Any = None
    device: Any = None
    fsdp_version: int | None = None
    state_dict: str | None = None  # "full", "sharded" or "local"
    state_dict_offload: bool | None = None
    state_dict_rank0: bool | None = None
    activation_checkpointing: bool | None = None
    activation_offload: bool | None = None
    compile: bool | None = None
    compile_backend: str | None = None  # "no": not compiled
    compile_mode: str | None = None
    clip: float | None = None  # norm of the gradients
    cpu: bool | None = None
    processes: int | None = None  # on all machines
    machines: int | None = None
    machine_rank: int | None = None
    address: str | None = None
    port: int | None = None

    def settled(self) -> Policy:
        """With what its fields imply, and without what they leave unread. Idempotent."""
        policy = self
        for implied in (_mesh, _offload, _units, _compile, _dtypes):
            policy = replace(policy, **implied(policy))
        return policy


def _mesh(p: Policy) -> dict[str, Any]:
    """Two axes make ``full_shard`` hybrid: FSDP2 has no other word for it."""
    shape = p.mesh if isinstance(p.mesh, tuple) else getattr(p.mesh, "shape", ())
    replicate, shard = shape if len(shape) == 2 else (p.replicate, p.shard)
    sizes = {"replicate": replicate, "shard": shard}
    if (replicate or 1) < 2 or shard in (None, 1):
        return sizes
    strategy = _HYBRID.get(p.strategy or "full_shard", p.strategy)
    return {**sizes, "strategy": strategy, "mesh": p.mesh or (replicate, shard)}


def _offload(p: Policy) -> dict[str, Any]:
    return {"offload": OFFLOADED if p.offload_word else p.offload, "offload_word": None}


def _units(p: Policy) -> dict[str, Any]:
    wrap = p.wrap
    if wrap is None and (p.wrap_classes or p.min_num_params or p.auto_wrap):
        wrap = "size" if p.min_num_params and not p.wrap_classes else "auto"
    read = {"auto": p.wrap_classes, "size": p.min_num_params}.get(wrap or "") or None
    classes, size = (read, None) if wrap == "auto" else (None, read)
    return {"wrap": wrap, "auto_wrap": None, "wrap_classes": classes, "min_num_params": size}


def _compile(p: Policy) -> dict[str, Any]:
    backend = p.compile_backend
    if backend is None and p.compile is not None:
        backend = "inductor" if p.compile else "no"
    return {"compile": None if backend is None else backend != "no", "compile_backend": backend}


def _dtypes(p: Policy) -> dict[str, Any]:
    """``mixed_precision: bf16`` is bf16 compute; sums of gradients stay as wide as the shards."""
    words = {long: short for short, long in _SHORT.items()}
    mixed = p.mixed_precision or words.get(p.compute or "", "no")
    compute = p.compute or _SHORT.get(mixed)
    return {"compute": compute, "mixed_precision": None if mixed == "no" else mixed}
