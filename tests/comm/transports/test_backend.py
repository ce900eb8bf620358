"""The path of NCCL, XCCL and HCCL, as far as gloo can stand in for them.

That it keeps every law is tested in test_contract.py; no GPU has seen this. What one GPU can show,
a group of one rank over NCCL, is here too, and the same over gloo.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.machine.connect import over
from shardwise.comm.protocol import Comm, Label
from shardwise.comm.transports import backend, transport
from shardwise.comm.transports.backend import BackendComm
from shardwise.comm.transports.transport import Shutdown
from shardwise.comm.watchdog import watchdog
from shardwise.errors import RanksDisagree
from tests.comm.laws import start_sum, sum_of
from tests.devices import DEVICES
from tests.ranks import Outcome, gloo_group, outcomes_of

CPU = torch.device("cpu")


def mean_of_ranks(comm: Comm) -> float:
    """1.5 with two ranks."""
    return sum_of(comm, torch.full((comm.size * 3,), comm.rank + 1.0), by="mean")[0].item()


def averaging(folder: str, calls: backend._Calls) -> list[Any]:
    """The ReduceOps that a comm uses when the backend claims to average, and the mean."""
    used: list[str] = []
    scatter = calls.scatter

    def spy(out: Tensor, full: Tensor, **options: Any) -> Any:
        used.append(str(options["op"]))
        return scatter(out, full, **options)

    store: Store = FileStore(f"{folder}/averages{scatter.__name__}", 2)
    world = dist.group.WORLD
    assert world is not None
    backend._calls = lambda: calls._replace(scatter=spy)
    with BackendComm(world, CPU, store, has_average=True, timeout=60) as comm:
        mean = mean_of_ranks(comm)
    return [*used, mean]


def try_averages(rank: int, world: int, folder: str) -> list[list[Any]]:
    with gloo_group(rank, world, folder):
        right = backend._calls()

        def divides_twice(out: Tensor, full: Tensor, op: Any, **options: Any) -> Any:
            """A sum that is divided twice on one rank, for one size only, as XCCL once did."""
            work = right.scatter(out, full, op=op, **options)
            if rank == 1 and out.numel() == 513:
                out /= world
            return work

        wrong = right._replace(scatter=divides_twice)
        return [averaging(folder, right), averaging(folder, wrong)]


@pytest.mark.spawn
def test_the_backend_averages_only_if_it_can_on_every_rank() -> None:
    outcomes = outcomes_of(2, try_averages)
    assert [o.error for o in outcomes] == [""] * 2
    for outcome in outcomes:
        trusted, mistrusted = outcome.value
        assert trusted == ["RedOpType.AVG"] * 3 + ["RedOpType.AVG", 1.5]
        assert mistrusted == ["RedOpType.AVG"] * 3 + ["RedOpType.SUM", 1.5]


def go_wrong(rank: int, world: int, folder: str) -> list[tuple[float, str]]:
    """Seconds until rank 0 knows that rank 1 left; that it is at another collective."""
    errors = []
    with gloo_group(rank, world, folder):
        for leaves in (True, False):
            # A group each: gathers use the group itself, and it is dead afterwards.
            group = dist.new_group()
            with over(group, transport="native") as comm:
                start = time.monotonic()
                if rank == 1 and leaves:
                    comm.close()
                if rank == 1 and not leaves:
                    with pytest.raises(RanksDisagree):
                        comm.agree({})
                if rank == 0:
                    full = torch.zeros(8)
                    for _ in range(2):  # the second time, because the group is dead
                        with pytest.raises(RanksDisagree) as error:
                            comm.all_gather(full, Label("gather", "blocks.3")).wait()
                    errors.append((time.monotonic() - start, str(error.value)))
    return errors


@pytest.mark.spawn
def test_ranks_that_differ_soon_raise() -> None:
    first, second = outcomes_of(2, go_wrong)
    assert (first.error, second.error) == ("", "")
    (soon, closed), (also_soon, elsewhere) = first.value
    assert closed.startswith("rank 1 has left (it closed its communicator after 0 collectives)")
    assert elsewhere.startswith("collective 0 differs: rank 1 is at agree (0 bytes), rank 0 at gat")
    assert max(soon, also_soon) < 60  # and not the time limit of half an hour


def as_impostor(rank: int, world: int, folder: str) -> list[float]:
    """The code path of ``init_process_group("hccl")``, with gloo behind it."""

    def gloo(store: Store, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("hccl", gloo, devices=["cpu"])
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=world)
    with over(dist.group.WORLD, device="cpu", transport="native") as comm:
        full = torch.zeros(2)
        full[rank] = rank + 1.0
        comm.all_gather(full, Label("gather")).wait()
        result = [*full.tolist(), mean_of_ranks(comm)]
    dist.destroy_process_group()
    return result


class Named(TorchDispatchMode):
    """The operations that compute or copy while it is active, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def sum_wide(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """What it takes to sum a narrow wire in fp32 and to divide, and the result."""
    timeouts: list[timedelta] = []
    new_group = dist.new_group

    def spy(**options: Any) -> Any:
        timeouts.append(options["timeout"])
        return new_group(**options)

    with gloo_group(rank, world, folder), patch.object(dist, "new_group", spy):
        with over(dist.group.WORLD, transport="native", timeout=90) as comm:
            full = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16) * (rank + 1)
            _, out, pending = start_sum(comm, full, by=3)
            with Named() as mode:
                pending.wait()
        return mode.names, out.tolist(), [patience.total_seconds() for patience in timeouts]


