"""Opens pickles, in a process that has nothing to lose. Runs as a script, without shardwise.

A pickle is a program. Without trust it is read only by torch's restricted reader, which knows
tensors and plain values; with trust it may do what it likes, here: without environment, without
a byte written, and, where the system can take them away, without network and without the right to
make, change, remove or execute a file. The parent never unpickles: it gets JSON and raw bytes, and
believes neither.

    stdin     {"source": …, "trust": …}     then a number for each tensor that is wanted
    stdout    {"items": [{"path", "dtype", "shape"} | {"path", "value"} | {"path", "type"}]}
              or {"refused": …, "untrusted": …}; then each tensor's bytes
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, SIGKILL = 38, 1, 9
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
CREATE_RULESET, RESTRICT_SELF = 444, 446  # system calls
EXECUTE, WRITE_FILE, REMOVE_AND_MAKE, TRUNCATE = 1 << 0, 1 << 1, 0b1_1111_1111 << 4, 1 << 14


class Refused(Exception):
    """What the parent is told instead of items."""


class Item(NamedTuple):
    """A tensor: how it is described, and how it is read."""

    dtype: Any
    shape: tuple[int, ...]
    read: Callable[[], Any]


Found = Iterator[tuple[tuple[Any, ...], Any]]  # path → Item, or a value


def drop_privileges() -> None:
    """From here on: no byte written, nobody called, and where Linux can, no file changed at all."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:  # also takes root's rights away
        libc.unshare(CLONE_NEWNET)
    change_no_file(libc)


def change_no_file(libc: Any) -> None:
    """No file is made, opened to write, removed, renamed or executed (Landlock, Linux 5.13)."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    refused = EXECUTE | WRITE_FILE | REMOVE_AND_MAKE | (TRUNCATE if version >= 3 else 0)
    rules = ctypes.c_uint64(refused)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset >= 0:
        libc.syscall(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def opened(source: Path, trust: bool) -> Found:
    """Everything in a DCP folder or a pickled file."""
    if source.is_dir():
        if not trust:
            raise Refused("untrusted")
        return dcp(source)
    return pickled(source, trust)


# --- a file that torch.save wrote ------------------------------------------------------------


def pickled(source: Path, trust: bool) -> Found:
    """Its values; tensors are mapped, and read when they are wanted."""
    import pickle

    import torch

    def load(**how: Any) -> Any:
        try:
            return torch.load(source, map_location="cpu", mmap=True, **how)
        except RuntimeError:  # written by a torch before 1.6, in one stream: it cannot be mapped
            return torch.load(source, map_location="cpu", **how)

    try:
        found = load(weights_only=True)
    except pickle.UnpicklingError as error:
        if not trust:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise Refused(f"untrusted it asks for {named[1]}" if named else "untrusted") from None
        found = load(weights_only=False)
    return _walked((), found)


def _walked(path: tuple[Any, ...], value: Any) -> Found:
    import torch

    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _walked((*path, key if isinstance(key, int) else str(key)), inner)
    elif isinstance(value, list) and any(isinstance(v, Mapping | torch.Tensor) for v in value):
        for k, inner in enumerate(value):
            yield from _walked((*path, k), inner)
    elif isinstance(value, torch.Tensor):
        yield path, Item(value.dtype, tuple(value.shape), lambda: value)
    else:
        yield path, value


# --- a folder that torch.distributed.checkpoint wrote ----------------------------------------


def dcp(source: Path) -> Found:
    """What ``.metadata`` lists; tensors are put together from their chunks when wanted."""
    import pickle

    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with (source / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - this process exists to do it
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    pieces: dict[str, dict[Any, Any]] = {}
    for index, info in metadata.storage_data.items():
        at = None if index.offset is None else tuple(index.offset)
        pieces.setdefault(index.fqn, {})[at] = info
    for name, kind in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if isinstance(kind, TensorStorageMetadata):
            read = _joiner(source, name, kind, pieces.get(name, {}))
            yield path, Item(kind.properties.dtype, tuple(kind.size), read)
        else:
            info = next(iter(pieces.get(name, {}).values()))
            yield path, _load(source, info, weights_only=False)


def _joiner(source: Path, name: str, kind: Any, pieces: dict[Any, Any]) -> Callable[[], Any]:
    def read() -> Any:
        import torch

        whole = torch.empty(tuple(kind.size), dtype=kind.properties.dtype)
        there = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
        if sum(_numel(sizes) for sizes in there.values()) != whole.numel():
            raise Refused(f"the chunks of {name!r} do not make up its shape {tuple(kind.size)}")
        for offsets, sizes in there.items():
            view = whole
            for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
                view = view.narrow(dim, start, length)
            if view.numel():
                view.copy_(_load(source, pieces[offsets], weights_only=True))
        return whole

    return read


def _numel(sizes: tuple[int, ...]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _load(source: Path, info: Any, *, weights_only: bool) -> Any:
    import torch

    if getattr(info, "transform_descriptors", None):
        raise Refused("it was written through an extension of DCP (compressed or encrypted)")
    with (source / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        data = io.BytesIO(file.read(info.length))
    return torch.load(data, map_location="cpu", weights_only=weights_only)


# --- what the parent is told -----------------------------------------------------------------


def told(path: tuple[Any, ...], found: Any) -> dict[str, Any]:
    """One item as JSON."""
    if isinstance(found, Item):
        dtype = str(found.dtype).removeprefix("torch.")
        return {"path": path, "dtype": dtype, "shape": found.shape}
    try:
        return {"path": path, "value": plain(found)}
    except TypeError:
        return {"path": path, "type": f"{type(found).__module__}.{type(found).__qualname__}"}


def plain(value: Any) -> Any:
    """As ``shardwise.checkpoint.plain`` writes it, for the few types that options have."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if value - value == 0 else {"$float": repr(value)}
    if type(value) in (list, tuple):
        made = [plain(item) for item in value]
        return made if type(value) is list else {"$tuple": made}
    if isinstance(value, dict) and all(type(k) is str and k[:1] != "$" for k in value):
        return {key: plain(item) for key, item in value.items()}
    raise TypeError


def send(tensor: Any, out: BinaryIO) -> None:
    """The bytes of a tensor, in row-major order."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    out.writelines(part.numpy().data for part in flat.split(1 << 22))
    out.flush()


def main() -> None:
    """Answer the parent until it closes its end."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    asked = json.loads(sys.stdin.buffer.readline())
    drop_privileges()
    items: list[Any] = []
    try:
        found = list(opened(Path(asked["source"]), asked["trust"]))
        items = [item for _, item in found]
        answer: dict[str, Any] = {"items": [told(path, item) for path, item in found]}
    except Refused as refusal:
        answer = {"refused": [str(refusal)]}
    except Exception as error:  # noqa: BLE001 - the parent says it
        answer = {"refused": [f"{type(error).__name__}: {error}"]}
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()
    for line in sys.stdin.buffer:
        send(items[int(line)].read(), out)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
