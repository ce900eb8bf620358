"""Environments as launchers make them, and who each process is in them."""

from __future__ import annotations

import pytest

from shardwise.comm.machine.environment import Launch, local_size, read_launch
from shardwise.errors import ConfigError

MASTER = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SBATCH = {  # what a batch script of four tasks on two hosts has, and with it all that it starts
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = {  # its third task, under srun
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",  # the login node, where rank 0 is not
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
SRUN_HERE = {**SRUN, "SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_NUM_NODES": "1"}
SALLOC = {**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"}
MPIRUN = {  # Open MPI's, two ranks on each of two hosts
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-login-3907@1",
    "PMIX_RANK": "3",
}
MPIRUN_HERE = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
MPIEXEC = {  # MPICH's, as above
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
MPIEXEC_HERE = {**MPIEXEC, "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **MASTER}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (MASTER, None),  # set for the whole machine, perhaps
        (TORCHRUN, Launch(1, 4, 0, "10.0.0.7", 29500)),
        ({"RANK": "1", "WORLD_SIZE": "4", **MASTER}, Launch(1, 4, 1, "10.0.0.7", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1, 0)),
        (SRUN, Launch(2, 4, 0, "gpu07", 27573)),
        (SRUN | {"SLURM_STEP_ID": "1"}, Launch(2, 4, 0, "gpu07", 27531)),
        (SRUN | MASTER, Launch(2, 4, 0, "10.0.0.7", 29500)),
        (SRUN | {"WORLD_SIZE": "4", **MASTER}, Launch(2, 4, 0, "10.0.0.7", 29500)),
        (without(SRUN, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"), Launch(2, 4, 0, "gpu07", 27573)),
        (without(SRUN, "SLURM_STEP_NUM_NODES"), Launch(2, 4, 0, "gpu07", 27573)),
        (without(SRUN, "SLURM_STEP_NODELIST"), Launch(2, 4, 0, "gpu07", 27573)),
        (without(SRUN | {"SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), None),
        (SRUN_HERE, Launch(2, 4, 0, "127.0.0.1", 27573)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}, Launch(2, 4, 0, "gpu07", 27573)),
        (SBATCH, None),
        (SBATCH | {"SLURM_STEP_ID": "batch"}, None),
        (SALLOC, None),
        (MPIRUN_HERE, Launch(3, 4, 3, "127.0.0.1", 23282)),
        (MPIRUN | MASTER, Launch(3, 4, 1, "10.0.0.7", 29500)),
        (MPIRUN | {"MASTER_ADDR": "10.0.0.7"}, Launch(3, 4, 1, "10.0.0.7", 23282)),
        (MPIRUN_HERE | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        (MPIEXEC | MASTER, Launch(3, 4, 1, "10.0.0.7", 29500)),
        (MPIEXEC_HERE | {"MASTER_PORT": "29500"}, Launch(3, 4, 3, "127.0.0.1", 29500)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        # one launcher inside another: the inner one counts
        (SBATCH | TORCHRUN, Launch(1, 4, 0, "10.0.0.7", 29500)),
        (SRUN | TORCHRUN, Launch(1, 4, 0, "10.0.0.7", 29500)),
        (MPIRUN | TORCHRUN, Launch(1, 4, 0, "10.0.0.7", 29500)),
        (SRUN | MPIRUN | MASTER, Launch(3, 4, 1, "10.0.0.7", 29500)),
        (SRUN | MPIEXEC | {"PMI_SIZE": "8"} | MASTER, Launch(3, 8, 1, "10.0.0.7", 29500)),
    ],
)
def test_a_process_knows_who_it_is(environ: dict[str, str], launch: Launch | None) -> None:
    assert read_launch(environ) == launch


def test_one_rank_needs_no_address() -> None:
    assert Launch(rank=0, size=1, local_rank=0) == (0, 1, 0, "", 0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("rack[2-3]n[07,09]-eth,gpu5", "rack2n07-eth"),
        ("node-1.cluster,node-2.cluster", "node-1.cluster"),
    ],
)
def test_ranks_of_srun_meet_on_the_first_host_of_its_list(nodes: str, first: str) -> None:
    launch = read_launch(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert launch is not None
    assert launch.address == first


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "0"}, "has RANK, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "1"}, "has WORLD_SIZE, but not RANK"),
        ({"LOCAL_RANK": "0"}, "has LOCAL_RANK, but not RANK, WORLD_SIZE, MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MASTER}, "RANK=-1 and WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "two", **MASTER}, "WORLD_SIZE='two'"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 in the environment is no port"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 in the environment is no port"),
        (SRUN | {"RANK": "0"}, "has RANK, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, "mpirun says rank 4 of 4"),
    ],
)
def test_a_part_of_a_launcher_is_an_error(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_launch(environ)
    assert text in str(error.value)
    assert "torchrun" in str(error.value) or "Correct" in str(error.value)


def test_a_lone_rank_may_be_the_number_of_the_machine() -> None:
    with pytest.raises(ConfigError, match=r"name it NODE_RANK.*torchrun --node-rank=\$NODE_RANK"):
        read_launch({"RANK": "1"})


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (MPIRUN, "mpirun -n 4 env MASTER_ADDR=<the host of rank 0> python …"),
        (without(MPIRUN_HERE, "PMIX_NAMESPACE"), "mpirun -n 4 env MASTER_PORT=29500 python …"),
        (MPIEXEC, "mpiexec -n 4 env MASTER_ADDR=<the host of rank 0> MASTER_PORT=29500 python …"),
        (MPIEXEC_HERE, "mpiexec -n 4 env MASTER_PORT=29500 python …"),
    ],
)
def test_where_ranks_cannot_know_where_they_meet_the_line_to_type_is_said(
    environ: dict[str, str], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_launch(environ)
    by = line.split(maxsplit=1)[0]
    assert str(error.value) == (
        f"{by} started 4 processes, of which this is rank 3, but the environment "
        f"has no address at which they connect, so each would train alone. Set "
        f"it, for example: {line}"
    )


def test_another_world_size_than_was_started_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        read_launch(SRUN | {"WORLD_SIZE": "8"})
    assert str(error.value).startswith(
        "WORLD_SIZE=8 in the environment, but srun started 4 processes"
    )


def test_the_last_step_ids_are_those_of_scripts_and_shells() -> None:
    """From 0xfffffff0 on, they are none of srun's."""
    assert read_launch(SRUN | {"SLURM_STEP_ID": "4294967279"}) is not None
    assert read_launch(SRUN | {"SLURM_STEP_ID": "4294967280"}) is None


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "4"}, 2),
        (MPIRUN, 2),
        (MPIEXEC, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "12,8"}, 12),
    ],
)
def test_a_process_knows_how_many_share_its_host(environ: dict[str, str], ranks: int) -> None:
    assert local_size(environ) == ranks