@cache
def summed_wide() -> list[Outcome]:
    return outcomes_of(2, sum_wide)


@pytest.mark.spawn
def test_a_wide_sum_is_one_operation_however_many_ranks_there_are() -> None:
    outcomes = summed_wide()
    assert [o.error for o in outcomes] == [""] * 2
    assert [o.value[1] for o in outcomes] == [[1.0, 2.0], [3.0, 4.0]]
    assert [o.value[0] for o in outcomes] == [["aten::sum.IntList_out", "aten::div_.Tensor"]] * 2


@pytest.mark.spawn
def test_the_reductions_own_group_is_more_patient_than_the_watchdog() -> None:
    outcomes = summed_wide()
    assert [o.value[2] for o in outcomes] == [[150.0]] * 2


@pytest.mark.spawn
def test_a_backend_that_torch_does_not_know_by_name_will_do() -> None:
    outcomes = outcomes_of(2, as_impostor)
    assert [(o.error, o.value) for o in outcomes] == [("", [1.0, 2.0, 1.5])] * 2


def test_work_that_failed_is_not_over_although_nccl_says_that_it_is_complete() -> None:
    def over(result: int | None, is_completed: bool = True) -> bool:
        future: torch.futures.Future[int] = torch.futures.Future()
        if result is not None:
            future.set_result(result)
        work = SimpleNamespace(is_completed=lambda: is_completed, get_future_result=lambda: future)
        return backend._has_succeeded(cast("Any", work))

    assert [over(result) for result in (0, 1, 2, 100, None)] == [True, False, False, False, False]
    assert not over(0, is_completed=False)


def test_where_a_backend_knows_no_result_work_that_is_complete_is_over() -> None:
    def get_future_result() -> None:
        raise RuntimeError("not supported by this backend")

    work = SimpleNamespace(is_completed=lambda: True, get_future_result=get_future_result)
    assert backend._has_succeeded(cast("Any", work))


