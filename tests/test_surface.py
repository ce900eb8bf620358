"""The shape of the package, read from its source: arrows, sizes, names, and the public face.

Each rule is a pure function from a file to its offences, so that a failure lists all of them,
and each is also shown a file that breaks it: a rule that cannot fail protects nothing.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import shardwise

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "shardwise"

LONGEST_FUNCTION = 60  # lines, docstring included
LONGEST_FILE = 400  # lines
MOST_PARAMETERS = 8  # counting self; the aim is 6
ENTRY_POINTS = {  # they list all their options, typed, by keyword
    *("api/shard shard", "checkpoint/api save", "checkpoint/api save_async"),
    *("optim/fused __init__", "optim/muon __init__", "hf/load load", "tracing/stages trace"),
    *("plan/forecast/ask plan", "outer/diloco __init__"),
}
ENGINE_BUDGET = 13_751  # a ratchet: lines with docstrings, without blanks and comments
CHECKPOINT_BUDGET, CONVERT_BUDGET = 5_688, 1_172  # ratchets; docs/decisions.md says what they are
PRIVATE_OF_TORCH = {
    *("_version", "_base", "_cdata", "_parameters", "_buffers", "_modules", "_sequence_nr"),
    *("_post_accumulate_grad_hooks", "_torchdynamo_disable", "hooks_dict_ref"),
}
VENDORS = {"cuda", "xpu", "hpu", "mps", "npu", "mtia"}
HEADLESS = {  # a clause without its head: "What …", "Of …", "Let …"
    *("What", "Which", "Where", "How", "Why", "Who", "Whose", "Whether", "When", "Let", "Those"),
    *("Of", "As", "By", "For", "From", "In", "On", "Over", "To", "With", "Without", "Not"),
    *("Once", "After", "Before", "Inside"),
}
NAMES_THAT_EXPLAIN_NOTHING = {"utils", "helpers", "common", "misc", "base"}

# Rooms, floor by floor: each imports only rooms of floors before its own (itself always). A room is
# a folder of the package, or a file beside them.
FLOORS = (
    {"errors"},
    {"launch", "comm", "torch_internals"},
    {"config"},
    {"plan"},
    {"memory", "recipe"},
    {"runtime", "optim", "dialects"},
    {"setup", "checkpoint"},
    {"api", "convert"},
    {"hf", "tracing", "doctor", "outer"},
    {"__init__", "train", "integrations"},
    {"report"},
    {"cli", "__main__"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
NEVER = {  # beside the floors
    "dialects": {"memory", "plan"},
    "checkpoint": {"recipe"},
    "convert": {"recipe", "dialects", "setup"},
}
NUMBERS_OF_COMM = {"codec", "grid", "machine", "pages", "reduction"}  # the rest of it has peers
MAY_IMPORT_TORCH_DISTRIBUTED = {
    *("comm", "launch", "integrations", "convert/dcp_export", "runtime/other_engines"),
    "doctor/rivals",
}
WITHOUT_TORCH = {
    *("errors", "plan/layout", "plan/schedule", "config/placement", "config/prefetch"),
    *("config/strategies", "runtime/forward_calls"),
}


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: ``name`` is its path in the package without ``.py``, such as ``comm/threads``."""

    name: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.name)))

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def imports(self) -> set[str]:
        """Dotted names; ``from a import b`` counts as ``a.b``, and relative ones are resolved."""
        dotted: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                dotted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                dotted |= {f"{self._origin(node)}.{alias.name}" for alias in node.names}
        return dotted

    def _origin(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        inside = ["shardwise", *self.name.split("/")[:-1]]
        return ".".join([*inside[: len(inside) + 1 - node.level], *filter(None, [node.module])])

    @property
    def ours(self) -> set[str]:
        """The files and folders of the package that this one imports, by their first name."""
        names = (name.split(".") for name in self.imports)
        return {parts[1] for parts in names if parts[0] == "shardwise" and len(parts) > 1}

    @property
    def module(self) -> str:
        """Its dotted name, such as ``shardwise.comm.threads``."""
        parts = ["shardwise", *self.name.split("/")]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def within(self) -> str:
        """The first folder, or the file itself where it lies flat."""
        return self.name.split("/")[0]


def read(folder: Path) -> list[Source]:
    paths = sorted(folder.rglob("*.py"))
    return [
        Source(path.relative_to(folder).with_suffix("").as_posix(), path.read_text("utf-8"))
        for path in paths
    ]


SOURCES = read(PACKAGE)
_ENGINE = {
    *("errors", "torch_internals", "api", "config", "plan", "memory", "runtime", "setup"),
    *("comm", "optim"),
}
# They lie beside the engine's files and are not of it: drawings, what a step will cost, guards
# against other engines, a loss function that only asks the engine to gather a head, a look at the
# host's networks, and connections and secrets of processes beside the collectives.
_BESIDE = {
    "api/nn",
    *("plan/draw", "plan/bytes", "plan/forecast", "runtime/other_engines", "errors/projections"),
    *("memory/shard_tensor/adapter_order", "comm/machine/interfaces"),
    *("comm/machine/endpoint", "comm/machine/run_token", "comm/machine/peer_connection"),
}


def under(name: str, allowed: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in allowed)


ENGINE = [
    s for s in SOURCES if ("/" not in s.name or s.within in _ENGINE) and not under(s.name, _BESIDE)
]


# --- the rules: a source → its offences ------------------------------------------------------


def wrong_arrows(source: Source) -> list[str]:
    if source.within not in FLOOR:
        return [f"{source.name} is in no room of FLOORS"]
    above = {room for room in source.ours if FLOOR.get(room, 99) >= FLOOR[source.within]}
    extra = (above | (source.ours & NEVER.get(source.within, set()))) - {source.within}
    return [f"{source.name} imports {name}" for name in sorted(extra)]


def circle(sources: Sequence[Source]) -> list[str]:
    """Modules that import each other, one after the other; imports for types alone count."""
    modules = {source.module: source for source in sources}
    graph = {
        name: {_module_of(imported, modules) for imported in source.imports}
        & modules.keys() - {name}
        for name, source in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _module_of(imported: str, modules: Container[str]) -> str:
    """``a.b.name → a.b`` where ``name`` is no module itself."""
    return imported if imported in modules else imported.rpartition(".")[0]


def private_names_of_torch(source: Source) -> list[str]:
    """They have one file, with a test for each; the marks of other engines are integrations'."""
    if under(source.name, {"torch_internals", "integrations", "runtime/other_engines"}):
        return []
    imported = {name for name in source.imports if name.startswith("torch.") and "._" in name}
    chains = (_chain(node) for node in source.nodes if isinstance(node, ast.Attribute))
    read = {chain for chain in chains if _is_private_of_torch(chain.split("."))}
    whole = {name for name in read if not any(other.startswith(f"{name}.") for other in read)}
    return [f"{source.name} reads {name}" for name in sorted(imported | whole)]


def _chain(node: ast.expr) -> str:
    """``a.b.c`` of an attribute; what is before it, if no name, is empty."""
    if isinstance(node, ast.Attribute):
        return f"{_chain(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_private_of_torch(chain: list[str]) -> bool:
    of_torch = chain[0] == "torch" and any(re.match("_[^_]", part) for part in chain)
    return of_torch or (chain[-1] in PRIVATE_OF_TORCH and chain[0] not in ("self", "cls"))


def torch_where_none_belongs(source: Source) -> list[str]:
    if not under(source.name, WITHOUT_TORCH):
        return []
    torch = {name for name in source.imports if name.split(".")[0] == "torch"}
    return [f"{source.name} imports {name}" for name in sorted(torch)]


def peers_of_a_plan(source: Source) -> list[str]:
    """A plan is of ranks that need not exist: it knows their numbers, and no communicator."""
    of_comm = {name for name in source.imports if name.startswith("shardwise.comm.")}
    known = {name for name in of_comm if name.split(".")[2] in NUMBERS_OF_COMM}
    wrong = of_comm - known if source.within == "plan" else set()
    return [f"{source.name} imports {name}" for name in sorted(wrong)]


def torch_distributed(source: Source) -> list[str]:
    """Uses by import in any spelling, and by reaching through ``torch.distributed``."""
    if under(source.name, MAY_IMPORT_TORCH_DISTRIBUTED):
        return []
    wrong = {name for name in source.imports if f"{name}.".startswith("torch.distributed.")}
    wrong |= {
        f"torch.distributed (line {node.lineno})"
        for node in source.nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    }
    return [f"{source.name} uses {name}" for name in sorted(wrong)]


def calls_of_one_vendor(source: Source) -> list[str]:
    """``torch.cuda`` and its like: the engine asks ``torch.get_device_module`` for the device's."""
    chains = {_chain(node) for node in source.nodes if isinstance(node, ast.Attribute)}
    parts = (name.split(".") for name in chains | source.imports)
    vendors = {two[1] for two in parts if two[0] == "torch" and two[1:] and two[1] in VENDORS}
    return [f"{source.name} uses torch.{vendor}" for vendor in sorted(vendors)]


def accelerators_without_a_driver(source: Source) -> list[str]:
    """Without ``check_available`` a wheel with CUDA has an accelerator on every machine."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    return [
        f"{source.name}:{call.lineno} may name a device that is not there"
        for call in calls
        if ast.unparse(call.func).endswith("current_accelerator") and not call.keywords
    ]


def prints(source: Source) -> list[str]:
    """Writing to the terminal, or importing what does."""
    if source.within == "cli":
        return []
    lines = [
        f"{source.name}:{node.lineno} calls print"
        for node in source.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "pprint"}
    ]
    lines += [
        f"{source.name}:{node.lineno} reaches for {ast.unparse(node)}"
        for node in source.nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"}
    ]
    tools = {name.split(".")[0] for name in source.imports} & {"click", "rich"}
    return lines + [f"{source.name} imports {name}" for name in sorted(tools)]


def names_that_explain_nothing(source: Source) -> list[str]:
    words = set(source.name.split("/")) & NAMES_THAT_EXPLAIN_NOTHING
    return [f"{source.name} has a part called {word}" for word in sorted(words)]


def long_functions(source: Source) -> list[str]:
    lengths = {f: (f.end_lineno or f.lineno) - f.lineno + 1 for f in source.functions}
    return [
        f"{source.name}:{function.lineno} {function.name} has {length} lines"
        for function, length in lengths.items()
        if length > LONGEST_FUNCTION
    ]


def parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def long_signatures(source: Source) -> list[str]:
    return [
        f"{source.name}:{function.lineno} {function.name} has {len(parameters(function))}"
        for function in source.functions
        if len(parameters(function)) > MOST_PARAMETERS
        and f"{source.name} {function.name}" not in ENTRY_POINTS
    ]


def long_file(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    return [f"{source.name} has {lines} lines"] if lines > LONGEST_FILE else []


def without_annotations(source: Source) -> list[str]:
    def is_bare(function: Function) -> bool:
        bare = [a for a in parameters(function) if a.annotation is None]
        return function.returns is None or any(a.arg not in {"self", "cls"} for a in bare)

    return [
        f"{source.name}:{function.lineno} {function.name}"
        for function in source.functions
        if not function.name.startswith("_") and is_bare(function)
    ]


def without_docstring(source: Source) -> list[str]:
    """The module, and its public functions and classes."""
    module = ast.parse(source.text)
    places = [] if ast.get_docstring(module) else [source.name]
    for node in module.body:
        if not isinstance(node, Function | ast.ClassDef):
            continue
        if not node.name.startswith("_") and not ast.get_docstring(node):
            places.append(f"{source.name}:{node.lineno} {node.name}")
    return places


def headless_docstrings(source: Source) -> list[str]:
    """Docstrings begin with a noun or a verb, as torch's do."""
    documented = Function | ast.ClassDef | ast.Module
    nodes = [node for node in source.nodes if isinstance(node, documented)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return [
        f"{source.name} has {text.splitlines()[0]!r}"
        for text in texts
        if text.split()[0].strip(".,:;") in HEADLESS
    ]


def unfinished(source: Source) -> list[str]:
    return [
        f"{source.name}:{node.lineno} raises NotImplementedError"
        for node in source.nodes
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node)
    ]


def lines_of_code(source: Source) -> int:
    """Lines that are neither blank nor a comment; docstrings count, since they are read."""
    stripped = (line.strip() for line in source.text.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in stripped)


# --- each rule on the package, and on a file that breaks it ----------------------------------

LONG = "\n".join(["def f() -> None:", *["    x = 1"] * 60])
BROKEN: dict[Callable[[Source], list[str]], list[Source]] = {
    wrong_arrows: [
        Source("plan/layout/layout", "from shardwise.memory.parameters import Bucket"),
        Source("plan/schedule/events", "from ...runtime import unit"),
        Source("errors/arguments", "import shardwise.comm.protocol"),
        Source("memory/gradients", "from shardwise.runtime.unit import UnitState"),
        Source("runtime/forward", "from shardwise.api.sharded import Sharded"),
        Source("comm/mesh", "from shardwise.config.placement import Placement"),
        Source("somewhere/new", ""),
    ],
    peers_of_a_plan: [Source("plan/spec", "from shardwise.comm.protocol import Comm")],
    torch_where_none_belongs: [Source("plan/schedule/events", "from torch import Tensor")],
    private_names_of_torch: [
        Source("hooks", "torch._C._current_graph_task_id()"),
        Source("hooks", "from torch.utils._pytree import tree_map"),
        Source("hooks", "version = param._version"),
    ],
    torch_distributed: [
        Source("runtime", "import torch.distributed as dist"),
        Source("runtime", "from torch import distributed"),
        Source("runtime", "from torch.distributed import fsdp"),
        Source("runtime", "import torch\nd = torch.distributed.get_rank()"),
        Source("checkpoint/write", "import torch.distributed.checkpoint"),
    ],
    calls_of_one_vendor: [
        Source("runtime", "torch.cuda.synchronize()"),
        Source("comm/backend", "from torch.xpu import Event"),
        Source("comm/devices", "import torch.hpu"),
    ],
    prints: [
        Source("train/loop", "print('step')"),
        Source("train/loop", "import sys\nsys.stderr.write('step')"),
        Source("train/loop", "from rich.table import Table"),
    ],
    accelerators_without_a_driver: [
        Source("cli", "device = torch.accelerator.current_accelerator() or cpu")
    ],
    names_that_explain_nothing: [Source("comm/utils", ""), Source("common/ring", "")],
    long_functions: [Source("runtime", LONG)],
    headless_docstrings: [Source("runtime", '"""What a step does."""')],
    long_signatures: [Source("runtime", "def f(self, a, b, c, d, e, *, f, g, h): ...")],
    long_file: [Source("runtime", "x = 1\n" * 401)],
    without_annotations: [
        Source("runtime", "def f(a) -> None: ..."),
        Source("runtime", "def f(a: int): ..."),
    ],
    without_docstring: [Source("runtime", ""), Source("runtime", '"""Idea."""\nclass A: x = 1')],
    unfinished: [Source("runtime", "def f() -> None:\n    raise NotImplementedError('later')")],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_package_keeps_the_rule(rule: Callable[[Source], list[str]]) -> None:
    assert [offence for source in SOURCES for offence in rule(source)] == []


@pytest.mark.parametrize("rule", BROKEN)
def test_the_rule_sees_each_offence(rule: Callable[[Source], list[str]]) -> None:
    assert [len(rule(source)) for source in BROKEN[rule]] == [1] * len(BROKEN[rule])


def test_no_modules_import_each_other() -> None:
    assert circle(SOURCES) == []
    types_alone = "if TYPE_CHECKING:\n    from shardwise.a import A"
    broken = [Source("a", "import shardwise.b.c"), Source("b/c", types_alone)]
    assert set(circle(broken)) == {"shardwise.a", "shardwise.b.c"}


def test_the_engine_can_be_read_in_one_sitting() -> None:
    assert sum(map(lines_of_code, ENGINE)) <= ENGINE_BUDGET


@pytest.mark.parametrize(
    ("folder", "budget"), [("checkpoint", CHECKPOINT_BUDGET), ("convert", CONVERT_BUDGET)]
)
def test_what_reads_and_writes_checkpoints_keeps_its_budget(folder: str, budget: int) -> None:
    assert sum(lines_of_code(source) for source in SOURCES if source.within == folder) <= budget


# --- the public face, and what it asks of the machine ----------------------------------------

IMPORTED_AS = {"pyyaml": "yaml", "pytest-timeout": "pytest_timeout"}


def declared() -> dict[str, set[str]]:
    """Import names by extra, as pyproject.toml declares them; ``""`` is what everybody installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {import_name(line) for line in lines} for extra, lines in groups.items()}


def import_name(requirement: str) -> str:
    distribution = re.split(r"[\[<>=!~; ]", requirement)[0].lower()
    return IMPORTED_AS.get(distribution, distribution.replace("-", "_"))


def third_party(source: Source) -> set[str]:
    known = {*sys.stdlib_module_names, "shardwise", "tests", "benchmarks", "examples"}
    return {name.split(".")[0] for name in source.imports} - known


def test_the_public_names_are_sorted_and_there() -> None:
    names = shardwise.__all__
    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(shardwise, name)] == []


def test_an_editor_is_offered_the_public_names_alone() -> None:
    assert dir(shardwise) == sorted([*shardwise.__all__, "__version__"])


def test_what_is_imported_is_declared() -> None:
    extras = declared()
    assert {"torch", "yaml"} <= extras[""]
    in_package = set().union(*map(third_party, SOURCES))
    optional = set().union(
        *(extras[name] for name in ("train", "data", "hf", "peft", "bnb", "trainer"))
    )
    assert in_package - extras[""] - optional == set()
    in_tests = set().union(*map(third_party, read(ROOT / "tests")))
    assert in_tests - set().union(*extras.values()) == set()


def test_the_engine_needs_no_extra() -> None:
    engine = set().union(*map(third_party, ENGINE))
    assert engine - declared()[""] == set()


def test_every_folder_of_tests_is_a_package() -> None:
    # Otherwise tests/test_x.py and tests/comm/test_x.py are one module to pytest,
    # and a spawned rank cannot import what it should run.
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
