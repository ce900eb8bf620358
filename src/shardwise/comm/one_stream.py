"""The one stream of a device on which a model computes.

The host frees a unit's memory as soon as its last kernel is in that stream, and what is allocated
next in the same stream comes after it. A kernel in another stream would read what is written then.
"""

from __future__ import annotations

import torch

from shardwise.errors import ScheduleError


class OneStream:
    """The current stream of ``device`` when ``check`` is called first."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._stream: torch.Stream | None = None

    def check(self) -> None:
        """Raises ``ScheduleError`` if the current stream is another one."""
        if self._device is None:
            return
        stream = torch.accelerator.current_stream(self._device)
        if self._stream is None:
            self._stream = stream
        if stream != self._stream:
            raise ScheduleError(
                f"a unit is called in {stream}, and the first one was called in {self._stream}. "
                "Its memory is freed and used again in the order of that stream, so a kernel of "
                "another one would read what is not there any more. Call all of the model, for "
                "training and for evaluation, in one stream; data may be loaded in others."
            )
