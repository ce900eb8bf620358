"""What is written in the background is what was there at the call, in bounded memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import background
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.staging import MOST, Copy, Copying, Pool, Watched, budget_of
from shardwise.checkpoint.writer import Chunk, Writer
from shardwise.comm.protocol import Comm
from shardwise.launch import machine_memory
from tests.checkpoint.runs import adamw, names, same, steps, tensors
from tests.copies import clones, error_text, on_ranks
from tests.nets import NETS
from tests.steps import train


def chunk(*pieces: list[int], start: int = 0) -> Chunk:
    tensors = tuple(torch.tensor(piece, dtype=torch.uint8) for piece in pieces)
    return Chunk("file", start, start + sum(map(len, tensors)), tensors)


def large(value: int) -> Chunk:
    return Chunk("file", 0, BLOCK, (torch.full((BLOCK,), value, dtype=torch.uint8),))


def test_a_copy_is_one_piece_and_does_not_change_with_the_original() -> None:
    pool, original = Pool(BLOCK), chunk([1, 2], [3], start=10)
    copy = pool.copy(original).chunk
    original.pieces[0].fill_(9)
    assert (copy.file, copy.start, copy.stop) == ("file", 10, 13)
    assert [piece.tolist() for piece in copy.pieces] == [[1, 2, 3]]


def test_a_buffer_is_used_again() -> None:
    pool = Pool(2 * BLOCK)
    for value in range(10):
        copy = pool.copy(large(value))
        assert copy.chunk.pieces[0][-1] == value
        pool.free(copy)
    assert pool.count == 1


def test_the_ranks_of_a_host_divide_a_quarter_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 << 18}  # 64 GiB
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(machine_memory, "_limits", lambda: ())
    assert [budget_of(ranks) >> 30 for ranks in (1, 2, 8)] == [16, 8, 2]
    pages["SC_PHYS_PAGES"] = 2 << 28  # 2 TiB
    assert budget_of(8) == MOST
    monkeypatch.setattr(machine_memory, "_limits", lambda: (16 << 30,))
    assert budget_of(2) == 2 << 30  # of a container
    pages["SC_PHYS_PAGES"] = 1000
    assert budget_of(8) == BLOCK


DECODER, CONVNET = NETS[0], NETS[2]


def wide() -> nn.Module:
    return nn.Linear(1024, 8 * 1024, bias=False)  # 32 MiB


# --- chunks, by whoever comes first ----------------------------------------------------------


def chunks(count: int, fails_at: int = -1) -> Iterator[Chunk]:
    for number in range(count):
        if number == fails_at:
            raise MemoryError("no more")
        value = torch.full((BLOCK // 2,), number % 256, dtype=torch.uint8)
        yield Chunk("file", number * len(value), (number + 1) * len(value), (value,))


def drain(copying: Copying) -> list[int]:
    """What a writer finds, in order."""
    return [int(chunk.pieces[0][0]) for chunk in copying.chunks()]


def test_the_writer_alone_copies_all_of_it_through_one_buffer() -> None:
    pool = Pool(64 * BLOCK)
    copying, copied = Copying(chunks(20), pool), []
    for number, piece in enumerate(copying.chunks()):
        copied.append((number, int(piece.pieces[0][0]), pool.count))
    assert copied == [(number, number, 1) for number in range(20)]


@pytest.mark.parametrize("budget", [BLOCK, 3 * BLOCK, 64 * BLOCK])
def test_two_threads_copy_each_chunk_once_and_in_order(budget: int) -> None:
    for _ in range(20):
        pool = Pool(budget)
        copying = Copying(chunks(40), pool)
        main = threading.Thread(target=copying.rest, daemon=True)
        main.start()
        assert drain(copying) == list(range(40))
        main.join(60)
        assert not main.is_alive()
        assert pool._free.qsize() == pool.count == 0  # all memory is given back


def test_what_is_copied_is_given_back_as_it_is_written() -> None:
    """And not kept for the next save: the whole state may lie there when training goes on."""
    pool = Pool(64 * BLOCK)
    copying = Copying(chunks(20), pool)
    copying.rest()
    addresses = [piece.pieces[0].data_ptr() for piece in copying.chunks()]
    assert len(set(addresses)) == 20
    assert not [address for address in addresses if _is_mapped(address)]


def _is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < stop for start, stop in ends)


def test_a_chunk_that_cannot_be_copied_keeps_no_memory() -> None:
    def broken() -> Iterator[Chunk]:
        yield from chunks(1)
        yield Chunk("file", 0, BLOCK, (torch.empty(BLOCK, dtype=torch.uint8, device="meta"),))

    pool = Pool(64 * BLOCK)
    with pytest.raises(NotImplementedError, match="meta"):
        drain(Copying(broken(), pool))
    assert pool._free.qsize() == pool.count == 0


def test_where_nobody_writes_all_can_be_let_go() -> None:
    pool = Pool(64 * BLOCK)
    copying = Copying(chunks(20), pool)
    copying.rest()
    for _ in range(2):
        copying.drain()
    assert pool._free.qsize() == pool.count == 0


def test_when_the_other_thread_cannot_copy_the_writer_learns_it_at_the_end() -> None:
    pool = Pool(64 * BLOCK)
    copying = Copying(chunks(5, fails_at=2), pool)
    with pytest.raises(MemoryError):
        copying.rest()
    copying.rest()  # it is over
    remaining = copying.chunks()
    assert [int(next(remaining).pieces[0][0]), int(next(remaining).pieces[0][0])] == [0, 1]
    with pytest.raises(sw.CheckpointError, match="could not be copied completely"):
        next(remaining)


def test_when_the_writer_cannot_copy_it_is_over_for_both() -> None:
    pool = Pool(64 * BLOCK)
    copying = Copying(chunks(5, fails_at=2), pool)
    with pytest.raises(MemoryError):
        drain(copying)
    copying.rest()
    assert pool._free.qsize() == pool.count


def test_a_writer_that_stops_lets_the_rest_go() -> None:
    pool = Pool(BLOCK)
    copying = Copying(chunks(40), pool)
    main = threading.Thread(target=copying.rest, daemon=True)
    main.start()
    remaining = copying.chunks()
    next(remaining)
    remaining.close()
    main.join(60)
    assert not main.is_alive()
    assert pool._free.qsize() == 0
    assert copying.over.is_set()


def test_forward_and_backward_passes_change_nothing_that_is_watched() -> None:
    def rank(comm: Comm, model: nn.Module) -> list[str]:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, DECODER, comm.rank, range(1))
        watched = Watched(sharded, [optimizer])
        train(model, DECODER.batch(comm.rank, 2))
        changes = [watched.changed()]
        optimizer.zero_grad()
        model.eval()
        model(*DECODER.batch(comm.rank, 2)[:-1])
        changes.append(watched.changed())
        train(model, DECODER.batch(comm.rank, 2))
        optimizer.step()
        return [*changes, watched.changed()]

    for before, still, after in on_ranks(2, DECODER.build, rank):
        assert (before, still) == ("", "")
        assert " and " in after


# --- a save, copied by the next step ---------------------------------------------------------


def test_buffers_are_as_they_were_before_the_next_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = threading.Barrier(4)  # two writers wait for two ranks

    class Waits(Writer):
        def write(self, chunk: Chunk) -> None:
            if not self.written:
                trained.wait(60)
            super().write(chunk)

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        before = clones(model.state_dict())
        saving = sharded.save_async(tmp_path / "step-1", None, sw.Training())
        assert saving is not None
        train(model, CONVNET.batch(comm.rank, 4))
        trained.wait(60)
        saving.wait()
        after = clones(model.state_dict())
        assert not same(before, after)  # the buffers
        sharded.load(tmp_path / "step-1", None, sw.Training())
        assert same(before, model.state_dict())
        return before

    monkeypatch.setattr(background, "Writer", Waits)
    on_ranks(2, CONVNET.build, rank)


def test_the_next_step_copies_only_what_is_not_written_yet(
    tmp_path: Path, listen: Callable[[Callable[[str, int], None]], None]
) -> None:
    may_go = threading.Event()

    def wait(point: str, rank: int) -> None:
        if point == "half of the data written":
            may_go.wait(60)

    listen(wait)

    def rank(comm: Comm, model: nn.Module) -> tuple[bool, Tensor]:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = clones(model.state_dict())
        saving = sharded.save_async(tmp_path / "step-1", optimizer)
        assert saving is not None
        model(torch.ones(1, 1024)).sum().backward()
        copied_before = saving._copied.is_set()
        optimizer.step()
        assert saving._copied.is_set()
        assert saving.check() is None  # the writers wait at half of it
        comm.agree({})
        may_go.set()
        saving.wait()
        assert not same(before, model.state_dict())
        return copied_before, before["weight"]

    for copied_before, weight in on_ranks(2, wide, rank):
        assert not copied_before
        assert torch.equal(tensors(tmp_path / "step-1", "model")["weight"], weight)


@pytest.mark.parametrize("what", ["a parameter", "optimizer state"])
def test_a_change_by_hand_before_the_next_step_is_an_error_on_all_ranks(
    what: str, tmp_path: Path
) -> None:
    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, DECODER, comm.rank, range(1))
        saving = sharded.save_async(tmp_path / "step-1", optimizer)
        assert saving is not None
        if comm.rank == 1:
            param = next(model.parameters())
            with torch.no_grad():
                (
                    param.detach() if what == "a parameter" else optimizer.state[param]["exp_avg"]
                ).add_(1)
        text = error_text(
            sw.CheckpointError, lambda: steps(model, optimizer, DECODER, comm.rank, range(1, 2))
        )
        optimizer.step()
        sharded.save(tmp_path / "step-2", optimizer)
        return text

    texts = on_ranks(2, DECODER.build, rank)
    assert texts[0] == texts[1]
    assert "rank 1: " in texts[0]
    assert ("parameter 'embed.weight' changed after save_async" in texts[0]) == (
        what == "a parameter"
    )
    assert "there is no checkpoint. Before you modify it in place, call finish_copy()" in texts[0]
    assert names(tmp_path) == ["latest", "step-2"]


def test_another_tensor_in_a_parameters_place_is_an_error_too(tmp_path: Path) -> None:
    """Its values go into the shard."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded.save_async(tmp_path / "step-1", optimizer)
        for param in model.parameters():
            param.data = torch.zeros_like(param.data)
        return error_text(sw.CheckpointError, optimizer.step)

    text = on_ranks(2, DECODER.build, rank)[0]
    assert "parameter 'embed.weight' and " in text
    assert "the copy may mix old and new values" in text
    assert names(tmp_path) == []


