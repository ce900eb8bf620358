"""Quantised shards from files: each rank reads the values of its own blocks, and no others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.read_requests import read_into, request_for
from shardwise.checkpoint.reader import CheckpointReader, TensorLocation
from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError
from shardwise.hf.file_map import FileMap
from shardwise.hf.preparation import prepare, quantized_layers
from shardwise.hf.quantized import Quantized, quantize, quantize_codes, share_scales


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """Places of the stored values of quantised layers.

    Attributes:
        places: of each layer's weight.
        table: what was quantised.
    """

    places: dict[Any, TensorLocation] = field(default_factory=dict)
    table: Quantized | None = None

    @classmethod
    def of(
        cls, model: nn.Module, config: Any, file_map: FileMap
    ) -> tuple[QuantizedWeights, FileMap]:
        """Quantise and prepare ``model``, on the meta device; nothing if ``config`` is ``None``.

        Returns:
            Also the map of all tensors but the layers' weights.

        Raises:
            ConfigError: as ``quantize``; or a weight is made of several stored tensors.
        """
        if config is None:
            return cls(), file_map
        weights = dict(model.named_parameters())
        table = quantize(model, config)
        prepare(model)
        direct = dict(file_map.direct)
        layers = quantized_layers(model)
        values = {name: weights[f"{name}.weight"] for name in layers}
        if joined := [name for name, weight in values.items() if weight not in direct]:
            raise ConfigError(
                f"{joined[0]!r} is made of several stored tensors, which are not read in blocks. "
                "Name it in llm_int8_skip_modules (model.quantization.skip)."
            )
        places = {layer: direct.pop(values[name]) for name, layer in layers.items()}
        return cls(places, table), replace(file_map, direct=direct)

    @property
    def tensors(self) -> frozenset[Tensor]:
        """The parameters that are made of them."""
        return frozenset(t for layer in self.places for t in (layer.weight, layer.scales))

    def read(self, reader: CheckpointReader, comm: Comm) -> list[Tensor]:
        """Quantise this rank's blocks: their absmax for ``share``. No communication."""
        return [
            quantize_codes(layer, partial(_values, reader, comm, layer, place))
            for layer, place in self.places.items()
        ]

    def share(self, absmax: Iterable[Tensor]) -> None:
        """Fill the scales from all ranks' absmax. A collective."""
        for layer, own in zip(self.places, absmax, strict=True):
            share_scales(layer, own)


def _values(
    reader: CheckpointReader, comm: Comm, layer: Any, place: TensorLocation, first: int, last: int
) -> Tensor:
    """Elements ``[first, last)`` of ``[out, in]``; what is stored transposed is read whole."""
    begin, end = (0, layer.values) if layer.transposed else (first, last)
    values = torch.empty(end - begin, dtype=layer.values_dtype)
    read_into(reader, [request_for(place, begin, values)], comm.rank, comm.size)
    if layer.transposed:
        values = values.view(layer.in_features, -1).T.reshape(-1)[first:last]
    return values.to(comm.device)
