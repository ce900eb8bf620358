"""The sharded model with its optimizer and batches, and one training step.

The loss of a micro-batch is its *sum* over the tokens that are trained on, scaled so that gradients
are the mean over all of these in the global batch, however it is divided. A mean of the
micro-batches' means would give 1×4×1, 2×2×1 and 2×1×2 (micro × accumulation × ranks) different
losses whenever micro-batches have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.protocol import Comm
from shardwise.errors import ConfigError
from shardwise.offload import Offload
from shardwise.precision import Precision
from shardwise.schedule.events import Prefetch
from shardwise.setup.recompute import ActivationCheckpointing
from shardwise.sharded import Sharded, shard
from shardwise.train.batches import IGNORED, Batches, MicroBatch, RowSource
from shardwise.train.config import OptimizerConfig, Recipe
from shardwise.train.decoder import Decoder, initialiser
from shardwise.train.learning_rate import learning_rate
from shardwise.train.sharding_config import ShardingConfig
from shardwise.train.streams import StreamBatches, StreamedRows
from shardwise.units import wrap as wraps
from shardwise.units.wrap import Wrap

__all__ = ["Job", "build", "parameter_groups", "wrap_of"]


@dataclass(frozen=True)
class Job:
    """One rank's part of a training run."""

    recipe: Recipe
    model: Decoder
    sharded: Sharded
    optimizer: torch.optim.Optimizer
    batches: Batches | StreamBatches
    scaler: torch.amp.GradScaler  # of the loss; does nothing where it is not enabled

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.batch.rows * self.recipe.data.context

    def forward_backward(self, step: int) -> float:
        """Forward and backward of step ``step``, with reduction of the gradients.

        Returns:
            This rank's part of the mean loss, which is the sum over ranks. Gradients are unscaled.
        """
        micro_batches, targets = self.batches.step(step), self.batches.targets(step) or 1
        rank_loss = torch.zeros((), device=self.sharded.comm.device)
        for number, batch in enumerate(micro_batches, start=1):
            with self.sharded.accumulate(last=number == len(micro_batches)):
                loss = self._loss(batch) / targets
                # The engine averages over ranks, and the ranks' losses are to be summed.
                self.scaler.scale(loss * self.sharded.comm.size).backward()
                rank_loss += loss.detach()
        self.scaler.unscale_(self.optimizer)
        return float(rank_loss)

    def clip_and_set_lr(self, step: int) -> tuple[float, float]:
        """Clip the gradients of step ``step``, and set its learning rate.

        Returns:
            The gradient norm before clipping, and the learning rate.
        """
        norm = self.sharded.clip_grad_norm_(self.recipe.optimizer.clip)
        lr = learning_rate(step, self.recipe.run.steps, self.recipe.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return float(norm), lr

    def update(self) -> None:
        """Update the parameters; with a loss scale only if no rank's gradients overflowed."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _loss(self, batch: MicroBatch) -> Tensor:
        """The sum over the tokens that are trained on."""
        batch = batch.to(self.sharded.comm.device)
        logits = self.model(batch.ids, batch.positions, batch.segments).float()
        return F.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="sum", ignore_index=IGNORED
        )


def build(recipe: Recipe, comm: Comm, rows: RowSource | StreamedRows, vocabulary: int) -> Job:
    """Build the model on the meta device, shard it, and make its optimizer. A collective.

    Every rank draws the same weights from the seed, unit by unit, and keeps its shard.
    """
    with torch.device("meta"):
        model = Decoder(recipe.model, vocabulary, recipe.data.context)
    sharding = recipe.sharding
    sharded = shard(
        model,
        strategy=sharding.strategy,
        wrap=wrap_of(sharding),
        comm=comm,
        init=initialiser(torch.Generator(comm.device).manual_seed(recipe.run.seed)),
        mesh=sharding.mesh,
        bucketing=sharding.bucketing,
        activation_checkpointing=checkpointing_of(sharding),
        compile=sharding.compile,
        offload=Offload(**dict.fromkeys(sharding.offload, True)),
        prefetch=Prefetch(**sharding.prefetch.model_dump()),
        precision=Precision(**sharding.precision.arguments()),
    )
    optimizer = _optimizer(model.parameters(), recipe.optimizer)
    scaler = _scaler(recipe, comm.device.type)
    return Job(recipe, model, sharded, optimizer, _batches(rows, recipe, comm), scaler)


def _scaler(recipe: Recipe, device: str) -> torch.amp.GradScaler:
    """Of the recipe's initial scale. Gradients of float16 activations underflow without one."""
    scale = recipe.optimizer.loss_scale
    if scale is None:
        scale = 2.0**16 if recipe.sharding.precision.compute == "float16" else 0.0
    return torch.amp.GradScaler(device, init_scale=scale or 1.0, enabled=scale > 0)


def _batches(rows: RowSource | StreamedRows, recipe: Recipe, comm: Comm) -> Batches | StreamBatches:
    if isinstance(rows, StreamedRows):
        return StreamBatches(rows, comm.rank, comm.size)
    return Batches(rows, recipe.batch, recipe.run.seed, comm.rank, comm.size)


def checkpointing_of(config: ShardingConfig) -> bool | ActivationCheckpointing:
    """Recompute repeated units, with their inputs on the host or the device, or none."""
    if config.activation_offload and not config.activation_checkpointing:
        raise ConfigError(
            "sharding.activation_offload keeps the inputs of blocks that are recomputed, and none "
            "is; set sharding.activation_checkpointing: true."
        )
    return config.activation_checkpointing and ActivationCheckpointing(
        offload=config.activation_offload
    )


def wrap_of(config: ShardingConfig) -> Wrap:
    """The wrap policy for ``auto``, ``none``, class names, or a minimum number of parameters."""
    if isinstance(config.wrap, int):
        return wraps.by_size(config.wrap)
    policies = {"auto": wraps.automatic, "none": wraps.whole}
    if isinstance(config.wrap, str) and config.wrap in policies:
        return policies[config.wrap]()
    return wraps.by_class(config.wrap)


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Two parameter groups: matrices with weight decay, and norms without.

    Decaying a norm's scale would shrink its output, not regularise it. A shard has the number of
    dimensions of its parameter, so the rule holds for shards.
    """
    trained = [param for param in parameters if param.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    groups = parameter_groups(parameters, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
