"""The soak: faults by turns at random, then the same run undisturbed, and what differs."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.harness.command import Log, setting
from benchmarks.harness.hosts import hosts
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Column, Report, Row, Table
from benchmarks.soak.faults import FAULTS
from benchmarks.soak.scene import PATIENCE, Scene, Silence, Stuck, mount_disk

RECIPE = """\
model: {width: 32, layers: 1, heads: 2, kv_heads: 2, hidden: 64, tied: true}
tokenizer: {vocabulary: 300}
data: {source: stdlib, max_bytes: 100_000, context: 32, validation: 0.1}
batch: {rows: 8, micro: 4}
optimizer: {schedule: constant}
checkpoint: {save_every: 10, save_total_limit: 3}
sample: {tokens: 0}
run: {folder: FOLDER/run, device: cpu, steps: 1_000_000, eval_rows: 8, log_every: 1, plan: false}
"""
COLUMNS = (
    Column("fault"), Column("times"), Column("back after s", ".1f", drawn=True),
    Column("at most s", ".1f"), Column("longest silence s", ".1f"),
)  # fmt: skip
KEPT = (
    Column("process"), Column("faults lived through"), Column("MiB first", ".1f"),
    Column("MiB last", ".1f"), Column("files first"), Column("files last"),
    Column("threads first"), Column("threads last"),
)  # fmt: skip
NOTES = """
two hosts (namespaces of this machine) of one rank each, torchrun on both, cables of MBITS Mbit/s; a
fault strikes a random one of them once the run has gone on from the one before
back after s   from the end of a fault to a step that had not been taken before it: median; at most
longest silence s   in which no process prints anything, from a fault to that step; where ranks
               start again it is the import of torch, on cores that other programs share
               torchrun that is killed: the other one is told to end, and takes up to 30 s
processes      that lived longest; first and last as they were when the run had gone on
""".strip()


# Processes of a host, but for the one that keeps it and those that look; and listeners.
LOOK = """
for p in /proc/[0-9]*; do tr '\\0\\n' '  ' <$p/cmdline; echo; done |
grep -v -e '^cat ' -e '^sh -c' -e '^grep' -e '^ *$'
grep ' 0A ' /proc/net/tcp /proc/net/tcp6
"""


@dataclass(frozen=True)
class Config:
    """The length of the run, and its faults."""

    faults: int = setting(200, "faults", least=1)
    minutes: int = setting(60, "no fault begins later", least=1)
    kinds: tuple[str, ...] = setting(tuple(FAULTS), "which", known=FAULTS)
    mbits: int = setting(4, "megabits a second of a cable", least=1)
    seed: int = setting(0, "of the faults")


def run(config: Config, log: Log) -> Iterator[Report]:
    """The trainer under faults on two hosts: exact losses, no silence, nothing left behind."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        disk = mount_disk(Path(name), 48)
        recipe = Path(name) / "soak.yaml"
        recipe.write_text(RECIPE.replace("FOLDER", str(disk)), "utf-8")
        shared = _shared_memory()
        with hosts(2, config.mbits) as pair:
            scene = Scene(pair, disk)
            yield from _soaked(config, log, scene, recipe, shared)


