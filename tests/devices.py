"""The devices on which a test runs: the CPU everywhere, one CUDA device where there is one.

The case on the CPU is what keeps the other one runnable between two days with a GPU.
"""

from __future__ import annotations

import pytest
import torch

__all__ = ["DEVICES"]

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
