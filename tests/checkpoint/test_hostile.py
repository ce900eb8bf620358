"""A checkpoint from wherever: a clear error, or the right tensors. No crash, no big memory.

Bytes that changed by accident are found by checksums (``test_damage``). Here the checksums fit, or
there are none: somebody else wrote the folder, by mistake or with intent.
"""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import checksum
from shardwise.checkpoint.collectives import all_gather_object
from shardwise.checkpoint.manifest import NAME, Manifest, record_of
from shardwise.comm.protocol import Comm
from tests.checkpoint.runs import adamw
from tests.copies import error_text, on_ranks, seeded

MOST = 32 << 20
"""Bytes that reading may allocate beside the model: the sizes below announce up to 2^60."""

NASTY: list[Any] = [
    *(0, 1, -1, 7, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, 0.0, -0.5, 1e308),
    *(float("nan"), float("inf"), True, None, "", "x", "F32", "BF16", "F8_E4M3", "C64", "U4"),
    *("..", "../../etc/passwd", "/etc/passwd", "a/b", "C:\\x", "\0", "\ud800", "é" * 300, "$tuple"),
    *([], [0], [0, 0], [8, 0], [0, 2**62], [-1, 7], [2**40, 2**40], ["x"], [[]], [None, None]),
    *({}, {"x": 1}, {"$tuple": 5}, {"$dict": [[[1], 2]]}, {"$float": "y"}, {"$new": 1}),
    *({"$bytes": "?"}, {"$tensor": {}}, {"$array": {"dtype": "F32", "shape": [3], "data": "AA=="}}),
    {"$tensor": {"dtype": "F32", "shape": [2**33], "data": ""}},
    {"$tensor": {"dtype": "F32", "shape": [-1], "data": "AAAA"}},
    {"$set": [[1]]},
    {"$counter": [[1]]},
]


DEEP = "a list in a list in a list …"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 2, bias=False)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


