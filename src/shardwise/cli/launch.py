"""``shardwise launch RECIPE``: lines, files and programs that start ranks on several machines.

What starts them is torchrun, SLURM, MPI, Ray, Kubernetes or SkyPilot; here is what each is told.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import click

from shardwise.comm.machine.accelerators import row
from shardwise.comm.machine.interfaces import Interface, interface_to, interfaces, reachable
from shardwise.errors import ConfigError
from shardwise.launch import kubernetes, mpi, ray, sky, slurm, torchrun
from shardwise.launch.host_file import Host, parse_hosts
from shardwise.launch.launcher import threads_of_ranks
from shardwise.launch.plan import (
    RUN_TOKEN,
    LaunchPlan,
    checked_rank,
    cleaned,
    node_rank,
    preset,
    resolved,
    shell,
)
from shardwise.recipe.launch_config import LaunchConfig
from shardwise.recipe.read import read_recipe
from shardwise.recipe.recipe import Recipe
from shardwise.recipe.shipped import path_of


@dataclass(frozen=True)
class LaunchOptions:
    """The options of ``shardwise launch`` that a recipe does not have."""

    host_file: Path | None = None
    node_rank: int | None = None
    start: bool = False
    output: Path | None = None
    overwrite: bool = False
    image: str = "shardwise"
    accelerator: str = "H100"

    def refuse_unused(self, by: str) -> None:
        """Raises ``ConfigError`` for an option that changes nothing where ``by`` starts ranks."""
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        unused = sorted(given - {"host_file", *_USES[by]})
        if by == "torchrun" and "node_rank" in given and not self.start:
            unused = ["node_rank"]
        if unused:
            raise ConfigError(
                f"--{unused[0].replace('_', '-')} changes nothing of what {by} is told here. Leave "
                "it out, or pass the option that it belongs to: --help names it."
            )


_FILE = ("output", "overwrite")
_USES = {  # options by what starts the ranks
    "torchrun": ("start", "node_rank"),
    "slurm": _FILE,
    "mpi": (),
    "ray": _FILE,
    "k8s": (*_FILE, "image"),
    "sky": (*_FILE, "accelerator"),
}


def run_launch(arguments: Sequence[str], given: dict[str, object], options: LaunchOptions) -> None:
    """Print or write what starts the run; with ``--start`` or ``--mpi`` become it.

    Args:
        arguments: of ``shardwise train``: a recipe, and overrides.
        given: keys of the recipe's section ``launch`` that were options of the command, as text.
    """
    overrides = [f"launch.{key}={value}" for key, value in given.items() if value is not None]
    recipe = read_recipe(
        arguments[0], [*arguments[1:], *overrides], ("--nodes", "--nproc", "--hosts")
    )
    file = options.host_file
    hosts = parse_hosts(file.read_text("utf-8", "replace"), str(file)) if file else ()
    config = _config(recipe.launch, hosts)
    options.refuse_unused(config.by)
    if idle := sum(host.slots - (config.nproc or 0) for host in hosts):
        click.echo(f"note      {idle} slots of {file} have no rank: each node has {config.nproc}")
    plan = _plan(recipe, tuple(arguments), config)
    if note := preset(os.environ):
        click.echo(f"note      {note}")
    _ACTIONS[config.by](plan, options)


def _config(config: LaunchConfig, hosts: Sequence[Host]) -> LaunchConfig:
    """The recipe's section with what a host file says."""
    values = config.model_dump()
    if hosts:
        least = min(hosts, key=lambda host: host.slots)
        values |= {"hosts": tuple(host.name for host in hosts)}
        values["nproc"] = values["nproc"] or least.slots
        if values["nproc"] > least.slots:
            raise ConfigError(
                f"each node has {values['nproc']} ranks, and {least.name} takes {least.slots}. "
                "Lower --nproc, or raise its slots."
            )
    if values["hosts"] and values["nodes"] == 1:
        values["nodes"] = len(values["hosts"])
    return LaunchConfig.model_validate(values)


