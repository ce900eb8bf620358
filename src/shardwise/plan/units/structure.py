"""Finds a model's repeated blocks, its embeddings and its head by structure.

model                  blocks            embeddings   head
├── embed                                embed
├── layers: ModuleList
│   ├── 0: Block       layers.0
│   └── 1: Block       layers.1
├── norm                                              norm ┐ one unit
└── lm_head                                        lm_head ┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from inspect import getattr_static

from torch import nn

Group = tuple[nn.Module, ...]
"""Modules that share one unit: the forward of any of them needs all of its parameters."""


def has_forward(module: nn.Module) -> bool:
    """Test that the module can be called; ``nn.ModuleList`` and other containers cannot."""
    own = getattr_static(type(module), "forward")  # the class of a scripted one cannot be asked
    return "forward" in vars(module) or own is not nn.Module.forward


def holds_parameters(module: nn.Module) -> bool:
    """Test that the module or a submodule has a parameter."""
    return any(True for _ in module.parameters())


def pick_by_structure(model: nn.Module) -> list[Group]:
    """Blocks, then embeddings outside them, then the head; nothing if the model repeats nothing.

    Single layers (a ``Linear`` in a ``Sequential``) are blocks only in a model without larger
    ones, and norms never are. An embedding or head with less than a sixteenth of the largest
    block's elements (BERT's token types) is not picked: it is cheaper to keep it gathered.
    """
    blocks = _repeated_blocks(model)
    others, largest = _embeddings_and_head(model, blocks), max(map(elements, blocks), default=0)
    return _disjoint([*blocks, *(group for group in others if 16 * elements(group) >= largest)])


def joined(
    model: nn.Module, groups: Iterable[Group], most: int, nbytes: Callable[[Group], int]
) -> list[Group]:
    """Make one group of neighbours that together have at most so many bytes.

    Neighbours by the order of registration, which is that of use in most models. A model that has
    no more bytes than that is one unit.
    """
    position = {module: i for i, module in enumerate(model.modules())}
    rows: list[Group] = []
    for group in sorted(groups, key=lambda group: position[group[0]]):
        if rows and nbytes((*rows[-1], *group)) <= most:
            rows[-1] += group
        else:
            rows.append(group)
    return rows if nbytes((model,)) > most else []


def partial_roots(
    model: nn.Module, unit_modules: Collection[nn.Module], root_params: Iterable[nn.Parameter]
) -> set[nn.Module]:
    """Modules of the root's unit that can be called without the model.

    They contain units or blocks, as the encoder in ``generate()`` and one tower of two; or they are
    an embedding or the head. Blocks have no hooks for it, which a model of many would wait for.
    """
    ids, blocks = {id(param) for param in root_params}, _repeated_blocks(model)
    ends = {part for group in _embeddings_and_head(model, blocks) for part in group}
    inner = {*unit_modules, *(part for block in blocks for part in block)}
    return {
        module
        for module in model.modules()
        if module not in unit_modules
        and (module in ends or any(m in inner and m is not module for m in module.modules()))
        and any(id(param) in ids for param in module.parameters())
    }


def _disjoint(groups: Iterable[Group]) -> list[Group]:
    """A module in several groups (one object in many places) stays in the first one only."""
    first: dict[nn.Module, int] = {}
    for number, group in enumerate(groups):
        for module in group:
            first.setdefault(module, number)
    remaining: dict[int, list[nn.Module]] = defaultdict(list)
    for module, number in first.items():
        remaining[number].append(module)
    return [tuple(modules) for modules in remaining.values()]


def elements(group: Group) -> int:
    """Elements of all parameters inside."""
    return sum(param.numel() for param in _parameters(group))


def all_nbytes(group: Group) -> int:
    """Bytes of all parameters inside."""
    return sum(param.nbytes for param in _parameters(group))


def trained_nbytes(group: Group) -> int:
    """Bytes of those that are trained."""
    return sum(param.nbytes for param in _parameters(group) if param.requires_grad)


def _parameters(group: Group) -> set[nn.Parameter]:
    return {param for module in group for param in module.parameters()}


def _repeated_blocks(model: nn.Module) -> list[Group]:
    return _blocks(model, _is_large) or _blocks(model, _has_matrix)


def _embeddings_and_head(model: nn.Module, blocks: Iterable[Group]) -> list[Group]:
    """Embeddings outside the blocks, and what comes after them; nothing if there are none."""
    inside = {m for block in blocks for top in block for m in top.modules()}
    if not inside:
        return []
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    # peft's layer for new tokens reads the weight of the table, and does not call that.
    children = ((m, *pair) for m in model.modules() for pair in m.named_children())
    outer = {child: m for m, name, child in children if name == "base_layer"}
    embeddings = [outer.get(table, table) for table in tables if table not in inside]
    return [*((table,) for table in embeddings), _head(model, inside, set(embeddings))]


def _blocks(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> list[Group]:
    """The topmost repeated siblings for which ``is_block``, in order of registration."""
    siblings_of = {module: _repeated(module, is_block) for module in model.modules()}
    repeated_classes = {
        type(row[0]) for blocks_in in siblings_of.values() for row in blocks_in if _any_equal(row)
    }

    def below(module: nn.Module) -> list[nn.Module]:
        blocks_in = {child: below(child) for child in module.children()}
        for siblings in siblings_of[module]:
            # Swin's stages have one class, but different shapes, and most hold blocks: descend
            # into them. Experts lie inside blocks, too, but these blocks have equal shapes.
            most_hold = 2 * sum(bool(blocks_in[child]) for child in siblings) > len(siblings)
            stages = type(siblings[0]) not in repeated_classes and most_hold
            deeper = stages or not has_forward(siblings[0])
            blocks_in |= {one: (blocks_in[one] if deeper else []) or [one] for one in siblings}
        return [block for blocks in blocks_in.values() for block in blocks]

    return [as_group(block) for block in dict.fromkeys(below(model))]


def _repeated(module: nn.Module, is_block: Callable[[nn.Module], bool]) -> list[list[nn.Module]]:
    """Two or more children of one class, if the module is a list of some kind."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    by_class: dict[type, list[nn.Module]] = defaultdict(list)
    for child in filter(is_block, module.children()):
        by_class[type(child)].append(child)
    return [siblings for siblings in by_class.values() if len(siblings) > 1]


