from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from shardwise.errors import ConfigError
from shardwise.plan.units import wrap
from shardwise.plan.units.wrap import Wrap, called_modules, checked_groups
from tests.nets import NETS, Attention, Block, Decoder, Net, Oddities, Scaled


class MnistNet(nn.Module):
    """The network of PyTorch's FSDP tutorial, and of Intel's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


class LlamaDecoderLayer(Block):
    pass


class LlamaLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(LlamaDecoderLayer(8) for _ in range(2))
        self.act = nn.ReLU()
        self.lm_head = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.act(x))
        return out


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.attention(x, x, x)[0])
        return out


def picked(model: nn.Module, rule: Wrap) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return ["+".join(names[module] for module in group) for group in checked_groups(model, rule)]


# --- by class --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        wrap.by_class(LlamaDecoderLayer),
        wrap.by_class("LlamaDecoderLayer"),
        wrap.by_class("tests.plan.units.test_wrap.LlamaDecoderLayer"),
        wrap.by_class(["LlamaDecoderLayer"]),
        wrap.by_class([LlamaDecoderLayer]),
        wrap.by_class(" LlamaDecoderLayer , "),
    ],
    ids=["class", "name", "full name", "list of names", "list of classes", "comma list"],
)
def test_a_class_is_given_in_any_of_the_usual_ways(rule: Wrap) -> None:
    assert picked(LlamaLike(), rule) == ["layers.0", "layers.1"]


def test_several_classes_may_be_given_and_may_be_nested() -> None:
    expected = ["embed", "layers.0", "layers.0.attention", "layers.1", "layers.1.attention"]
    assert picked(LlamaLike(), wrap.by_class("LlamaDecoderLayer,Attention", nn.Embedding)) == (
        expected
    )
    assert picked(LlamaLike(), wrap.by_class([Attention, "Embedding"], Block)) == expected


def test_subclasses_count_by_class_and_by_name() -> None:
    assert picked(LlamaLike(), wrap.by_class(Block)) == ["layers.0", "layers.1"]
    assert picked(LlamaLike(), wrap.by_class("Block")) == ["layers.0", "layers.1"]


def test_a_class_that_is_not_there_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError) as error:
        picked(LlamaLike(), wrap.by_class("GaudiLlamaDecoderLayer"))
    assert str(error.value) == (
        "GaudiLlamaDecoderLayer is not in this model; LlamaDecoderLayer is. Classes with "
        "parameters here, nearest first: LlamaDecoderLayer, LlamaLike, LayerNorm, Attention, "
        "Linear, Embedding, Mlp. Name one of these."
    )
    with pytest.raises(ConfigError, match=r"^Bilinear is not in this model; Linear is"):
        picked(LlamaLike(), wrap.by_class(LlamaDecoderLayer, nn.Bilinear))
    with pytest.raises(ConfigError, match="has no parameters at all"):
        picked(nn.ReLU(), wrap.by_class("Block"))


def test_a_class_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"by_class\(ReLU\) picks 'act' \(ReLU\), which has no"):
        picked(LlamaLike(), wrap.by_class(nn.ReLU))


def test_no_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no class"):
        wrap.by_class()
    with pytest.raises(ConfigError, match="names no class"):
        wrap.by_class(" , ", [])


def test_a_module_is_not_a_class() -> None:
    with pytest.raises(ConfigError, match=r"got a module \(Sequential\). Use by_hand"):
        wrap.by_class(nn.Sequential(nn.Linear(1, 1)))  # type: ignore[arg-type]


# --- by size ---------------------------------------------------------------------------------


class Marked(nn.Module):
    """What FSDP's own recursion puts around the modules that it picks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def wrapped_by_fsdp(model: nn.Module, minimum: int) -> list[str]:
    policy = partial(size_based_auto_wrap_policy, min_num_params=minimum)
    _recursive_wrap(model, policy, Marked, set(), set(), only_wrap_children=True)
    marked = [name for name, module in model.named_modules() if isinstance(module, Marked)]
    return [".".join(part for part in name.split(".") if part != "module") for name in marked]


