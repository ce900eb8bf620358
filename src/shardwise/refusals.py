"""What is said where a shard cannot stand for the whole of its parameter."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.errors import ConfigError, ScheduleError, ShardUseError
from shardwise.sharding import Sharding, sharding_of

__all__ = [
    "came_at_rest",
    "clipped",
    "handed_out",
    "lost",
    "misused",
    "recorded",
    "replaced",
    "transformed",
]


def misused(function: str, shard: Tensor) -> ShardUseError:
    """A function needs all elements of what a rank has a part of."""
    if isinstance(shard, nn.Parameter):
        return ShardUseError(
            f"{_described(shard)}, and {function!r} needs the whole of it. It is whole only while "
            "its unit computes: call the model or the module through model(...), not "
            ".forward(...), and let the unit's own modules read it; name another method that is "
            "called from outside by sharded.register_forward_method(module, 'encode'); or read it "
            "inside `with sharded.full_params():`. To update a moving average, shard the averaging "
            "model likewise, or update it inside full_params(). On purpose, .to_local() is this "
            "rank's part as a plain tensor."
        )
    return ShardUseError(
        f"{_described(shard)}, and {function!r} needs the whole of it. Elementwise functions among "
        "tensors that are cut alike are right on it, and so are norm, sum, mean, max, min, any and "
        "all over every element. .full_tensor() is the whole on every rank (a collective); on "
        "purpose, .to_local() is this rank's part as a plain tensor. To update a moving average, "
        "shard the averaging model likewise, or update it inside `with sharded.full_params():`."
    )


def recorded(function: str, shard: Tensor) -> ShardUseError:
    """Autograd would make a shard part of a loss."""
    return ShardUseError(
        f"{_described(shard)}, and autograd would record {function!r} on it as if it were all of "
        "the parameter. To add the penalty c * sum(p.pow(2).sum() for p in model.parameters()) to "
        "the loss, add its gradient after backward(): `for p in model.parameters(): "
        "p.grad.add_(p.detach(), alpha=2 * c)`. Otherwise read the parameter in the forward() of "
        "the model, where it is whole, or detach it: p.detach() is right in elementwise functions, "
        "norms and sums."
    )


def clipped() -> ShardUseError:
    """Torch would clip by what it takes for the norm of all gradients."""
    return ShardUseError(
        "torch.nn.utils.clip_grad_norm_ on a sharded model would clip by the norm of this "
        "rank's shards, another norm on every rank. Use sharded.clip_grad_norm_(max_norm), "
        "which forms the norm over all ranks with one collective; with parameters=, of a part of "
        "the model."
    )


def lost(shard: Tensor, how: str) -> ShardUseError:
    """A shard alone would be copied or written, as if it were all there is."""
    return ShardUseError(
        f"{_described(shard)}; {how} it would lose the other ranks' parts. Save "
        "model.state_dict() (whole tensors) or sharded.local_state_dict() (shards); "
        "copy.deepcopy(model) of the model that was given to shard() is a plain, whole copy."
    )


def handed_out(name: str) -> ShardUseError:
    """``torch.autograd.grad`` was asked for the gradient of the parameter of this name."""
    return ShardUseError(
        f"torch.autograd.grad was asked for the gradient of parameter {name!r}, which the ranks "
        "share: what it hands out would be this rank's alone, never averaged with the others'. "
        "Call loss.backward() and read .grad (this rank's shard of the mean); or compute inside "
        "`with sharded.full_params():`, where parameters are whole, and average it yourself."
    )


def came_at_rest(name: str, unit: str) -> ScheduleError:
    """The gradient of a parameter came while its unit was not whole."""
    return ScheduleError(
        f"the gradient of {name!r} came while unit {unit or '(root)'!r} was at rest or on its way: "
        "the backward pass reached it through a tensor that the unit did not return, so it "
        "computed with shards or with values that had not arrived. Return every tensor that a "
        "loss needs from forward(), instead of keeping it in an attribute."
    )


def transformed() -> ShardUseError:
    """``torch.func`` looks through what computes, and would see units gathered."""
    return ShardUseError(
        "a sharded model was called inside a torch.func transform (grad, vmap, jacrev, ...), which "
        "cannot look through the gathering of its units. Call the transform inside `with "
        "sharded.full_params():`, where the model is a plain one."
    )


def replaced(name: str, shard: Tensor, value: Tensor) -> ConfigError:
    """``value`` was put in place of a shard that it cannot stand for."""
    return ConfigError(
        f"parameter {name!r} was replaced by a tensor of shape {tuple(value.shape)}, "
        f"{value.dtype} on {value.device}; its shard is {tuple(shard.shape)}, {shard.dtype} on "
        f"{shard.device}. After shard() a model's dtype and device are fixed: set them before "
        "shard(), or with precision=sw.Precision(...). Whole values go in by "
        "model.load_state_dict() or inside `with sharded.full_params(writeback=True):`."
    )


def _described(shard: Tensor) -> str:
    sharding = sharding_of(shard)
    if sharding is None:
        return f"this parameter is a shard of shape {tuple(shard.shape)}"
    if isinstance(shard, nn.Parameter):
        return f"parameter {sharding.name!r} is at rest: {_held(sharding, shard)}"
    return (
        f"this tensor is one rank's part of a value of parameter {sharding.name!r} (its gradient, "
        f"or what was computed from it): {_held(sharding, shard)}"
    )


def _held(sharding: Sharding, shard: Tensor) -> str:
    return (
        f"this rank holds elements {sharding.start:,} to {sharding.stop:,} of "
        f"{sharding.shape.numel():,} (shard {tuple(shard.shape)} of {tuple(sharding.shape)}, unit "
        f"{sharding.unit or '(root)'!r})"
    )
