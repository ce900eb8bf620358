"""A model that is named on the command line, and an input for it.

nothing             Linear(Tanh(Linear(x))) of width 64, on an input of [64, 64]
recipe.yaml         the model that `shardwise train` would shard, on the meta device
folder              the causal language model that its config.json describes, likewise
file.py:function    what the function returns: a module, or a module and its input
package.mod:name    the same, imported
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.recipe.shipped import shipped
from shardwise.tracing.stages import Inputs

FOR_TRANSFORMERS = {"input_ids": torch.zeros(1, 16, dtype=torch.int64), "use_cache": False}


class Named(NamedTuple):
    """A model.

    Attributes:
        inputs: for it, if one is known.
        optimizer, arguments: a recipe's, and its arguments of ``shard()``.
    """

    model: nn.Module
    inputs: Inputs | None
    optimizer: str = "adamw"
    arguments: Mapping[str, Any] = {}


def named_model(name: str | None) -> Named:
    """The model of this name.

    Raises:
        ConfigError: there is none, or what was found is no model.
    """
    if name is None:
        return _example()
    if name.endswith((".yaml", ".yml", ".toml")) or name in shipped():
        return _decoder(name)
    folder = Path(name).parent if Path(name).name == "config.json" else Path(name)
    if (folder / "config.json").is_file():
        return _hugging_face(folder)
    place, _, attribute = name.rpartition(":")
    if not (place and attribute):
        raise ConfigError(
            f"{name!r} names no model. Pass a recipe (recipe.yaml, or a shipped one such as "
            f"{nearest(name, shipped(), 1)[0]!r}), a folder with a config.json, file.py:function, "
            "or package.module:function; a function returns a module, or a module and its input."
        )
    with _as_its_own_program(place):
        value = _attribute(place, attribute)
        built = value if isinstance(value, nn.Module) else value()
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} gave a value of type {type(model).__name__}, and not a module. "
            "Return an nn.Module, or a module and its input: return model, torch.randn(8, 64)."
        )
    return Named(model, inputs)


def _example() -> Named:
    """The model of the tutorial on ZeRO-2."""
    width = 64
    layers = nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False)
    return Named(nn.Sequential(*layers), torch.randn(width, width))


def _decoder(path: str) -> Named:
    from shardwise.recipe.read import read_recipe
    from shardwise.recipe.shard_arguments import shard_arguments
    from shardwise.train.decoder import Decoder
    from shardwise.train.model_folder import on_meta
    from shardwise.train.optimizer import state_of

    recipe = read_recipe(path, (), ())
    settings = state_of(recipe), shard_arguments(recipe.sharding)
    if recipe.model.source is not None:
        return Named(on_meta(recipe), FOR_TRANSFORMERS, *settings)
    with torch.device("meta"):
        model = Decoder(recipe.model, recipe.tokenizer.vocabulary, recipe.data.context)
    ids = torch.zeros(recipe.batch.micro, recipe.data.context, dtype=torch.int64)
    return Named(model, ids, *settings)


def _hugging_face(folder: Path) -> Named:
    from shardwise.hf.folder import config_of, new_model

    config = config_of(folder)
    with torch.device("meta"):
        model = new_model(config)
    return Named(model, FOR_TRANSFORMERS)


_BELOW_MAIN = ' Put training code below `if __name__ == "__main__":`, which does not run here.'


@contextmanager
def _as_its_own_program(place: str) -> Iterator[None]:
    """The user's code imports the modules beside it, and gets no arguments but its own name.

    Raises:
        ConfigError: it raised an exception, or ended.
    """
    path, argv, written = list(sys.path), sys.argv, io.StringIO()
    folder = str((Path(place).parent if place.endswith(".py") else Path()).resolve())
    sys.path.insert(0, folder)
    sys.argv = [place]
    try:
        with redirect_stderr(written):
            yield
        sys.stderr.write(written.getvalue())
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # Of argparse the last line says what it misses.
        why = written.getvalue().strip().rpartition("\n")[2] or str(error)
        frames = extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(folder)]
        line = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        is_its_own = isinstance(error, (SyntaxError, ImportError, TypeError))
        advice = "" if is_its_own else _BELOW_MAIN
        raise ConfigError(
            f"{place} ended with {type(error).__name__}, so it gives no model: {line}{why}.{advice}"
        ) from error
    finally:
        sys.path[:], sys.argv = path, argv


def _attribute(place: str, attribute: str) -> Callable[[], Any] | nn.Module:
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    if not hasattr(module, attribute):
        like = ", ".join(nearest(attribute, [n for n in vars(module) if not n.startswith("_")]))
        raise ConfigError(f"{place} has no {attribute!r}; nearest is {like or 'nothing'}.")
    value: Callable[[], Any] = getattr(module, attribute)
    return value


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ConfigError(
            f"there is no module {name!r}. Name a file (model.py:build), or start the command "
            "where the package can be imported."
        ) from error


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None or not path.exists():
        raise ConfigError(f"there is no file {path}, so it holds no model.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
