"""`shardwise doctor --nodes` as torchrun, SLURM and Open MPI start it, and on hosts that differ."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.hosts import hosts, problem
from benchmarks.soak.scene import CLOCK, preloaded
from tests.hosts import shardwise
from tests.launch import slurm_cluster
from tests.launch.mpi_hosts import over
from tests.launch.test_clusters import ENVIRON, RECIPE, needs
from tests.ranks import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.spawn, pytest.mark.slow, pytest.mark.timeout(200)]

TOKEN = {"SHARDWISE_RUN_TOKEN": "a secret"}
DOCTOR = (sys.executable, "-m", "shardwise.cli", "doctor", "--nodes")
SLOW_DISK = """\
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int file) { usleep(200000); return syscall(SYS_fsync, file); }
"""  # for each 4 MiB


def run(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        command,
        check=False,
        env=environment | TOKEN | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


@needs(problem() or "not installed: cc" * (shutil.which("cc") is None))
def test_a_host_with_another_clock_disk_folder_and_recipe(tmp_path: Path) -> None:
    """Its clock, and how long its disk takes, are preloaded libraries'; all else is as it seems."""
    (disk := tmp_path / "disk.c").write_text(SLOW_DISK)
    (clock := tmp_path / "clock").write_bytes((90).to_bytes(8, sys.byteorder))
    libraries = ":".join(preloaded(source, tmp_path) for source in (CLOCK, disk))
    (runs := tmp_path / "runs").mkdir()
    for rank, rows in enumerate((8, 4)):
        text = RECIPE.replace("batch: {rows: 8", f"batch: {{rows: {rows}")
        (tmp_path / f"{rank}.yaml").write_text(text, "utf-8")
    odd = {"LD_PRELOAD": libraries, "CLOCK_AHEAD": str(clock)}
    with hosts(2) as pair:
        tmpfs = ("mount", "-t", "tmpfs", "-o", "size=64m", "none", str(runs))
        subprocess.run(pair[1].command(*tmpfs), check=True)
        options = ("--nnodes=2", "--master=host0:29500", f"--folder={runs}")
        started = [
            shardwise(
                host,
                *("doctor", "--nodes", *options, f"--node-rank={rank}"),
                *(f"--recipe={tmp_path / str(rank)}.yaml", f"--output={tmp_path / 'nodes.json'}"),
                **TOKEN | odd,
            )
            for rank, (host, odd) in enumerate(zip(pair, ({}, odd), strict=True))
        ]
        texts = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1], texts
    assert re.search(r"the clock of host1 is (90\.\d|89\.9) s ahead of that of host0", texts[0])
    assert f"{runs} of host0 is not shared with host1 (rank 1)" in texts[0]
    assert re.search(rf"{runs} on host1 has 0\.1 GB free and takes (\d|1\d|20|21) MB/s", texts[0])
    assert "batch.rows differs: 8 on host0 (rank 0); 4 on host1 (rank 1)" in texts[0]
    assert texts[0].count("PROBLEM") == 1


@needs(problem() or "not installed: mpirun (openmpi-bin)" * (shutil.which("mpirun") is None))
def test_mpirun_over_two_hosts(tmp_path: Path) -> None:
    exported = (word for name in ("MASTER_ADDR", "MASTER_PORT", *TOKEN) for word in ("-x", name))
    with hosts(3) as machines:
        enter, environment = over(machines, tmp_path)
        environment |= {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29500"}
        mpirun = [*enter, "mpirun", "--hostfile", "hosts", "--map-by", "node", *exported]
        status, text = run([*mpirun, "-n", "2", *DOCTOR], environment, tmp_path)
        assert status == 0, text
        assert re.search(r"^1 +host1 +eth1 +10\.77\.0\.2 ", text, re.MULTILINE)
        again = (*DOCTOR, ":", "-n", "2", "env", "OMPI_COMM_WORLD_RANK=1", *DOCTOR)
        status, text = run([*mpirun, "-n", "1", *again], environment, tmp_path)
    assert status == 1
    assert re.search(r"two processes are rank 1 of 3.* on host0", text), text
    assert re.search(r"two processes are rank 1 of 3.* on host1", text), text


@needs(problem())
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    with hosts(2) as pair:
        place = ("--nnodes=2", f"--master-addr={pair[0].address}", "--master-port=29500")
        started = [
            host.start(
                *("torchrun", *place, f"--node-rank={rank}", *DOCTOR[1:]),
                folder=tmp_path,
                env=ENVIRON | TOKEN,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, host in enumerate(pair)
        ]
        texts = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], texts
    assert re.search(r"^1 +host1 +eth1 +10\.77\.0\.2 ", texts[0], re.MULTILINE), texts[0]
    assert "on host0 listens at port 29500 on every interface" in texts[0]  # torchrun's store


@needs(slurm_cluster.problem())
def test_srun_on_two_nodes(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    (folder := tmp_path / "slurm").mkdir()
    with slurm_cluster.slurm_cluster(folder, ports) as environment:
        environment |= {"PATH": ENVIRON["PATH"]}
        srun = ["srun", "--nodes=2", "--ntasks-per-node=1"]
        status, text = run([*srun, *DOCTOR], environment, tmp_path)
        assert status == 0, text
        assert "from rank  to rank" in text
        ends = 'test "$SLURM_PROCID" = 1 || exec "$@"'  # rank 1 does, at once
        words = ["sh", "-c", ends, "sh", *DOCTOR, "--timeout=7"]
        status, text = run([*srun, *words], environment, tmp_path)
        slurm_cluster.wait_for_nodes(environment)  # for all has ended there
    assert status == 1
    assert "rank 1 is not there" in text, text
