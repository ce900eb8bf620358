"""The launcher's environment variables: this process's rank, the world size, and the address.

The variables of torchrun are read first, then those of ``mpirun`` and ``srun``; without any there
is one rank. With torchrun's alone, each of N processes that ``srun`` started would silently be
rank 0 of 1. Pure functions of an environment.

A batch script's own process is one rank, whatever ``SLURM_NTASKS`` is: only ``srun`` starts
tasks, and sets a step id.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.errors import ConfigError

LOOPBACK = "127.0.0.1"
PORTS = range(15_000, 30_000)  # below Linux's ephemeral ports
# SLURM's step ids from here on are not srun's, such as batch scripts.
FIRST_RESERVED_STEP = 0xFFFF_FFF0


class Launch(NamedTuple):
    """A launcher's variables."""

    rank: int
    size: int  # the world size
    local_rank: int  # the rank on this host
    address: str = ""  # of rank 0's store; "" for one rank, or if unknown
    port: int = 0  # of rank 0's store; 0 for one rank, or if unknown


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """This process's rank; ``None`` without a launcher, or if it started one process only.

    torchrun's variables take precedence. ``MASTER_ADDR`` and ``MASTER_PORT`` are read with every
    launcher; ``srun``, and ``mpirun`` on one host, work without them.

    Raises:
        ConfigError: some of the variables are missing or inconsistent, or the address of rank 0
            is unknown.
    """
    if "RANK" in environ or "LOCAL_RANK" in environ:
        return _torchrun(environ)
    launchers = {"mpirun": _open_mpi, "srun": _slurm, "mpiexec": _pmi}
    tasks = ((name, read(environ)) for name, read in launchers.items())
    launcher, task = next(((name, task) for name, task in tasks if task), ("", None))
    if task is None:
        return _torchrun(environ) if "WORLD_SIZE" in environ else None
    rank, size = task.rank, task.size
    if environ.get("WORLD_SIZE", str(size)) != str(size):
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} in the environment, but {launcher} started "
            f"{size} processes: ranks would wait for others that do not exist, or miss some. "
            "Unset WORLD_SIZE, or start that number of processes."
        )
    _check(rank, size, f"{launcher} says rank {rank} of {size}")
    return None if size == 1 else _with_master(environ, task, launcher)


# ---- each launcher's own variables ---------------------------------------------------------------


def _torchrun(environ: Mapping[str, str]) -> Launch:
    needed = ["RANK", "WORLD_SIZE"]
    if environ.get("WORLD_SIZE") != "1":
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if name not in environ]:
        present = [name for name in [*needed, "LOCAL_RANK"] if name in environ]
        node_rank = (
            " If it is the number of this machine, name it NODE_RANK, and pass it on: "
            "torchrun --node-rank=$NODE_RANK …"
        )
        raise ConfigError(
            f"the environment has {', '.join(present)}, but not {', '.join(missing)}: a launcher "
            "sets all of them, and with some of them ranks cannot connect. Start with torchrun, "
            f"or set {', '.join(missing)}, or unset {', '.join(present)} to run a single rank."
            + (node_rank if present == ["RANK"] else "")
        )
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    _check(rank, size, f"RANK={rank} and WORLD_SIZE={size}")
    if size == 1:
        return Launch(rank, size, local_rank)
    if not 0 < (port := _number(environ, "MASTER_PORT")) < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT={port} in the environment is no port at which ranks can meet. Set the "
            "same free one for all, from 1 to 65535, or start with torchrun, which finds one."
        )
    return Launch(rank, size, local_rank, environ["MASTER_ADDR"], port)


def local_size(environ: Mapping[str, str]) -> int | None:
    """The number of ranks on this host; ``None`` if no launcher has set it."""
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    size = _first_number(environ, 0, *names)
    if not size and (tasks := re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))):
        size = int(tasks[0])  # "4(x2)": four on each of two hosts
    return size or None


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    prefix, port = "OMPI_COMM_WORLD", _port(environ.get("PMIX_NAMESPACE", ""))
    return _mpi(environ, prefix, [f"{prefix}_LOCAL_RANK"], [f"{prefix}_LOCAL_SIZE"], port)


def _pmi(environ: Mapping[str, str]) -> Launch | None:
    """A task of MPICH, Intel MPI and related launchers."""
    local_ranks = ["MPI_LOCALRANKID", "PMI_LOCAL_RANK"]
    return _mpi(environ, "PMI", local_ranks, ["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"], 0)


def _mpi(
    environ: Mapping[str, str],
    prefix: str,
    local_ranks: Sequence[str],
    local_sizes: Sequence[str],
    port: int,
) -> Launch | None:
    if f"{prefix}_RANK" not in environ or f"{prefix}_SIZE" not in environ:
        return None
    rank, size = _number(environ, f"{prefix}_RANK"), _number(environ, f"{prefix}_SIZE")
    is_single_node = _first_number(environ, 0, *local_sizes) == size
    address = LOOPBACK if is_single_node else ""
    return Launch(rank, size, _first_number(environ, rank, *local_ranks), address, port)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    """A task that ``srun`` started; not a batch script, nor a shell that ``salloc`` opened."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= FIRST_RESERVED_STEP or "SLURM_PROCID" not in environ:
        return None
    rank = _number(environ, "SLURM_PROCID")
    size = _first_number(environ, 1, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if "PMI_SIZE" in environ and _number(environ, "PMI_SIZE") != size:
        return None  # a child of mpiexec's own helper, of which srun starts one on each host
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    is_single_node = _first_number(environ, 0, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == 1
    address = LOOPBACK if is_single_node else _first_host(nodes)
    local_rank = _first_number(environ, rank, "SLURM_LOCALID")
    job_id = environ.get("SLURM_JOB_ID", "")
    return Launch(rank, size, local_rank, address, _port(f"{job_id}.{step}" if job_id else ""))


# ---- the address of rank 0 -----------------------------------------------------------------------


def _with_master(environ: Mapping[str, str], task: Launch, launcher: str) -> Launch:
    """``task`` with the address and port that the user set, if any."""
    address = environ.get("MASTER_ADDR") or task.address
    port = _first_number(environ, task.port, "MASTER_PORT")
    if address and port:
        return task._replace(address=address, port=port)
    missing = [] if address else ["MASTER_ADDR=<the host of rank 0>"]
    missing += [] if port else ["MASTER_PORT=29500"]
    raise ConfigError(
        f"{launcher} started {task.size} processes, of which this is rank {task.rank}, but "
        "the environment has no address at which they connect, so each would train alone. Set it, "
        f"for example: {launcher} -n {task.size} env {' '.join(missing)} python …"
    )


def _port(job_id: str) -> int:
    """The same on all ranks of a job; 0 without ``job_id``."""
    return PORTS[zlib.crc32(job_id.encode()) % len(PORTS)] if job_id else 0


def _first_host(nodes: str) -> str:
    """``"rack[2-3]n[07,09],gpu5"`` → ``"rack2n07"``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


# ---- numbers -------------------------------------------------------------------------------------


def _check(rank: int, size: int, fact: str) -> None:
    if not 0 <= rank < size:
        raise ConfigError(f"{fact}: ranks go from 0 to {size - 1}. Correct one of the variables.")


def _first_number(environ: Mapping[str, str], default: int, *names: str) -> int:
    """The number in the first of these variables that is set."""
    return next((_number(environ, name) for name in names if name in environ), default)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"{name}={environ[name]!r} in the environment is not a whole number. "
            "Start with torchrun, or correct it."
        ) from None
