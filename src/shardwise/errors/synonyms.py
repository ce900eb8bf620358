"""Other names of strategies, of options of ``shard()`` and ``Precision``, and of optimizers'."""

from __future__ import annotations

import re

_STRATEGIES = {
    # The numbers are those of torch's ShardingStrategy, which accelerate took over.
    "no_shard": "3 ddp distributed_data_parallel replicate zero0 zero_0 stage_0",
    "zero1": "zero_1 stage_1 zero_stage_1",
    "shard_grad_op": "2 zero2 zero_2 stage_2 zero_stage_2",
    "full_shard": "1 zero3 zero_3 stage_3 zero_stage_3 fsdp fsdp2 fully_shard "
    "fully_sharded_data_parallel",
    "hybrid_shard": "4 hybrid hsdp",
    "hybrid_shard_zero2": "5",
    "hybrid_full": "hfsdp",
}


def parse_strategy(name: object) -> str:
    """Our name of a strategy, or ``name`` in our spelling if it has none.

    Args:
        name: a string in any case, a number, or a member of torch's ``ShardingStrategy``.
    """
    key = str(name).strip().lower().rpartition(".")[2].replace("-", "_").lstrip("_")
    return next((ours for ours, words in _STRATEGIES.items() if key in words.split()), key)


_OPTIONS = {
    "that is strategy= here": "sharding_strategy fsdp zero zero_stage stage zero_optimization",
    'that is strategy= here: "full_shard" for True, "shard_grad_op" for False': (
        "reshard_after_forward"
    ),
    'that is wrap= here, for example sw.wrap.by_class("Block")': (
        "auto_wrap_policy wrap_policy wrapping_policy transformer_cls_names_to_wrap "
        "transformer_layer_cls_to_wrap transformer_layer_cls"
    ),
    "that is wrap=sw.wrap.by_size(…) here": "min_num_params size_based_auto_wrap_policy",
    "that is precision= here, for example sw.Precision(param_dtype=torch.bfloat16)": (
        "mixed_precision mixed_precision_policy mp_policy bf16 fp16 fp32 dtype torch_dtype "
        "amp autocast"
    ),
    "that is precision=sw.Precision(param_dtype=…) here": "param_dtype compute_dtype",
    "that is precision=sw.Precision(reduce_dtype=…) here, with sum_dtype=… for the sums": (
        "reduce_dtype communication_data_type"
    ),
    "parameters are gathered in the dtype of sw.Precision(param_dtype=…) here": (
        "zero_quantized_weights gather_wire"
    ),
    "that is precision=sw.Precision(reduce_dtype=torch.int8) here": "zero_quantized_gradients",
    "that is precision=sw.Precision(buffer_dtype=…) here": "buffer_dtype",
    "that is precision=sw.Precision(output_dtype=…) here": "output_dtype",
    'that is prefetch=sw.Prefetch(when="pre") here, or "post"': "backward_prefetch",
    "that is prefetch=sw.Prefetch(forward=…) here, in bytes; it is on by itself": (
        "forward_prefetch stage3_prefetch_bucket_size"
    ),
    "that is prefetch=sw.Prefetch(limit=2) here": "limit_all_gathers",
    "that is init= here": "param_init_fn",
    "that is mesh= here": "process_group device_mesh group dp_mesh_dims",
    "that is comm=sw.connect(device=…) here": "device device_id device_ids",
    "that is activation_checkpointing= here": (
        "gradient_checkpointing grad_checkpointing activation_checkpoint checkpoint_activations "
        "activation_recompute recompute"
    ),
    "that is activation_checkpointing=sw.ActivationCheckpointing(offload=True) here": (
        "activation_checkpointing_offload activation_offload cpu_checkpointing"
    ),
    'that is compile= here: True, or a backend such as "inductor"': (
        "torch_compile torch_compile_backend dynamo_backend compile_backend"
    ),
    "that is sync_module_states= here": "cpu_ram_efficient_loading sync_params init_sync",
    'that is sharded.state_dict("full"), "sharded" or "local" here': "state_dict_type",
    "that is sharded.clip_grad_norm_(max_norm) here": (
        "gradient_clipping clip_grad_norm max_grad_norm grad_clip"
    ),
    "that is `with sharded.accumulate(last=…):` here": (
        "gradient_accumulation_steps gradient_accumulation accumulate no_sync"
    ),
    'that is offload="everything" here': "cpu_offload offload_policy offload_params offload_param",
    'that is offload="optimizer" here': "offload_optimizer",
    "that is unsharded= here: bytes, or names of units": "residency",  # ours in 0.1, for one more
    "that is ignored= here: modules, parameters or their names": (
        "ignored_modules ignored_parameters ignored_params ignored_states"
    ),
    "leave it out: parameters without a gradient are found in every step": (
        "find_unused_parameters static_graph"
    ),
    "leave it out: a unit's gradients are one buffer, which is reduced while others compute": (
        "bucket_cap_mb gradient_as_bucket_view overlap_comm contiguous_gradients "
        "reduce_bucket_size allgather_bucket_size reduce_scatter"
    ),
    'that is buffers= here: "broadcast" for True, "local" for False': "broadcast_buffers",
    "Parameters keep their names and objects, so parameter groups and mixed requires_grad work; "
    "there is no flat parameter": "use_orig_params",
    "leave it out: the step is one fused kernel": "fused foreach capturable differentiable",
    "leave it out: host memory is pinned where the device can": "pin_memory",
    "leave it out: the next optimizer step copies what is not written yet, and "
    "`sharded.save_async(…).finish_copy()` copies it at once": "copied_by",
    "leave it out: the launcher's environment says it, and the device's row which backend": (
        "rank world_size local_rank init_method backend dist_backend"
    ),
    "leave it out: ranks hold equal ranges of whole units": "shard_placement_fn device_map",
}


def option_hint(option: str) -> str:
    """A hint for an option of another library; ``""`` if it is unknown."""
    key = option.lower().removeprefix("fsdp_")
    return next((text for text, words in _OPTIONS.items() if key in words.split()), "")


def option_key(option: str) -> str:
    """``"limit_all_gathers" → "prefetch.limit"``: the argument that the hint names, or ``""``."""
    example = re.match(r"that is (\w+)=(?:sw\.[A-Z]\w+\((\w+)=)?", option_hint(option))
    return ".".join(filter(None, example.groups())) if example else ""


OTHER_NAMES = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "beta1": "betas",
    "beta2": "betas",
    "wd": "weight_decay",
    "clip": "max_norm",
    "max_grad_norm": "max_norm",
    "clip_grad_norm": "max_norm",
    "stored": "stored_dtype",  # this and those below: ours in 0.1, for one more release
    "compute": "param_dtype",
    "wire": "reduce_dtype",
    "sum": "sum_dtype",
    "buffers": "buffer_dtype",
    "output": "output_dtype",
    "keep": "keep_in_fp32_modules",
}
"""Options of ``sw.optim`` and ``sw.Precision`` by other names; each counts where ours exists."""
