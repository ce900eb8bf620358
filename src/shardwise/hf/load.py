"""A causal language model of the hub, in shards that were never whole.

1. open        config, headers of the files: what is stored
2. build       the model on the meta device
3. map         which stored tensors make which of the model; everything that does not fit
4. change      quantised, with new tokens, with adapters of peft, where they are wanted
5. shard       the units, without values but for what no file has
6. read        each rank the byte ranges that it holds; then the adapters' values

``on_meta`` ends before the fifth, so what a rank will hold is known before a value is read.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from shardwise.api.shard import shard
from shardwise.api.sharded import Sharded
from shardwise.checkpoint.collectives import raise_on_all
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.safetensors_format import dtype_of
from shardwise.checkpoint.wrappers import of_plain_model
from shardwise.comm.machine.accelerators import check_kernels
from shardwise.comm.machine.connect import comm_for
from shardwise.comm.malloc import trim
from shardwise.comm.mesh import Ranks
from shardwise.comm.protocol import Comm
from shardwise.config.checkpointing import ActivationCheckpointing, NamedUnits
from shardwise.config.ignored import Ignored
from shardwise.config.options import Options, default_init
from shardwise.config.placement import Placement
from shardwise.config.precision import Precision
from shardwise.config.prefetch import Prefetch
from shardwise.errors import ConfigError
from shardwise.errors.arguments import named, taken
from shardwise.hf import weights
from shardwise.hf.adapters import add_adapter, init_adapter
from shardwise.hf.file_map import FileMap, map_files
from shardwise.hf.folder import (
    CONFIG,
    SMALL,
    config_of,
    dtype_on_hub,
    errors_of_transformers,
    locate,
    new_model,
    tokenizer_of,
)
from shardwise.hf.new_tokens import add_tokens, check_tables
from shardwise.hf.preparation import check_compute, prepare
from shardwise.hf.quantized import Quantized, quantize
from shardwise.hf.quantized_weights import QuantizedWeights
from shardwise.hf.report import Report
from shardwise.hf.targets import Matches, trainable_line
from shardwise.plan.units.wrap import Wrap

if TYPE_CHECKING:
    from peft import LoraConfig

log = logging.getLogger("shardwise")

_GLOBALS = threading.Lock()  # transformers and torch change them: default dtype, random generator


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model of the hub, sharded. ``print`` it.

    Attributes:
        model: of ``transformers``, in training mode, or peft's ``PeftModel`` around it.
        tokenizer: of ``transformers``; ``None`` if the folder has none.
        folder: where it was read.
        report: what of the files was read, converted, and left out.
        matches: which modules the adapter's targets are.
        quantized: which layers, and their bytes before and after.
    """

    model: Any
    sharded: Sharded
    tokenizer: Any
    folder: Path
    report: Report
    matches: Matches | None = None
    quantized: Quantized | None = None

    def __str__(self) -> str:
        lines: list[object] = [self.report, self.quantized, self.matches]
        if self.matches is not None:
            packed = 0 if self.quantized is None else self.quantized.packed
            numel = self.sharded.numel
            lines.append(trainable_line(numel(trainable_only=True), numel() + packed))
        return "\n".join(map(str, filter(None, lines)))


@named
def load(
    source: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    lora: LoraConfig | None = None,
    new_tokens: Sequence[str] = (),
    quantization: Any = None,
    comm: Comm | None = None,
    strategy: str | int | Enum | Placement = "full_shard",
    wrap: Wrap | None = None,
    precision: Precision = Precision(),
    prefetch: Prefetch = Prefetch(),
    offload: Literal["none", "optimizer", "everything"] = "none",
    bucketing: Literal["block", "layer", "none"] = "block",
    uneven: Literal["pad", "error"] = "pad",
    blocksize: int = 0,
    unsharded: int | NamedUnits | None = None,
    sync_module_states: bool = True,
    ignored: Ignored = (),
    buffers: Literal["local", "broadcast", "average"] = "local",
    activation_checkpointing: bool | ActivationCheckpointing = False,
    compile: bool | str = False,  # noqa: A002
    mesh: Ranks | tuple[int, int] | None = None,
) -> LoadedModel:
    """Load a causal language model of ``transformers`` in shards. A collective.

    It is built on the meta device, and each rank reads the byte ranges that it holds, whatever the
    number of ranks. Beyond its shards a rank holds at most one unit. Nothing is cached for
    generation while it trains: ``model.config.use_cache`` is off.

    Args:
        source: a folder with a ``config.json`` and safetensors files, or a name on the hub.
        revision: of the hub's name: a branch, a tag or a commit.
        cache_dir: the hub's cache, instead of the usual one.
        dtype: of the weights; ``None`` = as the folder says.
        lora: an adapter to train on the frozen model; its values are drawn as peft does, by rank 0.
        new_tokens: what the tokenizer gets besides; the adapter trains their embeddings, which
            begin at the mean of the others.
        quantization: a ``transformers.BitsAndBytesConfig``. The model is then frozen, and what is
            not quantised is cast as by ``prepare_model_for_kbit_training``.
        comm: the ranks; ``None`` = from the launcher's environment, or one.
        strategy, wrap, …, mesh: as for ``sw.shard``.

    Raises:
        ConfigError: there is no such folder, transformers has no such model, a target of the
            adapter matches nothing, or an argument is of another kind.
        CheckpointError: the files lack tensors of the model, hold them in another shape, or hold a
            tied one twice with different values.
    """
    options = taken(Options, {**locals(), "init": default_init, "load_later": frozenset()})
    comm = comm_for(comm, mesh)
    if dtype is not None:
        _check_type("dtype", dtype, torch.dtype, "torch.bfloat16")
    changes = Changes(quantization, lora, _tokens(new_tokens))
    changes.check(precision.param_dtype, comm.device)
    shard_it = partial(shard, strategy=strategy, wrap=wrap, comm=comm, **vars(options))
    return _load(source, (revision, cache_dir), dtype, changes, comm, shard_it)


