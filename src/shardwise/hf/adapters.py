"""Adapters of ``peft`` on sharded models: added, initialised, saved, loaded.

peft builds its layers; here the model is on the meta device when it does, so an adapter's values
are made after ``shard()``, one unit at a time. ``model.save_pretrained`` on one rank would call
state dict hooks, which are collectives: all ranks gather the adapter without the frozen base, and
then peft writes with our hooks removed.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.collectives import raise_on_all
from shardwise.checkpoint.disk import explained, make_folder, sync_folder
from shardwise.checkpoint.folder import new_token
from shardwise.checkpoint.options import Part
from shardwise.checkpoint.wrappers import bare_names
from shardwise.comm.protocol import Comm
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.hf.peft_files import config_text, on_meta, peft_names, stored_names
from shardwise.hf.preparation import quantized_layers
from shardwise.hf.targets import Matches, match_targets
from shardwise.memory.shard_tensor.adapter_order import ORDER
from shardwise.memory.sharding import sharding_of
from shardwise.plan.printed import size
from shardwise.runtime.full_params import full_params
from shardwise.setup.materialise import sync

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from shardwise.api.sharded import Sharded

log = logging.getLogger("shardwise")

INITIAL = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` for which neither the base's weights nor data are read."""
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
"""Either is the file of an adapter that peft has saved."""
CONFIG = "adapter_config.json"


def add_adapter(
    model: nn.Module, config: LoraConfig, adapter: str = "default"
) -> tuple[PeftModel, Matches]:
    """Add an adapter to ``model``, which may be on the meta device, before ``shard()``.

    Args:
        config: not changed. With tied embeddings an adapter of one is one of both.
        model: of ``transformers``, or a ``PeftModel`` that gets one more.

    Returns:
        The model with the adapter, whose parameters are where the model's are; and what matched.

    Raises:
        ConfigError: the model is sharded already, a target matches nothing, or the initial values
            would change the frozen weights, or peft refuses the configuration.
    """
    import peft

    if any(sharding_of(param) is not None for param in model.parameters()):
        raise ConfigError(f"adapters cannot be added to a model that is sharded. {ORDER}")
    _check_initial(model, config)
    with _peft_errors("add", ConfigError):
        config, matches = copy.deepcopy(config), match_targets(config, model)
    for warning in matches.warnings:
        log.warning(warning)
    matched = {path.rpartition(".")[2] for row in matches.rows for path in row.paths}
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if is_tied and matched & {"embed_tokens", "lm_head"}:
        config.ensure_weight_tying = True
    on_meta = any(param.is_meta for param in model.parameters())
    with _peft_errors("add", ConfigError), torch.device("meta") if on_meta else nullcontext():
        if isinstance(model, peft.PeftModel):
            model.add_adapter(adapter, config)
            return model, matches
        return peft.get_peft_model(model, config, adapter), matches


def _check_initial(model: nn.Module, config: LoraConfig) -> None:
    """Raises ``ConfigError`` for initial values that are made of what no rank holds."""
    if config.init_lora_weights not in INITIAL:
        raise ConfigError(
            f"init_lora_weights={config.init_lora_weights!r} computes the adapter from full "
            "weights of the base, or from data, and may change the base; no rank has the full "
            f"weights. Choose one of {', '.join(map(repr, INITIAL))}."
        )
    if config.init_lora_weights == "orthogonal" and quantized_layers(model):
        raise ConfigError(
            'init_lora_weights="orthogonal" gives the adapter the dtype of the base, which peft '
            "reads from its weights, and here they are bytes. Choose another, such as "
            '"gaussian", or leave the quantisation out.'
        )
    if config.use_dora and quantized_layers(model):
        raise ConfigError(
            "use_dora=True uses norms of the frozen weights, which peft finds only in parameters "
            "of bitsandbytes; here they are sharded bytes. Leave it out, or the quantisation."
        )


def init_adapter(sharded: Sharded, adapter: str = "default") -> None:
    """Give a new adapter the values that peft gives it. A collective.

    Rank 0 draws them, in peft's order and from torch's generator, so they are those of one process
    with the same seed, for every number of ranks. One unit is whole at a time; of the frozen base
    only what the values come from: DoRA's norms, tokens and modules that are trained whole.

    Raises:
        CheckpointError: the model has no adapter of this name.
    """
    config = _config_of(sharded.model, adapter)
    units = defaultdict[frozenset[str | None], dict[str, Any]](dict)
    unit_of = {id(param): b.unit for b in sharded.buckets for param in b.params}
    for name, layer in sharded.model.named_modules():
        if is_layer(layer, adapter):
            units[frozenset(unit_of.get(id(p)) for p in layer.parameters())][name] = layer
    for names, layers in units.items():
        copies = config.use_dora or not all(_is_lora(layer) for layer in layers.values())
        buckets = [b for b in sharded.buckets if b.unit in names and (b.trainable or copies)]
        with full_params(buckets, sharded.comm, writeback=True), torch.no_grad():
            for layer in layers.values() if sharded.comm.rank == 0 else ():
                _fill(layer, adapter, config)
            _share(layers, adapter, sharded.comm)


