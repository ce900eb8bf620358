"""Lightning Fabric with our strategy: two ranks do as one, and go on from Fabric's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

import shardwise as sw
from shardwise.integrations.fabric import ShardwiseStrategy
from tests.forked import forked
from tests.integrations.started import on_ranks


class Stepped(nn.Linear):
    """A module with the step of a LightningModule."""

    def training_step(self, x: Tensor) -> Tensor:
        return self.forward(x).sum()


@pytest.mark.slow
@forked
def test_a_step_gathers_units_and_an_optimizer_has_its_own_gradients_clipped() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ShardwiseStrategy())
    fabric.launch()
    net = Stepped(2, 2)
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in net.parameters()]
    model, *optimizers = fabric.setup(net, *optimizers)
    fabric.backward(model.training_step(torch.ones(3, 2)))
    norms = [fabric.clip_gradients(model, one, max_norm=1.0) for one in optimizers]
    assert norms == [pytest.approx(6.0), pytest.approx(18**0.5)]
    other: nn.Module = fabric.setup(nn.Linear(2, 2))
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(sw.ConfigError, match="SGD steps on parameters of 2 of the 2 models"):
        fabric.save("never.pt", {"optimizer": both})


@pytest.mark.prove
@pytest.mark.spawn
def test_a_loop_over_fabric_is_that_of_one_process_and_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """With accumulation and clipping."""
    jobs = [(1, "full_shard"), (2, "full_shard")]
    module = "tests.integrations.fabric_runs"
    on_ranks(module=module, imports="import lightning_fabric", jobs=jobs, folder=tmp_path)
    alone, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert two["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert min(two["norms"]) > 0.1
    assert two["again"] == two["norms"][2:]
    assert two["strategy"] == "full_shard"
