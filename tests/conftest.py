"""What holds for every test: one seed, one thread, no launcher's environment, no network."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by spawned ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_")

# The same examples on every run and every machine; time limits are pytest's business.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.load_profile("same")

torch.set_num_threads(1)

# ``nohup`` and a script's ``&`` leave SIGINT ignored, here and in every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed every generator, and hide the launcher that may have started pytest itself."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries under test read the global generator
    torch.manual_seed(0)
    for name in os.environ:
        if name in LAUNCHER or name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small checkpoints have blocks of 4 MiB, as large ones do."""
    from shardwise.checkpoint import plan

    monkeypatch.setattr(plan, "LEAST", plan.BLOCK)
