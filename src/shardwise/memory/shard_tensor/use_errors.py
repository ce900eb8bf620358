"""Errors for uses of a shard that would need the full parameter."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.errors import ConfigError, ScheduleError, ShardUseError
from shardwise.memory.sharding import Sharding


def needs_full_tensor(function: str, shard: Tensor) -> ShardUseError:
    """A function needs all elements of a sharded tensor."""
    if isinstance(shard, nn.Parameter):
        return ShardUseError(
            f"{_describe(shard)}, and {function!r} needs the full tensor. It is gathered only "
            "while its unit computes: call the model or the module through model(...), not "
            ".forward(...), and let the unit's own modules read it; give a block that is called by "
            "itself a unit, by wrap=sw.wrap.automatic(joined_nbytes=0); register a method that is "
            "called from outside by sharded.register_forward_method(module, 'encode'); or read "
            "it inside `with sharded.full_params():`. To update a moving average, shard the "
            "averaging model likewise and write to its parameters(), not to its state_dict(), which"
            " is a copy; or update it inside full_params(). .to_local() is this rank's part as a "
            "plain tensor. To write it, as nn.init does, do so inside `with sharded.full_params("
            "writeback=True):`, alike on every rank."
        )
    return ShardUseError(
        f"{_describe(shard)}, and {function!r} needs the full tensor. Elementwise functions of "
        "tensors with the same sharding are correct on it, and so are norm, sum, mean, max, min, "
        "any and all over every element. .full_tensor() gathers it on every rank (a collective), "
        "and .to_local() is this rank's part as a plain tensor. To update a moving average, shard "
        "the averaging model likewise and write to its parameters(), not to its state_dict(), "
        "which is a copy; or update it inside `with sharded.full_params():`."
    )


def recorded_by_autograd(function: str, shard: Tensor) -> ShardUseError:
    """Autograd would record a function of a shard as part of a loss."""
    return ShardUseError(
        f"{_describe(shard)}, and autograd would record {function!r} on it as if it were the full "
        "parameter. To add the penalty c * sum(p.pow(2).sum() for p in model.parameters()) to "
        "the loss, add its gradient after backward(): `for p in model.parameters(): "
        "p.grad.add_(p.detach(), alpha=2 * c)`. Otherwise read it in the model's forward(), or in "
        "what sharded.register_forward_method(model, 'encode') names, where it is gathered; or "
        "detach it: p.detach() is correct in elementwise functions, norms and sums."
    )


def sent_by_hand(function: str, shard: Tensor) -> ShardUseError:
    """A collective was called on one rank's shard."""
    return ShardUseError(
        f"{_describe(shard)}, so {function!r} would mix it with other parts. backward() has "
        "averaged gradients over all ranks: leave it out. sharded.comm.mean(value) averages a "
        "metric; .full_tensor() and `with sharded.full_params():` give whole tensors to send."
    )


def copied_shard(shard: Tensor, action: str) -> ShardUseError:
    """One rank's shard would be copied or pickled as if it were the full tensor."""
    return ShardUseError(
        f"{_describe(shard)}; {action} it would lose the other ranks' parts. Save "
        "model.state_dict() (full tensors) or sharded.local_state_dict() (shards); "
        "copy.deepcopy(model) of the model that was passed to shard() is a plain, unsharded copy."
    )


def autograd_grad_called(name: str) -> ShardUseError:
    """``torch.autograd.grad`` was called for the gradient of the parameter of this name."""
    return ShardUseError(
        f"torch.autograd.grad was called for the gradient of parameter {name!r}, which is sharded: "
        "it would return this rank's gradient, not averaged over ranks. Call loss.backward() and "
        "read .grad (this rank's shard of the mean); or compute inside "
        "`with sharded.full_params():`, where parameters are gathered, and average it yourself."
    )


def gradient_without_gather(name: str, unit: str) -> ScheduleError:
    """The gradient of a parameter was computed while its unit was not gathered."""
    return ScheduleError(
        f"the gradient of {name!r} was computed while unit {unit or '(root)'!r} was not gathered: "
        "the backward pass reached it through a tensor that the unit did not return, so it "
        "computed with shards or with values that had not arrived. Return every tensor that a "
        "loss needs from forward(), instead of keeping it in an attribute."
    )


def wrong_replacement(name: str, shard: Tensor, value: Tensor) -> ConfigError:
    """A shard was replaced by a ``value`` of another shape, dtype or device."""
    return ConfigError(
        f"parameter {name!r} was replaced by a tensor of shape {tuple(value.shape)}, "
        f"{value.dtype} on {value.device}; its shard is {tuple(shard.shape)}, {shard.dtype} on "
        f"{shard.device}. After shard() a model's dtype and device are fixed: set them before "
        "shard(), or with precision=sw.Precision(...). Load full values by "
        "model.load_state_dict() or inside `with sharded.full_params(writeback=True):`."
    )


def converted(name: str, shard: Tensor, value: Tensor) -> ConfigError:
    """A sharded model, or a module of it, was to be given another dtype or device."""
    return ConfigError(
        f"the model was to be converted to {value.dtype} on {value.device}, and its parameter "
        f"{name!r} is sharded as {shard.dtype} on {shard.device}. After shard() a model's dtype "
        f"and device are fixed. To compute in {value.dtype}, pass precision=sw.Precision("
        f"param_dtype={value.dtype}) to shard(); to store it so, or elsewhere, convert the model "
        "before shard(), or copy.deepcopy(model), which is plain."
    )


def _describe(shard: Tensor) -> str:
    sharding: Sharding = shard.sharding  # type: ignore[attr-defined]
    name, unit, shape = sharding.name, sharding.unit or "(root)", sharding.shape
    fact = f"this tensor is a shard of parameter {name!r} (its gradient, or computed from it)"
    if isinstance(shard, nn.Parameter):
        fact = f"parameter {name!r} is sharded"
    return (
        f"{fact}: this rank has elements {sharding.start:,} to {sharding.stop:,} of "
        f"{shape.numel():,} (shape {tuple(shape)}, unit {unit!r})"
    )


def written_by_all_ranks(name: str, ranks: int) -> ShardUseError:
    """A function wrote to a parameter in memory that ranks share."""
    return ShardUseError(
        f"parameter {name!r} was written in a forward pass by a function, while {ranks} ranks map "
        "the same memory, so every rank overwrote the others' values. Use a method of the "
        'parameter, such as param.add_(...); or call sw.connect(transport="messages").'
    )
