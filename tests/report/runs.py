"""A folder as a run leaves it, without a run: its files, as small as they can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.recipe.read import to_yaml
from tests.train.tiny import tiny_recipe

EVENTS = [
    (0.00, [0, 10, 0, 0, 20, 0], None),
    (0.01, [40, 10, 0, 0, 20, 0], ["gather", "a.b", "forward", "first use"]),
    (0.02, [40, 10, 0, 0, 20, 0], ["enter", "a.b", "forward", ""]),
    (0.05, [40, 10, 0, 0, 20, 64], ["exit", "a.b", "forward", ""]),
    (0.06, [40, 10, 40, 0, 20, 64], ["enter", "a.b", "backward", ""]),
    (0.08, [40, 10, 40, 0, 20, 32], ["exit", "a.b", "backward", ""]),
    (0.09, [0, 10, 40, 0, 20, 0], ["reduce", "a.b", "backward", "its gradients are complete"]),
    (0.10, [0, 10, 40, 0, 20, 0], ["end", "", "backward", ""]),
    (0.11, [0, 10, 0, 10, 20, 0], ["settle", "a.b", "backward", "the optimizer may run next"]),
    (0.15, [0, 10, 0, 10, 20, 0], None),
]
KINDS = ["gathered", "parameters", "gradient buckets", "gradients", "optimizer"]
OTHERS = "activations and others"
PLANNED = [[None if e is None else 30, None if e is None else sum(n)] for _, n, e in EVENTS]
STEP = {
    "step": 3,
    "kinds": [*KINDS, OTHERS],
    "moments": EVENTS,
    "planned": PLANNED,
    "planned_most": dict(zip([*KINDS, OTHERS], [40, 10, 50, 10, 20, 64], strict=True)),
}
COMPARED = {
    "record": "compared",
    "planned_memory": 2**20,
    "memory": 2**21,
    "planned_rate": 1e3,
    "rate": 2e3,
    "planned_mfu": None,
    "mfu": None,
}
BUILT = {
    "record": "built",
    "parameters": 1_234,
    "strategy": "full_shard",
    "ranks": 2,
    "rows": 4,
    "micro": 2,
    "accumulation": 1,
    "dtypes": ["all float32"],
    "machine": "a machine, 2 cores",
    "versions": {"python": "3.11", "torch": "2.13"},
    "context": 16,
    "steps": 8,
    "units": [{"name": "a.b", "numel": 1_234, "gathered": 4_936, "shard": 2_468}],
}


def stepped(step: int, steps: int = 8, **changed: Any) -> dict[str, Any]:
    numbers = {"loss": 4 - step / 4, "lr": 1e-3, "grad_norm": 1.5, "tokens_per_second": 2e3 + step}
    rest = {"memory": 2**29, "seconds_left": 65.0, "tokens": step * 64, "steps": steps}
    return {"record": "stepped", "step": step, **numbers, **rest, **changed}


def lines_of_a_run(steps: int = 8) -> list[dict[str, Any]]:
    """A run that was restarted after step 4, and has finished."""
    lines = [BUILT, *(stepped(step, steps) for step in range(1, steps + 1))]
    lines[5:5] = [
        {"record": "evaluated", "step": 4, "loss": 3.25, "unigram_entropy": 5.5},
        {"record": "saved", "step": 4, "nbytes": 2**20},
        {"record": "resumed", "step": 4},
    ]
    sampled = {"record": "sampled", "prompt": "def <f>", "text": "</script>(x)", "continues": True}
    lines += [COMPARED, sampled, {"record": "finished", "steps": steps}]
    return [{**line, "time": 1e9 + n, "elapsed": float(n)} for n, line in enumerate(lines)]


def folder_of_a_run(path: Path, *overrides: str, steps: int = 8) -> Path:
    path.mkdir(parents=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines_of_a_run(steps))
    (path / "metrics.jsonl").write_text(text, "utf-8")
    (path / "step.json").write_text(json.dumps(STEP), "utf-8")
    recipe = tiny_recipe(_made(path.parent / f"{path.name}-recipe"), *overrides)
    (path / "recipe.yaml").write_text(to_yaml(recipe), "utf-8")
    return path


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
