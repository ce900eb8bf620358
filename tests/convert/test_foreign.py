"""Foreign pickles: never here, never without trust, and with it in a process that may do little.

The canary is a pickle that makes a folder, where it may, and becomes the number of the process
that opened it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import shardwise as sw
from shardwise.convert import foreign, worker
from shardwise.convert.dcp_import import import_checkpoint
from shardwise.convert.foreign import opened

PROCESS = "__import__('os').getpid()"


class Canary:
    """Runs code where it is unpickled, and becomes what ``result`` says."""

    def __init__(self, folder: Path, result: str = PROCESS, code: str = "") -> None:
        made = f"try: __import__('os').mkdir({str(folder / 'fired')!r})\nexcept OSError: pass\n"
        self.code = f"(ns := {{}}, exec({made + code!r}, ns), eval({result!r}, ns))[-1]"

    def __reduce__(self) -> Any:
        return eval, (self.code,)


def dcp_folder(folder: Path, planner_data: Any = None, item: Any = 3) -> Path:
    """A DCP folder of one tensor and one value, made by hand."""
    folder.mkdir()
    parts = {"w": io.BytesIO(), "extra": io.BytesIO()}
    torch.save(torch.arange(4.0), parts["w"])
    torch.save(item, parts["extra"])
    data = b"".join(part.getvalue() for part in parts.values())
    (folder / "__0_0.distcp").write_bytes(data)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [chunk])
    first = len(parts["w"].getvalue())
    places = {
        MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, first),
        MetadataIndex("extra"): _StorageInfo("__0_0.distcp", first, len(data) - first),
    }
    listed: dict[str, Any] = {"w": tensor, "extra": BytesStorageMetadata()}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(listed, planner_data, places)))
    return folder


def hostile(kind: str, folder: Path) -> Path:
    """A checkpoint of this kind that is otherwise in order."""
    if kind == ".metadata":
        return dcp_folder(folder / "dcp", {"w": Canary(folder, f"('w', {PROCESS})")})
    if kind == "byte item":
        return dcp_folder(folder / "dcp", item=Canary(folder))
    torch.save({"w": torch.arange(4.0), "extra": Canary(folder)}, folder / "a.pt")
    return folder / "a.pt"


KINDS = (".metadata", "byte item", ".pt")


@pytest.mark.parametrize("kind", KINDS)
def test_the_canary_fires_where_it_is_opened(kind: str, tmp_path: Path) -> None:
    list(worker.opened(hostile(kind, tmp_path), trust=True))  # else the tests below say nothing
    assert (tmp_path / "fired").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_without_trust_it_does_not_fire(kind: str, tmp_path: Path) -> None:
    source = hostile(kind, tmp_path)
    with pytest.raises(sw.CheckpointError) as error:
        import_checkpoint(source, tmp_path / "out")
    assert foreign.FLAG in str(error.value)
    assert "--trust-source" in str(error.value)
    with pytest.raises(worker.Refused):  # the other process, without what holds it back
        list(worker.opened(source, trust=False))
    assert not (tmp_path / "fired").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_with_trust_it_fires_in_the_other_process_alone(kind: str, tmp_path: Path) -> None:
    with opened(hostile(kind, tmp_path), trust=True) as found:
        parts = [part for tensor in found.tensors for part in tensor.path]
        (process,) = [
            n for n in [*parts, *(v.value for v in found.values)] if type(n) is int and n > 3
        ]
        assert process == found._talk.process.pid
        assert process != os.getpid()
        assert found.read(found.tensors[0]).view("float32").tolist() == [0, 1, 2, 3]


TRIES = """
import os, resource, socket
def tried(act):
    try:
        return str(act())
    except OSError as error:
        return type(error).__name__
