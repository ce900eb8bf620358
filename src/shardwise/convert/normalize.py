"""Weights, optimizer state by name, and step in the forms that checkpoints of torch have. Pure.

{"model": {NAME: …}, "optimizer": {"state": {NAME: {KEY: …}}, "param_groups": [{…}]}, "step": 3}
{NAME: …}                                       weights alone
{"state": {0: {KEY: …}}, "param_groups": […]}   an optimizer alone, by numbers
{"state.NAME.KEY": …, "param_groups.NAME.lr": …}    flattened, as StateDictOptions can ask for
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.optimizer_state import AS_BUILT
from shardwise.checkpoint.safetensors_format import DTYPES
from shardwise.checkpoint.wrappers import MODULE, bare, renamed, without_wrappers
from shardwise.convert.torch_reader import TorchTensor, Tree
from shardwise.errors import CheckpointError

log = logging.getLogger("shardwise")

MODELS = ("model", "module", "state_dict", "model_state_dict", "model_state")
OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state")
STEPS = ("step", "global_step", "iteration", "global_steps")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class Group:
    """One group of an optimizer: names or numbers of its parameters, and its options as JSON."""

    params: list[Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class NormalizedState:
    """Checkpoints of torch, in one form."""

    weights: dict[str, TorchTensor] = field(default_factory=dict)  # in the order of the source
    # parameter (name, or number) → key → tensor, or another value as JSON
    state: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    step: int | None = None  # optimizer steps taken, if known
    left_out: list[str] = field(default_factory=list)  # names of what ours cannot hold


def normalize(trees: Iterable[Tree]) -> NormalizedState:
    """Find weights and optimizer in what ``read_torch`` returned for one or more sources."""
    result = NormalizedState()
    for tree in trees:
        _add_source(result, tree)
    _remove_wrappers(result)
    if not result.weights:
        raise CheckpointError(
            "no weights were found: tensors by name, or under one of "
            f"{', '.join(map(repr, MODELS))}. Name the file or folder that holds them, too; "
            "several can be given."
        )
    return result


def _add_source(result: NormalizedState, tree: Tree) -> None:
    if any(str(key).partition(".")[0] == "param_groups" for key in tree):
        _add_optimizer(result, "", tree)
        return
    for name, optimizer in _pop(tree, OPTIMIZERS).items():
        _add_optimizer(result, f"{name}.", optimizer)
    models = _pop(tree, MODELS)
    for prefix, model in models.items():
        for name, value in _leaves(model):
            _add_weight(result, name, value, prefix)
    for key, value in tree.items():
        if isinstance(value, TorchTensor) and not models:  # beside a model: a loss, generators
            _add_weight(result, str(key), value)
        elif key in STEPS and type(value) is int and 0 <= value < 1 << 63:
            result.step = value  # of the run: a scheduler has one of its own, further inside
        else:
            result.left_out += [name for name, _ in _leaves({key: value})]


def _pop(tree: Tree, keys: Sequence[str], prefix: str = "") -> dict[str, Tree]:
    """Remove the dicts under one of these keys, at any depth; return them by dotted names."""
    removed: dict[str, Tree] = {}
    for key in [key for key, value in tree.items() if isinstance(value, dict)]:
        name = f"{prefix}{key}"
        removed |= {name: tree.pop(key)} if key in keys else _pop(tree[key], keys, f"{name}.")
    return removed


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        yield from _leaves(value, f"{name}.") if isinstance(value, dict) else [(name, value)]


def _add_weight(result: NormalizedState, name: str, value: Any, prefix: str = "") -> None:
    if not isinstance(value, TorchTensor):
        result.left_out.append(f"{prefix}.{name}")
    elif name in result.weights:
        raise CheckpointError(
            f"{result.weights[name].source} and {value.source} both hold weights called {name!r}. "
            "Name one of them, and the optimizer's file or folder beside it."
        )
    else:
        result.weights[name] = value


def _add_optimizer(result: NormalizedState, prefix: str, flat: Tree) -> None:
    tree: dict[Any, Any] = {}
    for path, value in flat.items():  # "state.0.weight.exp_avg" → "state", "0.weight", "exp_avg"
        first, _, rest = str(path).partition(".")
        name, _, key = rest.rpartition(".")
        if first in ("state", "param_groups") and name and key:
            tree.setdefault(first, {}).setdefault(name, {})[key] = value
        else:
            tree[path] = value
    states, groups = tree.pop("state", {}), tree.pop("param_groups", {})
    for owner, values in states.items() if isinstance(states, dict) else ():
        if isinstance(values, dict):
            result.state[owner] = _encoded(result, f"{prefix}state.{owner}", values)
    if not isinstance(groups, dict):
        groups = dict(enumerate(groups if isinstance(groups, list) else [groups]))
    for key, options in groups.items():
        result.groups.append(_group(result, f"{prefix}param_groups.{key}", key, options))
    result.left_out += [f"{prefix}{name}" for name, _ in _leaves(tree)]


def _group(result: NormalizedState, name: str, key: Any, options: Any) -> Group:
    # Flattened, every parameter has options of its own, so it is a group for now.
    params = options.pop("params", []) if isinstance(options, dict) else None
    params = [key] if isinstance(key, str) and params is not None else params
    if not isinstance(params, list) or not all(type(param) in (str, int) for param in params):
        raise CheckpointError(
            f"a group of the optimizer is {options!r:.80}, and its parameters are {params!r:.80}: "
            "no list of names or numbers. Save optimizer.state_dict(), or import the weights alone."
        )
    return Group(list(params), _encoded(result, name, options, tensors=False))


def _encoded(
    result: NormalizedState, name: str, values: Tree, tensors: bool = True
) -> dict[str, Any]:
    """Tensors as they are, other values as JSON; what it cannot write is left out."""
    encoded: dict[str, Any] = {}
    for key, value in values.items():
        try:
            keeps = tensors and isinstance(value, TorchTensor)
            encoded[str(key)] = value if keeps else json_codec.encode(value, name)
        except CheckpointError:
            result.left_out.append(f"{name}.{key}")
    return encoded


def _remove_wrappers(result: NormalizedState) -> None:
    """Rename all to the names that the model itself has."""
    names = without_wrappers(result.weights)
    held = f"{MODULE}." * any(names[name] != bare(name) for name in names)

    def plain(name: Any) -> Any:
        return bare(name).removeprefix(held) if isinstance(name, str) else name

    result.weights = renamed(result.weights, plain)
    result.state = renamed(result.state, plain)
    for group in result.groups:
        group.params = [plain(name) for name in group.params]


# --- the optimizer ---------------------------------------------------------------------------


def name_numbered(state: NormalizedState) -> None:
    """Give numbered parameters their names, and check that all state fits the weights."""
    params = [param for group in state.groups for param in group.params]
    if not all(isinstance(param, str) for param in params):
        names = _names_of_numbers(state)
        is_sure = len(names) == len({*names}) == len({*params}) == len(params)
        if state.state.keys() - set(params) or not is_sure:
            raise CheckpointError(
                f"the optimizer's state numbers its {len(params)} parameters in "
                f"{len(state.groups)} groups, and the weights are {len(state.weights)} tensors: "
                "which is which is not sure. Save it by name (get_optimizer_state_dict, or an "
                "optimizer over model.named_parameters()), or import the weights alone."
            )
        name_of = dict(zip(params, names, strict=True))
        state.state = {name_of[number]: values for number, values in state.state.items()}
        for group in state.groups:
            group.params = [name_of[number] for number in group.params]
    known = state.weights.keys() & {param for group in state.groups for param in group.params}
    for name, values in state.state.items():
        shapes = {value.shape for value in values.values() if isinstance(value, TorchTensor)}
        if name not in known or shapes - {(), state.weights[name].shape}:
            whose = "an 8-bit optimizer's, in blocks" if "absmax1" in values else "another model's"
            raise CheckpointError(
                f"the optimizer has state of {name!r}, and there is no weight of that name and the "
                f"state's shape, or none of its groups has it. It is {whose}; import the weights "
                "alone."
            )


def _names_of_numbers(state: NormalizedState) -> list[str]:
    """Names from ``param_names`` of the groups; or else, of one group, the weights in order."""
    in_groups = [n for group in state.groups for n in group.options.get("param_names") or ()]
    if in_groups or len(state.groups) != 1:
        names = [bare(str(name)) for name in in_groups]
        return [name if name in state.weights else name.removeprefix("module.") for name in names]
    log.warning(
        "the optimizer's state numbers its parameters. The order of the weights was assumed, which "
        "is right for an optimizer over model.parameters(). To be sure, make it over "
        "model.named_parameters(), or save it by name (get_optimizer_state_dict)."
    )
    floats = [n for n, one in state.weights.items() if DTYPES[one.dtype].is_floating_point]
    return [name for name in floats if name.rpartition(".")[2] not in BUFFERS]


def class_of(state: NormalizedState) -> str:
    """The optimizer's class, from what only it keeps."""
    keys = {key for values in state.state.values() for key in values}
    options = {key for group in state.groups for key in group.options}
    decoupled = {group.options.get("decoupled_weight_decay") for group in state.groups}
    # NAdam and RAdam keep the same as Adam
    adam = {"exp_avg", "exp_avg_sq"} <= keys and "amsgrad" in options
    if adam and "momentum_decay" not in options and decoupled in ({True}, {False}):
        return "AdamW" if decoupled == {True} else "Adam"
    if {"momentum", "nesterov", "dampening"} <= options:  # the last is not Muon's
        return "SGD"
    raise CheckpointError(
        f"the optimizer keeps {', '.join(sorted(keys)) or 'nothing'} with the options "
        f"{', '.join(sorted(options)) or 'none'}, and the source does not say of which class it "
        "is. Pass optimizer='AdamW' (on the command line: --optimizer-class AdamW), or another."
    )


def records(state: NormalizedState, kind: str) -> list[dict[str, Any]]:
    """The optimizer's records in the training state: see ``optimizer_state.record_of``.

    Neighbours with the same options, as flattening makes them, are one group.
    """
    groups: list[dict[str, Any]] = []
    for group in state.groups:
        options = {key: v for key, v in group.options.items() if key not in AS_BUILT}
        if groups and groups[-1]["options"] == options:
            groups[-1]["params"] += group.params
        else:
            groups.append({"params": [*group.params], "options": options})
    values: dict[Any, dict[str, Any]] = {}
    for name, one in state.state.items():
        if others := {key: v for key, v in one.items() if not isinstance(v, TorchTensor)}:
            values[name] = others
    return [{"class": kind, "groups": groups, "values": values}]
