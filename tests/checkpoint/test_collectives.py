"""Short texts between ranks, with and without their comm."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.checkpoint.collectives import (
    agreed,
    all_gather_object,
    await_parts,
    broadcast_object,
    joined_message,
    leave_part,
    raise_on_all,
    run_on_rank_0,
)
from shardwise.comm.protocol import Comm
from tests.ranks import run_threads

TEXTS = ["", "größe", "x" * 10_000, "\0 in the middle"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_hears_every_text(world: int) -> None:
    gathered = run_threads(world, lambda comm: all_gather_object(comm, TEXTS[comm.rank], "texts"))
    assert gathered == [TEXTS[:world]] * world


def test_rank_0_tells_the_others() -> None:
    assert run_threads(3, lambda comm: broadcast_object(comm, str(comm.rank), "x")) == ["0"] * 3
    assert (
        run_threads(3, lambda comm: run_on_rank_0(comm, "x", lambda: str(comm.rank))) == ["0"] * 3
    )


def test_what_one_rank_cannot_do_no_rank_has_done() -> None:
    def rank(comm: Comm) -> str:
        def act() -> int:
            if comm.rank == 1:
                raise sw.CheckpointError("no room")
            return comm.rank

        with pytest.raises(sw.CheckpointError) as caught:
            raise_on_all(comm, "trying", act)
        return str(caught.value)

    assert run_threads(3, rank) == ["rank 1: no room"] * 3
    assert run_threads(3, lambda comm: raise_on_all(comm, "x", lambda: comm.rank)) == [0, 1, 2]


DAMAGED, CONFIG = sw.DamagedCheckpoint("bits"), sw.ConfigError("no such option")
OTHER, UNREADABLE = TypeError("no len()"), sw.CheckpointError("the disk fails")


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ((None, OTHER, None), sw.CheckpointError),
        ((None, OSError(5, "I/O"), None), sw.CheckpointError),
        ((None, None, DAMAGED), sw.DamagedCheckpoint),
        ((DAMAGED, DAMAGED, DAMAGED), sw.DamagedCheckpoint),
        ((None, UNREADABLE, DAMAGED), sw.CheckpointError),  # one of them may be whole
        ((CONFIG, None, None), sw.ConfigError),
    ],
    ids=str,
)
def test_any_error_of_any_rank_is_one_of_a_kind_on_all(
    failures: tuple[Exception | None, ...], kind: type[Exception]
) -> None:
    def rank(comm: Comm) -> tuple[type[Exception], str]:
        def act() -> None:
            if failure := failures[comm.rank]:
                raise failure

        with pytest.raises(sw.ShardwiseError) as caught:
            raise_on_all(comm, "trying", act)
        assert raise_on_all(comm, "again", lambda: "well") == "well"
        return caught.type, str(caught.value)

    assert {kind} == {raised for raised, _ in run_threads(3, rank)}
    assert len(set(run_threads(3, rank))) == 1


def test_facts_that_differ_are_named_and_the_ranks_go_on() -> None:
    def rank(comm: Comm) -> str:
        same = {"path": "run"}
        with pytest.raises(sw.CheckpointError) as caught:
            agreed(comm, "x", lambda: same, lambda _: {**same, "position": str(comm.rank // 2)})
        agree = agreed(comm, "x", lambda: same, dict, lambda _: f"of {comm.rank}")
        assert agree == (same, ["of 0", "of 1", "of 2"])
        return str(caught.value)

    [text] = set(run_threads(3, rank))
    assert "position: ranks 0 and 1: 0; rank 2: 1\nNothing was written" in text
    assert "path" not in text
    assert "Training(local=...)" in text


def test_a_long_text_of_one_rank_is_not_padded_for_all() -> None:
    def rank(comm: Comm) -> int:
        text = "x" * 1_000_000 * (comm.rank == 1)
        before = sum(comm.counters.bytes_sent.values())
        assert all_gather_object(comm, text, "x") == ["", "x" * 1_000_000, "", ""]
        return sum(comm.counters.bytes_sent.values()) - before

    assert [sent < 50_000 for sent in run_threads(4, rank)] == [True, False, True, True]


def test_messages_are_said_once() -> None:
    assert joined_message({0: "a", 1: "a"}, 2) == "a"
    assert joined_message({1: "a"}, 2) == "rank 1: a"
    assert joined_message({0: "a", 1: "b", 2: "a"}, 3) == "ranks 0 and 2: a\nrank 1: b"
    many = joined_message(dict.fromkeys(range(9), "a"), 10)
    assert many == "ranks 0–8: a"


def test_parts_are_found_and_gone(tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        leave_part(tmp_path, rank, f"of {rank}")
    assert await_parts(tmp_path, 3, threading.Event()) == ["of 0", "of 1", "of 2"]
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    leave_part(tmp_path, 0, "here")
    late = threading.Timer(0.1, leave_part, (tmp_path, 1, "late"))
    late.start()
    assert await_parts(tmp_path, 2, threading.Event()) == ["here", "late"]


def test_a_folder_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    leave_part(run, 0, "here")
    moved = threading.Timer(0.1, run.rename, (tmp_path / "moved",))
    moved.start()
    with pytest.raises(sw.CheckpointError, match=r"was renamed, .* rank 1 of 2 cannot be waited"):
        await_parts(run, 2, threading.Event())
    moved.join()


def test_patience_ends_with_the_names_of_those_who_are_absent(tmp_path: Path) -> None:
    leave_part(tmp_path, 1, "here")
    with pytest.raises(sw.CheckpointError, match=r"ranks 0 and 2 of 3 did not finish writing"):
        await_parts(tmp_path, 3, threading.Event(), patience=0.05)


def test_a_save_that_is_given_up_waits_no_longer(tmp_path: Path) -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(sw.CheckpointError, match=r"given up; rank 0 was absent"):
        await_parts(tmp_path, 1, given_up)
