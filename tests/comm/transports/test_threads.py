"""How a group of threads ends when its ranks do not do the same, and whose error is raised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.protocol import Comm, Label
from shardwise.comm.transports import threads
from shardwise.comm.transports.transport import Group
from shardwise.errors import RanksDisagree
from tests.comm.differences import extra, gather, larger, missing, swapped
from tests.comm.laws import sum_of


def smaller(comm: Comm) -> None:
    gather(comm, "blocks.3", 0 if comm.rank == 1 else 128)


def too_few(comm: Comm) -> None:
    for i in range(2 if comm.rank == 1 else 3):
        gather(comm, f"blocks.{i}")


DIFFERENCES: dict[Callable[[Comm], None], list[str]] = {
    missing: ["collective 1 differs: ", "rank 1 ", "blocks.4 (1,", "blocks.3 (1,", "was gather b"],
    extra: ["collective 1 differs: ", "rank 1 ", "blocks.2 (1,", "blocks.3 (1,"],
    swapped: ["collective 0 differs: ", "rank 1 ", "blocks.3 (1,", "blocks.2 (1,"],
    larger: ["collective 0 differs: ", "rank 1 ", "blocks.3 (2,048 bytes)", "(1,024 bytes)"],
    smaller: ["collective 0 differs: ", "rank 1 ", "blocks.3 (0 bytes)", "(1,024 bytes)"],
    too_few: [
        (
            "rank 1 has left (its thread ended normally after 2 collectives) while rank 0 waits at "
            "gather blocks.2 (collective 2, 1,024 bytes)"
        )
    ],
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_differ_raise(difference: Callable[[Comm], None]) -> None:
    with pytest.raises(RanksDisagree) as error:
        threads.run(2, difference)
    text = str(error.value)
    assert [part for part in DIFFERENCES[difference] if part not in text] == []
    assert "This group cannot be used any more." in text


def test_every_rank_gets_the_same_error_and_the_group_is_dead() -> None:
    def swapped_then_again(comm: Comm) -> list[str]:
        texts = []
        for _ in range(2):
            with pytest.raises(RanksDisagree) as error:
                swapped(comm)
            texts.append(str(error.value))
        return texts

    texts = threads.run(3, swapped_then_again)
    assert len({text for rank in texts for text in rank}) == 1


def test_a_rank_s_own_error_is_raised_and_not_what_it_caused() -> None:
    def fail_on_rank_2(comm: Comm) -> None:
        gather(comm, "blocks.0")
        if comm.rank == 2:
            time.sleep(0.05)  # the others wait already
            raise KeyError("no such file")
        gather(comm, "blocks.1")

    with pytest.raises(KeyError, match="no such file"):
        threads.run(4, fail_on_rank_2)


def test_those_who_wait_for_a_rank_that_raised_are_told_what() -> None:
    messages: list[str] = []

    def fail_on_rank_1(comm: Comm) -> None:
        if comm.rank == 1:
            raise KeyError("no such file")
        with pytest.raises(RanksDisagree) as error:
            gather(comm, "blocks.1")
        messages.append(str(error.value))

    with pytest.raises(KeyError):
        threads.run(2, fail_on_rank_1)
    assert messages[0].startswith(
        "rank 1 has left (it raised KeyError('no such file') after 0 coll"
    )


def test_a_rank_that_closed_its_end_has_left() -> None:
    def close_early(comm: Comm) -> None:
        if comm.rank == 1:
            comm.close()
            time.sleep(0.2)
        else:
            gather(comm, "blocks.1")

    with pytest.raises(RanksDisagree, match=r"rank 1 has left \(it closed its communicator"):
        threads.run(2, close_early)


def test_a_slow_rank_is_waited_for_until_the_time_limit() -> None:
    free = threading.Event()

    def one_is_busy(comm: Comm) -> None:
        if comm.rank == 1:
            free.wait(60)
        else:
            gather(comm, "blocks.1")

    with pytest.raises(RanksDisagree, match="rank 1 has not come within 0 s while rank 0 waits at"):
        threads.run(2, one_is_busy, timeout=0.3)
    free.set()


def test_a_rank_that_never_ends_is_named() -> None:
    free = threading.Event()

    def one_never_ends(comm: Comm) -> None:
        if comm.rank == 1:
            free.wait(60)

    with pytest.raises(RanksDisagree, match="rank 1 did not end within 0 s"):
        threads.run(2, one_never_ends, timeout=0.2)
    free.set()


def test_issuing_never_waits() -> None:
    # Rank 0 issues everything before rank 1 issues anything.
    first_is_done = threading.Event()

    def issue_all_then_wait(comm: Comm) -> list[float]:
        if comm.rank == 1:
            assert first_is_done.wait(60)
        fulls = [torch.full((2 * n,), float(comm.rank)) for n in range(1, 20)]
        flying = [comm.all_gather(full, Label("gather", str(len(full)))) for full in fulls]
        first_is_done.set()
        for pending in flying if comm.rank else reversed(flying):
            pending.wait()
        return [full[-1].item() - full[0].item() for full in fulls]

    assert threads.run(2, issue_all_then_wait) == [[1.0] * 19] * 2


def test_backward_may_communicate() -> None:
    # Autograd runs CPU backwards in the calling thread, so a hook is on its own rank.
    def sum_gradients(comm: Comm) -> float:
        weight = torch.ones(comm.size, requires_grad=True)
        sums: list[float] = []
        weight.register_hook(lambda grad: sums.append(sum_of(comm, grad.contiguous()).item()))
        (weight * float(comm.rank + 1)).sum().backward()
        return sums[0]

    assert threads.run(3, sum_gradients) == [6.0, 6.0, 6.0]


def test_messages_are_seen_by_no_dispatch_mode_and_no_version_counter() -> None:
    class Copies(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += "copy" in str(func)
            return func(*args, **(kwargs or {}))

    def watched(comm: Comm) -> tuple[int, int]:
        full = torch.zeros(comm.size * 8)
        with Copies() as copies:
            comm.all_gather(full, Label("gather")).wait()
        return copies.count, full._version

    assert threads.run(2, watched) == [(0, 0)] * 2


def test_who_waits_on_an_axis_is_told_that_a_rank_of_it_has_ended() -> None:
    def rank(comm: Comm) -> str:
        _, shard = comm.axes(1, 2)
        if comm.rank == 1:
            return ""
        with pytest.raises(RanksDisagree) as error:
            gather(shard, "blocks.0")
        return str(error.value)

    text, _ = threads.run(2, rank)
    assert "of all: rank 1 has left (its thread ended normally after 0 collectives) while" in text


def test_who_waits_is_woken_when_another_rank_ends_the_group() -> None:
    raised = threading.Event()

    def rank(comm: Comm) -> None:
        assert isinstance(comm, Group)
        if comm.rank == 1:
            time.sleep(0.05)  # rank 0 waits already
            comm._fail("the test ends it")
            assert raised.wait(20)
        else:
            with pytest.raises(RanksDisagree, match="the test ends it"):
                gather(comm, "blocks.0")
            raised.set()

    threads.run(2, rank, timeout=40)


def test_a_rank_is_a_thread_that_ends_with_the_process() -> None:
    def rank(comm: Comm) -> tuple[str, bool]:
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert threads.run(2, rank) == [("rank-0", True), ("rank-1", True)]


def test_results_come_in_rank_order() -> None:
    def slow_first(comm: Comm) -> int:
        time.sleep(0.05 * (comm.size - comm.rank))
        return comm.rank

    assert threads.run(3, slow_first) == [0, 1, 2]


def test_ranks_whose_facts_differ_are_told_so() -> None:
    with pytest.raises(RanksDisagree, match="1 setting is not the same on all ranks"):
        threads.run(2, lambda comm: comm.agree({"layout": str(comm.rank)}))


def test_an_axis_of_one_rank_is_that_rank_alone() -> None:
    def rank(comm: Comm) -> list[tuple[str, int]]:
        return [(type(axis).__name__, axis.size) for axis in comm.axes(1, 2)]

    assert threads.run(2, rank) == [[("LocalComm", 1), ("_ThreadsComm", 2)]] * 2