def _soaked(
    config: Config, log: Log, scene: Scene, recipe: Path, shared: set[str]
) -> Iterator[Report]:
    lasted, samples = dict[str, list[tuple[float, float]]](), dict[tuple[str, int], list[Row]]()
    scene.begin(recipe)
    scene.come_to(25)  # with two checkpoints
    silence, chance, begin = Silence(scene), Random(config.seed), time.monotonic()  # noqa: S311
    silence.start()
    kinds, wrong, count = list[str](), list[str](), 0
    while not wrong and count < config.faults and time.monotonic() < begin + 60 * config.minutes:
        kinds = kinds or chance.sample(config.kinds, len(config.kinds))
        kind, before, number = kinds.pop(), scene.step(), chance.randrange(2)
        silence.take()
        log(f"{count}: {kind}, {number}, after step {before}")
        try:
            FAULTS[kind](scene, number, chance)
            took = scene.come_to(max(before, scene.step()) + 3)
        except Stuck as error:
            log(f"WRONG: {kind}: {error}")
            wrong.append(f"{kind}: {error}")
            break
        lasted.setdefault(kind, []).append((took, silence.take()))
        count += 1
        for process, values in scene.sample().items():
            samples.setdefault(process, []).append(values)
    silence.end()
    minutes, starts = (time.monotonic() - begin) / 60, scene.starts
    scene.end()
    last = scene.step()
    leftovers = _leftovers(scene, shared)
    log(f"undisturbed, {last} steps")
    wrong += _differences(scene, recipe, last)
    done = f"{count} faults in {minutes:.0f} minutes, {last} steps; seed {config.seed}; "
    done += f"both torchruns were started {starts} times"
    exact = f"the losses of all {last} steps are those of an undisturbed run; no manual step"
    clean = "left behind: no process, listener, shared memory or unfinished checkpoint"
    notes = NOTES.replace("MBITS", str(config.mbits)).splitlines()
    notes += [f"WRONG: {one}" for one in wrong] or [exact]
    notes += [f"LEFT: {one}" for one in leftovers] or [clean]
    tables = (faults_table(lasted), kept_table(samples))
    yield Report(this_machine(), (done,), tables, tuple(notes), len(wrong) + len(leftovers))


def faults_table(lasted: Mapping[str, Sequence[tuple[float, float]]]) -> Table:
    rows: dict[str, Row] = {
        kind: {
            "times": len(each),
            "back after s": median(took for took, _ in each),
            "at most s": max(took for took, _ in each),
            "longest silence s": max(silence for _, silence in each),
        }
        for kind, each in sorted(lasted.items())
    }
    return Table.of("faults", COLUMNS, rows)


def kept_table(samples: Mapping[tuple[str, int], list[Row]]) -> Table:
    """The process that ran longest, of each name."""
    longest: dict[str, list[Row]] = {}
    for (name, _), each in samples.items():
        longest[name] = max(longest.get(name, []), each, key=len)
    rows: dict[str, Row] = {
        name: {
            "faults lived through": len(each) - 1,
            **{f"{what} first": value for what, value in each[0].items()},
            **{f"{what} last": value for what, value in each[-1].items()},
        }
        for name, each in sorted(longest.items())
    }
    return Table.of("processes", KEPT, rows)


def _differences(scene: Scene, recipe: Path, last: int) -> list[str]:
    """What differs from the same run that nobody disturbs, over fast cables."""
    for host in scene.hosts:
        host.limit(10_000)
    undisturbed = scene.disk / "undisturbed"
    scene.begin(recipe, f"--run.folder={undisturbed}", f"--run.steps={last}")
    scene.wait(PATIENCE + last)
    losses, expected = (_losses(run) for run in (scene.disk / "run", undisturbed))
    differing = [step for step in range(1, last + 1) if losses.get(step) != expected.get(step)]
    return [f"losses differ at {len(differing)} steps: {differing[:5]}"] * bool(differing)


def _losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {one["step"]: one["loss"] for one in records if one["record"] == "stepped"}


def _leftovers(scene: Scene, shared: set[str]) -> list[str]:
    """What should have been removed with the run."""
    paths = [f"shared memory {name}" for name in sorted(_shared_memory() - shared)]
    known = ("step-", "latest", "broken-")
    folder = scene.disk / "run" / "checkpoints"
    paths += [path.name for path in folder.iterdir() if not path.name.startswith(known)]
    for host in scene.hosts:
        command = host.command("sh", "-c", LOOK)
        ended = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
        paths += [f"{host.name}: {line}" for line in ended.stdout.splitlines()]
    return paths


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108
