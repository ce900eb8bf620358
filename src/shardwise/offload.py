"""What is kept in host memory instead of a device's. One frozen policy for a model.

FSDP's ``CPUOffload`` moves everything or nothing, so whoever lacks memory for optimizer state alone
also waits for parameters in every use of a unit. Here each has a switch of its own:

                    where it rests   what a step copies, once for each bucket
    parameters      host             its shard to the device before each gather
    gradients       host             their mean to the host as soon as it is reduced
    optimizer       host             what it has written to the device, once after it
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.arguments import checked
from shardwise.errors import ConfigError

__all__ = ["Offload"]


@checked
@dataclass(frozen=True)
class Offload:
    """What is kept in host memory; pinned, where there is a device.

    Attributes:
        parameters: the device keeps no shards between the uses of a unit. Needs ``optimizer``.
        gradients: mean gradients leave the device as soon as they are reduced. Otherwise they stay
            there until they are clipped or the optimizer steps.
        optimizer: the optimizer steps in host memory, where its state and the parameters that it
            sees are (DeepSpeed's ``offload_optimizer``).

    Raises:
        ConfigError: ``parameters`` without ``optimizer``.
    """

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False

    def __post_init__(self) -> None:
        if self.parameters and not self.optimizer:
            raise ConfigError(
                "offload.parameters is on and offload.optimizer is off: an optimizer on the device "
                "needs all shards there at each step, so they would take as much memory as without "
                "offload. Add optimizer=True, or leave parameters out."
            )

    @property
    def words(self) -> str:
        """``" with parameters, optimizer in host memory"``, or ``""``."""
        names = ", ".join(name for name, is_on in vars(self).items() if is_on)
        return f" with {names} in host memory" if names else ""
