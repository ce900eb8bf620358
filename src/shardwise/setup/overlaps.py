"""Refuses a model whose parameters lie in the memory of other tensors.

Each rank copies its part of a parameter into memory of its own. So what is written to one of two
tensors in the same memory would no longer be seen in the other. One ``Parameter`` object in several
modules is another thing, and stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ConfigError
from shardwise.torch_internals import base_of, storage_key

Named = tuple[str, Tensor]


def check_overlaps(model: nn.Module) -> None:
    """Raises ``ConfigError`` if an element of a parameter is an element of another tensor, too."""
    _check_attributes(model)
    by_storage: dict[int, list[Named]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.requires_grad and is_expanded(tensor):
            raise ConfigError(
                f"elements of {name!r} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) "
                "share memory, so no optimizer can write to it. Give them memory of their own: "
                "nn.Parameter(value.clone())."
            )
        by_storage.setdefault(storage_key(tensor), []).append((name, tensor))
    for together in by_storage.values():
        for one, other in _neighbours(together):
            if _overlap(one[1], other[1]):
                raise _error(one, other)


def _check_attributes(model: nn.Module) -> None:
    """Raises ``ConfigError`` if a module keeps a view of a parameter."""
    names = {id(param): name for name, param in model.named_parameters()}
    for module in model.modules():
        for attribute, value in vars(module).items():
            several = value if isinstance(value, (list, tuple)) else (value,)
            bases = (base_of(one) for one in several if isinstance(one, Tensor))
            for name in filter(None, (names.get(id(base)) for base in bases)):
                raise ConfigError(
                    f"{type(module).__name__}.{attribute} is a view of parameter {name!r}: after "
                    "shard() it would show the present values for ever. Make the view in "
                    "forward(), from the parameter, or delete the attribute."
                )


def is_expanded(tensor: Tensor) -> bool:
    """Is one element of memory several elements of the tensor, as after ``expand()``?"""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _neighbours(together: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """Pairs whose ranges of memory meet; at least one of the two is a parameter."""
    open_ = list[Named]()
    for named in sorted(together, key=lambda named: _range(named[1])):
        start = _range(named[1])[0]
        open_ = [other for other in open_ if _range(other[1])[1] > start]
        pairs = ((other, named) for other in open_)
        yield from (p for p in pairs if any(isinstance(t, nn.Parameter) for _, t in p))
        open_.append(named)


def _range(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between its first and its last element."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + int(last) + 1) * size


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Do tensors whose ranges meet share an element? Columns of one matrix do not."""
    if one.dtype is not other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    return bool(torch.isin(_places(one), _places(other)).any())


def _places(tensor: Tensor) -> Tensor:
    """Return the range of its elements in its storage."""
    places = torch.tensor(tensor.storage_offset())
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(n) * step
    return places.reshape(-1)


def _error(one: Named, other: Named) -> ConfigError:
    pair = sorted((one, other), key=lambda named: not isinstance(named[1], nn.Parameter))
    (first, _), (second, tensor) = pair
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return ConfigError(
        f"parameter {first!r} and {kind} {second!r} share memory, and after shard() each would "
        "have its own, so a change of one would no longer change the other. To tie two "
        "parameters, assign one nn.Parameter object to both modules (head.weight = embed.weight, "
        "not head.weight.data = embed.weight.data); otherwise give one of them a .clone()."
    )
