from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.plan.units import wrap
from shardwise.plan.units.units import Unit, Units, choose_units
from tests.nets import (
    NETS,
    Block,
    Decoder,
    EncoderDecoder,
    Mlp,
    Net,
    Oddities,
    loss,
    mostly_frozen,
    odd_convnet,
    scalar_and_13_rows,
)


def names(units: Units) -> list[str]:
    return [unit.name for unit in units]


def inside(unit: Unit) -> list[str]:
    return [member.name for member in unit.members]


def named(units: Units, name: str) -> Unit:
    return next(unit for unit in units if unit.name == name)


# --- what always holds -----------------------------------------------------------------------


def assert_divided(model: nn.Module, units: Units) -> None:
    """Each parameter in one unit; no module with two; whoever reads one is inside its unit."""
    counts = Counter(member.param for unit in units for member in unit.members)
    assert counts == Counter(model.parameters())
    times_entered = Counter(module for unit in units for module in unit.modules)
    assert set(times_entered.values()) <= {1}
    assert len(set(names(units))) == len(units)
    assert all(unit.members for unit in units)
    modules = dict(model.named_modules(remove_duplicate=False))
    for unit in units:
        for alias in (alias for member in unit.members for alias in member.aliases):
            parts = alias.split(".")[:-1]
            around = {modules[".".join(parts[:depth])] for depth in range(len(parts) + 1)}
            assert around & set(unit.modules), (alias, unit)


RULES = {
    "automatic": wrap.automatic(),
    "by class": wrap.by_class(nn.Linear),
    "by size": wrap.by_size(60),
    "whole": wrap.whole(),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_every_parameter_is_in_one_unit_and_is_read_inside_it(net: Net, rule: str) -> None:
    model = net.build()
    assert_divided(model, choose_units(model, RULES[rule]))


@pytest.mark.parametrize("net", NETS, ids=str)
def test_names_aliases_and_owners_are_those_of_the_model(net: Net) -> None:
    model = net.build()
    members = [member for unit in choose_units(model) for member in unit.members]
    assert {member.name: member.param for member in members} == dict(model.named_parameters())
    everything = dict(model.named_parameters(remove_duplicate=False))
    assert {alias: m.param for m in members for alias in m.aliases} == everything
    for member in members:
        assert member.aliases[0] == member.name
        assert all(getattr(owner, attribute) is member.param for owner, attribute in member.owners)
        assert len(set(member.owners)) == len(member.owners)


def grow(chance: random.Random, depth: int, modules: list[nn.Module]) -> nn.Module:
    """A tree of lists, chains and layers that reuses modules and parameters at random."""
    if modules and chance.random() < 0.15:
        return chance.choice(modules)
    if depth == 0:
        leaf = chance.choice([nn.Linear(3, 3), nn.LayerNorm(3), nn.ReLU(), nn.Embedding(5, 3)])
        old = [m for m in modules if isinstance(m, nn.Linear)]
        if isinstance(leaf, nn.Linear) and old and chance.random() < 0.5:
            leaf.weight = chance.choice(old).weight
        modules.append(leaf)
        return leaf
    children = [grow(chance, depth - 1, modules) for _ in range(chance.randint(1, 3))]
    tree = nn.Sequential(*children) if chance.random() < 0.6 else nn.ModuleList(children)
    if chance.random() < 0.2:
        tree.register_parameter("own", nn.Parameter(torch.zeros(chance.randint(0, 4))))
    modules.append(tree)
    return tree


# 1356: a module is inside another in one place, and beside it in the next.
@pytest.mark.parametrize(
    "seed", [*range(20), 1356, *(pytest.param(n, marks=pytest.mark.prove) for n in range(20, 150))]
)
def test_any_tree_is_divided_whatever_is_picked(seed: int) -> None:
    chance = random.Random(seed)
    modules: list[nn.Module] = []
    model = nn.Sequential(grow(chance, 3, modules), grow(chance, 3, modules))
    called = [m for m in wrap.called_modules(model) if any(True for _ in m.parameters())]
    by_hand = wrap.by_hand(*chance.sample(called, chance.randint(0, len(called))))
    for rule in (None, by_hand, wrap.by_size(chance.randint(1, 30))):
        units = choose_units(model, rule)
        assert_divided(model, units)
        assert names(units) == names(choose_units(model, rule))


# --- the automatic choice --------------------------------------------------------------------


def test_blocks_embedding_and_head_are_units_in_order_of_registration() -> None:
    units = choose_units(Decoder(depth=3, tied=False))
    assert names(units) == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm+lm_head"]
    assert inside(units[-1]) == ["norm.weight", "norm.bias", "lm_head.weight"]


def test_a_model_that_repeats_nothing_is_one_unit() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    (unit,) = choose_units(model)
    assert (unit.name, unit.modules, unit.class_name) == ("", (model,), "Sequential")


def test_the_root_comes_first_with_what_nobody_claims() -> None:
    units = choose_units(odd_convnet())
    assert names(units) == ["", "features.0", "features.1", "classifier"]
    assert inside(units[0]) == ["stem.weight", "stem.bias"]
    units = choose_units(scalar_and_13_rows())
    assert names(units) == ["", "blocks.0", "blocks.1", "head"]
    assert inside(units[0]) == ["temperature", "project.weight", "project.bias"]


def test_frozen_parameters_lie_beside_trainable_ones() -> None:
    units = choose_units(mostly_frozen())
    assert [unit.trainable for unit in units] == [0, 192, 192, 192, 0]
    assert units[1].numel == 2467


def test_the_layers_of_a_list_in_a_list_bracket_one_unit() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.LayerNorm(4), Mlp(4, 5)]) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                for part in layer.children():
                    x = part(x)
            return x

    model = Lists()
    units = choose_units(model)
    assert names(units) == ["layers.0.0+1", "layers.1.0+1"]
    assert units[0].class_name == "LayerNorm+Mlp"


