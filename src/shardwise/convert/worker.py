"""Opens pickles, in a process that has nothing to lose. Runs as a script, without shardwise.

A pickle is a program. Without trust it is read only by torch's restricted reader, which knows
tensors and plain values; with trust it may do what it likes, here: without environment, without
a byte written, and, where the system can take them away, without network, without processes of its
own, and without the right to signal one or to make, change, remove or execute a file. The parent
never unpickles: it gets JSON and raw bytes, and believes neither.

    stdin     {"source": …, "trust": …}     then a number for each tensor that is wanted
    stdout    {"items": [{"path", "dtype", "shape"} | {"path", "value"} | {"path", "type"}]}
              or {"refused": [why]}; then for each tensor {"nbytes": …} and its bytes, or why not
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import re
import resource
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, SIGKILL = 38, 1, 9
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
CREATE_RULESET, RESTRICT_SELF = 444, 446  # system calls
EXECUTE, WRITE_FILE, REMOVE_AND_MAKE, TRUNCATE = 1 << 0, 1 << 1, 0b1_1111_1111 << 4, 1 << 14


SCOPE_SOCKETS_AND_SIGNALS, TCP = 0b11, 0b11
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ALLOW, EPERM, ENOSYS = 22, 2, 0x7FFF0000, 0x50001, 0x50026
CLONE_THREAD = 0x10000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of the kernel's filters
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # where they find a call's
CALLS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        56,
        302,
        (57, 58, 59, 322, 62, 200, 234, 129, 297, 424, 438, 101, 311, 41, 425, 109, 112),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        261,
        (221, 281, 129, 130, 131, 138, 240, 424, 438, 117, 271, 198, 425, 154, 157),
    ),
}
"""The architecture, clone, prlimit64, and what is refused whole: fork, vfork, execve,
execveat, kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, pidfd_getfd,
ptrace, process_vm_writev, socket, io_uring_setup, setpgid, setsid."""
CLONE3 = 435
MOST_TIMES = 64
"""A storage may be seen by as many tensors: those of tied weights and shared layers."""


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
    stay_alone(libc)


def change_no_file(libc: Any) -> None:
    """No file is made, opened to write, removed, renamed or executed (Landlock, Linux 5.13).

    Nor is TCP used (6.7), nor a process outside signalled (6.12).
    """
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    refused = EXECUTE | WRITE_FILE | REMOVE_AND_MAKE | (TRUNCATE if version >= 3 else 0)
    fields = 3 if version >= 6 else 2 if version >= 4 else 1
    rules = (ctypes.c_uint64 * 3)(refused, TCP, SCOPE_SOCKETS_AND_SIGNALS)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.byref(rules), 8 * fields, 0)
    if ruleset >= 0:
        libc.syscall(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def stay_alone(libc: Any) -> None:
    """No process is started, signalled or traced, and no socket opened (seccomp). Threads are."""
    known = CALLS.get(platform.machine())
    if known is None or sys.maxsize < 1 << 32:
        return
    lines = filtered(*known)
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(text))
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0)


def filtered(
    architecture: int, clone: int, prlimit: int, refused: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """The kernel's filter: (what, lines to skip if so, if not, number) each."""
    no, yes = (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), no, (LOAD, 0, 0, NUMBER)]
    lines += [(AT_LEAST, 0, 1, 0x40000000), no]  # the same calls by other numbers, on x86
    lines += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ENOSYS)]  # then clone is tried
    for number in refused:
        lines += [(EQUAL, 0, 1, number), no]
    argument = (LOAD, 0, 0, ARGUMENT)
    lines += [(EQUAL, 0, 4, clone), argument, (ANY_BIT, 0, 1, CLONE_THREAD), yes, no]
    lines += [(EQUAL, 0, 4, prlimit), argument, (EQUAL, 0, 1, 0), yes, no]  # 0: its own
    return [*lines, yes]


def bound(source: Path, trust: bool) -> None:
    """No process more (where root did not start it); and without trust, no more memory than due."""
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if not trust and source.is_file():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 3 * source.stat().st_size + (1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


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
    return _held(list(_walked((), found)))


def _held(found: list[tuple[tuple[Any, ...], Any]]) -> Found:
    """The same, if a few bytes of the file are not meant to become very many."""
    storages: dict[int, int] = {}
    total = 0
    for path, item in found:
        if isinstance(item, Item):
            storage = item.read().untyped_storage()
            nbytes, there = _numel(item.shape) * item.dtype.itemsize, storage.nbytes()
            storages[storage.data_ptr()] = there
            total += nbytes
            if nbytes > there:
                raise Refused(
                    f"{'.'.join(map(str, path))!r} is a tensor of {nbytes:,} bytes, of which the "
                    f"file holds {there:,} (it repeats them, as expand does)"
                )
    if total > MOST_TIMES * sum(storages.values()):
        raise Refused(
            f"its tensors are {total:,} bytes, and the file holds {sum(storages.values()):,} of "
            "them (very many names for the same bytes)"
        )
    yield from found


def _walked(path: tuple[Any, ...], value: Any) -> Found:
    import torch

    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _walked((*path, key if isinstance(key, int) else str(key)), inner)
    elif isinstance(value, list) and any(isinstance(v, Mapping | torch.Tensor) for v in value):
        for k, inner in enumerate(value):
            yield from _walked((*path, k), inner)
    elif isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            how = "meta" if value.is_meta else "quantized" if value.is_quantized else value.layout
            raise Refused(f"{'.'.join(map(str, path))!r} is no dense tensor ({how})")
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


def give(item: Item, out: BinaryIO) -> None:
    """How many bytes a tensor has, and they, in row-major order; or why it cannot be read."""
    import torch

    try:
        flat = item.read().detach().contiguous().reshape(-1).view(torch.uint8)
    except Exception as error:  # noqa: BLE001 - the parent says it
        say(refusal(error), out)
        return
    say({"nbytes": flat.numel()}, out)
    out.writelines(part.numpy().data for part in flat.split(1 << 22))
    out.flush()


def say(answer: dict[str, Any], out: BinaryIO) -> None:
    """One line."""
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()


def refusal(error: Exception) -> dict[str, Any]:
    """What the parent is told instead."""
    name = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
    return {"refused": [f"{name}{error}"[:500]]}


def main() -> None:
    """Answer the parent until it closes its end."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    asked = json.loads(sys.stdin.buffer.readline())
    items: list[Any] = []
    try:
        source, trust = Path(asked["source"]), asked["trust"]
        drop_privileges()
        bound(source, trust)
        found = list(opened(source, trust))
        items = [item for _, item in found]
        answer: dict[str, Any] = {"items": [told(path, item) for path, item in found]}
    except Exception as error:  # noqa: BLE001 - the parent says it
        answer = refusal(error)
    say(answer, out)
    for line in sys.stdin.buffer:
        give(items[int(line)], out)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
