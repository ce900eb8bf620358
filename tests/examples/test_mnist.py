"""The MNIST program: its numbers against one process, its output, its data, its file."""

from __future__ import annotations

import gzip
import re
import struct
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise as sw
from examples import mnist
from tests.examples.run import EXAMPLES, lines_of, run, torchrun
from tests.ranks import gloo_group, outcomes_of

CPU = torch.device("cpu")
MNIST = EXAMPLES / "mnist.py"
LOSS = r"Train Epoch: \d+ \tLoss: \d+\.\d{6}"
ACCURACY = r"Test set: Average loss: \d+\.\d{4}, Accuracy: (\d+)/(\d+) \((\d+\.\d\d)%\)"


# --- the numbers -----------------------------------------------------------------------------


def images(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 1, 28, 28, generator=generator), torch.arange(count))


def net() -> mnist.Net:
    torch.manual_seed(1)
    model = mnist.Net()
    model.dropout1.p = model.dropout2.p = 0.0  # masks would differ
    return model


def two_epochs(rank: int, world: int, folder: str) -> tuple[str, list[list[int]]]:
    """What rank 0 prints of eight samples to train with and seven to test; each epoch's samples."""
    train, test = images(8), images(7)
    printed, orders = StringIO(), []
    with gloo_group(rank, world, folder), redirect_stdout(printed):
        sampler: DistributedSampler[Any] = DistributedSampler(train, seed=3)
        train_loader = DataLoader(train, 2, sampler=sampler)
        test_loader = DataLoader(test, 1, sampler=DistributedSampler(test, shuffle=False))
        model = net()
        with sw.connect() as comm:
            sw.shard(model, wrap=mnist.WRAPS["hand"], comm=comm)
            optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
            for epoch in (1, 2):
                mnist.train(model, CPU, train_loader, optimizer, epoch, sampler)
                orders.append(list(sampler))
            mnist.test(model, CPU, test_loader)
    return printed.getvalue(), orders


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*", text)]


def one_process(orders: list[list[list[int]]]) -> list[float]:
    """The same training, of both ranks' batches together; epoch and loss, twice, and the test."""
    train, test = images(8).tensors, images(7).tensors
    model, printed = net(), list[float]()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in (1, 2):
        total = 0.0
        for at in (0, 2):
            chosen = [index for order in orders for index in order[epoch - 1][at : at + 2]]
            loss = F.nll_loss(model(train[0][chosen]), train[1][chosen], reduction="sum")
            (loss / 2).backward()  # the mean over ranks
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        printed += [epoch, total / 8]
    output = model.eval()(test[0])
    right = int(output.argmax(1).eq(test[1]).sum())
    return [*printed, F.nll_loss(output, test[1]).item(), right, 7, 100 * right / 7]


@pytest.mark.spawn
def test_losses_and_accuracy_are_those_of_one_process_and_padding_does_not_count() -> None:
    outcomes = outcomes_of(2, two_epochs)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    (printed, _), (nothing, _) = (outcome.value for outcome in outcomes)
    orders = [outcome.value[1] for outcome in outcomes]
    assert nothing == ""
    assert numbers(printed) == pytest.approx(one_process(orders), rel=1e-3)
    for epoch in (0, 1):
        assert sorted(orders[0][epoch] + orders[1][epoch]) == list(range(8))  # disjoint
    assert orders[0][0] != orders[0][1]


# --- the program -----------------------------------------------------------------------------


def write_idx(path: Path, values: Tensor, *, packed: bool) -> None:
    head = struct.pack(f">BBBB{values.ndim}i", 0, 0, 8, values.ndim, *values.shape)
    data = head + values.to(torch.uint8).numpy().tobytes()
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


def write_mnist(folder: Path) -> None:
    """MNIST's four files, with 64 digits to train with and 7 to test; two of them packed."""
    folder.mkdir(parents=True)
    for part, count, packed in (("train", 64, True), ("t10k", 7, False)):
        pixels = torch.arange(count * 784).view(count, 28, 28) % 256
        write_idx(folder / f"{part}-images-idx3-ubyte", pixels, packed=packed)
        write_idx(folder / f"{part}-labels-idx1-ubyte", torch.arange(count) % 10, packed=packed)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.prove
