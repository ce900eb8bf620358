"""An adapter of ``peft`` merged into the files of its base model, one weight at a time.

``merge_and_unload`` needs the whole model in memory. Here the model is on the meta device; each
layer with an adapter gets its weight from the base's file, is merged by peft, and lets it go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.read_requests import read_into, request_for
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.errors import CheckpointError
from shardwise.hf.adapters import check_adapter, is_layer, read_adapter
from shardwise.hf.folder import config_of, new_model

Make = Callable[[], Tensor]


def merged_weights(source: CheckpointReader, folder: Path) -> dict[str, Make]:
    """Each tensor of a base model's files that an adapter changes, and what makes it.

    Holds the adapter, and of the base the one weight that is made, whatever the model's size.

    Args:
        source: the base, a folder of ``transformers``.
        folder: the adapter, which peft or ``save_adapter`` wrote.

    Raises:
        CheckpointError: the adapter is not one of this base's, changes one of two tied weights, or
            changes a weight that the base's files hold under another name.
        ConfigError: the base is no model of transformers, but an adapter, say.
    """
    import peft

    check_adapter(folder)
    config: Any = peft.PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = None  # or peft warns that the model has another name
    with torch.device("meta"):
        base: Any = new_model(config_of(source.folder))
        _check_rows(config.trainable_token_indices or (), base, folder)
        names = defaultdict[nn.Parameter, list[str]](list)
        for name, param in base.named_parameters(remove_duplicate=False):
            names[param].append(name)
        model: Any = peft.get_peft_model(base, config)
    values = read_adapter(folder, model, dict(model.state_dict()))
    makers = defaultdict[nn.Parameter, list[Make]](list)
    for name, module in model.named_modules():
        for param, make in _changed_by(name, module, values, source, names):
            makers[param].append(make)
    wrapped = {*makers}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in values and param in names and param not in wrapped:  # a bias; an embedding
            makers[param].append(partial(values.__getitem__, name))
    model.load_state_dict(values, strict=False, assign=True)
    return {
        name: makes[0] if len(makes) == 1 else partial(_alike, names[param], makes)
        for param, makes in makers.items()
        for name in _stored(names[param], len(makes), source)
    }


def _check_rows(indices: Any, base: Any, folder: Path) -> None:
    """Raises ``CheckpointError`` where the adapter has tokens that the base has no rows for."""
    tables = indices.values() if isinstance(indices, dict) else [indices]
    last, rows = max(chain(*tables), default=0), len(base.get_input_embeddings().weight)
    if last >= rows:
        raise CheckpointError(
            f"the adapter in {folder} trains token {last}, and the base has rows for {rows}. Make "
            f"room first: model.resize_token_embeddings({last + 1}), model.save_pretrained(…)."
        )


def _changed_by(
    name: str,
    layer: Any,
    values: Mapping[str, Tensor],
    source: CheckpointReader,
    names: Mapping[nn.Parameter, list[str]],
) -> Iterator[tuple[nn.Parameter, Make]]:
    """The base's parameters that a module of peft changes, and what makes each."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils import ModulesToSaveWrapper

    if not is_layer(layer):
        return
    if isinstance(layer, ModulesToSaveWrapper):
        for attribute, param in layer.original_module.named_parameters():
            saved = f"{name}.modules_to_save.default.{attribute}"
            if saved not in values:
                raise _unlike(f"has {name}, and not its {attribute}, which the base has")
            yield param, partial(values.__getitem__, saved)
        return
    base = layer.get_base_layer()
    changed = [layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"]
    if getattr(layer, "lora_bias", {}).get("default"):
        if base.bias is None:
            raise _unlike(f"adds a bias to {name}, which has none in the base")
        changed.append("bias")
    reads = {
        attribute: partial(values.__getitem__, trained)
        if (trained := f"{name}.base_layer.{attribute}") in values
        else partial(_read, source, names[getattr(base, attribute)])
        for attribute in changed
    }
    for attribute in changed:
        yield getattr(base, attribute), partial(_merged, layer, attribute, reads)


def _merged(layer: Any, own: str, reads: Mapping[str, Make]) -> Tensor:
    """A parameter of a layer's base with the adapter in it; afterwards the layer holds none."""
    base = layer.get_base_layer()
    before = {name: getattr(base, name) for name in reads}
    for name, read in reads.items():
        setattr(base, name, nn.Parameter(read(), requires_grad=False))
    layer.merge(adapter_names=["default"])
    merged: Tensor = getattr(base, own).data
    for name, param in before.items():
        setattr(base, name, param)
    layer.merged_adapters.clear()
    return merged


def _unlike(fact: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter {fact}, so it cannot be merged. Load it without merging it:"
        " PeftModel.from_pretrained(…)."
    )


def _alike(names: list[str], makes: list[Make]) -> Tensor:
    """The one value of a weight with ``names``, of which the adapter may have changed several."""
    first, *others = (make() for make in makes)
    if not all(torch.equal(first, other) for other in others):
        raise _unlike(
            f"changes {' and '.join(names)}, which are tied in the base, unlike each other"
        )
    return first


def _read(source: CheckpointReader, names: list[str]) -> Tensor:
    place = next(source.weights()[name] for name in names if name in source.weights())
    whole = torch.empty(place.stored.shape, dtype=dtype_of(place.stored.dtype))
    read_into(source, [request_for(place, 0, whole)])
    return whole


def _stored(names: list[str], changed: int, source: CheckpointReader) -> list[str]:
    """Under which names the files hold a parameter that ``changed`` of its owners change."""
    if changed < len(names):
        raise CheckpointError(
            f"{' and '.join(names)} are tied in {source.folder}, and the adapter changes {changed} "
            f"of {len(names)}, so one weight cannot be both. Train it with "
            "ensure_weight_tying=True, or load the adapter without merging it."
        )
    if stored := [name for name in names if name in source.weights()]:
        return stored
    raise CheckpointError(
        f"the adapter changes {names[0]}, which the files of {source.folder} hold under another "
        "name or in parts, as transformers converts them. Merge in transformers: "
        "PeftModel.from_pretrained(…).merge_and_unload().save_pretrained(…)."
    )
