"""A moving average of the parameters, kept as one more tensor of the optimizer's state.

There it is sharded as the moments are, and goes into checkpoints and out of them at any number of
ranks. Averaged weights often generalise better than the last ones (Polyak & Juditsky 1992,
doi:10.1137/0330046); as in torch's ``AveragedModel``, the average starts at the first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.errors.arguments import checked

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
        for param in self._trained():
            state = self.optimizer.state[param]
            if KEY in state:
                state[KEY].lerp_(param, 1 - self.decay)
            else:
                state[KEY] = _local_copy(param)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange parameters and averages for the block; before the first update, do nothing."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for param in self._trained():
            if (average := self.optimizer.state[param].get(KEY)) is not None:
                last = _local_copy(param)
                param.copy_(average)
                average.copy_(last)

    def _trained(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the optimizer has stepped."""
        for group in self.optimizer.param_groups:
            yield from (param for param in group["params"] if self.optimizer.state.get(param))


def _local_copy(param: nn.Parameter) -> Tensor:
    """Copy this rank's shard into a plain tensor, as optimizers keep their state."""
    return torch.empty(param.shape, dtype=param.dtype, device=param.device).copy_(param)
