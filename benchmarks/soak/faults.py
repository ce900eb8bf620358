"""What befalls one of two hosts while they train: each kind is a function of the scene.

A fault begins, lasts and is over within the call.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

from benchmarks.soak.scene import MIB, Scene, Stuck

Fault = Callable[[Scene, int, Random], None]
LONG, SHORT = 10.0, 2.0  # seconds
NAMED = ("no heartbeat", "has waited", "has not answered")


def rank_killed(scene: Scene, number: int, _: Random) -> None:
    _signal(scene.rank(number), signal.SIGKILL)


def torchrun_killed(scene: Scene, number: int, _: Random) -> None:
    _signal(scene.launcher(number), signal.SIGKILL)


def rank_frozen(scene: Scene, number: int, chance: Random) -> None:
    process = scene.rank(number)
    _signal(process, signal.SIGSTOP)
    _wait_until_named(scene, chance)
    _signal(process, signal.SIGCONT)


def rank_slow(scene: Scene, number: int, _: Random) -> None:
    process = scene.rank(number)
    for _turn in range(30):
        _signal(process, signal.SIGSTOP)
        time.sleep(0.07)
        _signal(process, signal.SIGCONT)
        time.sleep(0.03)


def link_cut(scene: Scene, number: int, chance: Random) -> None:
    scene.hosts[number].cut()
    _wait_until_named(scene, chance)
    scene.hosts[number].mend()


def disk_full(scene: Scene, _number: int, _: Random) -> None:
    ballast = scene.disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB // 16))
    time.sleep(3.0)
    ballast.unlink()


def bit_flipped(scene: Scene, number: int, chance: Random) -> None:
    """One bit of the newest checkpoint; then the run has to resume."""
    folders = sorted(
        (path for path in (scene.disk / "run" / "checkpoints").glob("step-*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    if len(folders) > 1:
        with chance.choice(sorted(folders[-1].rglob("*.safetensors"))).open("r+b") as file:
            at = chance.randrange(os.fstat(file.fileno()).st_size)
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ (1 << chance.randrange(8))]), at)
    _signal(scene.rank(number), signal.SIGKILL)


def clock_jump(scene: Scene, number: int, chance: Random) -> None:
    """It jumps by hours, forward or back, and stays there until it jumps again."""
    scene.set_clock(number, chance.randrange(-36_000, 36_000))


def asked_to_save(scene: Scene, number: int, _: Random) -> None:
    _signal(scene.rank(number), signal.SIGUSR1)


def asked_to_stop(scene: Scene, number: int, _: Random) -> None:
    _signal(scene.rank(number), signal.SIGTERM)


FAULTS: dict[str, Fault] = {
    function.__name__.replace("_", " "): function
    for function in (
        rank_killed,
        torchrun_killed,
        rank_frozen,
        rank_slow,
        link_cut,
        disk_full,
        bit_flipped,
        clock_jump,
        asked_to_save,
        asked_to_stop,
    )
}


def _signal(process: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if process:  # else none runs at this moment
            os.kill(process, which)


def _wait_until_named(scene: Scene, chance: Random) -> None:
    """Wait for a short time; or a long one, in which somebody says who is waited for."""
    seconds = chance.choice((SHORT, LONG))
    before = [len(text) for text in scene.texts()]
    time.sleep(seconds)
    printed = "".join(text[n:] for text, n in zip(scene.texts(), before, strict=True))
    if seconds == LONG and not any(words in printed for words in NAMED):
        raise Stuck(f"nobody was named within {seconds:.0f} s")
