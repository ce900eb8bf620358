"""A real SLURM on this machine, of two nodes, for as long as a block lasts; it needs root.

No file outside the folder is touched: the nodes' names resolve in a mount namespace of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_min_interval=100000
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
IN_NAMESPACE = 'mount --bind "$0" /etc/hosts && exec "$@"'


def problem() -> str:
    """Say why there can be none here; ``""`` if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (slurm-wlm, munge)"
    result = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    return f"no mount namespace can be made here: {result.stderr.decode()}" * (
        result.returncode != 0
    )


@contextmanager
def slurm_cluster(folder: Path, ports: list[int]) -> Iterator[dict[str, str]]:
    """The environment in which its commands find it.

    Args:
        ports: three that are free.
    """
    folder.chmod(0o755)
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    hosts = folder / "hosts"
    hosts.write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 n1 n2\n")
    configuration = folder / "slurm.conf"
    host, (port, first, second) = os.uname().nodename, ports
    text = CONFIGURATION.format(host=host, folder=folder, port=port, first=first, second=second)
    configuration.write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    node = ["unshare", "--mount", "sh", "-c", IN_NAMESPACE, str(hosts), "slurmd", "-D", "-N"]
    commands = [[*munge, f"--socket={folder}/munge.socket"], ["slurmctld", "-D"]]
    commands += [[*node, "n1"], [*node, "n2"]]
    processes = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            )
            time.sleep(0.5 if command is commands[0] else 0)
        wait_for_nodes(environment)
        yield environment
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def wait_for_nodes(environment: dict[str, str], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        states = output_of("sinfo", "--noheader", "--format=%T", environment=environment)
        if states.split() == ["idle"]:
            return
        time.sleep(0.2)
    raise TimeoutError(f"the nodes are {states!r}")


def output_of(*command: str, environment: dict[str, str], folder: Path | None = None) -> str:
    run = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    return run.stdout + run.stderr
