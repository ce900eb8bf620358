"""Names as the model itself has them: without the parts that wrappers around its modules add.

``torch.compile(model)`` calls ``weight`` ``_orig_mod.weight``. No other program, and no plain
model, knows that name, so no file and no state dict has it. Those that do are read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardwise.errors import CheckpointError

T = TypeVar("T")

WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_module"}
"""Parts of names that wrappers put there, and that no model has."""
MODULE = "module"  # so DDP, DataParallel and AveragedModel call what they hold; models use it, too


def bare_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that gives a tensor of ``model`` its name without wrappers."""
    paths = (path for path, module in model.named_modules() if isinstance(module, AveragedModel))
    return partial(bare, held=frozenset(f"{path}.{MODULE}".lstrip(".") for path in paths))


def bare(name: str, held: Iterable[str] = ()) -> str:
    """``name`` without ``WRAPPERS``, and without the last part of each of the paths ``held``.

    What is before a slash stays: the state of an optimizer is stored as ``STATE/PARAMETER``.
    """
    head, slash, path = name.rpartition("/")
    parts = path.split(".")
    if not held and WRAPPERS.isdisjoint(parts):  # as a rule, and a save asks of every tensor
        return name
    kept = (k for k, part in enumerate(parts) if part not in WRAPPERS)
    names = (parts[k] for k in kept if not held or ".".join(parts[: k + 1]) not in held)
    return head + slash + ".".join(names)


def renamed(given: Mapping[Any, T], rename: Callable[[Any], Any] = bare) -> dict[Any, T]:
    """``given`` by other names. Raises ``CheckpointError`` if two become one."""
    states: dict[Any, T] = {}
    for old, value in given.items():
        if (new := rename(old)) in states:
            raise CheckpointError(f"two names are both {new!r} without what wrappers add to names.")
        states[new] = value
    return states


def bare_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an optimizer, with the names of parameters without ``WRAPPERS``."""
    groups = [{**group, "params": [*map(bare, group["params"])]} for group in record["groups"]]
    return {**record, "groups": groups, "values": renamed(record["values"])}


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Name that was stored → name without wrappers; ``module.`` is one where all begin with it."""
    held = f"{MODULE}." * all(bare(name).startswith(f"{MODULE}.") for name in names)
    return {name: bare(name).removeprefix(held) for name in names}


def of_plain_model(stored: Mapping[str, T]) -> dict[str, T]:
    """Return another program's tensors by names without wrappers, of which ``module.`` is one."""
    return renamed(stored, without_wrappers(stored).__getitem__)


def further_names(stored: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """``aliases``, and the names that stored tensors have without wrappers → the stored name."""
    bare_of = without_wrappers([*stored, *aliases])
    return {bare_of[name]: aliases.get(name, name) for name in bare_of} | dict(aliases)