def _any_equal(siblings: list[nn.Module]) -> bool:
    shapes = {tuple((name, p.shape) for name, p in m.named_parameters()) for m in siblings}
    return len(shapes) < len(siblings)


def as_group(block: nn.Module) -> Group:
    """Return the root of a block's unit: itself or, if it is a list of layers, those."""
    if has_forward(block):
        return (block,) if holds_parameters(block) else ()
    return tuple(module for child in block.children() for module in as_group(child))


def _is_large(module: nn.Module) -> bool:
    """Is it more than a single layer: has it children, or several matrices?"""
    has_parts = any(True for _ in module.children())
    return bool(as_group(module)) and (has_parts or _matrices(module.parameters()) > 1)


def _has_matrix(module: nn.Module) -> bool:
    return bool(as_group(module)) and _matrices(module.parameters()) > 0


def _matrices(parameters: Iterable[nn.Parameter]) -> int:
    return sum(param.ndim > 1 for param in parameters)


def _head(model: nn.Module, blocks: set[nn.Module], embeddings: set[nn.Module]) -> Group:
    """The topmost modules after the last block, if the last of them has a matrix."""
    position = {module: i for i, module in enumerate(model.modules())}
    last = max(position[module] for module in blocks)

    def heads_in(module: nn.Module) -> list[nn.Module]:
        is_after = position[module] > last and embeddings.isdisjoint(module.modules())
        if is_after and has_forward(module):
            return [module] if holds_parameters(module) else []
        return [inner for child in module.children() for inner in heads_in(child)]

    head = tuple(dict.fromkeys(heads_in(model)))
    owned = [list(m.parameters(recurse=False)) for top in head[-1:] for m in top.modules()]
    final = [parameters for parameters in owned if parameters][-1:]
    return head if any(_matrices(parameters) for parameters in final) else ()