def test_the_program_under_torchrun(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data" / "MNIST" / "raw")
    options = ("--epochs", 1, "--no-cuda", "--save-model", "--data", "data")
    lines, nothing = torchrun(MNIST, *options, folder=tmp_path)
    assert nothing == []
    table = lines_of("seeds.md")
    assert all(line in table for line in lines[:6])  # the units
    batch, lr, loss, accuracy, _, seconds, *model = lines[7:]
    assert batch == "global batch 128 = 64 × 2 ranks"
    assert lr == "Learning rate: 1.000000"
    assert re.fullmatch(LOSS, loss)
    matched = re.fullmatch(ACCURACY, accuracy)
    assert matched
    assert matched[2] == "7"
    assert re.fullmatch(r"CPU event elapsed time: \d+\.\d+sec", seconds)
    assert model == repr(mnist.Net()).splitlines()
    plain = mnist.Net()
    states = torch.load(tmp_path / "mnist_cnn.pt")
    plain.load_state_dict(states)
    assert {type(value) for value in states.values()} == {Tensor}


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.prove
def test_digits_are_recognised_and_two_runs_are_equal(tmp_path: Path) -> None:
    saved = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        lines = run(
            MNIST, "--epochs", 4, "--save-model", "--data", tmp_path, folder=tmp_path / name
        )
        assert lines[0] == "0 devices: 2 ranks on the CPU"
        assert "using built-in digits (offline)" in lines[1:3]  # test_toy may have taken the port
        accuracies = [match for line in lines if (match := re.fullmatch(ACCURACY, line))]
        assert {match[2] for match in accuracies} == {"257"}
        assert float(accuracies[-1][3]) >= 95
        saved.append(torch.load(tmp_path / name / "mnist_cnn.pt"))
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


# --- its parts -------------------------------------------------------------------------------


@pytest.mark.prove
def test_the_built_in_digits() -> None:
    (train, classes), (test, classes_of_test) = mnist.read_digits()
    assert (train.shape, classes.shape) == ((1540, 1, 28, 28), (1540,))
    assert (test.shape, classes_of_test.shape) == ((257, 1, 28, 28), (257,))
    assert train.std().item() == pytest.approx(1, abs=0.1)
    assert set(classes_of_test.tolist()) == set(range(10))


def test_the_options_are_the_documents() -> None:
    options = vars(mnist.parse_args([]))
    ours = {"data": Path("../data"), "wrap": "size"}
    documented = {"batch_size": 64, "test_batch_size": 1000, "epochs": 10, "lr": 1.0, "gamma": 0.7}
    assert options == {**ours, **documented, "no_cuda": False, "seed": 1, "save_model": False}


@pytest.mark.parametrize(
    ("devices", "no_cuda", "ranks", "printed"),
    [(8, False, 8, ""), (8, True, 2, "--no-cuda: "), (0, False, 2, "0 devices: ")],
)
def test_there_is_a_rank_for_each_device(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: int,
    no_cuda: bool,
    ranks: int,
    printed: str,
) -> None:
    monkeypatch.setattr(mnist, "device_count", lambda: devices)
    assert mnist.count_ranks(no_cuda) == ranks
    assert capsys.readouterr().out == (printed and f"{printed}2 ranks on the CPU\n")


def test_an_event_is_waited_for_before_its_time_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, device: torch.device, **options: Any) -> None:
            calls.append(f"made on {device}")

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            calls.append("elapsed_time")
            return 1500.0

    monkeypatch.setattr(torch, "Event", Event)
    device = torch.device("xpu", 1)
    assert mnist.seconds(mnist.now(device), mnist.now(device)) == 1.5
    assert calls == ["made on xpu:1", "record"] * 2 + ["synchronize", "elapsed_time"]
    assert mnist.seconds(mnist.now(CPU), mnist.now(CPU)) >= 0
