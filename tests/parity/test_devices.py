"""Parity on a device: one rank, sharded, trains as the plain model does.

All bits are equal on the CPU. A GPU adds up an embedding's gradient in any order, so there it is a
tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.transports.local import LocalComm
from tests import nets
from tests.copies import assert_near
from tests.devices import DEVICES
from tests.steps import STRATEGIES

Shard = Callable[[nn.Module], object]


def trained(device: str, shard: Shard) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of four steps, and every parameter after them."""
    torch.manual_seed(0)
    model = nets.decoder().to(device)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        batch = tuple(part.to(device) for part in nets.decoder_batch(step, 4))
        loss = nets.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_trains_as_a_plain_model_does(device: str, strategy: str) -> None:
    comm = LocalComm(torch.device(device, 0) if device != "cpu" else "cpu")
    plain = trained(device, lambda model: None)
    mine = trained(device, lambda model: sw.shard(model, strategy, comm=comm))
    assert plain[0][0] != plain[0][-1]
    tolerance = 0.0 if device == "cpu" else 1e-5
    assert mine[0] == pytest.approx(plain[0], rel=tolerance, abs=0)
    assert_near(mine[1], plain[1], tolerance)
