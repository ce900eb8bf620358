"""``Trainer`` of transformers that shards its model in place of DDP and FSDP.

    from shardwise.integrations.transformers import Trainer

Its loop, arguments, callbacks and files are those of ``transformers.Trainer``. What is replaced is
the ``Accelerator``, and how a sharded model and its optimizer get into those files: each rank
writes its part of the weights, and rank 0 the optimizer's whole state. A plain ``Trainer`` resumes
from them, and this one at any number of ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import SAFE_WEIGHTS_NAME

from shardwise.api.nn import chunked_cross_entropy
from shardwise.api.sharded import Sharded
from shardwise.checkpoint import by_name, numbered
from shardwise.checkpoint.collectives import raise_on_all
from shardwise.checkpoint.local_shards import held_whole
from shardwise.errors import CheckpointError, ConfigError
from shardwise.hf.adapters import is_adapters
from shardwise.hf.labelled import causal_model, head_of, in_place_of_logits, why_all_logits
from shardwise.integrations import handover
from shardwise.integrations.accelerate import Accelerator
from shardwise.integrations.handover import handle

__all__ = ["Trainer"]

log = logging.getLogger("shardwise")

IGNORED = -100  # the label of a place without one
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # as transformers names them
BLOCKSIZE = 256  # elements that an 8-bit optimizer of bitsandbytes scales together


class Trainer(transformers.Trainer):
    """``transformers.Trainer``, with a sharded model.

    A trainer derived from transformers' is combined with it, this one first:
    ``class MyTrainer(Trainer, TheirTrainer)``.
    """

    only_labelled = True
    """Run the head only at places with a label, if the model's class is tested with that."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    _loss_only = False  # the outputs are dropped
    _whole: dict[str, Tensor] | None = None  # what ``save_pretrained`` writes
    _written: set[str] | None = None  # the names of what all ranks write in its place

    def sharding(self) -> dict[str, Any]:
        """The arguments of ``shard()``, from ``TrainingArguments``; override it for others."""
        return arguments_of(self.args)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return dict(self._accelerator_args)

    def create_accelerator_and_postprocess(self) -> None:
        """Make transformers' ``Accelerator``, and ours of the same arguments, which is used."""
        plugin, self.args.fsdp_plugin_args = self.args.fsdp_plugin_args, None
        with handover.without_fsdp():
            super().create_accelerator_and_postprocess()
        self.args.fsdp_plugin_args = plugin
        if self.args.bf16_full_eval or self.args.fp16_full_eval:
            raise ConfigError(
                "bf16_full_eval and fp16_full_eval convert the model in place before it is "
                "evaluated, and a sharded model keeps its dtype. Leave them out: with bf16=True it "
                "is evaluated in bfloat16, too."
            )
        options = {**self._accelerator_args, "fsdp_plugin": None}
        self.accelerator = Accelerator(self.sharding(), **options)
        gather, as_objects = self.accelerator.gather_for_metrics, self.args.eval_use_gather_object
        self.gather_function = partial(gather, use_gather_object=as_objects)

    @cached_property
    def all_logits(self) -> str:
        """The reason for computing all logits; ``""``: only those of places with a label."""
        why = why_all_logits(handle(self.model)) or self._other_loss()
        log.info("logits: %s", f"of all places: {why}" if why else "of places with a label only")
        return why

    def _other_loss(self) -> str:
        if not self.only_labelled:
            return "only_labelled is False"
        compute: Any = super().compute_loss
        if compute.__func__ is not transformers.Trainer.compute_loss:
            return f"{type(self).__name__} computes its own loss"
        given = self.compute_loss_func, self.label_smoother, self.args.use_liger_kernel or None
        is_usual = causal_model(self.model).loss_function is ForCausalLMLoss
        return "" if is_usual and given == (None, None, None) else "the loss is another one"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss; with logits of labelled places only, unless the caller reads them."""
        read = return_outputs and not self._loss_only
        whole = read or inputs.get("labels") is None or self.all_logits
        with nullcontext() if whole else labelled_loss(causal_model(model), inputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        own = type(self).compute_loss is Trainer.compute_loss  # another may read the logits
        self._loss_only = own and prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._loss_only = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is until it is sharded: the unsharded model may not fit."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for ``from_pretrained``. A collective.

        Each rank writes its part of the weights. Rank 0 gathers adapters, and a model whose weights
        transformers converts; with ``save_on_each_node`` one rank of each node has the whole model.
        """
        each = self.args.save_on_each_node
        self._written = None if each else written_as_they_are(self.model)
        self._whole = {} if self._written else whole_states(self.model, rank0_only=not each)
        super().save_model(output_dir, _internal_call)
        self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        sharded = handover.handle_of(self.model)
        # peft asks modules for their state_dict(), which with our hooks is a collective.
        with sharded._detached() if sharded else nullcontext():
            super()._save(output_dir, self._whole)
        if self._written is not None:
            path = Path(output_dir or str(self.args.output_dir)) / SAFE_WEIGHTS_NAME
            handle(self.model).save_file(path, names=self._written.__contains__)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, optimizer = Path(output_dir), self.optimizer.optimizer
        states = handle(self.model).optimizer_state_dict(optimizer, rank0_only=True)
        if self.args.should_save:
            torch.save(numbered(states), folder / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            files = Path(checkpoint) / OPTIMIZER, Path(checkpoint) / SCHEDULER
            load_state(handle(self.model), self.optimizer.optimizer, self.lr_scheduler, files)

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the FLOPs of a step, as transformers does, for the unsharded model."""
        return whole_flops(handle(self.model), inputs)


def arguments_of(args: transformers.TrainingArguments) -> dict[str, Any]:
    """``fsdp`` and ``fsdp_config``, or the variables of ``accelerate launch``, for ``shard()``."""
    arguments = handover.launched_settings(os.environ)
    if args.fsdp:
        settings = {"fsdp": True, "fsdp_config": args.fsdp_config}
        arguments = handover.shard_settings(settings, "transformers")
    if "8bit" in args.optim:
        arguments["blocksize"] = BLOCKSIZE
    return arguments


@contextmanager
def labelled_loss(model: Any, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the logits of ``model`` by their summed loss, and its loss by the mean of that."""
    head, targets = head_of(model), inputs.get("shift_labels")
    if targets is None:
        targets = F.pad(inputs["labels"], (0, 1), value=IGNORED)[..., 1:]

    def mean(logits: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        counted = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return logits / torch.as_tensor(counted, device=logits.device)

    compute = partial(chunked_cross_entropy, head=head, target=targets, reduction="sum")
    model.loss_function = mean
    try:
        with in_place_of_logits(head, compute):
            yield
    finally:
        del model._loss_function


def written_as_they_are(model: nn.Module) -> set[str] | None:
    """Return the names of the weights that ``save_pretrained`` would write, as the model has them.

    ``None`` where it would write others: adapters, or weights that it renames, splits or joins.
    """
    sharded = handover.handle_of(model)
    if sharded is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    members = [member for bucket in sharded.buckets for member in bucket.members]
    shapes = [(member.aliases, member.shape) for member in members]
    shapes += [(names, buffer.shape) for names, buffer in held_whole(model)]
    tied, left_out = model.all_tied_weights_keys, model._keys_to_ignore_on_save or ()
    named = {([n for n in names if n not in tied] or names)[0]: shape for names, shape in shapes}
    states = {name: torch.empty(shape, device="meta") for name, shape in named.items()}
    written = revert_weight_conversion(model, dict(states))
    is_other = model._hf_peft_config_loaded or any(written.get(n) is not states[n] for n in states)
    return None if is_other else states.keys() - left_out


def whole_states(model: nn.Module, rank0_only: bool) -> dict[str, Tensor] | None:
    """Return what ``save_pretrained`` is given: the unsharded model, or its adapters. A collective.

    ``None`` for a model that is not sharded yet.
    """
    sharded = handover.handle_of(model)
    if sharded is None:
        return None
    adapters = [is_adapters(sharded, name) for name in getattr(model, "peft_config", ())]

    def wanted(name: str) -> bool:
        return not adapters or any(is_wanted(name) for is_wanted in adapters)

    return sharded.state_dict(rank0_only=rank0_only, names=wanted)


def load_state(
    sharded: Sharded, optimizer: Optimizer, scheduler: Any, files: tuple[Path, Path]
) -> None:
    """Give an optimizer, from rank 0's file, and a scheduler their states. A collective."""
    if not sharded.all(all(path.is_file() for path in files)):
        log.warning("%s is not there on every rank: the optimizer starts from scratch.", files[0])
        return
    name = {id(param): name for name, param in sharded.model.named_parameters()}
    names = [name[id(param)] for group in optimizer.param_groups for param in group["params"]]

    def read() -> dict[str, Any]:
        if sharded.comm.rank:
            return {}
        try:
            return by_name(torch.load(files[0], map_location="cpu", weights_only=True), names)
        except Exception as error:
            raise CheckpointError(
                f"{files[0]} is no state of this model's optimizer: {error} Resume with the model "
                "and the optim of that run, or remove the file to start the optimizer from scratch."
            ) from error

    states = raise_on_all(sharded.comm, "reading an optimizer's state", read)
    sharded.load_optimizer_state_dict(optimizer, states)
    scheduler.load_state_dict(torch.load(files[1], weights_only=True))


def whole_flops(sharded: Sharded, inputs: Any) -> int:
    """6 for each token and parameter, as transformers has it, which would count the shards.

    0 for ``inputs`` without tokens: those of GRPO are a list of prompts.
    """
    given = inputs if isinstance(inputs, Mapping) else {}
    ids = given.get(getattr(sharded.model, "main_input_name", "input_ids"))
    modules = sharded.model.modules()
    embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    members = (member for bucket in sharded.buckets for member in bucket.members)
    numel = sum(member.numel for member in members if id(member.param) not in embeddings)
    return 0 if ids is None else 6 * numel * ids.numel()
