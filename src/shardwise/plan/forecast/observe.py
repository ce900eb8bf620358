"""Observation of one training step on the meta device: what is computed, and what stays alive.

The model runs forward and backward on tensors without memory. A dispatch mode sees each kernel
and the storages that it makes. Those end as in a real run, since Python and autograd hold the same
references, so nothing here is a formula for one family of models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.config.precision import Precision
from shardwise.errors import ConfigError, ScheduleError, ShardwiseError
from shardwise.plan.forecast.absent_compiler import without_compiler
from shardwise.plan.forecast.meta_autocast import let_autocast_be_off
from shardwise.plan.forecast.recording import Recording
from shardwise.plan.forecast.reentrant import without_reentrance
from shardwise.plan.forecast.work import MMAP_THRESHOLD, StepWork
from shardwise.plan.in_slot import forward_in_slot, is_large
from shardwise.plan.order import on_meta
from shardwise.plan.schedule.events import Cue, Op, Phase
from shardwise.plan.units.selection import checkpointed
from shardwise.plan.units.units import Member, Unit, Units
from shardwise.torch_internals import (
    flash_attention,
    parameters_of,
    storage_key,
    tree_leaves,
    tree_map_only,
)

OTHERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])  # code of no model
Loss = Callable[[Any], Tensor]
Forwards = Mapping[nn.Module, Callable[..., Any]]


def loss_of(output: Any) -> Tensor:
    """The model's own loss, as in ``transformers``; else the mean of its logits, or of each output.

    Raises:
        ConfigError: no output depends on what is trained.
    """
    named = isinstance(output, Mapping)
    given = output.get if named else lambda name: getattr(output, name, None)
    loss, logits = given("loss"), given("logits")
    if isinstance(loss, Tensor):
        return loss
    whole = output if logits is None else logits
    means = [tensor.float().mean() for tensor in _tensors(whole) if tensor.requires_grad]
    if not means:
        raise ConfigError(
            "no output of the model depends on a parameter that is trained, so there is no step to "
            "plan. Set requires_grad, or return the outputs that the loss is made of."
        )
    return torch.stack(means).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in containers and dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors(vars(leaf))


def observe(
    model: nn.Module,
    units: Units,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    checkpointing: ActivationCheckpointing | None = None,
    precision: Precision = Precision(),
    loss: Loss = loss_of,
    in_slot: bool = False,
) -> StepWork:
    """Run one step of ``model`` on the meta device; the model, real or not, stays as it is.

    Attention runs in one kernel where some accelerator has one for it.

    Args:
        units: of the model, which may be sharded.
        args, kwargs: of the model's forward; of tensors only shapes and dtypes matter.
        checkpointing: ``None``: as the model does it.
        precision: the dtypes of parameters and inputs.
        loss: of what the model returns.
        in_slot: gradients of large layers are computed in the engine's memory, as on a CPU.

    Raises:
        ConfigError: no output depends on what is trained.
        ScheduleError: the model looks at values, which the meta device does not have, or fails.
    """
    empty = on_meta(model, units, precision)
    state = {f"model.{name}": tensor for name, tensor in empty.items()}
    given = tree_map_only(Tensor, lambda t: t.to("meta"), (tuple(args), dict(kwargs)))
    batch = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    maps_from = min(getattr(module, "maps_from", MMAP_THRESHOLD) for module in model.modules())
    slots = _lend_slots(units, state, precision) if in_slot else []
    recording = Recording([*state.values(), *batch, *slots], maps_from)
    for unit in units:
        for member in unit.members:
            _collect(state[f"model.{member.name}"], unit.name, member.name, recording)
    with (
        _on_meta_alone(),
        _forwards(_in_slots(model) if in_slot else {}),
        _forwards(_recomputed(units, checkpointing, recording)),
        _cues(model, units, precision, recording),
        _without_values(),
        recording,
    ):
        step = _Step(model, loss, recording)
        torch.func.functional_call(step, state, *given, tie_weights=False)
    order, forward, backward = recording.finish()
    names = dict.fromkeys(cue.unit for cue in order.forward)
    return StepWork(
        {unit: recording.work_of(unit) for unit in names},
        rest=recording.work_of(None),
        **counted(batch),
        order=order,
        forward=forward,
        backward=backward,
        first_gradients=recording.first_gradients,
        inputs=sum({storage_key(t): t.untyped_storage().nbytes() for t in batch}.values()),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
    )


@contextmanager
def _on_meta_alone() -> Iterator[None]:
    """Replace what torch and transformers cannot do where tensors have no values."""
    let_autocast_be_off()
    with without_compiler(), _fused_attention(), _one_sequence_a_row(), without_reentrance():
        yield


@contextmanager
def _without_values() -> Iterator[None]:
    """Raises ``ScheduleError`` where a model fails, and says so where it asks for values."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(OTHERS)]
        place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
        why = f"{place}{type(error).__name__}: {str(error).rstrip('.')}."
        if isinstance(error, NotImplementedError) or "called on meta tensors" in str(error):
            why += " The model depends on values, which meta tensors do not have."
            why += " Run a step: it shows what it takes."
        raise ScheduleError(f"the rehearsal on the meta device stopped: {why}") from error