def _share(layers: Mapping[str, nn.Module], adapter: str, comm: Comm) -> None:
    """Give every rank the values that rank 0 has, in one message for each dtype. A collective."""
    by_dtype = defaultdict[torch.dtype, list[Tensor]](list)
    for layer in layers.values():
        for own, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if adapter in own.split("."):
                by_dtype[tensor.dtype].append(tensor.detach())
    for dtype, tensors in by_dtype.items():
        values = sync(torch.cat([t.flatten() for t in tensors]), comm, f"{adapter}, {dtype}")
        for tensor, value in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value.view(tensor.shape))


def _is_lora(layer: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(layer, LoraLayer)


def is_layer(layer: Any, adapter: str = "default") -> bool:
    """Is it a layer of peft that has values of this adapter's own?"""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils import ModulesToSaveWrapper

    if _is_lora(layer):
        return adapter in {*layer.lora_A, *layer.lora_embedding_A}
    if isinstance(layer, TrainableTokensLayer):
        return adapter in layer.trainable_tokens_delta
    return isinstance(layer, ModulesToSaveWrapper) and adapter in layer.modules_to_save


def _fill(layer: Any, adapter: str, config: LoraConfig) -> None:
    """Do again what peft does when it adds the adapter; all tensors of the layer are whole."""
    from peft.utils import ModulesToSaveWrapper

    if _is_lora(layer):
        _fill_lora(layer, adapter, config)
    elif isinstance(layer, ModulesToSaveWrapper):
        added: Any = layer.modules_to_save[adapter]
        originals = layer.original_module.parameters()
        for value, original in zip(added.parameters(), originals, strict=True):
            value.copy_(original)
    else:
        table = layer.get_base_layer().weight
        rows, is_new = table[layer.token_indices[adapter]], ~table.any(dim=1)
        rows[is_new[layer.token_indices[adapter]]] = table[~is_new].mean(dim=0)
        layer.trainable_tokens_delta[adapter].copy_(rows)
        layer.trainable_tokens_original[adapter].copy_(rows)


def _fill_lora(layer: Any, adapter: str, config: LoraConfig) -> None:
    for part in (layer.lora_A, layer.lora_B):
        if adapter in part:
            part[adapter].reset_parameters()
    for part in (layer.lora_embedding_A, layer.lora_embedding_B):
        if adapter in part:
            nn.init.normal_(part[adapter])
    if config.init_lora_weights == "orthogonal" and adapter in layer.lora_A:
        weights = [(part[adapter], part[adapter].weight) for part in (layer.lora_A, layer.lora_B)]
        layer.orthogonal_init(adapter)  # which replaces the parameters
        for part, weight in weights:
            weight.copy_(part.weight)
            part.weight = weight
    else:
        layer.reset_lora_parameters(adapter, config.init_lora_weights)
    if adapter in layer.lora_magnitude_vector:
        vectors, vector = layer.lora_magnitude_vector, layer.lora_magnitude_vector[adapter]
        layer.lora_variant[adapter].init(layer, adapter_name=adapter, config=config)
        initialised, vectors[adapter] = vectors[adapter], vector
        vector.weight.copy_(initialised.weight)


def _config_of(model: Any, adapter: str) -> LoraConfig:
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, Mapping) and adapter in configs:
        config: LoraConfig = configs[adapter]
        return config
    available = ", ".join(map(repr, configs)) if isinstance(configs, Mapping) else "none"
    raise CheckpointError(
        f"{type(model).__qualname__} has no peft adapter {adapter!r}; it has {available}. "
        "Shard the model that peft.get_peft_model() returned, and name one of its adapters."
    )


def load_adapter(sharded: Sharded, folder: str | Path, adapter: str = "default") -> None:
    """Load an adapter that peft or ``save_adapter`` wrote. A collective.

    Args:
        folder: one that every rank can read.

    Raises:
        CheckpointError: on every rank: the folder cannot be read, or its adapter has other tensors
            than the model's; nothing was loaded.
    """
    shapes = on_meta(sharded)
    values: dict[str, Tensor] = {}

    def read() -> None:
        values.update(read_adapter(Path(folder), sharded.model, shapes, adapter))

    raise_on_all(sharded.comm, "reading an adapter", read)
    sharded.model.load_state_dict(values, strict=False)


def check_adapter(folder: Path) -> None:
    """Raise ``CheckpointError`` if no adapter is in ``folder``; peft would ask the hub for it."""
    if not any((folder / name).is_file() for name in ADAPTER):
        names = sorted(path.name for path in folder.glob("*"))
        contents = f"it holds {', '.join(names[:4])}" if names else "it is empty, or no folder"
        raise CheckpointError(
            f"{folder} has no {ADAPTER[0]}, so there is no adapter to load: {contents}. Name "
            "a folder that save_adapter, `shardwise train` or peft's save_pretrained has written."
        )


