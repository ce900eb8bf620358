"""What the package changes outside itself is listed in ``docs/global_effects.md``."""

from __future__ import annotations

import ast
import re

import pytest

from tests.test_surface import ROOT, SOURCES, Source

LISTED = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "global_effects.md").read_text("utf-8")))
CALLS = {
    "register",  # of atexit
    "register_optimizer_step_pre_hook",
    "register_optimizer_step_post_hook",
    "signal",
    "prctl",
    "addHandler",
    "seed",
    "manual_seed",
    "filterwarnings",
    "simplefilter",
    "watch_compiler",
    "mallopt",
    "sched_setscheduler",
}
ATTRIBUTES = {"__class__", "forward", "__deepcopy__", "excepthook"}


def effects(source: Source) -> list[str]:
    """Statements that change what is not the package's own."""
    return [ast.unparse(node) for node in source.nodes if _has_effect(node)]


def _has_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in CALLS
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return method in CALLS and not isinstance(node.func.value, ast.Call)  # type: ignore[attr-defined]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(map(_is_others, targets))
    return False


def _is_others(target: ast.expr) -> bool:
    if isinstance(target, ast.Attribute):
        return target.attr in ATTRIBUTES
    held = target.value if isinstance(target, ast.Subscript) else None
    return isinstance(held, ast.Attribute) and held.attr in ("__dict__", "environ", "modules")


@pytest.mark.parametrize(
    "text",
    [
        "atexit.register(end)",
        "register_optimizer_step_pre_hook(hook)",
        "param.__class__ = nn.Parameter",
        "module.forward = wrapped",
        "model.__dict__['__deepcopy__'] = copy",
        "os.environ['A'] = 'b'",
        "mallopt(-3, 1)",
    ],
)
def test_an_effect_is_seen(text: str) -> None:
    assert effects(Source("somewhere", text)) == [text]


def test_every_file_with_an_effect_is_listed() -> None:
    assert {s.name: effects(s) for s in SOURCES if effects(s) and s.name not in LISTED} == {}


def test_every_file_that_is_listed_is_there() -> None:
    files = {source.name for source in SOURCES}
    named = {name for name in LISTED if "/" in name or name in files}
    assert named - files == set()
