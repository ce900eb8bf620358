"""What holds for every test: one seed, one thread, no launcher's environment, no network."""

from __future__ import annotations

import gc
import os

# Before torch is imported, and inherited by spawned ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import random
import signal
from collections import Counter

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

# For each kind of accelerator that no test has used, torch's own keeps the text of the whole stack:
# half a millisecond, in front of every test and for every model.
if not torch.accelerator.is_available():
    torch.manual_seed = torch.default_generator.manual_seed

# Nothing that is imported or collected is garbage: see ``pytest_collection_finish``.
gc.disable()

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


# ---- make test and make prove ----------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prove", action="store_true", help="every combination of parameters, not each value once"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage is collected, and what is there by now is not looked at any more.

    It is millions of objects, and a collection that a test asks for takes a second with them.
    """
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose which combinations run, and begin with the files that take longest."""
    _choose(config, items)
    tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


def _choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with several axes, keep as many combinations as show each value of each axis.

    What one axis does is then seen in every run of the suite; what only two together do, in
    ``make prove``, which has the rows that are marked so, too. A test that is named on the command
    line with its parameters is kept.
    """
    if config.getoption("prove"):
        return
    named = {argument for argument in config.args if "[" in argument}
    tests: dict[str, list[pytest.Item]] = {}
    for item in (item for item in items if item.get_closest_marker("prove") is None):
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for group in tests.values() for item in covering(group)}
    kept |= {item for item in items if item.nodeid in named}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Some of one test's items, in which each value of each of its axes occurs."""
    values = {item: _values(item) for item in items}
    missing = set().union(*values.values())
    chosen: list[pytest.Item] = []
    while missing:
        best = max(items, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen or items


def _values(item: pytest.Item) -> set[tuple[int, str]]:
    """Its place on each axis: the name that each ``parametrize`` gives to its row."""
    spec = getattr(item, "callspec", None)
    return set() if spec is None else set(enumerate(spec._idlist))
