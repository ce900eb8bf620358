"""Names as the model itself has them: without the parts that wrappers around its modules add.

``torch.compile(model)`` calls ``weight`` ``_orig_mod.weight``. No other program, and no plain
model, knows that name, so no file and no state dict has it; one that does is read all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import nn
from torch.optim.swa_utils import AveragedModel

WRAPPERS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_module"}
"""Parts of names that wrappers put there, and that no model has."""
MODULE = "module"  # so DDP, DataParallel and AveragedModel call what they hold; models use it, too


def bare_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that gives a tensor of ``model`` its name without wrappers."""
    paths = (path for path, module in model.named_modules() if isinstance(module, AveragedModel))
    return partial(bare, held=frozenset(f"{path}.{MODULE}".lstrip(".") for path in paths))


def bare(name: str, held: Iterable[str] = ()) -> str:
    """``name`` without ``WRAPPERS``, and without the last part of each of the paths ``held``."""
    parts = name.split(".")
    kept = (k for k, part in enumerate(parts) if part not in WRAPPERS)
    return ".".join(parts[k] for k in kept if not held or ".".join(parts[: k + 1]) not in held)


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Name that was stored → name without wrappers; ``module.`` is one where all begin with it."""
    names = list(names)
    all_held = [MODULE] if all(name.startswith(f"{MODULE}.") for name in names) else ()
    return {name: bare(name, all_held) for name in names}


def further_names(stored: Iterable[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """``aliases``, and the names that stored tensors have without wrappers → the stored name."""
    bare_of = without_wrappers([*stored, *aliases])
    return {bare_of[name]: aliases.get(name, name) for name in bare_of} | dict(aliases)