def _load(
    source: str | Path,
    hub: tuple[Any, Any],
    dtype: torch.dtype | None,
    changes: Changes,
    comm: Comm,
    shard_it: Callable[..., Sharded],
) -> LoadedModel:
    with ExitStack() as stack:
        build = partial(_build, source, hub, dtype, changes, stack)
        built = raise_on_all(comm, "opening a model", build)
        comm.agree({f"what is stored in {built.folder.name}": _digest(built.reader)})
        compare = partial(weights.check_twice, built.reader, built.map, comm.rank, comm.size)
        raise_on_all(comm, "comparing tied weights", compare)
        sharded = shard_it(built.model, init=built.init, load_later=built.later)
        absmax = raise_on_all(comm, "reading a model", partial(_read, built, sharded))
        built.quantized.share(absmax)
    del absmax
    trim()  # what was read and quantised lies between what stays
    if changes.lora is not None:
        init_adapter(sharded)
    report = Report.of(sharded, built.map, str(source))
    tables = built.matches, built.quantized.table
    if comm.rank == 0 and (built.map.initialised or built.map.unexpected):
        log.warning("not all tensors of the files and of the model have a counterpart: %s", report)
    return LoadedModel(built.model, sharded, built.tokenizer, built.folder, report, *tables)


def _tokens(new_tokens: Sequence[str]) -> tuple[str, ...]:
    if isinstance(new_tokens, str):
        raise ConfigError(
            f"new_tokens is {new_tokens!r}, and not a list. Pass one: new_tokens=[{new_tokens!r}]."
        )
    return tuple(new_tokens)


class Changes(NamedTuple):
    """Changes to a model before it is sharded; see ``load``."""

    quantization: Any = None
    lora: LoraConfig | None = None
    new_tokens: tuple[str, ...] = ()

    def check(self, computed: torch.dtype | None, device: torch.device) -> None:
        """Raise ``ConfigError`` for another kind, dtypes that differ, and what a device lacks."""
        if self.quantization is not None:
            from transformers import BitsAndBytesConfig

            example = "transformers.BitsAndBytesConfig(load_in_4bit=True)"
            _check_type("quantization", self.quantization, BitsAndBytesConfig, example)
            check_compute(self.quantization, computed)
            check_kernels(device, self.quantization.quantization_method())
        if self.lora is not None:
            from peft import LoraConfig

            _check_type(
                "lora", self.lora, LoraConfig, 'peft.LoraConfig(r=8, task_type="CAUSAL_LM")'
            )
            if self.new_tokens and self.lora.trainable_token_indices:
                raise ConfigError(
                    f"trainable_token_indices={self.lora.trainable_token_indices} are those of "
                    f"lora, and new_tokens ({', '.join(self.new_tokens)}) set others. Pass one of "
                    "the two."
                )
        elif self.new_tokens:
            raise ConfigError(
                f"new_tokens are {', '.join(self.new_tokens)}, and lora is None: an adapter trains "
                "their embeddings. Pass lora=peft.LoraConfig(…)."
            )


class Built(NamedTuple):
    """A model on the meta device, with its changes, and where its values are.

    Attributes:
        later: tensors whose values come from files, or are made after ``shard()``.
        init: initialises the others.
    """

    folder: Path
    reader: CheckpointReader
    model: Any
    map: FileMap
    quantized: QuantizedWeights
    tokenizer: Any
    matches: Matches | None
    later: frozenset[torch.Tensor]
    init: Callable[[nn.Module], None]