def test_the_old_names_serve_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    new = {"all_gather_single": object(), "reduce_scatter_single": object()}
    for name, call in new.items():
        monkeypatch.setattr(dist, name, call, raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    assert backend._calls() == (dist.all_gather_into_tensor, dist.reduce_scatter_tensor)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    assert backend._calls() == tuple(new.values())


def alone(rank: int, world: int, folder: str, device: str) -> list[Any]:
    """Each call that the engine makes, on a group of one rank: what came out."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    here = torch.device(device, 0) if device != "cpu" else CPU
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: Store = FileStore(f"{folder}/store", world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    own: Store = FileStore(f"{folder}/own", world)
    shutdown = Shutdown(callback=dist.destroy_process_group)
    with BackendComm(group, here, own, has_average=True, timeout=60, shutdown=shutdown) as comm:
        full = torch.arange(6, dtype=torch.bfloat16, device=here)
        pendings = [comm.all_gather(full, Label("gather")), comm.broadcast(full, 0, Label("send"))]
        received: list[Tensor] = []
        summed = torch.empty_like(full)
        pendings += [comm.reduce_scatter(summed, full, False, Label("reduce"))]
        pendings += [comm.exchange(full, received.extend, Label("reduce"))]
        for pending in reversed(pendings):
            pending.wait()
        comm.agree({"layout": "a1b2"})
        return [full.tolist(), summed.tolist(), received[0].tolist()]


@pytest.mark.spawn
@pytest.mark.parametrize("device", DEVICES)
def test_the_backend_takes_every_call_of_the_engine(device: str) -> None:
    (outcome,) = outcomes_of(1, alone, device)
    assert outcome.error == ""
    assert outcome.value == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3


def test_a_rank_that_never_starts_is_named_and_its_group_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_CHECK", 0.05)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    aborted = list[str]()
    group: Any = Aborted(aborted)
    running = set(threading.enumerate())
    with pytest.raises(RanksDisagree, match="rank 1 has not come within 0 s while rank 0 waits at"):
        BackendComm(group, CPU, HashStore(), has_average=False, timeout=0.1)
    assert aborted == ["aborted"]
    assert set(threading.enumerate()) <= running


def of_one_rank(monkeypatch: pytest.MonkeyPatch, world: int = 1) -> tuple[Any, Any, list[object]]:
    """Stand-ins: a vendor's group of a rank, that which is made for reductions, what was ended."""
    group, reductions, ended = Aborted(["all"]), Aborted(["reductions"]), list[object]()
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1 if group else world)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda **options: reductions)
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    return group, reductions, ended


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_of_all_ranks_has_one_more_for_reductions_which_ends_with_the_comm(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """All processes would have to make it, so a part of them has none."""
    group, reductions, ended = of_one_rank(monkeypatch, world)
    with BackendComm(group, CPU, HashStore(), has_average=False, timeout=60) as comm:
        assert comm in transport._open.values()  # which the end of the process closes
        assert comm.is_usable
        assert comm._gather_group is group
        assert comm._reduce_group is (reductions if world == 1 else group)
    assert ended == [reductions] * (world == 1)
    assert not comm.is_usable


@pytest.mark.parametrize(("claimed", "average"), [(True, 1.0), (True, 2.0), (False, 1.0)])
def test_an_average_is_tried_on_small_and_large_sums_where_it_is_claimed(
    monkeypatch: pytest.MonkeyPatch, claimed: bool, average: float
) -> None:
    tried: list[tuple[object, int, int]] = []

    def scatter(out: Tensor, full: Tensor, op: object, group: object) -> None:
        tried.append((op, out.numel(), full.numel()))
        out.fill_(average)

    group, _, _ = of_one_rank(monkeypatch)
    monkeypatch.setattr(
        backend, "_calls", lambda: backend._Calls(cast("Any", None), cast("Any", scatter))
    )
    with BackendComm(group, CPU, HashStore(), has_average=claimed, timeout=60) as comm:
        assert comm.has_average is (claimed and average == 1.0)
    assert tried == [(dist.ReduceOp.AVG, n, n) for n in (1, 513, 65_537)] * claimed


def test_a_call_that_the_backend_refuses_ends_the_group_and_an_empty_one_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **options: object) -> Any:
        raise RuntimeError("no such link")

    group, reductions, _ = of_one_rank(monkeypatch)
    monkeypatch.setattr(backend, "_calls", lambda: backend._Calls(refuse, refuse))
    with BackendComm(group, CPU, HashStore(), has_average=False, timeout=60) as comm:
        comm.all_gather(torch.empty(0), Label("gather")).wait()
        with pytest.raises(RanksDisagree) as error:
            comm.all_gather(torch.zeros(1, dtype=torch.uint8), Label("gather", "blocks.3"))
    assert str(error.value) == "gather blocks.3 failed on rank 0: no such link"
    assert [group.notes, reductions.notes] == [["all", "aborted"], ["reductions", "aborted"]]


