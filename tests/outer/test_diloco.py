"""Workers are threads, whose ranks are threads; their links are TCP on the loopback interface."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.comm.transports import threads
from shardwise.doctor.listeners import listeners
from shardwise.errors import ConfigError, RanksDisagree, ScheduleError
from shardwise.outer.common_start import MOMENTUM, START
from shardwise.outer.diloco import DiLoCo, place_of
from shardwise.outer.link import Link
from shardwise.outer.place import Place
from tests.copies import clones
from tests.optim.test_average import model as plain_model
from tests.ranks import run_threads
from tests.waiting import wait_for

AVERAGE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "wire": "float32"}
State = dict[str, Tensor]


def batch(step: int, worker: int, rank: int) -> Tensor:
    return torch.randn(
        4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * worker + rank)
    )


class Worker(NamedTuple):
    """One worker's rank, with all that it needs."""

    comm: Comm
    number: int
    addresses: list[str]

    def model(
        self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    ) -> tuple[nn.Module, sw.Sharded, torch.optim.Optimizer]:
        net = plain_model()
        sharded = sw.shard(net, comm=self.comm)
        return net, sharded, kind(net.parameters(), lr=0.05)

    def outer(
        self, sharded: sw.Sharded, optimizer: torch.optim.Optimizer, **options: Any
    ) -> DiLoCo:
        settings: dict[str, Any] = {"every": 4, "patience": 10.0, "timeout": 30.0, **options}
        return sw.DiLoCo(sharded, optimizer, workers=self.addresses, worker=self.number, **settings)

    def steps(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, outer: DiLoCo, steps: range
    ) -> None:
        for step in steps:
            net(batch(step, self.number, self.comm.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def run_workers(ranks: list[int], run: Callable[[Worker], Any]) -> list[list[Any]]:
    """``run`` on each rank of each worker; returns what each has returned."""
    addresses = free_addresses(len(ranks))

    def work(number: int) -> list[Any]:
        return threads.run(ranks[number], lambda comm: run(Worker(comm, number, addresses)), 60.0)

    with ThreadPoolExecutor(len(ranks)) as pool:
        workers = [pool.submit(work, number) for number in range(len(ranks))]
        for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
            worker.result()  # what went wrong first, and not who waited for that worker
        return [worker.result() for worker in workers]


def largest_difference(one: State, other: State) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard"])
def test_averaging_after_each_step_is_the_synchronous_run(strategy: str) -> None:
    def apart(worker: Worker) -> State:
        net = plain_model()
        sharded = sw.shard(net, strategy, comm=worker.comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = worker.outer(sharded, optimizer, every=1, **AVERAGE)
        assert {one.address for one in listeners([os.getpid()])} == {"127.0.0.1"}
        worker.steps(net, optimizer, outer, range(5))
        outer.close()
        return clones(net.state_dict())

    def together(comm: Comm) -> State:
        net = plain_model()
        sw.shard(net, strategy, comm=comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            net(batch(step, *divmod(comm.rank, 2))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return clones(net.state_dict())

    expected = run_threads(4, together)[0]
    for ranks in run_workers([2, 2], apart):
        assert largest_difference(ranks[0], expected) < 1e-6


def test_one_worker_does_what_the_papers_algorithm_says() -> None:
    """With SGD of torch as the outer optimizer, on a plain model that is one unit."""

    def run(worker: Worker) -> State:
        net = plain_model()
        sharded = sw.shard(net, wrap=sw.wrap.whole(), comm=worker.comm)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        outer = worker.outer(sharded, optimizer, delay=0, wire="float32")
        worker.steps(net, optimizer, outer, range(8))
        outer.close()
        return clones(net.state_dict())

    net = plain_model()
    start = [param.detach().clone().requires_grad_() for param in net.parameters()]
    outer = torch.optim.SGD(start, lr=0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(8):
        net(batch(step, 0, 0)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        if step % 4 == 3:
            with torch.no_grad():
                for of_start, param in zip(start, net.parameters(), strict=True):
                    of_start.grad = of_start - param
                outer.step()
                for of_start, param in zip(start, net.parameters(), strict=True):
                    param.copy_(of_start)
    [[ours]] = run_workers([1], run)
    assert largest_difference(ours, clones(net.state_dict())) < 1e-6


@pytest.mark.parametrize(("wire", "bytes_each"), [("float32", 4), ("float16", 2), ("int8", 1.1)])
def test_bytes_are_those_of_one_exchange_in_a_round(wire: str, bytes_each: float) -> None:
    def run(worker: Worker) -> tuple[dict[str, int], int]:
        net, sharded, optimizer = worker.model()
        outer = worker.outer(sharded, optimizer, every=4, wire=wire)
        worker.steps(net, optimizer, outer, range(8))
        outer.finish()
        nbytes = outer.nbytes
        outer.close()
        return nbytes, sharded.numel()

    for [(nbytes, numel)] in run_workers([1, 1], run):
        expected = 2 * numel * bytes_each  # two rounds
        assert expected <= nbytes["sent"] <= 1.2 * expected + 200
        assert expected <= nbytes["received"] <= 1.2 * expected + 200


def test_workers_of_any_number_of_ranks_have_the_same_start() -> None:
    all_are_done = threading.Barrier(6)

    def run(worker: Worker) -> tuple[State, list[int], dict[str, int]]:
        net, sharded, optimizer = worker.model()
        outer = worker.outer(sharded, optimizer, delay=0)
        worker.steps(net, optimizer, outer, range(8))
        present = outer.workers
        all_are_done.wait(20)
        outer.close()
        return clones(net.state_dict()), present, dict(outer.updates)

    (first, *_), (second, *_), (third, *_) = run_workers([2, 1, 3], run)
    assert first[1] == [0, 1, 2]
    assert set(first[2].values()) == {2}
    # The last unit was exchanged after the last step; the others have trained since, apart.
    last = {name: value for name, value in first[0].items() if name.startswith("3.")}
    for other in (second, third):
        assert largest_difference(last, other[0]) == 0


def test_a_lost_leader_stops_nobody_and_a_worker_that_returns_has_the_others_state() -> None:
    """Worker 0 leads, is lost after four steps, and comes back with its first values."""
    lost, alone, back = threading.Event(), threading.Event(), threading.Event()
    last: list[int] = []  # the step at which both end, which worker 0 chooses when it is back

    def run(worker: Worker) -> tuple[State, dict[str, int], list[int]]:
        net, sharded, optimizer = worker.model()
        outer = worker.outer(sharded, optimizer, delay=0)
        worker.steps(net, optimizer, outer, range(4))
        if worker.number == 0:
            outer.close()
            lost.set()
            wait_for(alone.is_set)
            net, sharded, optimizer = worker.model()
            outer = worker.outer(sharded, optimizer, delay=0)
            assert outer.steps >= 8  # it goes on where the others are
            told = place_of(worker.addresses, 1).ask(0)
            updates = sum(outer.updates.values())
            assert told == {"leads": False, "begun": False, "updates": updates}
            last.append(outer.steps - outer.steps % -4 + 4)
            back.set()
        else:
            wait_for(lost.is_set)
            worker.steps(net, optimizer, outer, range(4, 8))
            alone.set()
            step = 8
            while not back.wait(0.01):
                worker.steps(net, optimizer, outer, range(step, step + 1))
                step += 1
        worker.steps(net, optimizer, outer, range(outer.steps, last[0]))
        result = clones(net.state_dict()), dict(outer.updates), outer.workers
        outer.close()
        return result

    first, second = (ranks[0] for ranks in run_workers([1, 1], run))
    assert first[1]["3"] == second[1]["3"] >= 3
    assert torch.equal(first[0]["3.weight"], second[0]["3.weight"])


def test_a_worker_whose_parameters_are_not_finite_sends_nothing_and_stops() -> None:
    def run(worker: Worker) -> State:
        net, sharded, optimizer = worker.model()
        outer = worker.outer(sharded, optimizer, delay=0)
        worker.steps(net, optimizer, outer, range(3))
        if worker.number == 0:
            with torch.no_grad():
                net.get_parameter("3.weight").mul_(float("inf"))
            with pytest.raises(ScheduleError, match="parameters of 3 are not finite after step 4"):
                outer.step()
        else:
            worker.steps(net, optimizer, outer, range(3, 8))
        outer.close()
        return clones(net.state_dict())

    (_, alone) = run_workers([2, 1], run)
    assert all(value.isfinite().all() for value in alone[0].values())


def test_a_worker_that_is_ahead_keeps_its_steps_and_waits_for_the_mean() -> None:
    def run(worker: Worker) -> tuple[int, State]:
        net = plain_model()
        sharded = sw.shard(net, wrap=sw.wrap.whole(), comm=worker.comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.param_groups[0]["outer_step"] = 2 * worker.number  # of its checkpoint
        outer = worker.outer(sharded, optimizer, delay=0)
        start = outer.steps
        worker.steps(net, optimizer, outer, range(start, 4))
        outer.close()
        return start, clones(net.state_dict())

    (one,), (other,) = run_workers([1, 1], run)
    assert (one[0], other[0]) == (0, 2)
    assert largest_difference(one[1], other[1]) == 0.0


def test_a_worker_that_returns_while_a_mean_is_on_its_way_gets_it() -> None:
    """The leader had formed it, alone; who joined then sent its part, and waited for that mean."""
    lost, sent, done = threading.Event(), threading.Event(), threading.Barrier(2)

    def run(worker: Worker) -> State:
        net = plain_model()
        sharded = sw.shard(net, wrap=sw.wrap.whole(), comm=worker.comm)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        outer = worker.outer(sharded, optimizer, every=3, delay=1)
        if worker.number == 1:
            outer.close()
            lost.set()
            wait_for(sent.is_set)
            outer = worker.outer(sharded, optimizer, every=3, delay=1)
        else:
            wait_for(lost.is_set)
            worker.steps(net, optimizer, outer, range(3))
            sent.set()
            link = outer._on_rank_0
            wait_for(lambda: link._joining)
            worker.steps(net, optimizer, outer, range(3, 4))  # it is admitted, and the mean applied
            wait_for(lambda: link._ready or 1 in link._tally.present)
        worker.steps(net, optimizer, outer, range(outer.steps, 9))
        outer.finish()
        assert (outer.workers, set(outer.updates.values())) == ([0, 1], {3})
        done.wait(20)
        outer.close()
        return clones(net.state_dict())

    (first,), (second,) = run_workers([1, 1], run)
    assert largest_difference(first, second) == 0


def test_who_leads_next_sends_what_was_due_before_it_came_since_others_wait_for_it() -> None:
    """Worker 2 has sent a unit; worker 1 comes after that step; worker 0 is lost without a mean."""
    away, sent, back = (threading.Event() for _ in range(3))
    links: dict[int, Link] = {}

    def run(worker: Worker) -> None:
        net, sharded, optimizer = worker.model(torch.optim.SGD)
        outer = worker.outer(sharded, optimizer, every=4, delay=1)  # the first is sent at step 1
        links[worker.number] = outer._on_rank_0
        if worker.number == 0:
            wait_for(sent.is_set)
            outer._start.step = 1  # and its own part was not sent

            def takes_part() -> bool:
                outer._admit(expected=False)
                return 1 in links[0]._tally.present

            wait_for(takes_part)
            wait_for(back.is_set)
            outer.close()
            return
        if worker.number == 1:
            outer.close()
            away.set()
            wait_for(sent.is_set)
            outer = worker.outer(sharded, optimizer, every=4, delay=1)
            back.set()
        else:
            wait_for(away.is_set)
            wait_for(lambda: 0 in links and 1 not in links[0]._followers)
            worker.steps(net, optimizer, outer, range(1))
            sent.set()
        assert outer.steps == 1
        worker.steps(net, optimizer, outer, range(1, 5))
        outer.close()

    run_workers([1, 1, 1], run)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_resumed_worker_continues_exactly(
    tmp_path: Path, optimizer_class: Callable[..., torch.optim.Optimizer]
) -> None:
    all_have_stopped = threading.Barrier(3)

    def run(worker: Worker, stops: bool) -> State:
        folder = tmp_path / f"{stops}-{worker.number}"
        net, sharded, optimizer = worker.model(optimizer_class)
        outer = worker.outer(sharded, optimizer, delay=1)
        worker.steps(net, optimizer, outer, range(6))
        outer.finish()
        if stops:
            sharded.save(folder, optimizer)
            outer.close()
            all_have_stopped.wait(20)
            net, sharded, optimizer = worker.model(optimizer_class)
            sharded.load(folder, optimizer)
            outer = worker.outer(sharded, optimizer, delay=1)
        assert outer.steps == 6
        worker.steps(net, optimizer, outer, range(6, 10))
        outer.finish()
        outer.close()
        return clones(net.state_dict())

    straight = run_workers([2, 1], lambda worker: run(worker, stops=False))
    resumed = run_workers([2, 1], lambda worker: run(worker, stops=True))
    for one, other in zip(straight, resumed, strict=True):
        assert largest_difference(one[0], other[0]) == 0


def test_the_start_of_a_model_in_bfloat16_stays_float32_where_flat_state_is_loaded(
    tmp_path: Path,
) -> None:
    def model(comm: Comm) -> tuple[nn.Module, sw.Sharded, sw.optim.AdamW]:
        net = plain_model().bfloat16()
        sharded = sw.shard(net, comm=comm)
        return net, sharded, sw.optim.AdamW(sharded, lr=0.05)

    def step(net: nn.Module, optimizer: sw.optim.AdamW) -> list[Tensor]:
        net(batch(0, 0, 0).bfloat16()).square().mean().backward()
        optimizer.step()
        return [optimizer.state[p][name] for p in net.parameters() for name in (START, MOMENTUM)]

    def run(worker: Worker) -> None:
        net, sharded, optimizer = model(worker.comm)
        outer = worker.outer(sharded, optimizer, every=1)
        for _ in range(2):
            net(batch(0, 0, 0).bfloat16()).square().mean().backward()
            optimizer.step()
            outer.step()
        sharded.save(tmp_path / "step-2", optimizer)
        outer.close()
        other_net, other, loaded = model(worker.comm)
        other.load(tmp_path / "step-2", loaded)
        torch.testing.assert_close(step(other_net, loaded), step(net, optimizer), rtol=0, atol=0)

    run_workers([1], run)


@pytest.mark.parametrize("flat", [False, True])
def test_the_start_of_a_model_in_bfloat16_is_float32_again_after_a_state_dict(flat: bool) -> None:
    """torch loads all state in a parameter's dtype, in which small moves of the start are lost."""

    def run(worker: Worker) -> None:
        net = plain_model().bfloat16()
        sharded = sw.shard(net, comm=worker.comm)

        def new_optimizer() -> torch.optim.Optimizer:
            return sw.optim.AdamW(sharded) if flat else torch.optim.AdamW(net.parameters())

        def step(optimizer: torch.optim.Optimizer, outer: sw.DiLoCo) -> None:
            net(batch(0, 0, 0).bfloat16()).square().mean().backward()
            optimizer.step()
            outer.step()

        first, second = new_optimizer(), new_optimizer()
        outer = worker.outer(sharded, first, every=1)
        step(first, outer)
        step(first, outer)
        outer.close()
        second.load_state_dict(first.state_dict())
        outer = worker.outer(sharded, second, every=1)
        step(second, outer)
        outer.close()
        for param in net.parameters():
            assert {second.state[param][key].dtype for key in (START, MOMENTUM)} == {torch.float32}

    run_workers([2], run)


def test_a_worker_that_is_to_stop_waits_for_nobody() -> None:
    stop, left = threading.Event(), threading.Event()

    def run(worker: Worker) -> tuple[State, bool]:
        net, sharded, optimizer = worker.model()
        if worker.number:
            outer = worker.outer(sharded, optimizer)
            wait_for(left.is_set)
        else:
            outer = worker.outer(sharded, optimizer, stops=stop.is_set)
            stop.set()
        worker.steps(net, optimizer, outer, range(4))
        left.set()
        outer.finish()
        outer.close()
        return clones(net.state_dict()), outer.has_left

    def alone(comm: Comm) -> State:
        net, _, optimizer = Worker(comm, 0, []).model()
        for step in range(4):
            net(batch(step, 0, comm.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return clones(net.state_dict())

    (stopped, *_), [going_on] = run_workers([2, 1], run)
    assert (stopped[1], going_on[1]) == (True, False)
    assert largest_difference(stopped[0], run_threads(2, alone)[0]) == 0.0


def test_parameters_of_another_optimizer_are_averaged_and_a_warning_says_what_is_not_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(worker: Worker) -> None:
        net, sharded, _ = worker.model()
        one, *others = net.parameters()
        optimizers = [torch.optim.AdamW(of, lr=0.05) for of in ([one], others)]
        outer = worker.outer(sharded, optimizers[0], every=1)
        for step in range(2):
            net(batch(step, 0, 0)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            outer.step()
        outer.close()
        for optimizer, count in zip(optimizers, (1, len(others)), strict=True):
            assert len(optimizer.state_dict()["state"]) == count

    run_workers([1], run)
    assert "AdamW does not hold 6 of the model's trained parameters" in caplog.text


def test_unlike_workers_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    def run(worker: Worker) -> str:
        _, sharded, optimizer = worker.model()
        if worker.number == 0:
            outer = worker.outer(sharded, optimizer, timeout=1.0, patience=2.0)
            outer.close()
            return ""
        with pytest.raises(RanksDisagree) as refused:
            worker.outer(sharded, optimizer, every=5)
        return str(refused.value)

    [_], [text] = run_workers([1, 1], run)
    assert "worker 1 has every 5, and worker 0, which leads, has 4" in text
    assert "workers [0] of 2 are there and begin" in caplog.text


def test_a_worker_with_another_token_is_refused() -> None:
    addresses = [(host, int(port)) for host, port in (a.split(":") for a in free_addresses(2))]
    link = Link(Place(addresses, 0, b"secret"), {}, {}, lambda _key, parts: parts[0])
    told = Place(addresses, 1, b"secret").ask(0)
    assert told == {"leads": False, "begun": False, "updates": 0}
    with pytest.raises(ConfigError, match="another run token"):
        Place(addresses, 1, b"guessed").ask(0)
    link.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": ["10.0.0.1:1", "10.0.0.2:1"], "worker": 0}, "openssl rand"),
        ({"workers": ["127.0.0.1:1"], "worker": 1}, "from 0 to 0"),
        ({"workers": ["somewhere"], "worker": 0}, "HOST:PORT"),
        ({"workers": ["127.0.0.1:1"] * 2, "worker": 0}, "each needs an address of its own"),
        ({"workers": ["192.0.2.1:9999"], "worker": 0, "token": "x"}, "cannot listen"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sent(
    options: dict[str, Any], words: str
) -> None:
    def run(comm: Comm) -> None:
        _, sharded, optimizer = Worker(comm, 0, []).model()
        with pytest.raises(ConfigError, match=words):
            sw.DiLoCo(sharded, optimizer, **options)

    run_threads(1, run)
