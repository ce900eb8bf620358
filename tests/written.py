"""Who wrote how many bytes where, seen from below: a mode that knows nothing of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode


def storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage object; of a shard, of the one that holds it."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


class Written(TorchDispatchMode):
    """Counts the bytes that operators write, by storage and operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: Counter[tuple[int, str]] = Counter()
        self._alive: list[UntypedStorage] = []  # so that no other gets the same identity

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | named
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._count(func.overloadpacket.__name__, by_name.get(argument.name))
        return result

    def _count(self, name: str, written: Any) -> None:
        for tensor in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(tensor, Tensor):
                self._alive.append(tensor.untyped_storage())
                self.nbytes[storage(tensor), name] += tensor.numel() * tensor.element_size()

    def into(self, *tensors: Tensor) -> dict[str, int]:
        """Bytes by operator, written into the storages of ``tensors``."""
        storages = {storage(tensor) for tensor in tensors}
        nbytes_by_op: Counter[str] = Counter()
        for (key, name), nbytes in self.nbytes.items():
            if key in storages and nbytes:
                nbytes_by_op[name] += nbytes
        return dict(nbytes_by_op)