told = {
    "environment": sorted(os.environ),
    "folder": os.getcwd(),
    "file size": resource.getrlimit(resource.RLIMIT_FSIZE),
    "processes": resource.getrlimit(resource.RLIMIT_NPROC),
    "write": tried(lambda: os.write(os.open(MINE, os.O_WRONLY | os.O_CREAT), b"x" * 99)),
    "signal": tried(lambda: os.kill(os.getppid(), 0)),
    "fork": tried(lambda: os.fork() or os._exit(0)),
    "execute": tried(lambda: os.execv("/bin/true", ["true"])),
    "socket": tried(lambda: socket.socket(socket.AF_UNIX)),
    "limits": tried(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE)),
    "remove": tried(lambda: os.remove(MINE)),
    "make": tried(lambda: os.mkdir(MINE + "s")),
}
"""


def told_by(code: str, folder: Path) -> dict[str, Any]:
    """What code in a pickle found out."""
    torch.save({"w": torch.ones(1), "extra": Canary(folder, "told", code)}, folder / "a.pt")
    with opened(folder / "a.pt", trust=True) as found:
        return {str(value.path[1]): value.value for value in found.values}


def test_what_it_may_do_there_is_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    (tmp_path / "mine").write_text("mine")
    told = told_by(f"MINE = {str(tmp_path / 'mine')!r}\n{TRIES}", tmp_path)
    assert "SECRET_TOKEN" not in told["environment"]
    assert "HOME" not in told["environment"]
    assert told["folder"] == "/"
    assert told["file size"] == told["processes"] == {"$tuple": [0, 0]}
    assert "Error" in told["write"]
    acts = ["signal", "fork", "execute", "socket", "limits"] if seccomp() else []
    acts += ["execute", "remove", "make"] if landlock() else []
    assert {act: told[act] for act in acts} == dict.fromkeys(acts, "PermissionError")
    if landlock():
        assert (tmp_path / "mine").read_text() == "mine"


def seccomp() -> bool:
    return sys.platform == "linux" and platform.machine() in worker.CALLS


def landlock() -> bool:
    return bool(ctypes.CDLL(None).syscall(worker.CREATE_RULESET, None, 0, 1) >= 1)


def test_without_trust_it_has_no_more_memory_than_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[int, Any] = {}
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    (tmp_path / "a.pt").write_bytes(b"x" * 1000)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    worker.bound(tmp_path / "a.pt", trust=False)
    assert 1 << 30 < limits[resource.RLIMIT_AS][0] < 1 << 45


@pytest.mark.parametrize("shape", [(1 << 31,), (4, 3)])
def test_a_tensor_larger_than_what_the_file_holds_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(shape[-1] if len(shape) > 1 else 1).expand(shape)}, tmp_path / "a")
    with (
        pytest.raises(sw.CheckpointError, match="repeats them"),
        opened(tmp_path / "a", trust=False),
    ):
        pass


def test_very_many_names_for_the_same_bytes_are_refused(tmp_path: Path) -> None:
    shared = torch.ones(1000)
    torch.save({"a": shared, "tied": shared}, tmp_path / "a")
    with opened(tmp_path / "a", trust=False) as found:
        assert len(found.tensors) == 2
    torch.save({str(n): shared for n in range(65)}, tmp_path / "a")
    with pytest.raises(sw.CheckpointError, match="many names"), opened(tmp_path / "a", trust=False):
        pass


@pytest.mark.parametrize("value", [torch.ones(2), 5, {}], ids=["a tensor", "a number", "nothing"])
def test_a_file_without_names_is_said(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    with (
        pytest.raises(sw.CheckpointError, match="and no names"),
        opened(tmp_path / "a.pt", trust=False),
    ):
        pass


def test_nothing_of_torch_is_pickled_where_training_runs() -> None:
    text = Path(foreign.__file__).read_text("utf-8")
    assert "pickle.load" not in text
    assert "torch.load" not in text


def test_a_tensor_comes_as_it_is(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    states = {"a": whole.t(), "b": whole[1:, ::2], "c": torch.tensor(5), "d": torch.empty(0, 3)}
    torch.save(states, tmp_path / "a.pt")
    with opened(tmp_path / "a.pt", trust=False) as found:
        for tensor in found.tensors:
            value = states[str(tensor.path[0])]
            assert (tensor.shape, tensor.nbytes) == (value.shape, value.nbytes)
            assert found.read(tensor).tobytes() == value.contiguous().numpy().tobytes()


def test_a_file_of_an_old_torch_is_read_too(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with opened(tmp_path / "a.pt", trust=False) as found:
        assert found.read(found.tensors[0]).view("float32").tolist() == [1.0, 1.0, 1.0]


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "a.pt")
    with (
        pytest.raises(sw.CheckpointError, match="'complex128', which safetensors has no name"),
        opened(tmp_path / "a.pt", trust=False),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "says"),
    [("none.pt", "it is not there"), ("folder", r"no \.metadata"), ("text.pt", "cannot be read")],
)
def test_what_is_no_checkpoint_is_said(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(sw.CheckpointError, match=says), opened(tmp_path / name, trust=False):
        pass


LIES: dict[str, Any] = {
    "no JSON": "hello",
    "no object": [],
    "no list": {"items": 3},
    "no path": {"items": [{"dtype": "float32", "shape": [1]}]},
    "a path of dicts": {"items": [{"path": [{}], "value": 1}]},
    "no path in it": {"items": [{"path": [], "value": 1}]},
    "a refusal of numbers": {"refused": 5},
    "a refusal of dicts": {"refused": {"a": 1}},
    "no texts": {"items": [{"path": ["\ud800"], "dtype": "float32", "shape": [1]}]},
    "no number": '{"items": [{"path": ["a"], "value": 1e999}]}',
    "a value too deep": '{"items": [{"path": ["a"], "value": ' + "[" * 99 + "]" * 99 + "}]}",
    "far too deep": "[" * 100_000,
    "more than the file": {"items": [{"path": ["a"], "dtype": "uint8", "shape": [1 << 30]}]},
    "a negative shape": {"items": [{"path": ["a"], "dtype": "float32", "shape": [-1]}]},
    "a huge shape": {"items": [{"path": ["a"], "dtype": "float32", "shape": [1 << 40, 1 << 40]}]},
    "a shape of texts": {"items": [{"path": ["a"], "dtype": "float32", "shape": ["1"]}]},
    "an unknown dtype": {"items": [{"path": ["a"], "dtype": "system", "shape": [1]}]},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_worker_that_was_taken_over_is_not_believed(
    lie: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lie if isinstance(lie, str) else json.dumps(lie)
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.stdin.readline()\nprint({text!r}, flush=True)\n")
    monkeypatch.setattr(worker, "__file__", str(script))
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(sw.CheckpointError), opened(tmp_path / "a.pt", trust=True):
        pass


READS: dict[str, tuple[str, str]] = {
    "ends": ("", "'a' could not be read: it ended with status 0"),
    "ends with fewer": ('{"nbytes": 8}\n123', "it ended with status 0"),
    "says another size": ('{"nbytes": 9}\n', "it has 9 bytes"),
    "says why not": ('{"refused": ["OSError: gone"]}\n', "OSError: gone"),
    "says nonsense": ("[]\n", "it is no object"),
}


@pytest.mark.parametrize(("said", "why"), READS.values(), ids=READS)
def test_a_tensor_that_does_not_come_is_an_error_that_says_why(
    said: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"items": [{"path": ["a"], "dtype": "float32", "shape": [2]}]})
    script = tmp_path / "worker.py"
    lines = f"print({answer!r}, flush=True)\nsys.stdin.readline()\nsys.stdout.write({said!r})\n"
    script.write_text(f"import sys\nsys.stdin.readline()\n{lines}")
    monkeypatch.setattr(worker, "__file__", str(script))
    (tmp_path / "a.pt").write_bytes(b"x" * 8)
    with (
        opened(tmp_path / "a.pt", trust=True) as found,
        pytest.raises(sw.CheckpointError, match=why),
    ):
        found.read(found.tensors[0])


def test_the_worker_needs_nothing_of_ours() -> None:
    text = Path(worker.__file__).read_text("utf-8")
    assert "import shardwise" not in text
    assert "from shardwise" not in text
    assert worker.__file__ in sys.modules[worker.__name__].__file__  # type: ignore[operator]
