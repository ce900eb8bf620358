"""The map from stored tensors to a model's tensors, as ``transformers`` reads the hub's layouts.

A file need not hold what the model has: names have changed, Mixtral's experts are a tensor each,
and the model has all of them in one. ``transformers`` lists such conversions by model. Here they
are applied to names, and to tensors without values: so everything that does not fit is known
before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.load_plan import ModelTensor, match, misfit_error
from shardwise.checkpoint.local_shards import persistent_buffers
from shardwise.checkpoint.reader import TensorLocation
from shardwise.checkpoint.safetensors_format import Stored, code_of, dtype_of
from shardwise.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Conversion:
    """Some stored tensors that become others of the model together.

    Attributes:
        converter: of ``transformers``: patterns of names, and operations.
        name: of the first tensor that is made.
        sources: pattern → the stored tensors that match it, in the order of their numbers.
        model: what operations ask of the model: its config, and parameters for their whole shapes.
        targets: what is made: name → the model's tensor, and how many elements it has when whole.
    """

    converter: Any
    name: str
    model: Any
    sources: dict[str, list[TensorLocation]] = field(default_factory=dict)
    targets: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def run(
        self, load: Callable[[TensorLocation], Tensor], row: int | None = None
    ) -> dict[str, Tensor]:
        """All that is made, by name; or only row ``row`` of each, where ``rows`` says that it can.

        Args:
            load: gives the value of a stored tensor.
        """
        converter = deepcopy(self.converter)
        for pattern, places in self.sources.items():
            for place in places if row is None else places[row : row + 1]:
                converter.add_tensor(self.name, "", pattern, load(place))
        values = converter.convert(self.name, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in values.items()
        }

    @property
    def rows(self) -> int:
        """Rows that can be made one by one, such as experts; 0: only all at once."""
        from transformers.core_model_loading import MergeModulelist

        merges, *others = self.converter.operations
        stacks = isinstance(merges, MergeModulelist) and merges.dim == 0
        return (
            len(next(iter(self.sources.values()))) if stacks and all(map(_is_by_row, others)) else 0
        )


def _is_by_row(operation: Any) -> bool:
    """Does it make each row of dim 0 from the same row alone?"""
    from transformers.core_model_loading import Chunk, Concatenate, Transpose

    if isinstance(operation, Transpose):
        return 0 not in (operation.dim0, operation.dim1) and not operation.check_dims
    return isinstance(operation, (Chunk, Concatenate)) and operation.dim != 0


@dataclass(frozen=True, eq=False)
class FileMap:
    """The origin of every tensor of a model. Tensors are keys as the objects that they are.

    Attributes:
        direct: those that are stored as they are, parts of which can be read.
        conversions: what makes the others.
        tied: further name → the name by which the tensor is stored.
        twice: further names of ``tied`` that are stored, too → both places.
        initialised: names of tensors that no file has, and the model initialises on purpose.
        unexpected: stored names that the model does not have.
        cast: names of tensors that are stored in another dtype.
    """

    direct: dict[Tensor, TensorLocation]
    conversions: tuple[Conversion, ...]
    tied: Mapping[str, str]
    twice: Mapping[str, tuple[TensorLocation, TensorLocation]]
    initialised: Sequence[str]
    unexpected: Sequence[str]
    cast: Sequence[str]

    @property
    def tensors(self) -> frozenset[Tensor]:
        """All that are read."""
        made = (tensor for c in self.conversions for tensor, _ in c.targets.values())
        return frozenset({*self.direct, *made})


def map_files(model: Any, stored: Mapping[str, TensorLocation], folder: str) -> FileMap:
    """Find each tensor of ``model``, which is on the meta device.

    Args:
        model: a ``PreTrainedModel``, without adapters.
        stored: the tensors of the files, by name.
        folder: of the files, for the error.

    Raises:
        CheckpointError: with a line for each tensor that is missing or has another shape.
    """
    names, conversions, unexpected = _assign(model, stored)
    converted = {name: (one, value) for one in conversions for name, value in _shapes(one).items()}
    in_files = {name: stored[source].stored for name, source in names.items()}
    in_files |= {
        n: Stored(code_of(t.dtype, n), tuple(t.shape), 0, 0) for n, (_, t) in converted.items()
    }
    tensors = _tensors(model)
    in_model = [ModelTensor(n, code_of(t.dtype, n[0]), tuple(t.shape)) for n, t in tensors]
    matched = match(in_model, in_files, {})
    misfits = matched.misfits
    missing, left_out = _excused(model, misfits["missing"], {*misfits["unexpected"], *unexpected})
    problems = [misfits["missing"][name] for name in missing]
    problems += [*misfits["misshapen"].values(), *misfits["foreign"].values()]
    if problems:
        kind = type(model).__name__
        advice = "Name the folder of this model's weights, or correct its config.json."
        raise misfit_error(f"{folder} does not hold the weights of this {kind}", problems, advice)
    direct = dict[Tensor, TensorLocation]()
    tied = dict[str, str]()
    for aliases, tensor in tensors:
        if (name := matched.pairs.get(aliases[0])) is None:
            continue
        tied |= {alias: name for alias in aliases if alias != name}
        if name in names:
            direct[tensor] = stored[names[name]]
        else:
            converted[name][0].targets[name] = (tensor, tensor.numel())
    initialised = sorted({*misfits["missing"]} - {*missing})
    cast = tuple(misfits["cast"])
    twice = {
        alias: (stored[names[alias]], stored[names[name]])
        for alias, name in tied.items()
        if alias in names and name in names
    }
    return FileMap(direct, tuple(conversions), tied, twice, initialised, sorted(left_out), cast)


def _assign(
    model: Any, stored: Mapping[str, TensorLocation]
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """The model's name → the stored one; conversions; and stored names that match nothing."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    whole = SimpleNamespace(config=model.config, get_parameter=state.__getitem__)
    names, conversions, unexpected = dict[str, str](), dict[str, Conversion](), list[str]()
    for name in sorted(stored, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, pattern = loading.rename_source_key(name, [], [], prefix, state)
        if new not in state:
            unexpected.append(name)
        elif pattern is None:
            names[new] = name
        else:
            one = conversions.setdefault(new, Conversion(by_pattern[pattern], new, whole))
            one.sources.setdefault(pattern, []).append(stored[name])
    return names, list(conversions.values()), unexpected


def _shapes(conversion: Conversion) -> dict[str, Tensor]:
    """Return the shapes of what is made, on the meta device."""

    def load(place: TensorLocation) -> Tensor:
        return torch.empty(place.stored.shape, dtype=dtype_of(place.stored.dtype), device="meta")

    try:
        return conversion.run(load)
    except Exception as error:
        raise CheckpointError(
            f"{conversion.name} cannot be made from what is stored for "
            f"{', '.join(conversion.sources)} ({error}). The files are not whole, or of a model "
            "with another config.json; fetch both again."
        ) from error


def _tensors(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each parameter and persistent buffer once, with all its names."""
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    of_parameters = [(tuple(aliases), param) for param, aliases in names.items()]
    return [*of_parameters, *persistent_buffers(model)]


def _excused(model: Any, missing: Any, unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Both without the names that the model's class lists as no error."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys
