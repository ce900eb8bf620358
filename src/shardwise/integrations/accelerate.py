"""``Accelerator`` of accelerate that shards models in place of DDP and FSDP.

    from shardwise.integrations.accelerate import Accelerator

It keeps accelerate's process group, data loaders, autocast and gradient scaler. ``prepare`` calls
``shard()`` where accelerate would wrap the model in another module, so the model keeps its class
and its ``save_pretrained``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import accelerate
import torch
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

from shardwise.api.shard import shard
from shardwise.api.sharded import Sharded
from shardwise.config.precision import Precision
from shardwise.errors import ConfigError
from shardwise.hf.quantized import adopt
from shardwise.integrations import handover
from shardwise.integrations.handover import handle, owner_of

__all__ = ["Accelerator"]

log = logging.getLogger("shardwise")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OTHER_ENGINES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator``, with models sharded by ``shard()``.

    Args:
        sharding: arguments of ``shard()``, such as ``{"strategy": "shard_grad_op"}``; each comes
            before that of the plug-in.
        fsdp_plugin: its settings are read; ``None`` = those of ``accelerate launch``.
        options: what ``accelerate.Accelerator`` takes.

    Raises:
        ConfigError: another ``Accelerator`` of this process uses FSDP, DeepSpeed or Megatron-LM,
            or settings contradict each other.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(
        self, sharding: Mapping[str, Any] | None = None, fsdp_plugin: Any = None, **options: Any
    ) -> None:
        launched = handover.launched_settings(os.environ)
        plugin = handover.shard_settings(fsdp_plugin, "plugin") if fsdp_plugin else launched
        self.sharding = {**plugin, **(sharding or {})}
        self._own: WeakSet[nn.Module] = WeakSet()
        with handover.without_fsdp():
            super().__init__(**options)
        if self.distributed_type in _OTHER_ENGINES:
            raise ConfigError(
                f"accelerate is set up for {self.distributed_type.value} already: an Accelerator "
                "made before this one has that plug-in, and all of a process share one state. "
                "Leave the other Accelerator and its plug-in out."
            )
        compiler = self.state.dynamo_plugin
        if compiler.backend != DynamoBackend.NO:  # unit by unit: hooks are between the units
            self.sharding.setdefault("compile", compiler.backend.value.lower())
            compiler.backend = DynamoBackend.NO

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard ``model`` in place; one that ``shard()`` was called on is taken as it is.

        Raises:
            ConfigError: another ``Accelerator`` or ``device_map`` owns the model.
        """
        if model not in self._own:
            handover.check_own(model, self.device)
            # In evaluation mode accelerate adds autocast to the forward, and wraps nothing.
            super().prepare_model(model, device_placement=False, evaluation_mode=True)
            self._shard(model)
            self._own.add(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        arguments = dict(self.sharding)
        if handover.handle_of(model) is not None:
            if arguments:
                log.warning("the model is sharded already: %s have no effect", sorted(arguments))
            return
        if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
            log.info("%s", adopt(model))
        if self.native_amp and self.mixed_precision in _DTYPES:
            arguments.setdefault("precision", Precision(param_dtype=_DTYPES[self.mixed_precision]))
        shard(model, comm=handover.comm_of(self.device), **arguments)
        model.__dict__["no_sync"] = _refuse_no_sync

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank in backward passes inside the block."""
        return handle(model).no_sync()

    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Nothing, for all ranks have as many batches.

        Raises:
            ConfigError: they are not to.
        """
        even = self.even_batches if even_batches is None else even_batches
        if not even and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs(even_batches=False) lets ranks have different numbers of "
                "batches. Each rank of a sharded model takes part in every gather, so those that "
                "have data would wait for one that has none. Leave even_batches out: with True, "
                "its default, accelerate repeats samples so that every rank has as many batches."
            )
        return nullcontext()

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the norm of these gradients over all ranks; returns the norm before, 0-dim."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in self._models:
            if params and {*map(id, params)} <= {*map(id, model.parameters())}:
                self.unscale_gradients()
                return handle(model).clip_grad_norm_(max_norm, norm_type, params)
        norm: Tensor = super().clip_grad_norm_(params, max_norm, norm_type)  # of several models
        return norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Whole tensors on rank 0, nothing elsewhere. A collective."""
        return handle(model).state_dict(rank0_only=True)

    def save_state(self, output_dir: str | None = None, **options: Any) -> str:
        """Save as accelerate does, with a sharded checkpoint of each model. A collective."""
        if self._save_model_state_pre_hook:
            log.warning(
                "hooks of save_state() get no models and no weights: each model is stored in "
                "parts, in model-0 and so on. Write other files of it after save_state(), from "
                "accelerator.get_state_dict(model), which every rank calls."
            )
        with self._without_models() as models:
            for sharded, optimizers in models:
                if optimizers:  # before accelerate removes or replaces earlier files
                    sharded.runtime.check_reduced(
                        "and save_state() does not store gradients, so nothing was saved. Call it "
                        "after the last micro-batch of the step"
                    )
            folder: str = super().save_state(output_dir, **options)
        for number, (sharded, optimizers) in enumerate(models):
            sharded.save(Path(folder) / f"model-{number}", optimizers)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load what ``save_state`` wrote at any number of ranks. A collective."""
        folders: list[str] = []  # the newest folder, if no other is given
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        with self._without_models() as models:
            super().load_state(input_dir, *args, **options)
        hook.remove()
        for number, (sharded, optimizers) in enumerate(models):
            sharded.load(Path(*folders) / f"model-{number}", optimizers)

    @contextmanager
    def _without_models(self) -> Iterator[list[tuple[Sharded, list[Any]]]]:
        """Yields the models and their optimizers, which accelerate does not see in the block."""
        models, optimizers = self._models, self._optimizers
        owners = [owner_of(one, models) for one in optimizers]
        self._models, self._optimizers = [], []
        try:
            held = [*zip(owners, optimizers, strict=True)]
            yield [(handle(m), [o.optimizer for owner, o in held if owner is m]) for m in models]
        finally:
            self._models, self._optimizers = models, optimizers


def _refuse_no_sync() -> None:
    raise ConfigError(
        "model.no_sync() is a method of DDP's wrapper. Write `with accelerator.no_sync(model):` or "
        "accelerator.accumulate(model). accelerate's LocalSGD calls it to train a copy on each "
        "rank; here a rank has a shard and no copy. Leave LocalSGD out, or pass enabled=False."
    )