def test_who_only_looks_now_and_then_sees_it_complete(tmp_path: Path) -> None:
    """Without a step, and without waiting."""

    def rank(comm: Comm, model: nn.Module) -> None:
        saving = sw.shard(model, comm=comm).save_async(tmp_path / "step-1")
        assert saving is not None
        for _ in range(2000):
            if saving.check() is not None:
                break
            time.sleep(0.01)
        assert (tmp_path / "step-1").exists()

    on_ranks(2, DECODER.build, rank)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["writing", "closing", "copying"])
def test_what_goes_wrong_on_a_rank_is_an_error_on_all_at_the_next_step(
    what: str, who: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Writer):
        def write(self, chunk: Chunk) -> None:
            if what == "writing" and self.rank == who:
                raise OSError(5, "Input/output error")
            super().write(chunk)

        def __exit__(self, *args: object) -> None:
            super().__exit__(*args)
            if what == "closing" and self.rank == who:
                raise OSError(5, "Input/output error")

    def copy(self: Pool, chunk: Chunk) -> Copy:
        if what == "copying" and threading.current_thread().name.endswith(f"rank {who}"):
            raise MemoryError("Input/output error")
        return copied(self, chunk)

    copied = Pool.copy
    monkeypatch.setattr(background, "Writer", Breaks)
    monkeypatch.setattr(Pool, "copy", copy)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saving = sharded.save_async(tmp_path / "step-1", optimizer)
        assert saving is not None
        while not saving._copying.over.is_set():
            time.sleep(0.001)
        while saving._thread.is_alive() and comm.rank == who and not saving._wrong:
            saving.finish_copy()
            time.sleep(0.001)
        return error_text(sw.CheckpointError, optimizer.step)

    texts = on_ranks(2, DECODER.build, rank)
    assert texts[0] == texts[1]
    assert f"rank {who}: " in texts[0]
    assert "Input/output error" in texts[0]
    assert names(tmp_path) == []