# --- nesting ---------------------------------------------------------------------------------


def test_a_unit_has_what_no_nested_unit_claims() -> None:
    model = Decoder(depth=1, tied=False)
    units = choose_units(model, wrap.by_hand("blocks.0", "blocks.0.attention"))
    assert names(units) == ["", "blocks.0", "blocks.0.attention"]
    members = inside(named(units, "blocks.0"))
    assert {name.split(".")[2] for name in members} == {"norm1", "norm2", "mlp"}


def test_a_unit_that_nested_ones_leave_empty_does_not_exist() -> None:
    model = nn.Sequential(Mlp(4, 5), nn.Linear(4, 1))
    assert names(choose_units(model, wrap.by_hand("0", "0.up", "0.down"))) == ["", "0.up", "0.down"]


def test_the_root_does_not_exist_where_everything_is_claimed() -> None:
    assert names(choose_units(nn.Sequential(Mlp(4, 5)), wrap.by_hand("0"))) == ["0"]


# --- shared parameters -----------------------------------------------------------------------


def test_a_tied_embedding_and_head_are_one_unit_with_the_final_norm() -> None:
    model = Decoder(tied=True)
    units = choose_units(model)
    tied = named(units, "embed+norm+lm_head")
    assert tied.modules == (model.embed, model.norm, model.lm_head)
    weight, *norm = tied.members
    assert weight.aliases == ("embed.weight", "lm_head.weight")
    assert weight.owners == ((model.embed, "weight"), (model.lm_head, "weight"))
    assert [member.name for member in norm] == ["norm.weight", "norm.bias"]
    assert names(units)[0] == tied.name


def test_an_embedding_shared_by_encoder_decoder_and_head_is_one_unit() -> None:
    model = EncoderDecoder()
    unit = named(choose_units(model), "encoder.embed+...+lm_head")
    assert unit.modules == (
        *(model.encoder.embed, model.decoder.embed, model.decoder.norm, model.lm_head),
    )
    assert inside(unit)[0] == "encoder.embed.weight"
    assert inside(unit)[-1] == "lm_head.bias"


