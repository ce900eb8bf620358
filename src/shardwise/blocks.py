"""What a model repeats: its blocks, its embeddings and its head, found by structure alone.

No list of class names is kept, so a model that nobody has seen before is divided as well as a
famous one. The ordinary way, one policy per architecture, is a table that is never complete.

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

from torch import nn

__all__ = [
    "Group",
    "as_group",
    "has_forward",
    "holds_parameters",
    "partial_roots",
    "pick_by_structure",
]

Group = tuple[nn.Module, ...]
"""Modules that share one unit: entering any of them needs all of its parameters."""


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module can work: ``nn.ModuleList`` and its like only hold others."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def holds_parameters(module: nn.Module) -> bool:
    """Whether there is a parameter in the module or below it."""
    return any(True for _ in module.parameters())


def pick_by_structure(model: nn.Module) -> list[Group]:
    """Blocks, then embeddings outside them, then the head; nothing if the model repeats nothing.

    Single layers (a ``Linear`` in a ``Sequential``) are blocks only in a model without larger
    ones, and norms never are. An embedding or head that has less than a sixteenth of the largest
    block's elements (BERT's token types) is not picked: keeping it gathered is the cheaper way.
    """
    blocks = _blocks(model, _is_large) or _blocks(model, _has_matrix)
    if not blocks:
        return []
    inside = {m for block in blocks for top in block for m in top.modules()}
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    embeddings = [table for table in tables if table not in inside]
    others = [*((table,) for table in embeddings), _head(model, inside, set(embeddings))]
    largest = max(map(_elements, blocks))
    return _disjoint([*blocks, *(part for part in others if 16 * _elements(part) >= largest)])


def partial_roots(
    model: nn.Module, entry_modules: Collection[nn.Module], own: Iterable[nn.Parameter]
) -> set[nn.Module]:
    """Modules around units that hold parameters of the root, too.

    They are what is called without the model: the encoder in ``generate()``, one tower of two.

    Args:
        model: the root.
        entry_modules: the modules that stand for units.
        own: the parameters of the root's unit.
    """
    mine = {id(param) for param in own}
    return {
        module
        for module in model.modules()
        if module not in entry_modules
        and any(part in entry_modules for part in module.modules())
        and any(id(param) in mine for param in module.parameters())
    }


def _disjoint(groups: Iterable[Group]) -> list[Group]:
    """A module that several groups would have (one object in many places) is the first one's."""
    first: dict[nn.Module, int] = {}
    for number, group in enumerate(groups):
        for module in group:
            first.setdefault(module, number)
    parts: dict[int, list[nn.Module]] = defaultdict(list)
    for module, number in first.items():
        parts[number].append(module)
    return [tuple(part) for part in parts.values()]


def _elements(group: Group) -> int:
    inside = {param for module in group for param in module.parameters()}
    return sum(param.numel() for param in inside)


def _blocks(model: nn.Module, counts: Callable[[nn.Module], bool]) -> list[Group]:
    """The topmost repeated siblings among the modules that count, in order of registration."""
    rows = {module: _repeated(module, counts) for module in model.modules()}
    alike = {type(row[0]) for found in rows.values() for row in found if _some_equal(row)}

    def below(module: nn.Module) -> list[nn.Module]:
        found = {child: below(child) for child in module.children()}
        for siblings in rows[module]:
            # Swin's stages are of one class, but no two are alike, and most hold blocks: go on
            # below. Experts lie inside blocks, too, but there the blocks are alike.
            most_hold = 2 * sum(bool(found[child]) for child in siblings) > len(siblings)
            stages = type(siblings[0]) not in alike and most_hold
            deeper = stages or not has_forward(siblings[0])
            found |= {child: (found[child] if deeper else []) or [child] for child in siblings}
        return [block for blocks in found.values() for block in blocks]

    return [as_group(block) for block in dict.fromkeys(below(model))]


def _repeated(module: nn.Module, counts: Callable[[nn.Module], bool]) -> list[list[nn.Module]]:
    """Two or more children of one class, if the module is a list of some kind."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    by_class: dict[type, list[nn.Module]] = defaultdict(list)
    for child in filter(counts, module.children()):
        by_class[type(child)].append(child)
    return [siblings for siblings in by_class.values() if len(siblings) > 1]


def _some_equal(siblings: list[nn.Module]) -> bool:
    shapes = {tuple((name, p.shape) for name, p in m.named_parameters()) for m in siblings}
    return len(shapes) < len(siblings)


def as_group(block: nn.Module) -> Group:
    """What brackets a block: itself or, if it is only a list of layers, those layers."""
    if has_forward(block):
        return (block,) if holds_parameters(block) else ()
    return tuple(module for child in block.children() for module in as_group(child))


def _is_large(module: nn.Module) -> bool:
    """More than a single layer: it has parts, or several matrices of its own."""
    has_parts = any(True for _ in module.children())
    return bool(as_group(module)) and (has_parts or _matrices(module.parameters()) > 1)


def _has_matrix(module: nn.Module) -> bool:
    return bool(as_group(module)) and _matrices(module.parameters()) > 0


def _matrices(parameters: Iterable[nn.Parameter]) -> int:
    return sum(param.ndim > 1 for param in parameters)


def _head(model: nn.Module, blocks: set[nn.Module], embeddings: set[nn.Module]) -> Group:
    """The topmost modules registered after the last block, if the last of them has a matrix."""
    place = {module: i for i, module in enumerate(model.modules())}
    last = max(place[module] for module in blocks)

    def after(module: nn.Module) -> list[nn.Module]:
        behind = place[module] > last and embeddings.isdisjoint(module.modules())
        if behind and has_forward(module):
            return [module] if holds_parameters(module) else []
        return [found for child in module.children() for found in after(child)]

    tail = tuple(dict.fromkeys(after(model)))
    owned = [list(m.parameters(recurse=False)) for top in tail[-1:] for m in top.modules()]
    final = [parameters for parameters in owned if parameters][-1:]
    return tail if any(_matrices(parameters) for parameters in final) else ()
