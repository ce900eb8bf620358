"""New memory that outlives the mode in which it is first asked for."""

from __future__ import annotations

import torch

from shardwise.comm.memory import fresh


def test_memory_asked_for_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        memory = fresh(3, torch.float32, torch.device("cpu"))
    assert not memory.is_inference()
    memory.fill_(1.0).requires_grad_().sum().backward()
    assert memory.grad is not None


def test_memory_has_the_size_and_dtype_that_were_asked_for() -> None:
    memory = fresh(5, torch.bfloat16, torch.device("cpu"))
    assert (memory.shape, memory.dtype) == ((5,), torch.bfloat16)
    assert memory.untyped_storage().nbytes() == 10