class Unfinished(dist.Work):
    """A collective that no peer takes part in: waiting for it orders streams, and no more."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


@dataclass
class Device:
    """What a device with work on it does to a group of one rank, and what became of that."""

    monkeypatch: pytest.MonkeyPatch
    notes: list[str] = field(default_factory=list)
    is_idle: bool = False
    broken: str = ""

    def record_event(self) -> Device:
        return self

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError(self.broken)
        return self.is_idle

    def abort(self) -> None:
        self.notes.append("aborted")
        self.is_idle = True

    def destroy(self, _: object) -> None:
        """It would wait for the device, for ever."""
        assert self.is_idle
        self.notes.append("destroyed")

    def comm(self) -> BackendComm:
        of_one_rank(self.monkeypatch)
        group, reductions = MagicMock(abort=self.abort), MagicMock()
        gather = cast("Any", lambda *_, **__: Unfinished())
        self.monkeypatch.setattr(backend, "_calls", lambda: backend._Calls(gather, gather))
        self.monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self)
        self.monkeypatch.setattr(dist, "destroy_process_group", self.destroy)
        self.monkeypatch.setattr(dist, "new_group", lambda **_: reductions)
        comm = BackendComm(group, CPU, HashStore(), has_average=False, timeout=60)
        comm.device = torch.device("cuda", 0)
        return comm


BYTES, GATHER = torch.zeros(1, dtype=torch.uint8), Label("gather", "blocks.3")


@pytest.mark.parametrize("awaited", [False, True])
def test_after_an_error_what_is_unfinished_is_aborted_before_its_group_is_destroyed(
    monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    device = Device(monkeypatch)
    with suppress(KeyError), device.comm() as comm:
        pending = comm.all_gather(BYTES, GATHER)
        if awaited:
            pending.wait()
        raise KeyError
    assert device.notes == ["aborted", "destroyed"]


def test_what_is_finished_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    with suppress(KeyError), device.comm() as comm:
        comm.all_gather(BYTES, GATHER).wait()
        device.is_idle = True
        raise KeyError
    assert device.notes == ["destroyed"]


def test_a_comm_is_closed_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    with device.comm() as comm:
        comm.all_gather(BYTES, GATHER)  # which nobody awaits
        threading.Timer(0.1, setattr, (device, "is_idle", True)).start()
    assert device.notes == ["destroyed"]


@pytest.mark.parametrize("broken", ["", "an illegal address"])
def test_what_will_never_finish_is_said_and_aborted(
    monkeypatch: pytest.MonkeyPatch, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_CHECK", 0.05)
    device = Device(monkeypatch)
    with device.comm() as comm:
        comm.all_gather(BYTES, GATHER)
        comm._watchdog._timeout, device.broken = 0.1, broken
    assert device.notes == ["aborted", "destroyed"]
    assert (broken or "gather blocks.3") in caplog.text


class Aborted(NamedTuple):
    """A process group that notes its end."""

    notes: list[str]

    def __hash__(self) -> int:
        return 0

    def abort(self) -> None:
        self.notes.append("aborted")
