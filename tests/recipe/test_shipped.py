from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.read import read_recipe
from shardwise.recipe.shipped import path_of, shipped, write_copy

ROOT = Path(__file__).parents[2]


def test_every_recipe_of_the_source_tree_is_shipped_by_its_name() -> None:
    assert shipped() == {path.stem: path for path in (ROOT / "recipes").glob("*.yaml")}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"] == {"recipes": "shardwise/recipes"}


def test_a_recipe_is_read_by_its_name() -> None:
    assert read_recipe("demo") == read_recipe(ROOT / "recipes" / "demo.yaml")


def test_a_file_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert path_of("demo") == Path("demo")
    assert path_of("demo.yaml") == Path("demo.yaml")


def test_what_launch_writes_beside_one_is_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    for name in ("mine.yaml", "mine.k8s.yaml"):
        (tmp_path / "recipes" / name).touch()
    monkeypatch.setattr("shardwise.recipe.shipped._PACKAGE", tmp_path)
    assert [*shipped()] == ["mine"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"recipe dmo: expected a \.yaml.* one: demo, llama2-70b"):
        read_recipe("dmo")


def test_a_copy_is_written_once(tmp_path: Path) -> None:
    copy = tmp_path / "mine.yaml"
    write_copy("demo", copy)
    assert read_recipe(copy) == read_recipe("demo")
    with pytest.raises(ConfigError, match=r"mine\.yaml exists and is not replaced"):
        write_copy("demo", copy)
    with pytest.raises(ConfigError, match="there is no recipe 'dmo'; there are demo, "):
        write_copy("dmo", copy)


@pytest.mark.parametrize("name", ["mine.toml", "mine"])
def test_a_name_that_is_not_read_as_yaml_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"would hold YAML, .* name it .*mine\.yaml\.$"):
        write_copy("demo", tmp_path / name)
    assert not (tmp_path / name).exists()
