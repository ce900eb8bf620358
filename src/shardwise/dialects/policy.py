"""The meaning of a configuration, whoever wrote it: one frozen record between all dialects.

Every dialect is read into these fields and written from them, so n dialects need n tables and not
n² converters. Values are plain, so that they compare and print; only ``mesh``, ``init``,
``device`` and ``ignored`` may hold what was passed in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
FILL_IN = "FILL-IN"
"""What a recipe needs and the configuration does not show."""
_HYBRID = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
_SHORT = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Policy:
    """A configuration; ``None`` where it says nothing, and a library's default counts."""

    strategy: str | None = None  # our name
    mesh: Any = None  # (replicate, shard), a DeviceMesh or a process group
    replicate: int | None = None  # sizes of the mesh's axes
    shard: int | None = None
    offload: str | None = None  # "none", "optimizer" or "everything": kept in host memory
    offload_state: str | None = None  # the optimizer's, where it is said apart
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
    param_dtype: str | None = None  # dtypes by their names
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None
    output_dtype: str | None = None
    cast_inputs: bool | None = None  # of each unit; none of them, and not the model's
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
    gradient_checkpointing: bool | None = None  # of the model itself, and not by FSDP
    activation_offload: bool | None = None
    compile: bool | None = None
    compile_backend: str | None = None  # "no": not compiled
    compile_mode: str | None = None
    clip: float | None = None  # norm of the gradients
    cpu: bool | None = None
    processes: int | None = None  # on all machines
    processes_of_one: int | None = None  # machine
    machines: int | None = None
    machine_rank: int | None = None
    address: str | None = None
    port: int | None = None
    # training, where a dialect has it
    model: str | None = None  # a folder, or a name of the hub
    model_dtype: str | None = None
    dataset: str | None = None
    data_format: str | None = None
    data_split: str | None = None
    validation_source: str | None = None
    test_source: str | None = None  # validation's, where that has none
    validation: float | None = None  # fraction held out
    context: int | None = None
    packing: Any = None
    loss_on: str | None = None  # "all" tokens, or those of the "assistant"
    folder: str | None = None
    micro: int | None = None  # rows of one rank's forward pass
    accumulation: int | None = None
    rows: int | None = None  # micro × accumulation × processes
    optimizer: str | None = None
    lr: float | None = None
    schedule: str | None = None
    floor: float | None = None
    warmup: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    epochs: float | None = None
    steps: int | None = None
    seed: int | None = None
    log_every: int | None = None
    trackers: tuple[str, ...] | None = None
    project: str | None = None
    run_name: str | None = None
    sample_tokens: int | None = None
    throughput_warmup: int | None = None
    eval_strategy: str | None = None  # "no", "steps" or "epoch"
    eval_steps: int | None = None
    eval_every: int | str | None = None  # what both say: 0, steps or "epoch"
    eval_delay: float | None = None
    save_strategy: str | None = None
    save_steps: int | None = None
    save_every: int | str | None = None
    save_limit: int | None = None  # 0: all are kept
    resume: str | None = None
    adapter_rank: int | None = None
    adapter_alpha: float | None = None
    adapter_dropout: float | None = None
    adapter_bias: str | None = None
    adapter_targets: Any = None
    rslora: bool | None = None
    dora: bool | None = None
    modules_to_save: tuple[str, ...] | None = None
    quantized_bits: int | None = None
    quantized_type: str | None = None
    double_quantized: bool | None = None
    quantized_compute: str | None = None

    def settled(self) -> Policy:
        """Add what its fields imply, and leave out what they leave unread. Idempotent."""
        policy = self
        for implied in (_ranks, _mesh, _offload, _units, _compile, _dtypes, _training, _intervals):
            policy = replace(policy, **implied(policy))
        return policy


def _ranks(p: Policy) -> dict[str, Any]:
    ranks = p.processes_of_one and p.processes_of_one * (p.machines or 1)
    return {"processes": p.processes or ranks, "processes_of_one": None}


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
    modes = ("everything" if p.offload_word else None, p.offload, p.offload_state)
    offload = max(filter(None, modes), key=("none", "optimizer", "everything").index, default=None)
    return {"offload": offload, "offload_word": None, "offload_state": None}


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
    if p.mixed_precision == "fp16" and p.quantized_compute == "bfloat16":
        p = replace(p, mixed_precision="bf16")
    mixed = words.get(p.param_dtype or "", p.mixed_precision or "no")
    compute = p.param_dtype or _SHORT.get(mixed)
    return {"param_dtype": compute, "mixed_precision": None if mixed == "no" else mixed}


def _training(p: Policy) -> dict[str, Any]:
    """A batch over all ranks, and no key that another leaves unread."""
    constant, is_text = str(p.schedule).startswith("constant"), p.data_format in (None, "text")
    rows = p.micro and p.accumulation and p.micro * p.accumulation * (p.processes or 1)
    return {
        "activation_checkpointing": p.gradient_checkpointing or p.activation_checkpointing,
        "gradient_checkpointing": None,
        "rows": p.rows or rows,
        "floor": None if constant else p.floor,
        "warmup": None if p.schedule == "constant" else p.warmup,
        "betas": p.betas or (None if None in (p.beta1, p.beta2) else (p.beta1, p.beta2)),
        "epochs": None if p.steps else p.epochs,
        "validation_source": None if is_text else p.validation_source or p.test_source,
        "packing": None if is_text else p.packing,
        "loss_on": None if is_text else p.loss_on,
        "trackers": None if p.trackers is None else tuple(t for t in p.trackers if t in TRACKERS),
        "quantized_type": p.quantized_type if p.quantized_bits == 4 else None,
        "adapter_alpha": p.adapter_alpha if p.adapter_rank else None,
    }


def _intervals(p: Policy) -> dict[str, Any]:
    """A strategy and its number of steps as one value, as a recipe has it."""
    every = _interval(p.eval_strategy, p.eval_steps or p.log_every, p.eval_every)
    return {
        "eval_every": every,
        "save_every": _interval(p.save_strategy, p.save_steps, p.save_every),
        "eval_delay": p.eval_delay if every else None,
    }


def _interval(strategy: str | None, steps: int | None, known: int | str | None) -> int | str | None:
    words: dict[str | None, int | str | None] = {"no": 0, "epoch": "epoch", "steps": steps}
    return words.get(strategy, known)
