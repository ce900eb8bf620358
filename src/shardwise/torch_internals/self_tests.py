"""Decides whether a torch that is newer than every tested one may be used.

Most of what ``torch_internals`` relies on would not fail if torch changed it, but train wrongly. So
on a newer torch the rules whose loss would be silent are tried where ``torch_internals`` is
imported. ``tests/test_torch_internals.py`` looks closer; ``benchmarks/RESULTS.md`` has the runs.
"""

from __future__ import annotations

import logging
import os
import runpy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwise.errors import ConfigError

#: The newest release of torch that was tested, as far as RESULTS.md says.
NEWEST_TESTED = "2.15"

log = logging.getLogger("shardwise")


def decide_on_newer_torch(path: str) -> None:
    """Try what the file at ``path`` reads of torch; raise if a name is missing or has changed."""
    if _release(torch.__version__) <= _release(NEWEST_TESTED):
        return
    fact = f"torch {torch.__version__} is newer than {NEWEST_TESTED}, the newest one tested"
    try:
        with torch.device("cpu"), torch.inference_mode(mode=False), torch.enable_grad():
            internals = SimpleNamespace(**runpy.run_path(path))
            rules = [*_rules_of_tensors(internals), *_rules_of_autograd(internals)]
        broken = [rule for rule, holds in rules if not holds]
    except Exception as error:  # noqa: BLE001 - any: no tested torch raises one
        broken = [f"{type(error).__name__}: {error}"]
    if broken:
        raise ConfigError(
            f"{fact}, and breaks what shardwise relies on ({'; '.join(broken)}): "
            f'pip install "torch=={NEWEST_TESTED}.*"'
        )
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s; self-tests of what shardwise relies on passed", fact)


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def _rules_of_tensors(internals: Any) -> Iterator[tuple[str, bool]]:
    """Each rule, and whether it holds."""
    base, version = torch.ones(4), internals.get_version
    base[:2].add_(1)
    base.data.add_(1)
    yield "writes are counted through views, and not through .data", version(base[2:]) == 1
    with internals.untracked_views():
        first, _ = internals.split_flat(base, [base[:2], base[2:]])
    versions = version(first.detach_().zero_()), version(base)
    yield "an untracked view shares values and no version", versions == (1, 1) and not base[0]
    yield "a view knows its base", internals.base_of(base[:2]) is base
    key = internals.storage_key(base)
    base.untyped_storage().resize_(0)
    yield "a storage is known without its memory", internals.storage_key(base) == key
    param, grad = nn.Parameter(torch.ones(4)), torch.ones(4)
    uses = [internals.tensor_uses(grad), internals.storage_uses(grad)]
    param.grad, alias = grad, grad[:2]
    uses += internals.tensor_uses(grad), internals.storage_uses(alias)
    counted = uses[0] == 1 and uses[2] > 1 and uses[3] > uses[1]
    yield "owners of a tensor and of its storage are counted", counted
    internals.set_data(param, torch.ones(2, 4))
    yield "a gradient stays when .data gets another shape", internals.get_grad(param) is grad
    yield "operators say whether they return views", torch.ops.aten.t.default.is_view


def _rules_of_autograd(internals: Any) -> Iterator[tuple[str, bool]]:
    seen = list[object]()
    param = nn.Parameter(torch.ones(2))
    node = get_gradient_edge(param).node

    def note(_: Tensor) -> None:
        inside = internals.graph_task() >= 0, internals.keeps_graph()
        seen.append((*inside, internals.engine_executes(node)))
        internals.queue_callback(lambda: seen.append("end"))

    hooks = {key: lambda _, key=key: seen.append(key) for key in (1, 0)}
    internals.set_after_accumulation(param, hooks)
    first = internals.next_sequence_number()
    product = param * 2
    product.register_hook(note)
    number = internals.sequence_number(product.grad_fn)
    yield "nodes are numbered", number == first and internals.is_accumulate_grad(node)
    product.sum().backward()
    order = [(True, False, True), 1, 0, "end"]
    yield "a backward pass tells of itself, and calls hooks in order", seen == order
    yield "none goes on", internals.graph_task() == -1 and not internals.is_transformed()
