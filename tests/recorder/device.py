"""A program runs as if on a device: every operation is issued to the current stream.

Torch itself sees tensors of the CPU. All other code, which asks a tensor for its device, is told
the device, but for memory that was asked for on the host.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.torch_internals import tree_leaves, tree_map
from tests.recorder.accesses import Accesses
from tests.recorder.clocks import DEVICE, Stream
from tests.recorder.overlap import Overlap

__all__ = ["Device", "Values", "later"]

CPU = torch.device("cpu")
#: They change what a tensor is, and no memory.
NO_ACCESS = {"aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor"}
#: They make a tensor of the host's where no device is named.
FACTORIES = {
    *(torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange),
    *(torch.rand, torch.randn, torch.randint),
}
#: After these the host has a value, so it has waited.
VALUES = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
COPIES = {"aten::copy_", "aten::_to_copy"}
#: They take memory and compute nothing.
ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_like", "aten::empty_strided"}


class Device:
    """One device and the host beside it.

    Args:
        own_stream: the program computes in a stream of its own, not in the default one.
        is_late: streams beside it are late; otherwise all is done at once.
        has_host: there is memory of a host beside it; otherwise all memory is the device's.
        place: what it is called.
    """

    def __init__(
        self,
        own_stream: bool = False,
        is_late: bool = True,
        has_host: bool = True,
        place: torch.device = DEVICE,
    ) -> None:
        self.is_late, self.has_host, self.place = is_late, has_host, place
        self.host = Stream("host", waits=False)
        name = "the user's" if own_stream else "compute"
        self.compute = Stream(name, waits=False, host=self.host, device=place)
        self.accesses = Accesses(self.compute)
        self.streams = list[Stream]()
        self.launches = 0
        self.overlap = Overlap(self.compute)
        self._current = threading.local()

    @property
    def faults(self) -> list[str]:
        return self.accesses.faults

    @property
    def waits(self) -> list[str]:
        """The waits of the host for the device."""
        return self.host.awaited

    def begin_step(self) -> None:
        """Count anew."""
        self.launches = 0
        self.waits.clear()
        self.overlap.begin()
        self.accesses.allocator.begin()

    def current_stream(self, _: object = None) -> Stream:
        return getattr(self._current, "stream", self.compute)

    def set_stream(self, stream: Stream) -> None:
        self._current.stream = stream

    def new_stream(self, _: object = None) -> Stream:
        self.streams.append(Stream("copy", self.is_late, self.host, self.place))
        return self.streams[-1]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes in a thread that computes."""
        with _Asked(self), _Issued(self):
            yield

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Torch's streams are these."""
        resize, from_numpy = torch.UntypedStorage.resize_, torch.from_numpy

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self.accesses.resize(storage, nbytes, self.current_stream())
            return resize(storage, nbytes)

        def of_host(array: Any) -> Tensor:
            tensor = from_numpy(array)
            self.accesses.begin(tensor, self.host, True, self.host.stamp("from_numpy"))
            return tensor

        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_seen(*args: Any, **kwargs: Any) -> Any:
            with _Asked(self):  # which torch leaves at the call of ``backward``
                return run(*args, **kwargs)

        with ExitStack() as stack:
            for owner, name, new in (
                (torch, "Stream", self.new_stream),
                (torch.accelerator, "current_stream", self.current_stream),
                (torch.accelerator, "set_stream", self.set_stream),
                (torch.UntypedStorage, "resize_", resized),
                (torch, "from_numpy", of_host),
                (torch.autograd, "_engine_run_backward", run_seen),
            ):
                stack.enter_context(mock.patch.object(owner, name, new))
            stack.enter_context(self.modes())
            try:
                yield
            finally:
                for stream in self.streams:
                    stream.finish()
                self.accesses.ends = True

    def wait(self, what: str) -> None:
        """The host waits for the current stream."""
        self.current_stream().record_event().synchronize(what)


def later(
    stream: Stream, out: Tensor, write: Callable[[Tensor], object], own: Tensor | None = None
) -> None:
    """Poison ``out``, all but its part ``own``, and let the stream write it when it comes to that.

    Nobody keeps the memory alive for a stream.
    """
    storage = weakref.ref(out.untyped_storage())
    like = out.dtype, out.storage_offset(), out.shape, out.stride()
    if out.untyped_storage().nbytes():
        _poison(out, own)

    def go() -> None:
        memory = storage()
        if memory is not None and memory.nbytes():
            dtype, *place = like
            with torch.no_grad():
                write(torch.empty(0, dtype=dtype).set_(memory, *place))

    stream.give(go)


def _poison(out: Tensor, own: Tensor | None) -> None:
    with torch.no_grad():
        kept = None if own is None else own.clone()
        out.detach().fill_(float("nan") if out.is_floating_point() else 119)
        if own is not None and kept is not None:
            own.copy_(kept)