def on_meta(
    source: str | Path, revision: str | None, dtype: torch.dtype | None, changes: Changes
) -> Any:
    """The model that ``load`` would shard, from its config alone: no weight is fetched or read.

    Of a name on the hub, ``config.json`` is fetched; with new tokens the tokenizer, too; and the
    headers of the weights' files where only they have a dtype.

    Raises:
        ConfigError: as ``load``.
    """
    folder = locate(source, revision, patterns=SMALL if changes.new_tokens else [CONFIG])
    config = config_of(folder)
    is_here = Path(source).expanduser().is_dir() or any(folder.glob("*.safetensors"))
    if not (dtype or config.dtype or is_here):
        dtype = dtype_of(dtype_on_hub(str(source), revision))
    model = _empty(config, dtype, folder)
    if changes.quantization is not None:
        quantize(model, changes.quantization)
        prepare(model)
    return _adapted(model, changes, tokenizer_of(folder), {})[0]


def _build(
    source: str | Path,
    hub: tuple[Any, Any],
    dtype: torch.dtype | None,
    changes: Changes,
    stack: ExitStack,
) -> Built:
    """The files, which are closed with ``stack``, and the model that they fit."""
    folder = locate(source, *hub)
    reader = stack.enter_context(CheckpointReader.open(folder))
    model = _empty(config_of(folder), dtype, folder)
    file_map = map_files(model, of_plain_model(reader.weights()), str(folder))
    quantized, file_map = QuantizedWeights.of(model, changes.quantization, file_map)
    tokenizer, init, own = tokenizer_of(folder), initialiser(model), _tensors(model)
    model, matches = _adapted(model, changes, tokenizer, file_map.direct)
    later = file_map.tensors | quantized.tensors | (_tensors(model) - own)
    return Built(folder, reader, model, file_map, quantized, tokenizer, matches, later, init)


def _adapted(
    model: Any, changes: Changes, tokenizer: Any, places: dict[torch.Tensor, Any]
) -> tuple[Any, Matches | None]:
    """The model with the adapter, if there is to be one, and what its targets matched."""
    lora = changes.lora
    if lora is None:
        return model, None
    if changes.new_tokens:
        check_tables(model, lora, changes.new_tokens)
        ids = add_tokens(model, tokenizer, changes.new_tokens, places)
        lora = replace(lora, trainable_token_indices=ids)
    return add_adapter(model, lora)


def _read(built: Built, sharded: Sharded) -> list[torch.Tensor]:
    """Fill the shards, and return the absmax of this rank's blocks of quantised weights."""
    weights.read(built.reader, built.map, sharded)
    return built.quantized.read(built.reader, sharded.comm)


def _empty(config: Any, dtype: torch.dtype | None, folder: Path) -> Any:
    from transformers import GenerationConfig

    dtype = dtype or config.dtype or _stored_dtype(folder)
    with _GLOBALS, torch.device("meta"):
        model = new_model(config, dtype=dtype)
    if dtype is torch.float64 and config._experts_implementation == "grouped_mm":
        model.set_experts_implementation("eager")  # torch multiplies no groups of float64
    for pattern, kept_dtype in model._get_dtype_plan(dtype).items():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept_dtype)
    if (file := folder / "generation_config.json").is_file():
        with errors_of_transformers(f"transformers cannot read {file}", "Mend it, or remove it."):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.use_cache = False
    return model


def _stored_dtype(folder: Path) -> torch.dtype:
    with CheckpointReader.open(folder) as reader:  # older folders say it in their files alone
        return dtype_of(next(iter(reader.weights().values())).stored.dtype)


def initialiser(model: nn.Module) -> Callable[[nn.Module], None]:
    """Initialises what no file has, as ``transformers`` does.

    A module's random numbers depend on its name alone, so they are the same at any number of ranks.
    """
    from transformers import PreTrainedModel

    names, owners = dict[nn.Module, str](), dict[nn.Module, PreTrainedModel]()
    for name, module in model.named_modules():  # an inner model comes after the outer one
        names[module] = name
        if isinstance(module, PreTrainedModel):
            owners |= dict.fromkeys(module.modules(), module)

    def init(module: nn.Module) -> None:
        device = next(tensor.device for tensor in _own(module) if not tensor.is_meta)
        devices = [] if device.type == "cpu" else [device]
        with _GLOBALS, torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
            torch.manual_seed(zlib.crc32(names[module].encode()))
            owners[module]._init_weights(module)

    return init


def _tensors(model: nn.Module) -> frozenset[torch.Tensor]:
    return frozenset({*model.parameters(), *model.buffers()})


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _digest(reader: CheckpointReader) -> str:
    return hashlib.sha256(repr(sorted(reader.weights().items())).encode()).hexdigest()[:16]


def _check_type(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {value!r}, and not a {kind.__name__}. Pass one, for example {example}."
        )