class _Step(nn.Module):
    """A forward and a backward pass: what is recomputed needs the same parameters."""

    def __init__(self, model: nn.Module, loss: Loss, recording: Recording) -> None:
        super().__init__()
        self.model, self.loss, self.recording = model, loss, recording

    def forward(self, *args: Any, **kwargs: Any) -> None:
        loss = self.loss(self.model(*args, **kwargs))
        self.recording.turn()
        loss.backward()


def _lend_slots(units: Units, state: Mapping[str, Tensor], precision: Precision) -> list[Tensor]:
    """Give each parameter a place to compute its gradient in, once, where the engine would."""
    slots = []
    for member in (member for unit in units for member in unit.members):
        leaf, param = state[f"model.{member.name}"], member.param
        dtypes = precision.of(param.dtype, param.requires_grad, precision.keeps(member.name))
        if param.requires_grad and dtypes.lent is leaf.dtype:
            slots.append(torch.empty_like(leaf, requires_grad=False))
            lent = iter(slots[-1:])
            leaf.lend_slot = lambda _, lent=lent: next(lent, None)  # type: ignore[attr-defined]
            leaf.add_rows = lambda *_: True  # type: ignore[attr-defined]
    return slots


def _in_slots(model: nn.Module) -> Forwards:
    return {module: forward_in_slot(module) for module in model.modules() if is_large(module)}


def _collect(leaf: Tensor, unit: str, name: str, recording: Recording) -> None:
    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(partial(recording.take_gradient, unit, name))


def counted(batch: Sequence[Tensor]) -> dict[str, Any]:
    """Count a micro-batch: elements of its first rows of integers, or else rows."""
    ids = (t for t in batch if t.dtype in (torch.int64, torch.int32) and t.ndim > 1)
    if (first := next(ids, None)) is not None:
        return {"tokens": first.numel(), "counted": "tokens"}
    return {"tokens": len(batch[0]) if batch and batch[0].ndim else 1, "counted": "rows"}