class _Asked(TorchFunctionMode):
    """Calls of torch that name a device, or ask for one."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:  # another object each time
            asks = sys._getframe(1).f_globals.get("__name__", "")
            ours = not asks.startswith("torch") and not self.device.accesses.is_host(args[0])
            return self.device.place if ours and not args[0].is_meta else func(*args)
        if func in (Tensor.tolist, Tensor.numpy) and not self.device.accesses.is_host(args[0]):
            self.device.wait(func.__name__)
        if func is Tensor.pin_memory:
            return self._pinned(args[0])
        on = CPU if func in FACTORIES else None
        on = _named(func, args, kwargs) or on
        pinned = kwargs.pop("pin_memory", False)
        if on is None and not pinned:
            return func(*args, **kwargs)
        expected = "host" if self.device.has_host and (pinned or on == CPU) else "device"
        args, kwargs = tree_map(self._on_cpu, (args, kwargs))
        moved = args[0] if func in (Tensor.to, Tensor.cpu) else None
        with _hint(expected):
            if moved is None or moved.is_meta:
                result = func(*args, **kwargs)
                if pinned:
                    self.device.accesses.pin(result)
                return result
            if self.device.accesses.is_host(moved) is (expected == "host"):
                return func(*args, **kwargs) if func is Tensor.to else moved
            dtypes = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
            async_ = bool(kwargs.get("non_blocking"))
            dtype = dtypes[0] if dtypes else moved.dtype
            return torch.ops.aten._to_copy(moved, dtype=dtype, non_blocking=async_)

    def _pinned(self, source: Tensor) -> Tensor:
        """The host copies what it has, as data that was read is."""
        host, accesses = self.device.host, self.device.accesses
        with _disable_current_modes():
            result = source.clone()
        accesses.begin(result, host, True, host.stamp("pin_memory"))
        accesses.pin(result)
        return result

    def _on_cpu(self, value: Any) -> Any:
        """A device of another index is refused: memory is that of the current one."""
        place = self.device.place
        is_name = isinstance(value, str) and value.partition(":")[0] == place.type
        expected = torch.device(value) if is_name else value
        if not isinstance(expected, torch.device) or expected.type != place.type:
            return value
        assert expected.index in (None, place.index), f"{expected} is not {place}"
        return CPU


def _named(func: Any, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call names."""
    if func is Tensor.cpu:
        return CPU
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if func is Tensor.to:
        return next((torch.device(a) for a in args if isinstance(a, torch.device | str)), None)
    return None


_hints = threading.local()


@contextmanager
def _hint(where: str) -> Iterator[None]:
    before, _hints.where = getattr(_hints, "where", ""), where
    try:
        yield
    finally:
        _hints.where = before


@cache
def _writes(func: Any) -> tuple[list[bool], dict[str, bool]]:
    """Does an operation write its arguments, by position and by name?"""
    arguments = func._schema.arguments
    kinds = {a.name: a.alias_info is not None and a.alias_info.is_write for a in arguments}
    return list(kinds.values()), kinds


class _Issued(TorchDispatchMode):
    """Operations, each issued to the current stream or done by the host."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again with what is inside
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func.is_view or func.name() in NO_ACCESS or any(t.is_meta for t in tensors):
            return func(*args, **kwargs)
        return self._issue(func, args, kwargs, tensors)

    def _issue(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        device, accesses, name = self.device, self.device.accesses, func.name()
        of_memory = tensors[:1] if name == "aten::index_put_" else tensors  # else numbers, too
        on_host = [accesses.is_host(t) for t in of_memory]
        here = getattr(_hints, "where", "") == "host"
        by_host = all(on_host) and (bool(tensors) or here)
        if name == "aten::_to_copy" and getattr(_hints, "where", "") == "device":
            by_host = False
        stream = device.host if by_host else device.current_stream()
        device.launches += not by_host and name not in ALLOCATIONS
        stamp = stream.stamp(name)
        positions, names = _writes(func)
        arguments = [
            *zip(args, positions, strict=False),
            *((kwargs[k], names.get(k)) for k in kwargs),
        ]
        written = [t for value, writes in arguments if writes for t in _tensors(value)]
        for value, writes in arguments:
            for tensor in _tensors(value):
                if not writes:
                    accesses.read(tensor, stream, stamp)
        for tensor in written:
            accesses.write(tensor, stream, stamp)
        result = func(*args, **kwargs) if not stream.waits else None
        if stream.waits:
            result = _postponed(stream, func, args, kwargs, written)
        old = {id(t.untyped_storage()) for t in tensors}
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) not in old and not tensor.is_meta:
                host = here if name == "aten::_to_copy" or not tensors else by_host
                accesses.begin(tensor, stream, host, stamp)
        self._keep(stream, [*tensors, *_tensors(result)])
        crosses = len(set(on_host)) > 1 or (name == "aten::_to_copy" and here)
        if not by_host and (
            name in VALUES or (name in COPIES and crosses and _blocks(args, kwargs))
        ):
            device.wait(name)
        return result

    def _keep(self, stream: Stream, tensors: list[Tensor]) -> None:
        """Keep what torch keeps until a late stream has used it: its own memory and the host's."""
        if stream.waits:
            lives = map(self.device.accesses.of, tensors)
            kept = [
                t
                for t, life in zip(tensors, lives, strict=True)
                if life.is_host or life.owner is stream
            ]
            stream.give(kept.clear)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _postponed(stream: Stream, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
    """The result of an operation of a stream that does it when something waits for it."""
    if func.name() == "aten::copy_":
        out, source = args[:2]
        stream.give(lambda: None)
        values = Values(source)
        later(stream, out, lambda memory: memory.copy_(values()))
        return out
    result = func(*args, **kwargs)
    if func.name() == "aten::_to_copy":
        values = Values(args[0])
        later(stream, result, lambda memory: memory.copy_(values()))
    elif written or func.name() != "aten::empty.memory_format":
        raise AssertionError(f"{func.name()} in {stream} is not known here")
    return result


def _blocks(args: Any, kwargs: Any) -> bool:
    """Does the host wait for a copy between the two memories?"""
    return not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


class Values:
    """What a source holds when its stream comes to it. Nobody keeps it alive for a stream."""

    def __init__(self, source: Tensor) -> None:
        self._storage = weakref.ref(source.untyped_storage())
        self._like = source.dtype, source.storage_offset(), source.shape, source.stride()

    def __call__(self) -> Tensor:
        memory, (dtype, at, shape, stride) = self._storage(), self._like
        if memory is None or not memory.nbytes():
            return torch.full(shape, float("nan"))
        return torch.empty(0, dtype=dtype).set_(memory, at, shape, stride)
