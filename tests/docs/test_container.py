"""The container file names what is there."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LINES = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]


def test_each_line_is_an_instruction() -> None:
    words = [word for word, _ in INSTRUCTIONS]
    assert words[0] == "FROM"
    assert set(words) <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}


def test_what_is_copied_exists_and_the_build_has_what_it_needs() -> None:
    sources = {
        name for word, words in INSTRUCTIONS if word == "COPY" for name in words.split()[:-1]
    }
    assert sources == {name for name in sources if (ROOT / name).exists()}
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    required = {"pyproject.toml", project["readme"], *project["license-files"]}
    required |= {path.split("/")[0] for path in (*wheel["packages"], *wheel["force-include"])}
    assert required <= sources


def test_the_extras_and_the_interpreter_are_the_projects() -> None:
    (command,) = [words for word, words in INSTRUCTIONS if word == "RUN"]
    (extras,) = re.findall(r'"\.\[(.*)\]"', command)
    assert {*extras.split(",")} <= PROJECT["project"]["optional-dependencies"].keys()
    assert "-c constraints.txt" in command
    version = re.search(r"python:(\d+\.\d+)", INSTRUCTIONS[0][1])
    assert version
    assert f"Python {version[1]}" in (ROOT / "constraints.txt").read_text("utf-8")


def test_it_starts_the_projects_command() -> None:
    (entry,) = [words for word, words in INSTRUCTIONS if word == "ENTRYPOINT"]
    assert json.loads(entry) == ["shardwise"]
    assert "shardwise" in PROJECT["project"]["scripts"]