def test_a_tied_head_leaves_a_group_that_it_does_not_fill() -> None:
    # ModernBERT: what stands between the blocks and the tied head is a module with parts.
    class Model(Decoder):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.norm = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))  # type: ignore[assignment]

    model = Model()
    units = choose_units(model)
    assert [name for name in names(units) if "blocks" not in name] == ["embed+lm_head", "norm"]
    assert named(units, "embed+lm_head").modules == (model.embed, model.lm_head)


def test_a_tied_head_inside_a_larger_one_is_the_embeddings() -> None:
    # BERT: cls.predictions holds a bias that is its decoder's, and the decoder is tied.
    class Predictions(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.transform = nn.Linear(16, 16)
            self.decoder = nn.Linear(16, 37)
            self.decoder.weight = table.weight
            self.bias = self.decoder.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.transform(x))  # type: ignore[no-any-return]

    model = Decoder(tied=False)
    model.lm_head = Predictions(model.embed)  # type: ignore[assignment]
    units = choose_units(model)
    tied = named(units, "embed+lm_head.decoder")
    assert inside(tied) == ["embed.weight"]
    bias = named(units, "norm+lm_head").members[2]
    assert bias.aliases == ("lm_head.bias", "lm_head.decoder.bias")


def test_a_picked_embedding_takes_the_head_that_it_is_tied_to_along() -> None:
    units = choose_units(Decoder(tied=True, depth=1), wrap.by_hand("embed"))
    assert names(units) == ["", "embed+lm_head"]


def test_a_weight_of_layers_in_two_blocks_is_a_unit_with_those_layers() -> None:
    model = Oddities()
    units = choose_units(model)
    assert names(units) == ["", "blocks.0", "blocks.0.fc+2.fc", "blocks.1", "blocks.2"]
    shared = named(units, "blocks.0.fc+2.fc")
    assert inside(shared) == ["blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.2.fc.bias"]
    assert shared.members[0].aliases == (
        *("blocks.0.fc.weight", "blocks.0.again.weight"),
        *("blocks.2.fc.weight", "blocks.2.again.weight"),
    )
    assert len(shared.members[0].owners) == 2


def test_a_small_parameter_of_two_blocks_is_a_unit_of_its_own() -> None:
    model = nn.Sequential(Mlp(4, 4), Mlp(4, 4))
    first, second = (block.get_submodule("up") for block in model)
    second.bias = first.bias
    units = choose_units(model)
    assert names(units) == ["0", "0.up+1.up", "1"]
    assert inside(units[1]) == ["0.up.bias"]
    assert units[1].modules == (first, second)


def test_a_parameter_that_blocks_hold_themselves_is_their_parents() -> None:
    # The blocks are brackets already, and a module is the bracket of one unit.
    blocks = [Block(4), Block(4)]
    shared = nn.Parameter(torch.ones(4))
    for block in blocks:
        block.gate = shared
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 4))
    rule = wrap.by_hand("0", "0.0", "0.1")
    units = choose_units(model, rule)
    assert inside(named(units, "0")) == ["0.0.gate"]
    assert named(choose_units(model, wrap.by_class(Block)), "").members[0].name == "0.0.gate"


def test_a_parameter_of_the_root_and_of_a_unit_is_the_roots() -> None:
    model = Oddities()
    units = choose_units(model, wrap.by_hand("tail"))
    assert inside(named(units, "tail")) == ["tail.bias"]
    gain = next(member for member in units[0].members if member.name == "gain")
    assert gain.aliases == ("gain", "tail.weight")


def test_a_module_in_two_blocks_is_a_unit_of_its_own() -> None:
    first, second = Block(4), Block(4)
    second.mlp = first.mlp
    units = choose_units(nn.Sequential(first, second))
    assert names(units) == ["0", "0.mlp", "1"]
    assert units[1].modules == (first.mlp,)
    assert units[1].members[0].aliases == ("0.mlp.up.weight", "1.mlp.up.weight")


def test_a_parameter_shared_inside_a_unit_stays_there() -> None:
    model = nn.Sequential(Mlp(4, 4), Mlp(4, 4))
    model.get_submodule("0.down").weight = model.get_parameter("0.up.weight")
    units = choose_units(model)
    assert names(units) == ["0", "1"]
    assert units[0].members[0].aliases == ("0.up.weight", "0.down.weight")


