"""AdamW by torch's fused kernel, on the runs of flat shards.

The kernel is torch's own (``torch._fused_adamw_``), so that an update is bit for bit that of
``torch.optim.AdamW(fused=True)`` on tensors that hold the same runs. On CPU this was
run; on CUDA it was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked, named
from shardwise.optim.flat import FlatOptimizer
from shardwise.optim.flat_state import STEP
from shardwise.optim.groups import Policy
from shardwise.optim.sharded_model import ShardedModel
from shardwise.optim.update import Call, Update
from shardwise.torch_internals import fused_adamw_


@checked
@dataclass(frozen=True)
class AdamWPolicy:
    """The options of AdamW, those of ``torch.optim.AdamW`` and ``max_norm``.

    Attributes:
        lr: the learning rate; a 0-dim tensor, too.
        betas: the decay rates of the two moments, each in ``[0, 1)``.
        eps: added to the root of the second moment.
        weight_decay: each step subtracts ``lr * weight_decay`` times the parameter.
        amsgrad: divide by the largest second moment so far.
        max_norm: the largest global norm of gradients; ``None`` = any.
    """

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    max_norm: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "lr", "eps", "weight_decay")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas}; each must be in [0, 1), as (0.9, 0.999).")


def check_numbers(policy: Policy, *names: str) -> None:
    """``names`` must not be negative; ``max_norm`` must be above 0."""
    for name in names:
        if not getattr(policy, name) >= 0:
            raise ConfigError(f"{name} is {getattr(policy, name)}; it must not be negative.")
    if policy.max_norm is not None and not policy.max_norm > 0:
        raise ConfigError(
            f"max_norm is {policy.max_norm}; gradients would vanish. Set a norm above 0, or None "
            "to clip nothing."
        )


class AdamW(FlatOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), flat and fused.

    Options are those of ``torch.optim.AdamW`` and ``max_norm``: see ``AdamWPolicy``. For the rest
    see ``FlatOptimizer``.
    """

    elementwise = True
    policy_type = AdamWPolicy

    @named
    def __init__(
        self,
        sharded: ShardedModel,
        groups: Iterable[Any] | None = None,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(sharded, groups, locals())

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return adamw_names(group)

    def _carry_out(self, update: Update, gradients: list[Tensor], scale: Tensor | None) -> None:
        for call in update.calls:
            of_call = [gradients[at] for at in call.gradients]
            update_by_adamw(self.param_groups[call.group], call, of_call, scale)


def adamw_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the state that AdamW keeps for the parameters of a group."""
    names = (STEP, "exp_avg", "exp_avg_sq")
    return (*names, "max_exp_avg_sq") if group["amsgrad"] else names


def update_by_adamw(
    group: Mapping[str, Any], call: Call, gradients: list[Tensor], scale: Tensor | None
) -> None:
    """Call the kernel; ``scale``, 0-dim, is what ``gradients`` are divided by, in place."""
    if scale is not None and scale.dtype is torch.float64:  # the kernel takes fp32 alone
        [gradient.div_(scale) for gradient in gradients]
        scale = None
    state = call.state
    fused_adamw_(
        call.params,
        gradients,
        state["exp_avg"],
        state["exp_avg_sq"],
        state["max_exp_avg_sq"] if group["amsgrad"] else [],
        state[STEP],
        lr=group["lr"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=False,
        grad_scale=scale,
    )
