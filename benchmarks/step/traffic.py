"""Bytes: what left a process, what was copied inside it, and what must be sent at least.

What a process sent is read from the kernel's account of its writes, which unlike ``/proc/net/dev``
leaves out the headers and everybody else on the machine. What it copied is seen by a dispatch
mode, except for copies inside a backend's own threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.copies import copied_bytes, operation
from benchmarks.harness.memory import proc_number


def written_bytes() -> int:
    """Bytes that this process has written so far: to sockets, and hardly anywhere else."""
    return proc_number("/proc/self/io", "wchar:")


class CopiedBytes(TorchDispatchMode):
    """Sums what is copied while it is active: ``nbytes``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nbytes += copied_bytes(operation(func), args, kwargs or {}, result)
        return result


def least_bytes(engine: str, model: nn.Module, world: int) -> int:
    """The fewest bytes that a rank must send in a step, in fp32.

    A gather or a reduce-scatter of S bytes sends (W-1)/W S per rank, and what is in the frozen
    part has no gradients to send. See Chan et al. 2007, "Collective communication".
    """
    share = (world - 1) / world
    numels = [(param.numel(), param.requires_grad) for param in model.parameters()]
    every = 4 * sum(numel for numel, _ in numels)
    trained = 4 * sum(numel for numel, trains in numels if trains)
    gathers, updated, reduces = PARTS[engine]
    return round(share * (gathers * every + updated * trained + reduces * trained))


# engine → gathers of all parameters, of those that were updated, and reductions of gradients
PARTS: dict[str, tuple[int, int, int]] = {
    "plain": (0, 0, 0),
    "no_shard": (0, 1, 1),
    "zero1": (0, 1, 1),
    "shard_grad_op": (1, 0, 1),
    "full_shard": (2, 0, 1),
    "full_shard_inductor": (2, 0, 1),
    "no_shard_memory": (0, 0, 1),
    "zero1_memory": (0, 0, 1),
    "shard_grad_op_memory": (0, 0, 1),
    "full_shard_memory": (0, 0, 1),
    "ddp": (0, 1, 1),
    "fsdp1": (2, 0, 1),
    "fsdp2": (2, 0, 1),
    "fsdp2_inductor": (2, 0, 1),
    "fsdp2_keep": (1, 0, 1),
    "deepspeed_zero2": (0, 1, 1),
    "deepspeed_zero3": (2, 0, 1),
}
