"""The start from which all workers trained last, and its momentum, whole and in parts.

Both lie in the optimizer's state of each parameter, float32 in the shape of its shard, so they are
sharded and saved as moments are. Between workers a unit is one flat tensor of whole parameters,
in their order, so workers may have any number of ranks.
"""

from __future__ import annotations

import logging
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.comm.machine.peer_connection import Message
from shardwise.comm.protocol import Comm, Label
from shardwise.memory.parameters import Bucket
from shardwise.memory.whole import gather_parts
from shardwise.torch_internals import disable_torch_function

START, MOMENTUM = "outer_start", "outer_momentum"  # in the optimizer's state of a parameter
STEP = "outer_step"

log = logging.getLogger("shardwise")


class CommonStart:
    """The state that all workers share. Methods with whole values are collectives.

    Attributes:
        numels: unit → elements of its trained parameters.
        updates: unit → how often its start has moved; the same on every rank.
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer, comm: Comm
    ) -> None:
        self._optimizer, self._comm = optimizer, comm
        self._buckets: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            if bucket.trainable:
                self._buckets.setdefault(bucket.unit, []).append(bucket)
        self.numels = {unit: sum(_numels(of_unit)) for unit, of_unit in self._buckets.items()}
        self._before: dict[nn.Parameter, dict[str, Any]] = {}  # until the optimizer has state
        self.updates: dict[str, int] = dict.fromkeys(self._buckets, 0)
        for unit in self._buckets:
            for param in self.params(unit):
                self.state(param)
        if (others := len(self._before.keys() - self._held())) and comm.rank == 0:
            log.warning(
                "%s does not hold %d of the model's trained parameters: no checkpoint will have "
                "their common start. Give DiLoCo an optimizer over all of them, or freeze them.",
                type(optimizer).__name__,
                others,
            )

    @property
    def step(self) -> int:
        """Local steps taken; in the first group of the optimizer, so checkpoints hold it."""
        return int(self._optimizer.param_groups[0].get(STEP, 0))

    @step.setter
    def step(self, step: int) -> None:
        self._optimizer.param_groups[0][STEP] = step

    def state(self, param: nn.Parameter) -> dict[str, Any]:
        """The state of a parameter that holds its start, and its momentum once there is any."""
        state: dict[str, Any] = self._optimizer.state.get(param) or {}
        if START in state:
            for key in {START, MOMENTUM} & state.keys():  # torch loads all in a parameter's dtype
                state[key] = state[key].float()
            return state
        if param not in self._before:
            with disable_torch_function():
                self._before[param] = {START: param.detach().float().clone()}
        return self._before[param]

    def keep(self) -> None:
        """Put it into the optimizer's state, once there is any: before, it would pass for that.

        An optimizer that has moved a parameter without a state, such as plain SGD, will have none.
        """
        held, state = self._held(), self._optimizer.state
        waiting = [param for param in self._before if param in held]
        stateless = any(not state.get(p) and self._moved(p) for p in waiting)
        for param in [p for p in waiting if stateless or state.get(p)]:
            state[param].update(self._before.pop(param))

    def _held(self) -> set[Tensor]:
        return {param for group in self._optimizer.param_groups for param in group["params"]}

    def _moved(self, param: nn.Parameter) -> bool:
        with disable_torch_function():
            start: Tensor = self._before[param][START]
            return not torch.equal(start.to(param.dtype), param.detach())

    def params(self, unit: str) -> list[nn.Parameter]:
        """The trained parameters of a unit, in order."""
        return [param for bucket in self._buckets[unit] for param in bucket.params]

    def whole(self, unit: str, parts: Sequence[Tensor | None]) -> Tensor:
        """Join what ranks have one part of, ``[numel]`` float32 in host memory.

        Args:
            parts: for each parameter of the unit, in the shape of its shard; ``None``: zeros.
        """
        remaining, wholes = iter(parts), list[Tensor]()
        for bucket in self._buckets[unit]:
            of_bucket = [next(remaining) for _ in bucket.params]
            wholes += gather_parts(bucket, of_bucket, torch.float32)
        return torch.cat([whole.reshape(-1).cpu() for whole in wholes])

    def parts(self, unit: str, whole: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter of a unit, and this rank's part of it in ``whole``, ``[numel]``."""
        pieces = iter(whole.split(_numels(self._buckets[unit])))
        for bucket in self._buckets[unit]:
            for index, param in enumerate(bucket.params):
                piece = next(pieces).view(bucket.members[index].shape)
                yield param, bucket.part(index, piece).to(param.device)

    def shared(self, values: Tensor | None, numel: int) -> Tensor:
        """Rank 0's values, ``[numel]`` float32, on every rank."""
        tensor = torch.empty(numel, device=self._comm.device)
        if values is not None:
            tensor.copy_(values)
        self._comm.broadcast(tensor, 0, Label("broadcast", "of other workers")).wait()
        return tensor

    def digest(self) -> str:
        """All of it in eight letters, the same for any number of ranks."""
        crc = zlib.crc32(repr(sorted(self.updates.items())).encode())
        for unit in self._buckets:
            for key in (START, MOMENTUM):
                crc = zlib.crc32(self._whole_state(unit, key).numpy().data, crc)
        return f"{crc:08x}"

    def messages(self) -> list[Message]:
        """All of it for another worker. On rank 0 it waits in a file until it is sent."""
        messages = []
        for unit, update in self.updates.items():
            tensors = [self._whole_state(unit, key).numpy() for key in (START, MOMENTUM)]
            if self._comm.rank == 0:
                with tempfile.TemporaryFile() as file:  # which the mapping keeps
                    pages = np.memmap(file, np.float32, "w+", shape=(2, self.numels[unit]))
                pages[:] = tensors
                payload = pages.reshape(-1).view(np.uint8).data
                messages.append(Message("state", {"unit": unit, "update": update}, payload))
        return messages

    @torch.no_grad()
    def load(self, fields: Mapping[str, Any], payload: bytes | memoryview) -> str:
        """Go on from what another worker has sent of a unit; returns its name."""
        unit, numel = fields["unit"], self.numels[fields["unit"]]
        came = torch.from_numpy(np.frombuffer(payload, np.float32).copy()) if payload else None
        start, momentum = self.shared(came, 2 * numel).view(2, numel)
        pairs = zip(self.parts(unit, start), self.parts(unit, momentum), strict=True)
        for (param, of_start), (_, of_momentum) in pairs:
            state = self.state(param)
            state[START].copy_(of_start)
            state[MOMENTUM] = of_momentum.clone()
            param.copy_(state[START].to(param.dtype))
        self.updates[unit] = fields["update"]
        return str(unit)

    def _whole_state(self, unit: str, key: str) -> Tensor:
        return self.whole(unit, [self.state(param).get(key) for param in self.params(unit)])


def _numels(buckets: Sequence[Bucket]) -> list[int]:
    """The elements of each parameter, in order."""
    return [member.numel for bucket in buckets for member in bucket.members]
