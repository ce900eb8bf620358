"""Matches of each LoRA target in a model, decided before peft changes it.

peft matches module names by their ends. It raises where no target matches at all, and says nothing
of one that matches no module beside others that do, or only those of some layers; the run then
trains a part of what was asked for.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.errors.projections import instead

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class Match:
    """One target, or one module to save, and the paths that it matches."""

    target: str
    paths: tuple[str, ...]
    layers: Mapping[str, tuple[int, int]]  # list of layers → with a match, and all
    trained_whole: bool = False  # of modules_to_save

    @property
    def partial(self) -> str:
        """Name the layers that have no match; ``""`` if all have one."""
        few = [f"{n} of {of} in {name}" for name, (n, of) in self.layers.items() if n < of]
        return ", ".join(few)

    def __str__(self) -> str:
        kinds = Counter(re.sub(r"\.\d+\.", ".*.", path) for path in self.paths)
        where = ", ".join(kinds) + (" (trained whole)" if self.trained_whole else "")
        partial = f"  # only some layers: {self.partial}" if self.partial else ""
        return f"{where}{partial}"


@dataclass(frozen=True)
class Matches:
    """The match table of an adapter; print it."""

    rows: tuple[Match, ...]

    @property
    def warnings(self) -> list[str]:
        """A sentence for each target that only some layers have."""
        return [
            f"LoRA target {row.target!r} matches only some layers ({row.partial}), so the others "
            "are trained without it. If that is meant, give layers_to_transform or full names."
            for row in self.rows
            if row.partial
        ]

    def __str__(self) -> str:
        width = max(len(row.target) for row in self.rows)
        return "\n".join(
            [f"{'target':<{width}}  modules  where"]
            + [f"{row.target:<{width}}  {len(row.paths):>7,}  {row}" for row in self.rows]
        )


def match_targets(config: LoraConfig, model: nn.Module) -> Matches:
    """Return what each target of ``config`` matches in ``model``, by peft's own rules.

    Args:
        config: not changed. ``"all-linear"``, a regular expression, the defaults of peft for this
            model, and names of fused expert weights are resolved as peft does.
        model: before or after an adapter was added; its values are not read.

    Raises:
        ConfigError: a target or a module to save matches nothing; the message names what this model
            has in its place.
    """
    resolved, names = _resolved(config, model), [name for name, _ in model.named_modules() if name]
    layers = _layers(names)
    chosen = config.layers_to_transform is not None
    rows = [
        Match(target, paths, {} if chosen or _is_path(target) else _covered(paths, layers))
        for target, paths in _adapted(resolved, model, names)
    ]
    rows += [
        Match(name, tuple(path for path in names if path.endswith(name)), {}, trained_whole=True)
        for name in config.modules_to_save or ()
    ]
    if missing := [row for row in rows if not row.paths]:
        raise _unmatched(missing, model)
    return Matches(tuple(rows))


def trainable_line(trainable: int, total: int) -> str:
    """Peft's line, from numbers of elements of whole parameters."""
    return (
        f"trainable params: {trainable:,d} || all params: {total:,d} || "
        f"trainable%: {100 * trainable / total:.4f}"
    )


def _resolved(config: LoraConfig, model: nn.Module) -> LoraConfig:
    """A copy with the targets that peft makes of the given ones for this model."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    resolved = copy.deepcopy(config)
    settings: Any = getattr(model, "config", None)
    kind = getattr(settings, "model_type", "")
    if resolved.target_modules is None and not resolved.target_parameters:
        if kind not in DEFAULTS:
            raise ConfigError(
                f"the adapter has no targets, and peft has no defaults for {kind or 'this model'}. "
                f'Name them, such as {_own_names(model)[:4]}, or pass "all-linear".'
            )
        names: Any = DEFAULTS[kind]
        resolved.target_modules = names if isinstance(names, str) else list(names)
    convert_peft_config_for_transformers(resolved, model, None)
    return resolved


def _adapted(
    resolved: LoraConfig, model: nn.Module, names: list[str]
) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Each target and the paths that get an adapter."""
    from peft.tuners.tuners_utils import (
        _maybe_include_all_linear_layers,
        check_target_module_exists,
    )

    one: Any = copy.deepcopy(resolved)
    targets = resolved.target_modules
    for target in [targets] if isinstance(targets, str) else sorted(targets or ()):
        one.target_modules = target if isinstance(targets, str) else {target}
        _maybe_include_all_linear_layers(one, model)
        yield target, tuple(name for name in names if check_target_module_exists(one, name))
    for target in sorted(resolved.target_parameters or ()):
        params = (name for name, _ in model.named_parameters())
        yield target, tuple(n for n in params if n == target or n.endswith(f".{target}"))


def _is_path(target: str) -> bool:
    return any(part.isdigit() for part in target.split("."))


def _layers(names: Iterable[str]) -> dict[str, set[str]]:
    """Each list of layers → its indices; what is inside a layer (experts) is no list here."""
    layers = defaultdict[str, set[str]](set)
    for name in names:
        before, index, _ = _split(name)
        if index:
            layers[before].add(index)
    return layers


def _split(path: str) -> tuple[str, str, str]:
    """``"model.layers.3.mlp"`` → ``("model.layers", "3", "mlp")``, at the first number."""
    match = re.match(r"(.*?)\.(\d+)(?:\.(.*))?$", path)
    return (match[1], match[2], match[3] or "") if match else ("", "", "")


def _covered(paths: Iterable[str], layers: Mapping[str, set[str]]) -> dict[str, tuple[int, int]]:
    matched = _layers(paths)
    return {name: (len(matched[name]), len(layers[name])) for name in matched if name}


def _unmatched(missing: Iterable[Match], model: nn.Module) -> ConfigError:
    own = _own_names(model)
    elsewhere = "elsewhere: see layers_to_transform, layers_pattern and exclude_modules"
    targets = [row.target for row in missing]
    hints = (elsewhere if target in own else instead(target, own) for target in targets)
    rows = ", ".join(map("{}: 0 modules ({})".format, targets, hints))
    return ConfigError(
        f"no module of {type(model).__name__} has these names, so nothing would be trained there: "
        f"{rows}. It has {', '.join(own)}. Name some of these as targets, or "
        '"all-linear" for every linear layer but the head.'
    )


def _own_names(model: nn.Module) -> list[str]:
    """Last names of the modules that hold a matrix, as they occur."""
    holders = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]
    return list(dict.fromkeys(holders))