def mutated(value: Any, chance: random.Random) -> Any:
    """The same tree with one to three of its parts replaced, removed, doubled or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice([1, 1, 2, 3])):
        parents = list(_parents(value))
        if not parents:
            return chance.choice(NASTY)
        parent, key = chance.choice(parents)
        kind = chance.choice(["replace", "replace", "remove", "copy", "rename", "deep"])
        if kind == "replace":
            parent[key] = chance.choice(NASTY)
        elif kind == "remove":
            del parent[key]
        elif kind == "deep":
            parent[key] = DEEP
        elif isinstance(parent, dict):
            new = chance.choice(["x", "", "a.weight", "../x", "__metadata__", "digest", "$set"])
            parent[new] = parent.pop(key) if kind == "rename" else parent[key]
        else:
            parent.append(parent[key])
    return value


def _parents(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _parents(inner)


def text_of(value: Any, chance: random.Random) -> bytes:
    """The header as JSON, now and then with bytes that are none, or a name that occurs twice."""
    depth = chance.choice([3, 500, 5000])
    text = json.dumps(value).replace(json.dumps(DEEP), "[" * depth + "]" * depth)
    data = bytearray(text.encode())
    if data and chance.random() < 0.1:
        at = chance.randrange(len(data))
        data[at : at + 1] = chance.choice([b"\xff", b"NaN", b"{", b'"a":1,"a":', b"\0", b"1e999"])
    return bytes(data)


@pytest.fixture(scope="module")
def model() -> tuple[Two, sw.Sharded, torch.optim.Optimizer]:
    """One for all: a load that is refused leaves it as it was, or says so."""
    torch.manual_seed(0)
    module = Two()
    sharded = sw.shard(module)
    optimizer = adamw(module.parameters())
    module(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, sharded, optimizer


def outcome(do: Callable[[], object]) -> bool:
    """Did it succeed? Any error but ours is raised, and so is the use of much memory."""
    tracemalloc.start()
    try:
        do()
    except sw.CheckpointError:
        return False
    else:
        return True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST


# --- headers ---------------------------------------------------------------------------------


def test_headers_are_refused_or_right(
    model: tuple[Two, sw.Sharded, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Through ``load``, of a folder without a manifest, where the header is all there is."""
    module, sharded, _ = model
    truth = {name: value.clone() for name, value in seeded(Two, 1).state_dict().items()}
    path = tmp_path / "model.safetensors"
    save_file(truth, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    chance = random.Random(5)
    loaded = 0
    for _ in range(300):
        text = text_of(mutated(header, chance), chance)
        text += b" " * chance.choice([0, 0, 1, 7])
        announced = len(text) if chance.random() < 0.95 else chance.choice([0, 1, 2**40, 2**63])
        path.write_bytes(announced.to_bytes(8, "little") + text + body[: chance.choice([None, -1])])
        if outcome(lambda: sharded.load(tmp_path)):
            loaded += 1
            state = module.state_dict()
            assert all(torch.equal(state[name], truth[name]) for name in truth), text
    assert 0 < loaded < 300  # such as another __metadata__, or white space


# --- JSON beside them ------------------------------------------------------------------------


@pytest.fixture
def folder(model: tuple[Two, sw.Sharded, torch.optim.Optimizer], tmp_path: Path) -> Path:
    """A checkpoint with an index, and with values of every kind."""
    _, sharded, optimizer = model

    class Taken:
        def state_dict(self) -> dict[str, Any]:
            return {"last": 3, "rates": (0.1, float("inf")), "table": torch.ones(2)}

    values = {1: b"x", "s": {1, 2}, "n": [None, True]}
    training = sw.Training(step=1, scheduler=Taken(), position=values)  # type: ignore[arg-type]
    sharded.save(tmp_path / "step-1", optimizer, training, max_file_size=60)
    return tmp_path / "step-1"


class Taken:
    """A scheduler that takes whatever it is given, as many do, until it uses it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        dict(state_dict)


def sign(folder: Path, changes: dict[str, Any] | None = None) -> None:
    """A manifest whose checksums fit what is there, as somebody writes it who knows how."""
    fields = json.loads((folder / NAME).read_text())
    fields.pop("digest", None)
    for name in fields["files"]:
        data = (folder / name).read_bytes()
        fields["files"][name] = record_of(checksum.of_bytes(data), len(data)).model_dump()
    manifest = Manifest.model_validate({**fields, **(changes or {})})
    (folder / NAME).write_bytes(manifest.encode())


@pytest.mark.parametrize(
    "name",
    [
        "training.json",
        *(
            pytest.param(f"{name}.safetensors.index.json", marks=pytest.mark.prove)
            for name in ("model", "training/optimizer")
        ),
    ],
)
def test_json_whose_checksums_fit_is_refused_or_loads(
    name: str, folder: Path, model: tuple[Two, sw.Sharded, torch.optim.Optimizer]
) -> None:
    _, sharded, optimizer = model
    good = json.loads((folder / name).read_text())
    chance = random.Random(6)
    refused = 0
    for _ in range(60):
        (folder / name).write_bytes(text_of(mutated(good, chance), chance))
        sign(folder)
        training = sw.Training(scheduler=Taken())
        refused += not outcome(lambda t=training: sharded.load(folder, optimizer, t))  # type: ignore[misc]
    assert refused > 0


def test_manifests_are_refused_or_load(
    folder: Path, model: tuple[Two, sw.Sharded, torch.optim.Optimizer]
) -> None:
    from shardwise.checkpoint.manifest import _digest

    _, sharded, _ = model
    good = json.loads((folder / NAME).read_text())
    good.pop("digest")
    chance = random.Random(7)
    refused = 0
    for _ in range(80):
        fields = mutated(good, chance)
        if isinstance(fields, dict) and chance.random() < 0.9:
            fields.pop("digest", None)
            fields["digest"] = _digest(fields)
        (folder / NAME).write_bytes(text_of(fields, chance))
        refused += not outcome(lambda: sharded.load(folder))
    assert refused > 45


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "training.json", NAME])
def test_a_folder_without_a_file_that_its_manifest_does_not_list(
    name: str, folder: Path, model: tuple[Two, sw.Sharded, torch.optim.Optimizer]
) -> None:
    """As if somebody had taken it out of the list, and signed."""
    _, sharded, optimizer = model
    files = json.loads((folder / NAME).read_text())["files"]
    files.pop(name, None)
    sign(folder, {"files": files})
    loads = outcome(lambda: sharded.load(folder, optimizer, sw.Training(scheduler=Taken())))
    assert loads == (name == NAME)


def test_the_folder_of_the_tests_above_loads(
    folder: Path, model: tuple[Two, sw.Sharded, torch.optim.Optimizer], tmp_path: Path
) -> None:
    _, sharded, optimizer = model
    sign(Path(shutil.copytree(folder, tmp_path / "copy")))
    report = sharded.load(tmp_path / "copy", optimizer, sw.Training(scheduler=Taken()))
    assert report.position == {1: b"x", "s": {1, 2}, "n": [None, True]}


def test_what_cannot_be_understood_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    """Here only rank 1 misses something: its own values."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "step-1", training=sw.Training(step=1))
        if comm.rank == 0:
            fields = json.loads((tmp_path / "step-1" / "training.json").read_text())
            fields["local"].pop()
            (tmp_path / "step-1" / "training.json").write_text(json.dumps(fields))
            sign(tmp_path / "step-1")
        all_gather_object(comm, "", "signed")
        return error_text(sw.CheckpointError, lambda: sharded.load(tmp_path / "step-1"))

    one, other = on_ranks(2, Two, rank)
    assert one == other
    assert one.startswith("rank 1: ")
    assert "has state that cannot be read" in one
    assert "Nothing of it was used. Load another checkpoint" in one
