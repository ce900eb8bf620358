"""The conformance suite: it passes where the engine is right, and sees what is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm, Label, Pending
from shardwise.doctor import conformance
from shardwise.doctor.conformance import CHECKS, Result, conform
from tests.ranks import outcomes_of, run_threads


def test_every_check_passes_over_a_vendors_name() -> None:
    """On native calls, as on an accelerator, with gloo behind ``hccl``."""
    outcomes = outcomes_of(2, over_hccl)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for outcome in outcomes:
        results: list[Result] = outcome.value
        assert [(one.name, one.found) for one in results if not one.passed] == []
        assert [one.name for one in results] == list(CHECKS)
        assert results[-1].found == "AVG is right here; it is not used: sums are divided here"


def over_hccl(rank: int, world: int, folder: str) -> list[Result]:
    def gloo(store: Store, rank: int, size: int, timeout: object) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[arg-type]

    dist.Backend.register_backend("hccl", gloo, devices=["cpu"])
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=world)
    with over(dist.group.WORLD, device="cpu", transport="native") as comm:
        results = list(conform(comm))
    dist.destroy_process_group()
    return results


def test_what_is_wrong_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: CHECKS[name] for name in ("reduce-scatter", "all-gather", "broadcast")}
    monkeypatch.setattr(conformance, "CHECKS", few)
    for results in run_threads(2, with_one_wrong_gather):
        failed = {one.name: one.found for one in results if not one.passed}
        assert failed["all-gather"] == "rank 1: 1 of 2 torch.float32 elements differ"
        assert [one.name for one in results] == list(few)  # the others were run all the same


def with_one_wrong_gather(comm: Comm) -> list[Result]:
    right = comm.all_gather

    def wrong(full: Tensor, label: Label) -> Pending:
        pending = right(full, label)
        if comm.rank == 1 and label.unit == "torch.float32":
            pending.wait()
            full[0] += 1
        return pending

    comm.all_gather = wrong  # type: ignore[method-assign]
    return list(conform(comm))


def test_ranks_that_lose_each_other_end_the_suite() -> None:
    for results in run_threads(2, leaving_early):
        assert not results[-1].passed
        assert len(results) < len(CHECKS)


def leaving_early(comm: Comm) -> list[Result]:
    suite = conform(comm)
    results = [next(suite)]
    if comm.rank == 1:
        comm.close()
        return [Result("", passed=False, expected="", found="it left", seconds=0.0)]
    return [*results, *suite]


def test_a_nan_is_never_within_a_tolerance() -> None:
    sums = torch.tensor([0.0, torch.nan])
    assert max(0.1, conformance._error(sums, torch.ones(2))) == torch.inf
