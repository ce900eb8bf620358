"""A moving average of the parameters, kept as one more tensor of the optimizer's state.

There it is sharded as the moments are, and goes into checkpoints and out of them at any number of
ranks. It is float32 at least: in bfloat16 what a step adds to it would be rounded away. Averaged
weights often generalise better than the last ones (Polyak & Juditsky 1992,
doi:10.1137/0330046); as in torch's ``AveragedModel``, the average starts at the first update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked
from shardwise.optim.optimizer_hooks import OptimizerHooks
from shardwise.torch_internals import disable_torch_function

KEY = "ema"  # in the state of each parameter


class EMA:
    """The moving average of what ``optimizer`` trains.

        ema = sw.optim.EMA(optimizer, decay=0.999)
        optimizer.step()
        ema.update()
        with ema.applied():  # validation, generation, sharded.save_file(…)
            validate(model)

    Args:
        optimizer: with state for each parameter, such as torch's or bitsandbytes'.
        decay: weight of the average in ``average = decay × average + (1 − decay) × parameter``.

    Raises:
        ConfigError: ``decay`` is not in [0, 1).
    """

    @checked
    def __init__(self, optimizer: torch.optim.Optimizer, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay}; it must lie in [0, 1), such as 0.999.")
        self.optimizer, self.decay = optimizer, decay

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters into the average; call it after ``optimizer.step()``."""
        OptimizerHooks.end_steps(self.optimizer, "an average was updated")
        for param in self._trained():
            state = self.optimizer.state[param]
            own = _local_copy(param, torch.promote_types(param.dtype, torch.float32))
            old = state.get(KEY, own).to(own.dtype)  # torch loads all state in a parameter's dtype
            state[KEY] = old.lerp_(own, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give parameters their averages for the block; before the first update, do nothing."""
        OptimizerHooks.end_steps(self.optimizer, "an average was applied")
        state = self.optimizer.state
        averages = {param: state[param][KEY] for param in self._trained() if KEY in state[param]}
        last = {param: _local_copy(param, param.dtype) for param in averages}
        _fill(averages)
        try:
            yield
        finally:
            _fill(last)

    def _trained(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the optimizer has stepped."""
        for group in self.optimizer.param_groups:
            yield from (param for param in group["params"] if self.optimizer.state.get(param))


@torch.no_grad()
def _fill(values: Mapping[nn.Parameter, Tensor]) -> None:
    for param, value in values.items():
        param.copy_(value)


@torch.no_grad()
def _local_copy(param: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Copy this rank's shard into a plain tensor, as optimizers keep their state."""
    with disable_torch_function():
        return param.detach().to(dtype, copy=True)