def read_adapter(
    folder: Path, model: nn.Module, shapes: Mapping[str, Tensor], adapter: str = "default"
) -> dict[str, Tensor]:
    """The adapter in ``folder``, by the names that its tensors have in ``model``.

    Args:
        shapes: a tensor of the whole shape for each name in the model, each its own object.

    Raises:
        CheckpointError: it cannot be read, or is not one of this model's adapter.
    """
    from peft.utils import load_peft_weights

    config = _config_of(model, adapter)
    check_adapter(folder)
    with explained(f"reading {folder}", reads=True), _peft_errors("load"):
        stored = load_peft_weights(str(folder), device="cpu")
    expected = peft_names(model, shapes, adapter)
    of_base = peft_names(model, shapes, adapter, embeddings=True)
    expected |= {name: of_base[name] for name in stored if name in of_base}
    names = {*stored, *expected}
    pairs = {n: [tuple(s[n].shape) if n in s else None for s in (stored, expected)] for n in names}
    if differing := sorted(name for name, (one, other) in pairs.items() if one != other):
        has, needs = (f"shape {shape}" if shape else "none" for shape in pairs[differing[0]])
        raise CheckpointError(
            f"the adapter in {folder} is not one of this model's adapter {adapter!r} of rank "
            f"{config.r}: {len(differing)} of {len(names)} tensors differ, first {differing[0]}: "
            f"stored {has}, needed {needs}. Build it with the folder's own configuration, "
            "peft.PeftConfig.from_pretrained(folder), on the base that it was trained on."
        )
    own = {id(tensor): name for name, tensor in shapes.items()}
    return {own[id(expected[name])]: value for name, value in stored.items()}


def save_adapter(sharded: Sharded, folder: str | Path, adapter: str = "default") -> None:
    """Write an adapter's weights and configuration, as peft does. A collective.

    Existing files are replaced atomically, the weights last. Embeddings of the base model are not
    saved; train them with peft's ``modules_to_save``.

    Args:
        sharded: of a ``PeftModel``.
        folder: on rank 0's disk.
        adapter: its name.

    Raises:
        CheckpointError: on every rank: the model has no such adapter, or the folder cannot be
            written.
    """
    model: Any = sharded.model
    is_wanted = is_adapters(sharded, adapter)
    states = sharded.state_dict(rank0_only=True, names=is_wanted)

    def write() -> None:
        if sharded.comm.rank == 0:
            final = Path(folder).expanduser().absolute()
            with sharded._detached(), explained(f"writing {final}"), _peft_errors():
                _write(model, final, states, adapter)
            nbytes = (final / "adapter_model.safetensors").stat().st_size
            log.info("adapter %r saved to %s: %s", adapter, final, size(nbytes))

    raise_on_all(sharded.comm, "writing an adapter", write)


def is_adapters(sharded: Sharded, adapter: str = "default") -> Part:
    """A predicate: does a tensor name belong to the adapter, not to the frozen base?

    ``save(…, names=is_adapters(sharded))`` writes a folder that peft's ``from_pretrained`` reads.
    peft puts the adapter's name into the names of added tensors (``q_proj.lora_A.default.weight``);
    tensors that it trains in place, such as biases, are trainable.

    Raises:
        CheckpointError: the model has no adapter of this name.
    """
    model: Any = sharded.model
    _config_of(model, adapter)
    names, bare = model.named_parameters(remove_duplicate=False), bare_names(model)
    trained = {bare(name) for name, param in names if param.requires_grad}
    other_adapters = set(model.peft_config) - {adapter}

    def is_wanted(name: str) -> bool:
        parts = set(name.split("."))
        return adapter in parts or (name in trained and not parts & other_adapters)

    files = {CONFIG: config_text(model, _config_of(model, adapter))}
    return Part(is_wanted, "adapter_model", stored_names(sharded, adapter), files)


@contextmanager
def _peft_errors(
    verb: str = "save", kind: type[ShardwiseError] = CheckpointError
) -> Iterator[None]:
    """Errors of peft as one of ours, which is raised on every rank."""
    try:
        yield
    except (ShardwiseError, OSError):
        raise
    except Exception as error:
        raise kind(
            f"peft could not {verb} the adapter: {type(error).__name__}: {error}. Check whether "
            f"peft can {verb} it with an unsharded model."
        ) from error


def _write(model: Any, final: Path, states: Mapping[str, Tensor], adapter: str) -> None:
    partial = final.with_name(f".{final.name}.unfinished-{new_token()}")
    try:
        model.save_pretrained(
            partial,
            state_dict=dict(states),
            selected_adapters=[adapter],
            save_embedding_layers=False,
        )
        # peft puts any adapter but the default one into a folder of its name
        written = partial if adapter == "default" else partial / adapter
        make_folder(final)
        mode = stat.S_IMODE((written / CONFIG).stat().st_mode)
        for path in sorted(written.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            path.chmod(mode)  # safetensors creates files that only their owner can read
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(final / path.name)
        sync_folder(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
