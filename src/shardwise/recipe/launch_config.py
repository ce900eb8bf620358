"""The section of a recipe about machines: one file for all of them, with nothing of one alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwise.launch.host_file import HOST
from shardwise.recipe.section import Positive, Section

HostName = Annotated[str, Field(pattern=rf"^(?:{HOST})$")]
Launcher = Literal["torchrun", "slurm", "mpi", "ray", "k8s", "sky"]


class LaunchConfig(Section):
    """Machines and launcher, which change nothing of what the ranks compute."""

    by: Launcher = Field("torchrun", description="what starts the ranks of several machines")
    nodes: Positive = Field(1, description="machines")
    nproc: Positive | None = Field(
        None, description="ranks of each machine; null = one for each device"
    )
    hosts: tuple[HostName, ...] = Field(
        (), description="names or addresses of the machines, by rank"
    )
    address: HostName | None = Field(
        None, description="of machine 0, where the ranks meet; null = found"
    )
    port: Annotated[int, Field(gt=0, lt=65_536)] = Field(29500, description="at that address")
    interface: str | None = Field(
        None, min_length=1, description="network interface on every machine; null = found"
    )
    restarts: int = Field(0, ge=0, description="how often all ranks start again after a crash")
