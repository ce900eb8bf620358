"""The recipes that travel with the package, by name: in a wheel, or in a source tree."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def shipped() -> dict[str, Path]:
    """Return the shipped recipes by name, such as ``demo``."""
    installed = _PACKAGE / "recipes"
    folder = installed if installed.is_dir() else _PACKAGE.parents[1] / "recipes"
    # Not what `shardwise launch` writes beside a recipe, such as demo.k8s.yaml.
    return {path.stem: path for path in sorted(folder.glob("*.yaml")) if "." not in path.stem}


def path_of(recipe: str | Path) -> Path:
    """Return ``recipe``, or the shipped recipe of that name if there is no such file."""
    path = Path(recipe)
    return path if path.suffix or path.exists() else shipped().get(str(recipe), path)


def check_suffix(path: Path) -> None:
    """Raises ``ConfigError`` if a recipe in YAML at ``path`` would not be read as one."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{path} would hold YAML, and a recipe is read by its suffix. Nothing was written; "
            f"name it {path.with_suffix('.yaml')}."
        )


def write_copy(name: str, path: Path) -> None:
    """Write the shipped recipe ``name`` to ``path``.

    Raises:
        ConfigError: no recipe has that name, or ``path`` exists or is no name for YAML.
    """
    if name not in shipped():
        raise ConfigError(f"there is no recipe {name!r}; there are {', '.join(shipped())}.")
    check_suffix(path)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(shipped()[name].read_text("utf-8"))
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not replaced; name another file.") from None