def test_names_of_several_modules_are_short() -> None:
    model = nn.Sequential(Mlp(2, 2), *(nn.Linear(2, 2) for _ in range(8)))
    picks = (("1", "2", "3", "8"), ("4", "7"), ("0.up", "0.down", "6"))
    assert names(choose_units(model, wrap.by_hand(*picks))) == [
        *("", "0.up+down+6", "1+...+8", "4+7")
    ]


# --- odd models ------------------------------------------------------------------------------


def test_a_unit_may_have_no_elements() -> None:
    holder = nn.Linear(3, 3, bias=False)
    holder.weight = nn.Parameter(torch.empty(0, 3))
    (unit,) = choose_units(holder)
    assert (unit.numel, unit.nbytes, inside(unit)) == (0, 0, ["weight"])


def test_a_model_without_parameters_has_no_units() -> None:
    units = choose_units(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3, affine=False)))
    assert len(units) == 0
    assert str(units).split() == [
        *("unit", "class", "parameters", "bytes", "trainable", "total", "0", "0", "0")
    ]


def test_a_model_without_a_forward_is_entered_by_the_parts_that_have_one() -> None:
    tail = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 3))])
    units = choose_units(nn.ModuleDict({"net": Decoder(tied=False), "tail": tail}), wrap.whole())
    assert [unit.name for unit in units] == ["net", "tail.0", "tail.2"]
    assert all(len(unit.modules) == 1 for unit in units)


def test_a_parameter_that_lies_in_no_module_with_a_forward_is_named() -> None:
    model = nn.ModuleList([nn.Linear(2, 2)])
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    expected = "the model is a ModuleList, which has no forward, and parameter 'scale' lies in no"
    with pytest.raises(ConfigError, match=expected):
        choose_units(model)


def test_a_lazy_model_is_asked_to_run_once() -> None:
    with pytest.raises(
        ConfigError, match=r"2 parameters have no shape yet, the first is '0.weight'"
    ):
        choose_units(nn.Sequential(nn.LazyLinear(3)))


def test_the_meta_device_is_as_good_as_any() -> None:
    with torch.device("meta"):
        model = Decoder(tied=True)
    assert str(choose_units(model)) == str(choose_units(Decoder(tied=True)))


def test_every_attribute_that_holds_a_parameter_is_an_owner() -> None:
    model = nn.Linear(3, 3)
    model.mirror = model.weight
    weight = choose_units(model)[0].members[0]
    assert weight.aliases == ("weight", "mirror")
    assert weight.owners == ((model, "weight"), (model, "mirror"))


# --- the table -------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_unit_and_a_total() -> None:
    assert str(choose_units(mostly_frozen())) == (
        "unit          class             parameters   bytes  trainable\n"
        "embed         Table                    592   2,368          0\n"
        "blocks.0      Block                  2,467   9,868        192\n"
        "blocks.1      Block                  2,467   9,868        192\n"
        "blocks.2      Block                  2,467   9,868        192\n"
        "norm+lm_head  LayerNorm+Linear         624   2,496          0\n"
        "total                                8,617  34,468        576"
    )


def test_bytes_are_those_of_each_parameters_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4).double())
    assert [unit.nbytes for unit in choose_units(model)] == [40, 160]


def test_padding_and_placement_are_columns_once_they_are_known() -> None:
    units = choose_units(odd_convnet())
    placed = replace(
        units,
        padding=dict.fromkeys(names(units), 1_000),
        placements=dict.fromkeys(names(units), "sharded"),
    )
    lines = [line.split() for line in str(placed).splitlines()]
    assert lines[0][-2:] == ["padding", "placement"]
    assert lines[1] == ["(root)", "OddConvNet", "140", "560", "140", "1,000", "sharded"]
    assert lines[-1] == ["total", "1,484", "5,936", "1,484", "4,000"]


