"""Does a model keep the samples of a packed row apart? It is asked, before it trains.

`transformers` derives the mask from positions that begin again, in each attention that it has.
But some models take no positions, and some read tokens one after the other and carry a state over.
Neither raises an error, so a sample in front of another is changed, and the other's logits must
not change.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.batches import MicroBatch
from shardwise.train.decoder import Decoder
from shardwise.train.language_model import logits

LENGTH = 8  # tokens of each of the two samples


def check_packing(model: nn.Module, vocabulary: int, device: torch.device) -> None:
    """One forward pass of two short rows; of our decoder the tests show it. A collective.

    Raises:
        ConfigError: the model does not keep samples apart.
    """
    if isinstance(model, Decoder):
        return
    ids = torch.arange(2 * LENGTH).repeat(2, 1) % vocabulary
    ids[1, :LENGTH] = ids[1, :LENGTH].flip(0)
    positions = torch.arange(LENGTH).repeat(2, 2)
    segments = (torch.arange(2 * LENGTH) >= LENGTH).long().repeat(2, 1)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            out = logits(model, MicroBatch(ids, ids, positions, segments).to(device))
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise ConfigError(_message(model, "takes no position_ids")) from error
    model.train(training)
    change = (out[0] - out[1])[LENGTH:].abs().max().item()
    if change > torch.finfo(out.dtype).eps ** 0.5 * out.abs().max().item():
        raise ConfigError(_message(model, f"changes its logits by up to {change:.2g}"))


def _message(model: nn.Module, fact: str) -> str:
    return (
        f"data.packing is true, and {type(model).__name__} {fact} where another sample is in front "
        "of one: packed samples would read each other. Set data.packing: false; or concatenate, "
        "which accepts that."
    )
