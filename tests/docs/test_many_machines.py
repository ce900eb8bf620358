"""The page's commands of shardwise run as they stand, and it says of the others that none does."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from shardwise.cli import main
from shardwise.recipe.launch_config import LaunchConfig
from tests.dialects.test_interpret import ASKED_V1

PAGE = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text("utf-8")
COMMANDS = re.findall(r"^ +\$ (shardwise (?:launch|init) .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("default_config.yaml").write_text(ASKED_V1, "utf-8")
    [hosts] = re.findall(r"\$ cat hosts\n((?: +\w+ slots=\d+\n)+)", PAGE)
    Path("hosts").write_text(hosts, "utf-8")
    words = [word.replace("~/.cache/huggingface/accelerate/", "") for word in shlex.split(command)]
    if words[1] == "init":
        words.append("--yes")
    else:
        Path("my.yaml").write_text("run: {device: cuda}\nlaunch: {nproc: 8}\n", "utf-8")
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, words, __: became.append(words))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/mpirun")
    with pytest.raises(SystemExit) as caught:
        main(words[1:])
    out, error = capsys.readouterr()
    assert caught.value.code == 0, error
    for name in re.findall(r"wrote     ([\w.]+):", out):
        assert Path(name).exists()
        assert name in PAGE
    if became:
        assert shlex.join(became[0]).startswith("mpirun -n 16 --host gpu01:8,gpu02:8 --bind-to ")


def test_the_section_of_a_recipe_is_one() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert LaunchConfig.model_validate(yaml.safe_load(text)["launch"]).nodes == 2


def test_other_programs_commands_are_said_not_to_be_run() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for section in sections:
        others = re.findall(r"^ +\$ (?!shardwise|cat)(\S+)", section, re.MULTILINE)
        assert not others or re.search(r"not run by a test|is run by a test|Never run", section), (
            section
        )
