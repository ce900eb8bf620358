"""A run on two hosts that are namespaces: its launchers, its ranks, and what they print.

Each host has torchrun, which starts its rank again after an error. When a torchrun itself has
ended, both are started again, as a scheduler does. The run's folder is a small disk in memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness.hosts import Host, child
from benchmarks.harness.report import Row
from shardwise.launch import torchrun
from shardwise.launch.plan import LaunchPlan

PATIENCE = 180.0  # seconds in which a run has to go on by itself
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
CLOCK = Path(__file__).with_name("clock.c")
MIB = 2**20


class Stuck(Exception):
    """The run has not gone on by itself."""


def mount_disk(folder: Path, mib: int) -> Path:
    """A disk of so many MiB in memory, which this process and those that it starts alone see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no mount namespace can be made")
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # noqa: S607
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(disk)]
    subprocess.run(command, check=True)  # noqa: S603
    return disk


def preloaded(source: Path, folder: Path) -> str:
    """The library of a file in C, which is built in a folder, for ``LD_PRELOAD``."""
    library = str(folder / f"{source.stem}.so")
    build = ("cc", "-shared", "-fPIC", "-O2", "-o", library, str(source))
    subprocess.run(build, check=True)  # noqa: S603
    return library


class Scene:
    """Two hosts and what runs there. Final.

    Attributes:
        hosts: where ranks 0 and 1 are.
        disk: the folder that both share; ``run`` in it is the run's.
        starts: how often both lines were started.
    """

    def __init__(self, hosts: list[Host], disk: Path) -> None:
        self.hosts, self.disk, self.starts = hosts, disk, 0
        self._outputs = [disk.parent / f"{host.name}.out" for host in hosts]
        self._clocks = [disk.parent / f"{host.name}.clock" for host in hosts]
        for clock in self._clocks:
            clock.write_bytes(bytes(8))
        self._library = preloaded(CLOCK, disk.parent)
        self._launchers = list[subprocess.Popen[Any]]()
        self._plan: LaunchPlan

    def begin(self, recipe: Path, *overrides: str) -> None:
        """Begin a run by this recipe."""
        arguments, address = (str(recipe), *overrides), self.hosts[0].address
        self._plan = LaunchPlan(arguments, "soak", 2, 1, address=address, restarts=10_000)
        for output in self._outputs:
            output.write_text("")
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._launchers = []
        for node, host in enumerate(self.hosts):
            variables = os.environ | {"OMP_NUM_THREADS": "1", "LD_PRELOAD": self._library}
            variables |= {"CLOCK_AHEAD": str(self._clocks[node])}
            variables |= torchrun.environment(self._plan)
            module = (sys.executable, "-m", "torch.distributed.run")
            words = (*module, *torchrun.words(self._plan, node)[1:])
            with self._outputs[node].open("a") as output:
                streams: dict[str, Any] = {"stdout": output, "stderr": output}
                self._launchers.append(host.start(*words, env=variables, **streams))

    def keep_up(self) -> None:
        """Start both lines again if a torchrun has ended."""
        if any(launcher.poll() is not None for launcher in self._launchers):
            self.end()
            self._start()

    def end(self, patience: float = 60.0) -> None:
        """Let the run save and stop, and wait until all has ended."""
        for number, launcher in enumerate(self._launchers):
            with suppress(ProcessLookupError):
                os.kill(self.launcher(number) or launcher.pid, signal.SIGTERM)
        for launcher in self._launchers:
            try:
                launcher.wait(patience)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()

    def wait(self, seconds: float) -> None:
        """Wait so long for the run to end by itself."""
        for launcher in self._launchers:
            launcher.wait(seconds)

    def launcher(self, number: int) -> int:
        """The process of torchrun on a host; 0: none runs."""
        return child(self._launchers[number].pid)

    def rank(self, number: int) -> int:
        """The process of a rank; 0: none runs."""
        return child(self.launcher(number))

    def set_clock(self, number: int, seconds: int) -> None:
        """Let the clock of a host be so many seconds ahead of this machine's."""
        with self._clocks[number].open("r+b") as file:
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def nbytes(self) -> int:
        """Bytes that all have printed."""
        return sum(output.stat().st_size for output in self._outputs)

    def texts(self) -> list[str]:
        """What each host has printed."""
        return [output.read_text("utf-8", "replace") for output in self._outputs]

    def step(self) -> int:
        """The last step that was printed."""
        with self._outputs[0].open("rb") as file:
            file.seek(max(0, self._outputs[0].stat().st_size - 4096))
            return last_step(file.read())

    def come_to(self, step: int) -> float:
        """Wait until the run, which nobody touches, has come to a step; the seconds it took.

        Raises:
            Stuck: it does not come there.
        """
        begin = time.monotonic()
        while self.step() < step:
            self.keep_up()
            if time.monotonic() - begin > PATIENCE:
                raise Stuck(
                    f"step {step} was not reached: {[text[-2000:] for text in self.texts()]}"
                )
            time.sleep(0.1)
        return time.monotonic() - begin

    def sample(self) -> dict[tuple[str, int], Row]:
        """Memory, open files and threads of each process, by its name and number."""
        resources: dict[tuple[str, int], Row] = {}
        for number in range(2):
            named = {"rank": self.rank(number), "torchrun": self.launcher(number)}
            for name, process in named.items():
                with suppress(OSError, KeyError):  # it has just ended
                    resources[f"{name} {number}", process] = _resources(process)
        return resources


class Silence(threading.Thread):
    """Looks for how long nobody prints anything."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(daemon=True)
        self._scene, self._longest = scene, 0.0
        self._since, self._over = time.monotonic(), threading.Event()

    def run(self) -> None:
        before = 0
        while not self._over.wait(0.1):
            nbytes, now = self._scene.nbytes(), time.monotonic()
            self._longest = max(self._longest, now - self._since)
            if nbytes != before:
                before, self._since = nbytes, now

    def take(self) -> float:
        """The longest one since the last call, in seconds."""
        longest, self._longest, self._since = self._longest, 0.0, time.monotonic()
        return longest

    def end(self) -> None:
        self._over.set()
        self.join()


def last_step(printed: bytes) -> int:
    """The last step of the lines that a run prints; 0: there is none."""
    steps = re.findall(rb"^step +([\d,]+)/", printed, re.MULTILINE)
    return int(steps[-1].replace(b",", b"")) if steps else 0


def _resources(process: int) -> Row:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    files = len(list(Path(f"/proc/{process}/fd").iterdir()))
    kib = int(status["RssAnon"].split()[0])
    return {"MiB": kib / 1024, "files": files, "threads": int(status["Threads"])}
