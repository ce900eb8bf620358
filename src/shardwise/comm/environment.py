"""What a launcher says in the environment: this process's rank, of how many, and where they meet.

Read are torchrun's variables, then those of ``mpirun`` and of ``srun``; without any there is one
rank alone. The ordinary way knows torchrun's only, so that each of the N processes that ``srun``
started is rank 0 of 1, and nobody says so. Pure: an environment goes in.

A batch script's own process is one rank, whatever ``SLURM_NTASKS`` says: only ``srun`` starts
tasks, and gives them the number of a step.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError

__all__ = ["Launch", "launched"]

LOOPBACK = "127.0.0.1"
PORTS = range(15_000, 30_000)  # below those that Linux gives to outgoing connections
NO_STEP = 0xFFFF_FFF0  # from here on SLURM numbers what srun did not start, such as batch scripts


@dataclass(frozen=True)
class Launch:
    """A launcher's variables.

    Attributes:
        rank, size: this rank, and how many there are.
        local_rank: its number among those of this host.
        address, port: where rank 0 serves the store; unknown (``""``, 0) for one rank alone.
    """

    rank: int
    size: int
    local_rank: int
    address: str = ""
    port: int = 0


@dataclass(frozen=True)
class _Task:
    """A process as ``mpirun`` or ``srun`` numbers it.

    Attributes:
        by: what started it, as one types it.
        rank, size, local_rank: as in ``Launch``.
        host: where rank 0 runs; ``""`` if that is unknown.
        job: a name that all ranks have alike and no other job has; ``""`` if there is none.
    """

    by: str
    rank: int
    size: int
    local_rank: int
    host: str
    job: str


def launched(environ: Mapping[str, str]) -> Launch | None:
    """Who this process is; ``None`` without a launcher, or if it started this process alone.

    Torchrun's variables count first. ``MASTER_ADDR`` and ``MASTER_PORT`` say where the ranks meet
    whoever started them; for ``srun`` they are not needed, and for ``mpirun`` on one host neither.

    Raises:
        ConfigError: some of the variables are missing, or make no sense together; or the ranks
            cannot know where they meet.
    """
    if "RANK" in environ or "LOCAL_RANK" in environ:
        return _torchrun(environ)
    task = _open_mpi(environ) or _slurm(environ) or _pmi(environ)
    if task is None:
        return _torchrun(environ) if "WORLD_SIZE" in environ else None
    if environ.get("WORLD_SIZE", str(task.size)) != str(task.size):
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} in the environment, but {task.by} started "
            f"{task.size} processes: ranks would wait for others that do not exist, or miss some. "
            "Unset WORLD_SIZE, or start as many."
        )
    _check(task.rank, task.size, f"{task.by} says rank {task.rank} of {task.size}")
    if task.size == 1:
        return None
    return Launch(task.rank, task.size, task.local_rank, *_meeting_place(environ, task))


# ---- each launcher's own variables ---------------------------------------------------------------


def _torchrun(environ: Mapping[str, str]) -> Launch:
    needed = ["RANK", "WORLD_SIZE"]
    if environ.get("WORLD_SIZE") != "1":
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if name not in environ]:
        given = [name for name in [*needed, "LOCAL_RANK"] if name in environ]
        raise ConfigError(
            f"the environment has {', '.join(given)}, but not {', '.join(missing)}: a launcher "
            "sets all or none, and with a part of them ranks could not meet. Start with torchrun, "
            f"or set {', '.join(missing)}, or unset {', '.join(given)} to run one rank alone."
            + (_NODE_RANK if given == ["RANK"] else "")
        )
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    _check(rank, size, f"RANK={rank} and WORLD_SIZE={size}")
    if size == 1:
        return Launch(rank, size, local_rank)
    return Launch(rank, size, local_rank, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))


_NODE_RANK = (
    " If it is the number of this machine, call it NODE_RANK, and pass it on: "
    "torchrun --node-rank=$NODE_RANK …"
)


def _open_mpi(environ: Mapping[str, str]) -> _Task | None:
    if "OMPI_COMM_WORLD_RANK" not in environ or "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    rank, size = (_number(environ, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE"))
    local_rank = _first(environ, rank, "OMPI_COMM_WORLD_LOCAL_RANK")
    here = _first(environ, 0, "OMPI_COMM_WORLD_LOCAL_SIZE")
    host = LOOPBACK if here == size else ""
    return _Task("mpirun", rank, size, local_rank, host, environ.get("PMIX_NAMESPACE", ""))


def _slurm(environ: Mapping[str, str]) -> _Task | None:
    """A task that ``srun`` started; not a batch script, nor a shell that ``salloc`` opened."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= NO_STEP or "SLURM_PROCID" not in environ:
        return None
    rank = _number(environ, "SLURM_PROCID")
    size = _first(environ, 1, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if "PMI_SIZE" in environ and _number(environ, "PMI_SIZE") != size:
        return None  # mpiexec's own helpers, one on each host, of which this is a child
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    alone = _first(environ, 0, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == 1
    host = LOOPBACK if alone else _first_host(nodes)
    local_rank = _first(environ, rank, "SLURM_LOCALID")
    job = environ.get("SLURM_JOB_ID", "")
    return _Task("srun", rank, size, local_rank, host, f"{job}.{step}" if job else "")


def _pmi(environ: Mapping[str, str]) -> _Task | None:
    """MPICH, Intel MPI and their relatives."""
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    local_rank = _first(environ, rank, "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    here = _first(environ, 0, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    return _Task("mpiexec", rank, size, local_rank, LOOPBACK if here == size else "", "")


# ---- where the ranks meet ------------------------------------------------------------------------


def _meeting_place(environ: Mapping[str, str], task: _Task) -> tuple[str, int]:
    """Rank 0's address, and a port that no other job derives."""
    address = environ.get("MASTER_ADDR") or task.host
    given = "MASTER_PORT" in environ
    port = _number(environ, "MASTER_PORT") if given else _port(task.job)
    if address and port:
        return address, port
    missing = [] if address else ["MASTER_ADDR=<the host of rank 0>"]
    missing += [] if port else ["MASTER_PORT=29500"]
    raise ConfigError(
        f"{task.by} started {task.size} processes, of which this is rank {task.rank}, but nothing "
        "in the environment says where they meet, so each would train alone. Say it, for example: "
        f"{task.by} -n {task.size} env {' '.join(missing)} python …"
    )


def _port(job: str) -> int:
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else 0


def _first_host(nodes: str) -> str:
    """``"rack[2-3]n[07,09],gpu5"`` → ``"rack2n07"``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


# ---- numbers -------------------------------------------------------------------------------------


def _check(rank: int, size: int, fact: str) -> None:
    if not 0 <= rank < size:
        raise ConfigError(
            f"{fact}: ranks are numbered from 0 to {size - 1}. Correct one of the two variables."
        )


def _first(environ: Mapping[str, str], otherwise: int, *names: str) -> int:
    """The number in the first of these variables that is set."""
    return next((_number(environ, name) for name in names if name in environ), otherwise)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"{name}={environ[name]!r} in the environment is not a whole number. "
            "Start with torchrun, or correct it."
        ) from None