def _plan(recipe: Recipe, arguments: tuple[str, ...], config: LaunchConfig) -> LaunchPlan:
    device = recipe.run.device or _device(config.by)
    nproc = config.nproc or _devices(device)
    here = reachable(interfaces())
    address = config.address or (config.hosts[0] if config.hosts else "")
    if not address and config.nodes > 1 and here:
        chosen = [one for one in here if config.interface in (None, one.name)]
        address = chosen[0].address if chosen else ""
    return LaunchPlan(
        arguments=arguments,
        name=_name(path_of(arguments[0])),
        nodes=config.nodes,
        nproc=nproc,
        device=device,
        address=address,
        port=config.port,
        hosts=config.hosts,
        restarts=config.restarts,
        token=os.environ.get(RUN_TOKEN) or secrets.token_hex(16),
        variables=_interface_variables(device, config.interface),
    )


def _name(recipe: Path) -> str:
    """A name for files and jobs that no launcher has to be given in quotes."""
    return re.sub(r"[^\w.-]+", "-", recipe.stem, flags=re.ASCII).strip("-") or "shardwise"


def _interface_variables(device: str, interface: str | None) -> dict[str, str]:
    names = (row("cpu").socket_interface, row(device).socket_interface)
    return dict.fromkeys(names, interface) if interface else {}


def _device(by: str) -> str:
    """This machine's device; a job that is sent elsewhere finds CUDA there, if none is here."""
    from shardwise.comm.machine.devices import detect

    here = detect().device
    return here if here != "cpu" or by in ("torchrun", "mpi") else "cuda"


def _devices(device: str) -> int:
    from shardwise.comm.machine.devices import device_count

    count = 1 if device == "cpu" else device_count()
    if not count:
        raise ConfigError(
            f"this machine has no {device}, so how many ranks a node has is not known. Pass "
            "--nproc, such as --nproc 8."
        )
    return count


# --- torchrun --------------------------------------------------------------------------------


def _torchrun(plan: LaunchPlan, options: LaunchOptions) -> None:
    if plan.nodes == 1:
        words = [f"--nproc={plan.nproc}"] + [f"--restarts={plan.restarts}"] * (plan.restarts > 0)
        if options.start:
            _become([sys.executable, "-m", "shardwise.cli", "train", *plan.arguments, *words], {})
        click.echo(f"one node  {shell('shardwise', 'train', *plan.arguments, *words)}")
        return
    interface = next(iter(plan.variables.values()), "")  # the one that was asked for
    if not plan.address:
        raise ConfigError(
            f"this host has no address{f' at {interface}' * bool(interface)} that others "
            "can reach, so where the ranks meet is not known. Pass --address with that of node 0"
            f"{', or another --interface' * bool(interface)}."
        )
    plan = replace(plan, variables=threads_of_ranks(plan.nproc) | plan.variables)
    if options.start:
        _start_node(plan, options.node_rank)
    here = interface_to(plan.address)
    others = [one for one in reachable(interfaces()) if one != here]
    click.echo(f"ranks     {plan.ranks}: {plan.nproc} on each of {plan.nodes} nodes")
    click.echo(f"meeting   {plan.address}:{plan.port}{_where(plan.address, here)}")
    if others and not plan.hosts:
        names = ", ".join(f"{one.address} ({one.name})" for one in others)
        click.echo(f"note      this host has {names}, too: --address or --interface choose")
    click.echo("\nOn every node, with the same recipe and version:\n")
    click.echo(f"  {_same_line(plan)}")
    for node in range(plan.nodes):
        is_here = (
            here is not None and here.address in (plan.hosts or (plan.address,))[node : node + 1]
        )
        click.echo(f"\nor, on node {node}{', this one' * is_here}:\n")
        variables = _interface_variables(plan.device, here.name) if here and is_here else {}
        own = replace(plan, variables=variables | plan.variables)
        click.echo(f"  {torchrun.line(own, node)}")
    click.echo("\nThe same lines resume the run. The token is secret: it lets a process join.")


def _where(address: str, here: Interface | None) -> str:
    if here is None or here.address != address:
        return ""
    return f", this host's {here.name}"


def _same_line(plan: LaunchPlan) -> str:
    """One line for all nodes: each finds its rank, or is told by NODE_RANK."""
    options = [f"--nodes={plan.nodes}", f"--nproc={plan.nproc}", f"--address={plan.address}"]
    options += [f"--port={plan.port}", f"--restarts={plan.restarts}"]
    options += [f"--hosts={','.join(plan.hosts)}"] * bool(plan.hosts)
    if interface := plan.variables.get(row("cpu").socket_interface):
        options.append(f"--interface={interface}")
    line = shell("shardwise", "launch", *plan.arguments, *options, **{RUN_TOKEN: plan.token})
    return f"{line}{' --node-rank=$NODE_RANK' * (plan.nodes > 2 and not plan.hosts)} --start"


