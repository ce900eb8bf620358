"""What is what in a foreign checkpoint: weights, optimizer state by name, and the rest. Pure.

{"model": {NAME: …}, "optimizer": {"state": {NAME: {KEY: …}}, "param_groups": [{…}]}, "step": 3}
{NAME: …}                                       weights alone
{"state": {0: {KEY: …}}, "param_groups": […]}   an optimizer alone, by numbers
{"state.NAME.KEY": …, "param_groups.NAME.lr": …}    flattened, as StateDictOptions can ask for
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.optimizers import AS_BUILT
from shardwise.convert.foreign import Foreign, Part, Tensor, Value
from shardwise.errors import CheckpointError

__all__ = [
    "Group",
    "Sorted",
    "class_of",
    "default_options",
    "named_numbers",
    "records",
    "sort_out",
]

log = logging.getLogger("shardwise")

MODELS = ("model", "module", "state_dict", "model_state_dict", "model_state")
OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_module"})
"""Parts of names that wrappers put there, and that no model has."""
NOT_KEPT = AS_BUILT | {"param_names"}
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class Group:
    """One group of an optimizer: its parameters, and its options as JSON."""

    params: list[Any]
    options: dict[str, Any]


@dataclass
class Sorted:
    """A foreign checkpoint, sorted out.

    Attributes:
        weights: name → tensor, in the order of the source.
        state: parameter (name, or number) → key → tensor.
        values: the same for state that is no tensor, encoded.
        groups: by number, or by the name of their one parameter.
        step: optimizer steps taken, if it says so.
        left_out: names of what has no place in a checkpoint of ours.
    """

    weights: dict[str, tuple[Foreign, Tensor]] = field(default_factory=dict)
    state: dict[Any, dict[str, tuple[Foreign, Tensor]]] = field(default_factory=dict)
    values: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: dict[Any, Group] = field(default_factory=dict)
    step: int | None = None
    left_out: list[str] = field(default_factory=list)


def sort_out(sources: Iterable[Foreign]) -> Sorted:
    """Find weights and optimizer in one or more foreign checkpoints.

    Raises:
        CheckpointError: there are no weights, or a name occurs twice.
    """
    found = Sorted()
    for source in sources:
        bare = any(part.path[0] == "param_groups" for part in _parts(source))
        for tensor in source.tensors:
            _place_tensor(found, source, tensor, bare=bare)
        for value in source.values:
            _place_value(found, value, bare=bare)
        found.left_out += source.odd
    _unwrap(found)
    if not found.weights:
        raise CheckpointError(
            "no weights were found: tensors by name, or under one of "
            f"{', '.join(map(repr, MODELS))}. Name the file or folder that holds them, too; "
            "several can be given."
        )
    return found


def _parts(source: Foreign) -> list[Tensor | Value]:
    return [*source.tensors, *source.values]


def _place_tensor(found: Sorted, source: Foreign, tensor: Tensor, *, bare: bool) -> None:
    inner, name = _of_optimizer(tensor.path, bare=bare), _of_model(tensor.path)
    if inner is not None:
        match _flat(inner):
            case ["state", owner, str(key)]:
                found.state.setdefault(owner, {})[key] = (source, tensor)
            case _:
                found.left_out.append(_dotted(tensor.path))
    elif name is None:
        found.left_out.append(_dotted(tensor.path))
    elif name in found.weights:
        raise CheckpointError(
            f"{found.weights[name][0].source} and {source.source} both hold weights called "
            f"{name!r}. Name one of them, and the optimizer's file or folder beside it."
        )
    else:
        found.weights[name] = (source, tensor)


def _place_value(found: Sorted, value: Value, *, bare: bool) -> None:
    inner = _of_optimizer(value.path, bare=bare)
    match _flat(inner) if inner is not None else list(value.path):
        case ["state", name, str(key)] if inner is not None:
            found.values.setdefault(name, {})[key] = value.value
        case ["param_groups"] if inner is not None and isinstance(value.value, list):
            for number, options in enumerate(value.value):
                found.groups[number] = _group(options)
        case ["param_groups", int(number)] if inner is not None:
            found.groups[number] = _group(value.value)
        case ["param_groups", int(number), str(key)] if inner is not None:
            _set(found.groups.setdefault(number, Group([], {})), key, value.value)
        case ["param_groups", str(name), str(key)] if inner is not None:
            _set_of_one(found, name, key, value.value)
        case ["step" | "global_step" | "iteration"] if inner is None and _is_step(value.value):
            found.step = value.value  # of the run: a scheduler has one of its own, further inside
        case _:
            found.left_out.append(_dotted(value.path))


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _group(options: Any) -> Group:
    if not isinstance(options, dict):
        raise CheckpointError(f"a group of the optimizer is {options!r:.80}, and no dict.")
    rest = {key: value for key, value in options.items() if key != "params"}
    return Group(_params(options.get("params", [])), rest)


def _params(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(type(param) in (str, int) for param in value):
        raise CheckpointError(
            f"the parameters of a group of the optimizer are {value!r:.80}: no list of names or "
            "numbers. Save optimizer.state_dict(), or import the weights alone."
        )
    return list(value)


def _set(group: Group, key: str, value: Any) -> None:
    if key == "params":
        group.params[:] = _params(value)
    else:
        group.options[key] = value


def _set_of_one(found: Sorted, name: str, key: str, value: Any) -> None:
    """Flattened: every parameter has its options, so it is a group of its own for now."""
    group = found.groups.setdefault(name, Group([name], {}))
    if key != "params":
        group.options[key] = value


def _of_optimizer(path: Sequence[Part], *, bare: bool) -> list[Part] | None:
    """What follows the optimizer's own key, or ``None`` where it is not the optimizer's."""
    for k, part in enumerate(path[:-1]):
        if part in OPTIMIZERS:
            return list(path[k + 1 :])
    if bare or str(path[0]).startswith(("state.", "param_groups.")):
        return list(path)
    return None


def _flat(path: Sequence[Part]) -> list[Part]:
    """``["state.0.weight.exp_avg"] → ["state", "0.weight", "exp_avg"]``; others as they are."""
    if len(path) == 1 and isinstance(path[0], str):
        first, _, rest = path[0].partition(".")
        name, _, key = rest.rpartition(".")
        if first in ("state", "param_groups") and name and key:
            return [first, name, key]
    return list(path)


def _of_model(path: Sequence[Part]) -> str | None:
    """The tensor's name, or ``None`` where it is no weight."""
    for k, part in enumerate(path[:-1]):
        if part in MODELS:
            return _dotted(path[k + 1 :])
    return str(path[0]) if len(path) == 1 else None