def test_the_mnist_net_of_the_tutorial_is_wrapped_as_fsdp_wraps_it() -> None:
    assert picked(MnistNet(), wrap.by_size(100)) == ["conv1", "conv2", "fc1", "fc2"]
    assert picked(MnistNet(), wrap.by_size(321)) == ["conv2", "fc1", "fc2"]  # conv1 has 320
    assert picked(MnistNet(), wrap.by_size(10_000)) == ["conv2", "fc1"]


def test_a_parent_is_a_unit_if_what_is_left_of_it_is_large_enough() -> None:
    # A block of width 16: attention 1,040, MLP 1,171, norms 64.
    model = Decoder(depth=1, tied=False)
    assert "blocks.0" in picked(model, wrap.by_size(64))
    assert "blocks.0" not in picked(model, wrap.by_size(65))
    assert picked(model, wrap.by_size(2_000)) == ["blocks.0"]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mnist": MnistNet,
    "decoder": lambda: Decoder(tied=False),
    "attention": Attending,
    "convolutions": lambda: nn.Sequential(MnistNet(), nn.Sequential(nn.Linear(10, 40))),
    "lists": lambda: nn.Sequential(nn.Linear(9, 9), Scaled(9), LlamaLike()),
}


@pytest.mark.parametrize("minimum", [1, 8, 70, 100, 300, 1_000, 3_000, 10**9])
@pytest.mark.parametrize("model", MODELS)
def test_by_size_picks_what_fsdps_policy_picks(model: str, minimum: int) -> None:
    ours = picked(MODELS[model](), wrap.by_size(minimum))
    assert sorted(ours) == sorted(wrapped_by_fsdp(MODELS[model](), minimum))


def test_a_shared_parameter_is_counted_once() -> None:
    # 592 elements are embed's; lm_head has nothing of its own. With the norm, 32 are left.
    model = Decoder(tied=True)
    rule = wrap.by_size(500)
    assert "embed" in picked(model, rule)
    assert "lm_head" not in picked(model, rule)


def test_a_minimum_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"by_size\(0\)"):
        wrap.by_size(0)


# --- by hand ---------------------------------------------------------------------------------


def test_modules_and_names_are_picked_by_hand_and_a_tuple_is_one_unit() -> None:
    model = Decoder(depth=2, tied=False)
    assert picked(model, wrap.by_hand(model.embed, "blocks.1")) == ["embed", "blocks.1"]
    assert picked(model, wrap.by_hand(["norm", model.lm_head])) == ["norm+lm_head"]


def test_a_name_that_is_not_there_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'block.1' is not a module .* nearest names are 'blocks.1'"
    ):
        picked(Decoder(depth=2, tied=False), wrap.by_hand("block.1"))


def test_a_second_name_of_a_module_is_a_name() -> None:
    assert picked(Oddities(), wrap.by_hand("blocks.1.again")) == ["blocks.1.fc"]


def test_a_module_of_another_model_is_refused() -> None:
    stranger = Decoder(tied=False).embed
    with pytest.raises(ConfigError, match="picks a Table that is not in this model"):
        picked(Decoder(tied=False), wrap.by_hand(stranger))


def test_a_module_is_picked_once() -> None:
    with pytest.raises(ConfigError, match="picks 'embed' twice"):
        picked(Decoder(tied=False), wrap.by_hand("embed", ("norm", "embed")))


def test_a_module_without_a_forward_is_refused_and_what_it_holds_is_named() -> None:
    model = Decoder(depth=6, tied=False)
    with pytest.raises(ConfigError) as error:
        picked(model, wrap.by_hand(model.blocks))
    assert str(error.value) == (
        "'blocks' is a ModuleList, which has no forward, so its parameters could not be "
        "gathered. Pick its children: blocks.0, blocks.1, blocks.2, blocks.3 "
        "and 2 more."
    )
    with pytest.raises(ConfigError, match="'blocks' is a ModuleList"):
        picked(model, wrap.by_class("ModuleList"))