@contextmanager
def _cues(
    model: nn.Module, units: Units, precision: Precision, recording: Recording
) -> Iterator[None]:
    """Tell ``recording`` of each call of a unit, and cast its inputs as the engine does."""
    of_module, handles = {module: unit for unit in units for module in unit.modules}, []
    for path, module in model.named_modules():
        dtype = precision.of_inputs(path)
        if module in of_module:
            enter = partial(_enter, recording, of_module[module], precision)
            leave = partial(_leave, recording, of_module[module].name)
            handles += [module.register_forward_pre_hook(enter, with_kwargs=True)]
            handles += [module.register_forward_hook(leave)]
        if dtype is not None and (module in of_module or module is model):
            casts = partial(_cast_inputs, dtype)
            handles += [module.register_forward_pre_hook(casts, with_kwargs=True)]
    if precision.output_dtype is not None:
        handles += [model.register_forward_hook(partial(_cast_output, precision.output_dtype))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(
    recording: Recording, unit: Unit, precision: Precision, _: nn.Module, args: Any, kwargs: Any
) -> None:
    recording.cue(Cue(Op.ENTER, unit.name, Phase.FORWARD), given=(args, kwargs))
    for member in unit.members:
        param = member.param
        dtypes = precision.of(param.dtype, param.requires_grad, precision.keeps(member.name))
        if dtypes.stored is not dtypes.param:
            _bind_anew(member, unit.name, recording)


def _bind_anew(member: Member, unit: str, recording: Recording) -> None:
    """Give a parameter that is cast a node of its own in each call, as the engine does.

    So autograd does not wait for the gradients of all calls to add them up.
    """
    module, name = member.owners[0]
    leaf = parameters_of(module)[name]
    assert leaf is not None
    anew = nn.Parameter(leaf.detach(), leaf.requires_grad)
    _collect(anew, unit, member.name, recording)
    for module, name in member.owners:
        parameters_of(module)[name] = anew


def _leave(recording: Recording, unit: str, _: nn.Module, __: Any, output: Any) -> None:
    recording.cue(Cue(Op.EXIT, unit, Phase.FORWARD), output)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


# ---- checkpointing -----------------------------------------------------------------------------


def _recomputed(
    units: Units, policy: ActivationCheckpointing | None, recording: Recording
) -> Forwards:
    """A forward for each module that is recomputed."""
    modules = checkpointed(policy, units) if policy is not None else ()
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module in modules:
        forwards[module] = partial(checkpoint, module.forward, use_reentrant=False)
        if policy is not None and policy.offload:
            forwards[module] = partial(_in_host, recording, forwards[module])
    return forwards


@contextmanager
def _forwards(forwards: Forwards) -> Iterator[None]:
    """Replace the ``forward`` of these modules."""
    previous = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in previous.items():
            del module.forward
            if own is not None:
                module.forward = own


class _HostCopy:
    """A copy of a tensor in host memory; it lives as long as that."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _in_host(recording: Recording, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def pack(tensor: Tensor) -> Any:
        if recording.holds(tensor):
            return tensor
        copy = _HostCopy(tensor)
        recording.copy_to_host(copy, tensor.nbytes)
        return copy

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return torch.empty(packed.shape, dtype=packed.dtype, device="meta")

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


# ---- attention ---------------------------------------------------------------------------------


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Make attention of meta tensors one kernel; torch would make all scores, as on no device.

    A mode for functions would be off inside of the functions that it sees, such as ``backward``.
    """
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fused = _fused(query, *args, **kwargs) if query.is_meta else None
        return plain(query, *args, **kwargs) if fused is None else fused

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Keep ``transformers`` from looking for packed rows: positions have no values here."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    looks = getattr(masks, name, None)
    if looks is None:  # not imported, or an older one, which does not look
        yield
        return
    setattr(masks, name, lambda positions: None if positions.is_meta else looks(positions))
    try:
        yield
    finally:
        setattr(masks, name, looks)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - kernels for accelerators drop out, and keep a seed
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - kernels read few keys and values many times
) -> Tensor | None:
    """``[batch, heads, length, size]`` each; ``None`` where no kernel does it."""
    learnt = attn_mask is not None and attn_mask.requires_grad
    sizes = {(tensor.ndim, tensor.shape[-1]) for tensor in (query, key, value)}
    if learnt or query.ndim != 4 or len(sizes) > 1:
        return None
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # as torch does before the kernel
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), float("-inf"))
    given = (query, key, value, 0.0, is_causal)
    mixed: Tensor = flash_attention(*given, attn_mask=attn_mask, scale=scale)[0]
    return mixed