def _dotted(path: Sequence[Part]) -> str:
    return ".".join(map(str, path))


def _unwrap(found: Sorted) -> None:
    """Names as the model itself has them, without those of wrappers."""
    module = bool(found.weights) and all(name.startswith("module.") for name in found.weights)

    def bare(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        name = name.removeprefix("module.") if module else name
        return ".".join(part for part in name.split(".") if part not in WRAPPERS)

    found.weights = _renamed(found.weights, bare)
    found.state = _renamed(found.state, bare)
    found.values = _renamed(found.values, bare)
    for group in found.groups.values():
        group.params = [bare(name) for name in group.params]


def _renamed(given: dict[Any, Any], name: Callable[[Any], Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for old, value in given.items():
        if name(old) in made:
            raise CheckpointError(
                f"{old!r} and another name are both {name(old)!r} without what wrappers add to "
                "names. Remove one of them."
            )
        made[name(old)] = value
    return made


# --- the optimizer ---------------------------------------------------------------------------


def named_numbers(found: Sorted) -> None:
    """Give numbered parameters their names, where it is sure which they are.

    Their groups say it (``param_names``), or else the order of the weights does; the latter is
    said by a warning where shapes would fit another order, too.

    Raises:
        CheckpointError: it is not, or state does not fit the weight of its name.
    """
    numbers = [param for group in found.groups.values() for param in group.params]
    if not all(isinstance(number, str) for number in numbers):
        names = _told_names(found) or _names_in_order(found, numbers)
        name = dict(zip(numbers, names, strict=False))
        unknown = (set(found.state) | set(found.values)) - set(name)
        if unknown or len(set(names)) < len(numbers) or len(name) < len(numbers):
            raise _not_sure(found, numbers, names)
        found.state = {name[number]: value for number, value in found.state.items()}
        found.values = {name[number]: value for number, value in found.values.items()}
        for group in found.groups.values():
            group.params = [name[number] for number in group.params]
    for owner in found.state:
        if owner not in found.weights or not _fits(owner, found, owner):
            raise CheckpointError(
                f"the optimizer has state of {owner!r}, and there is no weight of that name and "
                "the state's shape. It is another model's; or import the weights alone."
            )


def _told_names(found: Sorted) -> list[str]:
    """What ``param_names`` says, as the weights are called; nothing if a group has none."""
    names: list[str] = []
    for group in found.groups.values():
        told = group.options.get("param_names")
        if not isinstance(told, list) or len(told) != len(group.params):
            return []
        names += map(str, told)
    bare = [".".join(p for p in name.split(".") if p not in WRAPPERS) for name in names]
    if not set(bare) <= set(found.weights):
        bare = [name.removeprefix("module.") for name in bare]
    return bare


def _names_in_order(found: Sorted, numbers: Sequence[Any]) -> list[str]:
    names = [name for name, (_, tensor) in found.weights.items() if _is_parameter(name, tensor)]
    sure = len(found.groups) == 1 and len(names) == len(numbers)
    if not sure or not all(map(_fits, names, [found] * len(names), numbers)):
        raise _not_sure(found, numbers, names)
    shapes = [found.weights[name][1].shape for name in names]
    if found.state and len(set(shapes)) < len(shapes):
        log.warning(
            "the optimizer's state numbers its %d parameters, and these have only %d different "
            "shapes, so that some could change places. The order of the weights was assumed, which "
            "is right for an optimizer over model.parameters(). To be sure, make it over "
            "model.named_parameters(), or save it by name (get_optimizer_state_dict).",
            len(shapes),
            len(set(shapes)),
        )
    return names


def _not_sure(found: Sorted, numbers: Sequence[Any], names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the optimizer's state numbers its {len(numbers)} parameters in {len(found.groups)} "
        f"groups, and the weights are {len(names)} tensors: which is which is not sure. Save "
        "it by name (FSDP.full_optim_state_dict, FSDP.optim_state_dict, or "
        "get_optimizer_state_dict), or import the weights alone."
    )


def _is_parameter(name: str, tensor: Tensor) -> bool:
    return DTYPES[tensor.dtype].is_floating_point and name.rpartition(".")[2] not in BUFFERS


def _fits(name: str, found: Sorted, number: Any) -> bool:
    shapes = {tensor.shape for _, tensor in found.state.get(number, {}).values()}
    return shapes <= {(), found.weights[name][1].shape}


def class_of(found: Sorted) -> str:
    """The optimizer's class, from what only it keeps.

    Raises:
        CheckpointError: several keep this.
    """
    keys = {key for one in (*found.state.values(), *found.values.values()) for key in one}
    options = {key for group in found.groups.values() for key in group.options}
    decoupled = [group.options.get("decoupled_weight_decay") for group in found.groups.values()]
    # NAdam and RAdam keep the same
    adam = {"exp_avg", "exp_avg_sq"} <= keys and "amsgrad" in options
    if adam and "momentum_decay" not in options and decoupled:
        for decays, kind in ((True, "AdamW"), (False, "Adam")):
            if all(one is decays for one in decoupled):
                return kind
    if {"momentum", "nesterov"} <= options:
        return "SGD"
    raise CheckpointError(
        f"the optimizer keeps {', '.join(sorted(keys)) or 'nothing'} with the options "
        f"{', '.join(sorted(options)) or 'none'}, and the source does not say of which class it "
        "is. Pass optimizer='AdamW' (on the command line: --optimizer AdamW), or another name."
    )


def records(found: Sorted, kind: str) -> list[dict[str, Any]]:
    """What the training state says of it; see ``optimizers.contents``."""
    groups = [
        {
            "params": list(group.params),
            "options": {key: v for key, v in group.options.items() if key not in NOT_KEPT},
        }
        for group in _merged(found.groups)
    ]
    return [{"class": kind, "groups": groups, "values": found.values}]


def _merged(groups: Mapping[Any, Group]) -> list[Group]:
    """In order; neighbours with the same options, as flattening makes them, are one group."""
    made: list[Group] = []
    for _, group in sorted(groups.items(), key=lambda g: g[0] if type(g[0]) is int else 0):
        if made and made[-1].options == group.options:
            made[-1].params += group.params
        else:
            made.append(Group(list(group.params), group.options))
    return made


def default_options(kind: str) -> dict[str, Any]:
    """The options of a torch optimizer's groups, with the values it has if nothing is said."""
    found = getattr(torch.optim, kind, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        return {}
    make: Any = found
    try:
        return dict(make([torch.zeros(1, requires_grad=True)]).defaults)
    except TypeError:  # it wants more than parameters
        return {}