def test_units_are_a_sequence() -> None:
    units = choose_units(Decoder(depth=2, tied=False))
    assert [unit.name for unit in reversed(units[1:3])] == ["blocks.1", "blocks.0"]
    assert units[0] in units
    assert repr(units[0]) == "Unit('embed', Table, 592 parameters)"
    assert repr(units[0].members[0]) == "Member('embed.weight', (37, 16), torch.float32)"


# --- a forward pass in which every parameter is nonsense outside its unit --------------------


@contextmanager
def nonsense_outside_units(units: Units) -> Iterator[None]:
    handles, whole = [], {m: m.param.data for unit in units for m in unit.members}
    for unit in units:
        opened: list[nn.Module] = []
        _hide(unit)

        def enter(
            module: nn.Module, args: object, unit: Unit = unit, opened: list[nn.Module] = opened
        ) -> None:
            opened.append(module)
            for member in unit.members:
                member.param.data = whole[member]

        def leave(
            module: nn.Module,
            args: object,
            out: object,
            unit: Unit = unit,
            opened: list[nn.Module] = opened,
        ) -> None:
            opened.remove(module)
            if not opened:
                _hide(unit)

        for module in unit.modules:
            handles += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave),
            ]
    yield
    for handle in handles:
        handle.remove()
    for member, data in whole.items():
        member.param.data = data


def _hide(unit: Unit) -> None:
    for member in unit.members:
        member.param.data = torch.full_like(member.param.data, float("nan"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("net", NETS, ids=str)
@torch.no_grad()
def test_no_parameter_is_needed_outside_its_unit(net: Net, rule: str) -> None:
    model, batch = net.build().eval(), net.batch(0, 2)
    expected = loss(model, batch)
    with nonsense_outside_units(choose_units(model, RULES[rule])):
        assert torch.equal(loss(model, batch), expected)


# --- models of transformers, tiny and random, divided by structure alone -----------------------

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
VIT = {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 70}
MOE = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "image_size": 32, "window_size": 4}
IDS = torch.arange(12).view(2, 6)
TRANSFORMERS: dict[str, tuple[Mapping[str, object], dict[str, Tensor], list[str]]] = {
    "LlamaForCausalLM": (
        *(SMALL, {"input_ids": IDS}),
        ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm+lm_head"],
    ),
    "GPT2LMHeadModel": (
        *(GPT2, {"input_ids": IDS}),
        [
            *("transformer.wte+ln_f+lm_head", "transformer.wpe"),
            *("transformer.h.0", "transformer.h.1"),
        ],
    ),
    "T5ForConditionalGeneration": (
        *(T5, {"input_ids": IDS, "decoder_input_ids": IDS}),
        [
            *("", "shared+...+lm_head", "encoder.block.0", "encoder.block.1"),
            *("decoder.block.0", "decoder.block.1"),
        ],
    ),
    "BertForMaskedLM": (
        *({**SMALL, "max_position_embeddings": 8}, {"input_ids": IDS}),
        [
            *("", "bert.embeddings.word_embeddings+cls.predictions.decoder"),
            *("bert.encoder.layer.0", "bert.encoder.layer.1", "cls"),
        ],
    ),
    "ViTForImageClassification": (
        *(VIT, {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)}),
        ["", "vit.layers.0", "vit.layers.1", "vit.layernorm+classifier"],
    ),
    "MixtralForCausalLM": (
        *(MOE, {"input_ids": IDS}),
        ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm+lm_head"],
    ),
    "SwinForImageClassification": (
        *(SWIN, {"pixel_values": torch.linspace(-1, 1, 6144).view(2, 3, 32, 32)}),
        ["", *(f"swin.encoder.layers.{i}.blocks.{j}" for i in range(2) for j in range(2))],
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@torch.no_grad()
def test_a_model_of_transformers_is_divided_unmodified(name: str) -> None:
    import transformers

    config, inputs, expected = TRANSFORMERS[name]
    build = getattr(transformers, name)
    model = build(build.config_class(**config)).eval()
    units = choose_units(model)
    assert names(units) == expected
    assert_divided(model, units)
    before = model(**inputs)[0]
    with nonsense_outside_units(units):
        assert torch.equal(model(**inputs)[0], before)
