"""docs/seeds.md is typed, row by row: each section is a notebook, read from the page itself."""

from __future__ import annotations

import ast
import fnmatch
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise as sw
from examples import mnist, toy
from shardwise.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "seeds.md").read_text("utf-8")
HEAD = "| the document | here | what differs | shown by |"
DEFECTS = range(1, 31)  # of the documents


class Row(NamedTuple):
    document: str
    here: str
    differs: str
    shown_by: str

    @property
    def typed(self) -> list[str]:
        """Commands and Python, in order."""
        return spans(self.document if self.here.startswith("the same") else self.here)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(section: str) -> list[Row]:
    lines = section.partition(HEAD)[2].splitlines()[2:]
    table = takewhile(lambda line: line.startswith("|"), lines)
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in table]


SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
ROWS = [row for section in SECTIONS.values() for row in rows(section)]


# --- what the names of each section mean -----------------------------------------------------


class LlamaDecoderLayer(nn.Linear):
    """A layer of that name."""


def llama() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4), *(LlamaDecoderLayer(4, 4) for _ in range(2)))


def create_model() -> nn.Module:
    layers = nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False)
    return nn.Sequential(*layers)


def toy_program() -> dict[str, Any]:
    return {"model": toy.ToyModel(), "in_data": torch.ones(3), "SGD": torch.optim.SGD}


def mnist_program() -> dict[str, Any]:
    return {
        "Net": mnist.Net,
        "F": F,
        "dist": dist,
        "optim": torch.optim,
        "StepLR": torch.optim.lr_scheduler.StepLR,
        "args": Namespace(lr=1.0, gamma=0.7),
        "DistributedSampler": DistributedSampler,
        "rank": 0,
        "world_size": 1,
        "dataset1": TensorDataset(torch.randn(8, 1, 28, 28), torch.arange(8)),
        "train_kwargs": {"batch_size": 4},
        "data": torch.randn(4, 1, 28, 28),
        "target": torch.arange(4),
        "epoch": 1,
    }


def tuning_program() -> dict[str, Any]:
    enum = {"ShardingStrategy": ShardingStrategy, "CPUOffload": CPUOffload}
    return {"model": llama(), "llama": llama, **enum}


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "Intel's article on FSDP for Gaudi: the toy program": toy_program,
    "Intel's article: fine-tuning Llama 2 with LoRA on eight cards": tuning_program,
    "The Llama-3 article: fine-tuning in four bits": tuning_program,
    "Intel's tutorial on FSDP for XPU: MNIST": mnist_program,
    "Lightning's tutorial on ZeRO-2 in thunder": lambda: {"create_model": create_model},
    "Concepts that the documents explain": dict,
}


@pytest.mark.parametrize("title", NAMES)
def test_a_reader_types_what_stands_there(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():  # as torchrun starts one rank
        monkeypatch.setenv(name, value)
    with sw.connect() as comm:
        names = {"sw": sw, "torch": torch, "comm": comm, **NAMES[title]()}
        for row in rows(SECTIONS[title]):
            if row.shown_by == "run":
                assert row.typed
                for text in row.typed:
                    type_in(text, names, capsys)
            elif row.shown_by == "refused":
                with pytest.raises(sw.ConfigError, match=re.escape(spans(row.differs)[-1])):
                    exec(row.typed[0], names)


def type_in(text: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A command of ``shardwise``, which prints something, or Python, in which no name is free."""
    command, *arguments = shlex.split(text) if text.startswith("shardwise ") else [""]
    if not command:
        exec(text, names)
        return
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed, errors = capsys.readouterr()
    assert (end.value.code, errors, bool(printed)) == (0, "", True), text


# --- the page itself -------------------------------------------------------------------------


@cache
def functions_of(path: str) -> set[str]:
    """Functions of a file of tests; ``make prove`` alone runs some of them."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def missing(text: str) -> Iterator[str]:
    """Tests that are named and are not there.

    ``test_a_…`` names all that begin so; a name without a file is one of the file before it.
    """
    path = ""
    for span in spans(text):
        file, _, name = span.rpartition("::")
        if span.startswith("tests/"):
            path, name = (file, name) if file else (span, "")
        elif not (span.startswith("…::") or re.fullmatch(r"test_\w+…?", span)):
            continue
        names = functions_of(path) if (ROOT / path).is_file() else set()
        if not fnmatch.filter(names, name.replace("…", "*") or "test_*"):
            yield span


def test_every_row_is_typed_or_says_why_not() -> None:
    tables = PAGE.count(HEAD)
    assert tables == PAGE.count("| the document |") == sum(HEAD in s for s in SECTIONS.values())
    for row in ROWS:
        by_test = re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", row.shown_by)
        assert by_test or row.shown_by in ("run", "refused", "none"), row
        assert row.differs or row.shown_by not in ("refused", "none"), row
    typed = {title for title, text in SECTIONS.items() for r in rows(text) if r.shown_by == "run"}
    assert typed == set(NAMES)


def test_every_defect_of_the_documents_is_named_with_what_shows_that_it_is_not_here() -> None:
    items = re.findall(r"^- \*\*D(\d+)\.\*\*(.*?)(?=^- |^$|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert sorted({int(number) for number, _ in items}) == list(DEFECTS)
    assert [number for number, text in items if "`tests/" not in text] == []


@pytest.mark.parametrize("page", ["seeds.md", "requirements.md"])
def test_tests_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert "`tests/" in text
    assert list(missing(text)) == []
    wrong = "`tests/test_seeds.py::test_a_r…`, `test_a_writer_…`, `tests/x.py`, `…::test_a_reader`"
    assert list(missing(wrong)) == ["test_a_writer_…", "tests/x.py", "…::test_a_reader"]
