"""What holds for every test: one seed, one thread, no launcher's environment, no network."""

from __future__ import annotations

import gc
import importlib
import os

# Before torch is imported, and inherited by spawned ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
# Some virtual machines show AMX and end a process that uses it. Sums of bf16 are alike on all.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from shardwise.plan import residency
from shardwise.plan.units import wrap

wrap.JOINED_NBYTES = wrap.JOINED_TRAINED_NBYTES = -1  # as tests/ranks.py
residency.KEPT_NBYTES = 0

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_")
# Files in which all is for make prove.
RIVALS = ("test_ddp.py", "test_fsdp1.py", "test_fsdp2.py")
PROVED = (*RIVALS, "test_fabric.py", "test_hf.py", "test_trl.py")
# Along these one property is measured again and again. What else is in the parameters of a test
# are its cases, and each has something to say of its own.
AXES = {
    "architecture",
    "average",
    "bucketing",
    "budget",
    "carrier",
    "dtype",
    "dtypes",
    "engine",
    "form",
    "grid",
    "harm",
    "kind",
    "mesh",
    "micro",
    "mixture",
    "mode",
    "model",
    "net",
    "norm_type",
    "offload",
    "optimizer",
    "optimizers",
    "placement",
    "precision",
    "strategy",
    "transport",
    "unsharded",
    "way",
    "world",
    "worlds",
    "wrap",
}
Value = tuple[str, str]
MANY = 100  # tests, in front of which an import of two seconds does not count

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
        "--prove", action="store_true", help="every combination of parameters, not one of each test"
    )
    parser.addoption(
        "--cluster", action="store_true", help="real clusters of SLURM, MPI, Ray and namespaces"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files alone in which all is for ``make prove``: importing them takes seconds."""
    if config.getoption("prove") or any("[" in argument for argument in config.args):
        return None
    return True if collection_path.name in PROVED else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage is collected, and what is there by now is not looked at any more.

    It is millions of objects, with those of what optimizers import when they step first. Models
    are cycles, and each test makes many: looking after every 700 objects is a sixth of all time.
    """
    if len(session.items) > MANY:
        importlib.import_module("torch._dynamo")
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose which combinations run, and begin with the files that take longest."""
    if not config.getoption("cluster"):
        skip = pytest.mark.skip(reason="a real cluster needs root and its programs: --cluster")
        for item in items:
            if item.get_closest_marker("cluster"):
                item.add_marker(skip)
    _choose(config, items)
    tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


def _choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with axes, keep one combination; of one with cases, as many as show each case.

    The tests of a file take turns: each takes the combinations of which the tests above it have
    shown least. All are in ``make prove``, which has the rows that are marked so, too. A test
    that is named on the command line with its parameters is kept.
    """
    if config.getoption("prove"):
        return
    named = {argument for argument in config.args if "[" in argument}
    tests: dict[str, list[pytest.Item]] = {}
    for item in (item for item in items if item.get_closest_marker("prove") is None):
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    shown: dict[Path, set[Value]] = {}
    chosen = {
        item
        for group in tests.values()
        for item in covering(group, shown.setdefault(group[0].path, set()))
    }
    chosen |= {item for item in items if item.nodeid in named}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def covering(items: list[pytest.Item], shown: set[Value]) -> list[pytest.Item]:
    """Some of one test's items: each case, or a combination of what is not ``shown`` yet."""
    values = {item: _values(item) for item in items}
    missing = {value for each in values.values() for value in each if value[0] not in AXES}
    uncovered = list(items)
    chosen: list[pytest.Item] = []
    while uncovered and (missing or not chosen):
        best = max(
            uncovered, key=lambda item: (len(values[item] & missing), len(values[item] - shown))
        )
        chosen.append(best)
        uncovered.remove(best)
        missing -= values[best]
        shown |= {value for value in values[best] if value[0] in AXES}
    return chosen


def _values(item: pytest.Item) -> set[Value]:
    """Its place on each axis, which has one name in all tests, and the row of each of its cases."""
    spec: Any = getattr(item, "callspec", None)
    if spec is None:
        return set()
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    rows = [m.replace(",", " ").split() if isinstance(m, str) else list(m) for m in marks]
    cases = [names for names in rows if not AXES.issuperset(names)]
    alone = spec.params.keys() - {name for names in cases for name in names}
    axes = {(name, repr(spec.params[name])) for name in alone}
    return axes | {(", ".join(row), repr([spec.params[name] for name in row])) for row in cases}
