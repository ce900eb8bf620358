from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.plan.units.structure import all_nbytes, has_forward, joined, pick_by_structure
from tests.nets import Block, Decoder, Mlp


class Chain(nn.Module):
    """Calls its parts one after the other, whatever they are."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


class Stage(Chain):
    pass


class Expert(Mlp):
    pass


def picked(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return ["+".join(names[module] for module in group) for group in pick_by_structure(model)]


def mlps(*widths: int) -> list[nn.Module]:
    return [Mlp(width, width) for width in widths]


def test_blocks_then_embeddings_then_the_head_with_the_norm_before_it() -> None:
    model = Decoder(depth=2, tied=False)
    assert picked(model) == ["blocks.0", "blocks.1", "embed", "norm+lm_head"]


def test_a_model_that_repeats_nothing_has_no_parts() -> None:
    assert picked(Chain(embed=nn.Embedding(9, 4), only=nn.Sequential(Block(4)))) == []
    assert picked(nn.Linear(3, 3)) == []
    assert picked(nn.ReLU()) == []


def test_attributes_of_one_class_have_roles_and_are_not_blocks() -> None:
    assert picked(Chain(query=Mlp(4, 4), key=Mlp(4, 4), value=Mlp(4, 4))) == []


def test_one_module_listed_twice_is_not_repeated() -> None:
    block = Block(4)
    assert picked(nn.Sequential(block, block)) == []
    assert picked(nn.Sequential(block, Block(4), block)) == ["0", "1"]


def test_lists_of_every_kind_hold_blocks() -> None:
    assert picked(Chain(a=nn.ModuleList(mlps(4, 4)))) == ["a.0", "a.1"]
    assert picked(Chain(a=nn.Sequential(*mlps(4, 4)))) == ["a.0", "a.1"]
    assert picked(Chain(a=nn.ModuleDict({"x": Mlp(4, 4), "y": Mlp(4, 4)}))) == ["a.x", "a.y"]


def test_the_topmost_repetition_counts_so_experts_stay_in_their_block() -> None:
    def layer() -> nn.Module:
        return Chain(norm=nn.LayerNorm(4), experts=nn.ModuleList(Expert(4, 4) for _ in range(4)))

    assert picked(Chain(layers=nn.ModuleList([layer(), layer()]))) == ["layers.0", "layers.1"]


def test_blocks_of_one_class_may_differ_in_shape() -> None:
    # DeepSeek: the first layers are dense, the others have experts.
    def layer(experts: int) -> nn.Module:
        return Chain(experts=nn.ModuleList(Expert(4, 4) for _ in range(experts)))

    model = Chain(layers=nn.ModuleList([layer(1), layer(4), layer(4)]))
    assert picked(model) == ["layers.0", "layers.1", "layers.2"]
    model = Chain(layers=nn.ModuleList([layer(1), layer(4)]))
    assert picked(model) == ["layers.0", "layers.1"]


def test_stages_no_two_of_which_are_alike_give_their_blocks() -> None:
    # Swin, ConvNeXt: each stage is wider than the one before.
    stages = [Stage(blocks=nn.Sequential(*mlps(width, width))) for width in (4, 6, 8)]
    expected = [f"stages.{i}.blocks.{j}" for i in range(3) for j in range(2)]
    assert picked(Chain(stages=nn.ModuleList(stages))) == expected


def test_a_stage_of_one_block_is_a_block() -> None:
    stages = [Stage(blocks=nn.Sequential(*mlps(*widths))) for widths in [(4, 4), (6,), (8, 8)]]
    expected = ["s.0.blocks.0", "s.0.blocks.1", "s.1", "s.2.blocks.0", "s.2.blocks.1"]
    assert picked(Chain(s=nn.ModuleList(stages))) == expected


def test_a_class_that_is_a_block_in_one_list_is_one_in_every_list() -> None:
    # ResNet-18 in transformers: the second stage's layers differ (one has a shortcut) and hold
    # two convolutions each, but in the first stage layers are alike.
    def layer(*widths: int) -> nn.Module:
        return Stage(inner=nn.Sequential(*mlps(*widths)))

    model = Chain(
        first=nn.Sequential(layer(4, 4), layer(4, 4)),
        second=nn.Sequential(layer(4, 6), layer(6, 6)),
    )
    assert picked(model) == ["first.0", "first.1", "second.0", "second.1"]


def test_lists_in_a_list_are_blocks_bracketed_by_their_layers() -> None:
    # A ModuleList is never called, so its layers say when the block's parameters are needed.
    layers = nn.ModuleList(
        nn.ModuleList([nn.Identity(), nn.LayerNorm(4), Mlp(4, 4)]) for _ in range(2)
    )
    assert picked(Chain(layers=layers)) == ["layers.0.1+layers.0.2", "layers.1.1+layers.1.2"]


def test_lists_of_blocks_in_a_list_give_the_blocks() -> None:
    layers = nn.ModuleList(nn.ModuleList(mlps(4, 4)) for _ in range(2))
    assert picked(Chain(layers=layers)) == [f"layers.{i}.{j}" for i in range(2) for j in range(2)]


def test_single_layers_are_blocks_only_where_there_is_nothing_larger() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert picked(plain) == ["0", "2"]
    with_blocks = Chain(blocks=nn.ModuleList(mlps(4, 4)), head=plain)
    assert picked(with_blocks) == ["blocks.0", "blocks.1", "head"]


def test_norms_are_never_blocks() -> None:
    assert picked(nn.Sequential(nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))) == []
    convs = nn.Sequential(
        *(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    )
    assert picked(convs) == ["0", "2"]


def test_what_follows_the_blocks_is_a_head_only_if_it_ends_in_a_matrix() -> None:
    blocks = nn.ModuleList(mlps(4, 4))
    assert picked(Chain(blocks=blocks, norm=nn.LayerNorm(4))) == ["blocks.0", "blocks.1"]
    pooled = Chain(blocks=blocks, pooler=Mlp(4, 4), act=nn.ReLU(), classifier=nn.Linear(4, 3))
    assert picked(pooled) == ["blocks.0", "blocks.1", "pooler+classifier"]


def test_the_head_is_looked_for_inside_the_modules_that_hold_blocks() -> None:
    inner = Chain(blocks=nn.ModuleList(mlps(4, 4)), norm=nn.LayerNorm(4))
    model = Chain(model=inner, lm_head=nn.Linear(4, 9))
    assert picked(model) == ["model.blocks.0", "model.blocks.1", "model.norm+lm_head"]


def test_an_embedding_is_no_part_of_a_head() -> None:
    model = Chain(
        blocks=nn.ModuleList(mlps(4, 4)), labels=Chain(e=nn.Embedding(9, 4)), head=nn.Linear(4, 9)
    )
    assert picked(model) == ["blocks.0", "blocks.1", "labels.e", "head"]


def test_small_embeddings_and_heads_are_left_to_the_root() -> None:
    # 16 × 16 weights and biases, twice: a block has 544 elements, a sixteenth of that is 34.
    blocks = nn.ModuleList(mlps(16, 16))
    model = Chain(kinds=nn.Embedding(2, 16), words=nn.Embedding(3, 16), blocks=blocks)
    assert picked(model) == ["blocks.0", "blocks.1", "words"]
    assert picked(Chain(blocks=blocks, head=nn.Linear(16, 1))) == ["blocks.0", "blocks.1"]


def test_a_forward_may_belong_to_the_class_or_to_the_object() -> None:
    called = nn.ModuleList()
    called.forward = torch.relu
    assert has_forward(nn.Linear(1, 1))
    assert has_forward(called)
    assert not has_forward(nn.ModuleList())
    assert not has_forward(nn.ParameterList())


# --- neighbours that are joined -------------------------------------------------------------


def test_neighbours_are_joined_while_they_are_small_in_the_order_of_registration() -> None:
    blocks = nn.ModuleList([nn.Linear(1, n, bias=False) for n in (3, 2, 5, 6, 1, 1)])
    model = Chain(blocks=blocks, rest=nn.Linear(8, 8))
    groups = [(block,) for block in reversed(blocks)]
    sizes = [
        [block.out_features for block in group]
        for group in joined(model, groups, 4 * 6, all_nbytes)
    ]
    assert sizes == [[3, 2], [5], [6], [1, 1]]


def test_a_shared_parameter_is_counted_once_in_what_is_joined() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = Chain(first=first, second=second, rest=nn.Linear(8, 8))
    assert joined(model, [(first,), (second,)], 4 * 16, all_nbytes) == [(first, second)]


def test_a_small_model_is_one_unit() -> None:
    model = Decoder(tied=False)
    groups = pick_by_structure(model)
    nbytes = sum(param.nbytes for param in model.parameters())
    assert joined(model, groups, nbytes, all_nbytes) == []
    assert joined(model, groups, nbytes - 1, all_nbytes)
