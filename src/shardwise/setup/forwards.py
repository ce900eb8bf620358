"""The wrappers of ``forward`` of units' modules, inside the hooks that gather them.

    hooks ─▶ saved tensors on the host ─▶ compiled ─▶ recomputed in backward ─▶ forward

The recomputation is inside the graph, so a compiler sees both and may fuse across them; the host
copies are outside, since a graph cannot hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.config.checkpointing import ActivationCheckpointing
from shardwise.config.options import Options
from shardwise.plan.in_slot import forward_in_slot, is_large
from shardwise.plan.units.selection import checkpointed
from shardwise.plan.units.units import Units
from shardwise.setup.compiler import (
    backend_of,
    check_not_compiled,
    compile_forward,
    compiled_modules,
)
from shardwise.setup.recompute import check_own_checkpointing, offload, recompute

Replaced = tuple[str, Sequence[nn.Module], Callable[[nn.Module], Callable[..., Any]]]
"""What to print, the modules, and what makes the new ``forward`` of one from the present one."""


class Forwards:
    """The replaced forwards of a model, from ``install`` to ``remove``.

    Raises:
        ConfigError: checkpointing or compiling is chosen twice, or cannot be done as chosen.
    """

    def __init__(
        self, model: nn.Module, units: Units, options: Options, device: torch.device
    ) -> None:
        self._replaced = list(_replacements(model, units, options, device))
        self._previous: dict[nn.Module, Any] = {}  # forwards that the user had set
        self.words = {
            unit.name: ", ".join(
                words
                for words, modules, _ in self._replaced
                if words and {*modules} & {*unit.modules}
            )
            for unit in units
        }

    def install(self) -> None:
        for _, modules, replacement in self._replaced:
            for module in modules:
                self._previous.setdefault(module, vars(module).get("forward"))
                module.forward = replacement(module)

    def remove(self) -> None:
        for module, forward in self._previous.items():
            del module.forward
            if forward is not None:
                module.forward = forward
        self._previous.clear()


def _replacements(
    model: nn.Module, units: Units, options: Options, device: torch.device
) -> Iterator[Replaced]:
    """Replacements in the order in which they are made, the innermost first."""
    if device.type == "cpu" and not options.compile:
        yield "", [*filter(is_large, model.modules())], forward_in_slot
    given, recomputed = options.activation_checkpointing, list[nn.Module]()
    policy = given if isinstance(given, ActivationCheckpointing) else ActivationCheckpointing()
    if given:
        check_own_checkpointing(model)
        recomputed = checkpointed(policy, units)
        yield "recomputed (non-reentrant)", recomputed, recompute
    if options.compile:
        check_not_compiled(model)
        backend = backend_of(options.compile, device)
        yield backend, compiled_modules(model, units), partial(compile_forward, backend=backend)
    if policy.offload:
        yield "inputs on the host", recomputed, partial(offload, device=device)
