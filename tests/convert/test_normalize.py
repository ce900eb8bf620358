"""What is what in a foreign checkpoint: found by its keys, or refused where it is not sure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.convert.normalize import NormalizedState, class_of, name_numbered, normalize, records
from shardwise.convert.torch_reader import Tree, _tree
from tests.convert.torch_files import Net, adamw, net, steps, whole_state

NAMES = [name for name, _ in Net().named_parameters()]


def tree_of(states: Any, name: str = "a.pt") -> Tree:
    """The nested values as if they had been read from a file."""
    tree: Tree = _tree(Path(name), states, "")
    return tree


def trained(make: Any = torch.optim.AdamW, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model.parameters(), **options)
    steps(model, optimizer)
    return model, optimizer


def muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2])


def named(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return whole_state(model, optimizer)[1]


@pytest.mark.parametrize(
    "keys",
    [
        ("model", "optimizer"),
        ("module", "optim"),
        ("state_dict", "optimizer_state_dict"),
        ("model_state_dict", "optim_state_dict"),
    ],
)
def test_the_usual_keys_of_scripts(keys: tuple[str, str]) -> None:
    model, optimizer = trained()
    states = {keys[0]: model.state_dict(), keys[1]: named(model, optimizer)}
    for nested in (states, {"app": states}):
        state = normalize([tree_of(nested)])
        assert list(state.weights) == list(model.state_dict())
        assert list(state.state) == NAMES
        assert state.groups[0].params == NAMES
        assert state.left_out == []


def test_names_that_begin_like_a_key_stay_names() -> None:
    # A Llama's own names begin with "model."
    states = {"model.layers.0.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}
    assert list(normalize([tree_of(states)]).weights) == list(states)
    assert list(normalize([tree_of({"model": states})]).weights) == list(states)


@pytest.mark.parametrize(
    "prefix",
    [
        *("module.", "_orig_mod.", "_fsdp_wrapped_module."),
        *("module._orig_mod.", "_orig_mod.module."),
    ],
)
def test_parts_of_names_that_wrappers_put_there(prefix: str) -> None:
    states = {f"{prefix}{name}": value for name, value in net().state_dict().items()}
    assert list(normalize([tree_of(states)]).weights) == list(net().state_dict())


def test_an_optimizer_in_a_file_of_its_own() -> None:
    model, optimizer = trained()
    for states in (named(model, optimizer), optimizer.state_dict()):
        state = normalize([tree_of(model.state_dict()), tree_of(states, "optimizer.pt")])
        name_numbered(state)
        assert list(state.state) == NAMES
        assert state.groups[0].params == NAMES
        assert state.groups[0].options["lr"] == 1e-3


@pytest.mark.parametrize("key", ["step", "global_step", "iteration", "global_steps"])
def test_how_many_steps_were_taken(key: str) -> None:
    assert normalize([tree_of({"model": net().state_dict(), key: 7})]).step == 7


def test_steps_of_something_else_are_not_the_runs() -> None:
    states = {"step": 5, "model": net().state_dict(), "scheduler": {"step": 999}}
    state = normalize([tree_of(states)])
    assert (state.step, state.left_out) == (5, ["scheduler.step"])
    assert normalize([tree_of({"model": net().state_dict(), "step": -1})]).step is None


def test_names_that_would_be_one_without_wrappers_are_refused() -> None:
    states = {"a._orig_mod.w": torch.zeros(2), "a.w": torch.ones(2)}
    with pytest.raises(sw.CheckpointError, match=r"are both 'a\.w'"):
        normalize([tree_of(states)])


GROUPS = [[1, 2], [{"params": 5}], [{"params": [[1]]}], [{"params": [0.5]}], [None]]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_groups_that_are_none_are_refused(groups: Any) -> None:
    optim = {"state": {}, "param_groups": groups}
    with pytest.raises(sw.CheckpointError, match=r"optimizer (is|are) "):
        normalize([tree_of({"model": {"a": torch.ones(2)}, "optim": optim})])


@pytest.mark.parametrize("prefix", ["", "module."])
def test_tensors_beside_a_model_are_none_of_its_weights(prefix: str) -> None:
    weights = {f"{prefix}{name}": value for name, value in net().state_dict().items()}
    states = {"model_state_dict": weights, "loss": torch.tensor(0.3)}
    state = normalize([tree_of(states)])
    assert (list(state.weights), state.left_out) == (list(net().state_dict()), ["loss"])


def test_what_has_no_place_is_listed() -> None:
    states = {"model": net().state_dict(), "ema": {"w": torch.ones(2)}, "args": {"lr": 0.1}}
    assert normalize([tree_of(states)]).left_out == ["ema.w", "args.lr"]
    odd = {"model": net().state_dict(), "dtype": torch.float32}
    assert normalize([tree_of(odd)]).left_out == ["dtype"]


def test_without_weights_it_is_no_checkpoint() -> None:
    with pytest.raises(sw.CheckpointError, match="no weights were found"):
        normalize([tree_of(trained()[1].state_dict())])


def test_two_sources_of_weights_are_one_too_many() -> None:
    states = net().state_dict()
    with pytest.raises(sw.CheckpointError, match=r"a.pt and .*b.pt both hold weights called"):
        normalize([tree_of(states), tree_of(states, "b.pt")])


def with_groups(*parts: str) -> NormalizedState:
    """A plain optimizer's state, numbered, with a group for each of these modules."""
    model = net()
    groups = [{"params": list(getattr(model, part).parameters())} for part in parts]
    optimizer = torch.optim.AdamW(groups)
    return normalize([tree_of({"model": model.state_dict(), "optim": optimizer.state_dict()})])