def test_memory_without_a_counter_is_no_obstacle(tmp_path: Path) -> None:
    with torch.inference_mode():
        frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(4, 4))
    saving = sw.shard(model).save_async(tmp_path / "step-1")
    assert saving is not None
    saving.wait()
    assert same(tensors(tmp_path / "step-1", "model"), clones(model.state_dict()))


def test_what_the_engine_itself_changes_waits_for_the_copy(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        states = [clones(model.state_dict())]
        doubled = {name: 2 * value for name, value in states[0].items()}

        def twice() -> None:
            with sharded.full_params(writeback=True), torch.no_grad():
                for param in model.parameters():
                    param.mul_(2.0)

        changes: list[Callable[[], Any]] = [
            twice,
            lambda: model.load_state_dict(doubled),
            lambda: sharded.load_state_dict(doubled),
            lambda: sharded.load(tmp_path / "0"),
            sharded.unshard,
        ]
        for number, change in enumerate(changes):
            before = clones(model.state_dict())
            saving = sharded.save_async(tmp_path / str(number))
            change()
            assert saving is not None
            saving.wait()
            assert same(tensors(tmp_path / str(number), "model"), before)
            if change is not changes[-1]:
                sharded.load_state_dict(doubled)
        return states[0]

    on_ranks(2, DECODER.build, rank)