def _start_node(plan: LaunchPlan, rank: int | None) -> None:
    """Become this node's torchrun."""
    if RUN_TOKEN not in os.environ:
        raise ConfigError(
            f"{RUN_TOKEN} is not set, so this node would have another token than the others. "
            "Run the same command without --start: it prints the line with the token."
        )
    if rank is not None:
        checked_rank(rank, "--node-rank", plan.nodes)
    else:
        own = {one.address for one in interfaces()} | {platform.node()}
        rank = node_rank(plan, resolved({plan.address, *plan.hosts}, own), os.environ)
    words = [sys.executable, "-m", "torch.distributed.run", *torchrun.words(plan, rank)[1:]]
    _become(words, torchrun.environment(plan))


def _become(words: list[str], variables: dict[str, str]) -> None:
    """Replace this process, so that signals and the exit status are those of the command."""
    click.echo(shell(*words))
    sys.stdout.flush()
    os.execvpe(words[0], words, cleaned(os.environ) | variables)  # noqa: S606 - as the user asked


# --- MPI -------------------------------------------------------------------------------------


def _mpi(plan: LaunchPlan, _: LaunchOptions) -> None:
    if shutil.which("mpirun") is None:
        raise ConfigError("there is no mpirun here; install Open MPI (apt install openmpi-bin).")
    is_local = plan.nodes == 1
    local = {"GLOO_SOCKET_IFNAME": "lo"} if is_local and platform.system() == "Linux" else {}
    variables = threads_of_ranks(plan.nproc) | local | plan.variables
    plan = replace(plan, address="" if is_local else plan.address, variables=variables)
    words = mpi.words(plan, sys.executable, _topology(), os.geteuid() == 0)
    _become(words, mpi.environment(plan))


def _topology() -> mpi.Topology | None:
    with suppress(OSError):
        result = subprocess.run(
            ["lscpu"],  # noqa: S607
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )
        return mpi.Topology.parse(result.stdout)
    return None


# --- files -----------------------------------------------------------------------------------


def _slurm(plan: LaunchPlan, options: LaunchOptions) -> None:
    path = _write(f"{plan.name}.sbatch", slurm.sbatch(plan, sys.executable), options)
    click.echo(f"wrote     {path}: {shell('sbatch', str(path))}")


def _ray(plan: LaunchPlan, options: LaunchOptions) -> None:
    path = _write(f"{plan.name}.ray.py", ray.program(plan), options)
    click.echo(f"wrote     {path}: {shell('python', str(path))}")


def _k8s(plan: LaunchPlan, options: LaunchOptions) -> None:
    recipe = path_of(plan.arguments[0])
    named = f"{plan.name}{recipe.suffix}", recipe.read_text("utf-8")
    text = kubernetes.manifests(plan, named, options.image)
    path = _write(f"{plan.name}.k8s.yaml", text, options)
    path.chmod(0o600)  # it has the token
    click.echo(f"wrote     {path}: {shell('kubectl', 'apply', '-f', str(path))}")


def _sky(plan: LaunchPlan, options: LaunchOptions) -> None:
    accelerator = "" if plan.device == "cpu" else options.accelerator
    path = _write(f"{plan.name}.sky.yaml", sky.task(plan, accelerator), options)
    token = f"{RUN_TOKEN}=$(openssl rand -hex 16)"
    click.echo(f"wrote     {path}: sky jobs launch --secret {token} {shell(str(path))}")


def _write(name: str, text: str, options: LaunchOptions) -> Path:
    path = options.output or Path(name)
    if path.exists() and not options.overwrite:
        raise ConfigError(f"{path} exists; name another --output, or pass --overwrite.")
    path.write_text(text, "utf-8")
    return path


_ACTIONS: dict[str, Callable[[LaunchPlan, LaunchOptions], None]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "mpi": _mpi,
    "ray": _ray,
    "k8s": _k8s,
    "sky": _sky,
}