@pytest.mark.parametrize("parts", [("down", "norm", "up"), ("up",)])
def test_numbers_that_could_be_other_parameters_are_refused(parts: tuple[str, ...]) -> None:
    with pytest.raises(sw.CheckpointError, match="which is which is not sure"):
        name_numbered(with_groups(*parts))


def test_several_groups_by_the_names_that_they_give() -> None:
    model = net()
    up = list(model.up.named_parameters("up"))
    others = [(n, p) for n, p in model.named_parameters() if not n.startswith("up.")]
    groups: list[dict[str, Any]] = [{"params": others[::-1], "lr": 0.5}, {"params": up}]
    optimizer = torch.optim.AdamW(groups)
    steps(model, optimizer)
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    state = normalize([tree_of(states)])
    name_numbered(state)
    assert state.groups[0].params == [name for name, _ in others[::-1]]
    assert state.groups[1].params == ["up.weight", "up.bias"]
    assert set(state.state) == set(NAMES)
    assert all("param_names" not in g["options"] for g in records(state, "AdamW")[0]["groups"])


def test_an_order_that_was_assumed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    name_numbered(normalize([tree_of(states)]))
    assert "The order of the weights was assumed" in caplog.text


@pytest.mark.parametrize("owner", ["a", "b"])
def test_state_by_name_must_fit_the_weight(owner: str) -> None:
    optim = {"state": {owner: {"exp_avg": torch.ones(7)}}, "param_groups": [{"params": ["a", "b"]}]}
    state = normalize([tree_of({"model": {"a": torch.ones(2)}, "optim": optim})])
    with pytest.raises(sw.CheckpointError, match=f"state of '{owner}', and there is no weight"):
        name_numbered(state)


def test_state_in_blocks_is_said_to_be_an_8_bit_optimizer_s() -> None:
    kept = {"state1": torch.ones(512, dtype=torch.uint8), "absmax1": torch.ones(2)}
    optim = {"state": {"a": kept}, "param_groups": [{"params": ["a"]}]}
    state = normalize([tree_of({"model": {"a": torch.ones(512)}, "optim": optim})])
    text = "It is an 8-bit optimizer's, in blocks; import the weights alone"
    with pytest.raises(sw.CheckpointError, match=text):
        name_numbered(state)


def test_state_of_a_number_that_no_group_has_is_refused() -> None:
    optim = {"state": {7: {"m": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    state = normalize([tree_of({"model": {"a": torch.ones(2)}, "optim": optim})])
    with pytest.raises(sw.CheckpointError, match="not sure"):
        name_numbered(state)


def test_shapes_must_fit_the_order_of_numbers() -> None:
    model = net()
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    steps(model, optimizer)
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with pytest.raises(sw.CheckpointError, match="there is no weight"):
        name_numbered(normalize([tree_of(states)]))


@pytest.mark.parametrize(
    ("make", "options", "kind"),
    [
        (torch.optim.Adam, {}, "Adam"),
        (torch.optim.AdamW, {}, "AdamW"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "SGD"),
        (torch.optim.SGD, {"lr": 0.1}, "SGD"),
    ],
)
def test_the_class_is_known_by_what_it_keeps(make: Any, options: Any, kind: str) -> None:
    model, optimizer = trained(make, **options)
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    assert class_of(normalize([tree_of(states)])) == kind


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RAdam, muon])
def test_a_class_that_keeps_the_same_as_another_is_not_taken_for_it(make: Any) -> None:
    model, optimizer = trained(make)
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with pytest.raises(sw.CheckpointError, match="--optimizer-class"):
        class_of(normalize([tree_of(states)]))


def test_groups_that_were_flattened_are_put_together_again() -> None:
    model = net()
    flat = {f"param_groups.{name}.lr": 0.5 if "up" in name else 0.1 for name in NAMES}
    state = normalize([tree_of({"model": model.state_dict(), "optim": flat})])
    groups = records(state, "SGD")[0]["groups"]
    assert [group["options"] for group in groups] == [{"lr": 0.5}, {"lr": 0.1}]
    assert [name for group in groups for name in group["params"]] == NAMES


def test_how_to_compute_is_not_stored() -> None:
    model, optimizer = trained(fused=False, foreach=True)
    states = {"model": model.state_dict(), "optim": named(model, optimizer)}
    (record,) = records(normalize([tree_of(states)]), "AdamW")
    assert set(record["groups"][0]["options"]) == set(adamw(model).param_groups[0]) - {
        "params",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
    }