def test_a_list_of_bare_parameters_is_refused_and_its_parent_is_named() -> None:
    holder = nn.Sequential(Scaled(4))
    holder[0].extra = nn.ParameterList([torch.zeros(3)])
    with pytest.raises(ConfigError, match=r"ParameterList, which has no forward.* Pick '0'\."):
        picked(holder, wrap.by_hand("0.extra"))


def test_attention_is_never_taken_apart_because_it_does_not_call_its_parts() -> None:
    model = Attending()
    assert "attention.out_proj" not in set(called_modules(model).values())
    assert picked(model, wrap.by_class(nn.Linear)) == ["fc"]
    assert picked(model, wrap.by_size(1)) == ["fc"]
    with pytest.raises(ConfigError, match=r"read by 'attention'.* Pick 'attention'"):
        picked(model, wrap.by_hand("attention.out_proj"))


# --- the others, and what all have in common -------------------------------------------------


def test_whole_picks_nothing_so_the_root_has_everything() -> None:
    assert picked(Decoder(tied=False), wrap.whole()) == []


def test_a_group_with_the_root_is_the_roots() -> None:
    model = Decoder(tied=False)
    assert picked(model, wrap.by_hand(model)) == []
    assert picked(model, wrap.by_hand("", "embed")) == ["embed"]
    assert picked(model, wrap.by_class(Decoder)) == []


@pytest.mark.parametrize("net", NETS, ids=str)
def test_picking_changes_nothing(net: Net) -> None:
    model = net.build()
    before = [(name, id(module), dict(vars(module))) for name, module in model.named_modules()]
    for rule in (wrap.automatic(), wrap.by_size(10), wrap.by_class(nn.Linear), wrap.whole()):
        assert rule.pick(model) == rule.pick(model)
    after = [(name, id(module), dict(vars(module))) for name, module in model.named_modules()]
    assert [b[:2] for b in before] == [a[:2] for a in after]
    assert all(b[2].keys() == a[2].keys() for b, a in zip(before, after, strict=True))


def test_where_parameters_stay_gathered_what_is_trained_counts_and_more_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))  # 256 bytes each
    for layer in list(layers)[4:]:
        layer.requires_grad_(False)
    monkeypatch.setattr(wrap, "JOINED_NBYTES", 2 * 256)

    def sizes(rule: wrap.Wrap, joined_trained: int) -> list[int]:
        return [len(group) for group in wrap.checked_groups(layers, rule, joined_trained)]

    assert sizes(wrap.automatic(), 0) == [2, 2, 2, 2]
    assert sizes(wrap.automatic(), 3 * 256) == [3, 5]
    assert sizes(wrap.automatic(joined_nbytes=256), 3 * 256) == [1, 1, 1, 5]
    assert sizes(wrap.automatic(joined_nbytes=0), 3 * 256) == [1] * 8


def test_a_rule_says_what_it_is_and_travels_to_other_processes() -> None:
    rules = [
        wrap.automatic(),
        wrap.by_class("LlamaDecoderLayer", nn.Embedding),
        wrap.by_size(100_000),
        wrap.by_hand("embed", ("norm", "lm_head")),
        wrap.whole(),
    ]
    assert [str(rule) for rule in rules] == [
        "automatic()",
        "by_class(LlamaDecoderLayer, Embedding)",
        "by_size(100,000)",
        "by_hand(embed, norm+lm_head)",
        "whole()",
    ]
    assert [str(pickle.loads(pickle.dumps(rule))) for rule in rules] == list(map(str, rules))


def test_a_rule_of_the_users_own_is_a_function() -> None:
    rule = Wrap(
        "every linear layer with a bias",
        lambda model: [
            (m,) for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None
        ],
    )
    assert picked(Decoder(depth=1, tied=False), rule) == [
        "blocks.0.attention.out",
        "blocks.0.mlp.up",
        "blocks.0.mlp.down",
    ]
