"""Defects that take a calculation: numbers that are compared, and names that are followed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

from shardwise.dialects.lint.source import Hit, Source
from shardwise.dialects.settings import Expression, dotted
from shardwise.errors.projections import instead

_WORLD = re.compile(r"ws|world_?size|n_?procs?", re.IGNORECASE)
_MODEL = re.compile(r"^(?!.*Tokenizer).*from_pretrained\.0$|model_name_or_path$|^model\.from$")
_EPOCHS = 3  # of TrainingArguments
_GATED = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head embed_tokens"
_MODULES = {  # a model's name → what it calls the modules that hold a matrix
    # mixtures of experts and hybrids with state spaces have others; Falcon 3 is a Llama
    r"(llama|mistral|qwen[23](?!-next|.*moe|.*-a\d)|gemma)": _GATED,
    r"(phi-?3)(?!.*moe)": "qkv_proj o_proj gate_up_proj down_proj lm_head embed_tokens",
    r"(gpt-?2)": "c_attn c_proj c_fc lm_head wte wpe",
    r"(pythia|gpt.neox)": "query_key_value dense dense_h_to_4h dense_4h_to_h embed_in embed_out",
    r"(falcon(?!-?3|-?h\d|-?mamba)|bloom)": (
        "query_key_value dense dense_h_to_4h dense_4h_to_h lm_head word_embeddings"
    ),
}


def _evaluates_once(source: Source) -> Iterator[Hit]:
    epochs = source.value("num_train_epochs") or _EPOCHS
    if source.value("evaluation_strategy", "eval_strategy") == "epoch":
        for setting in source.settings:
            is_computed = Expression in map(type, (setting.value, epochs))
            if setting.name != "eval_delay" or is_computed:
                continue
            if float(setting.value) >= float(epochs):
                yield Hit("D4", setting.line, (setting.value, epochs))


def _target_is_no_module(source: Source) -> Iterator[Hit]:
    """Find such targets in a file that loads models of one kind; texts are expressions."""
    loaded = "\n".join(str(s.value) for s in source.settings if _MODEL.search(s.key))
    kinds = {pattern: re.search(pattern, loaded, re.IGNORECASE) for pattern in _MODULES}
    named = [(match[1], _MODULES[pattern].split()) for pattern, match in kinds.items() if match]
    targets = [s for s in source.settings if s.name in ("target_modules", "lora_target_modules")]
    for setting in targets if len(named) == 1 else ():
        (model, own), value = named[0], setting.value
        of_command = [value] if setting.name.startswith("lora") else []
        for name in value if isinstance(value, list) else of_command:
            word = str(name).rpartition(".")[2]
            if word not in own and re.fullmatch(r"[\w.]+", word):
                yield Hit("D11", setting.line, (name, model, instead(word, own)))


def _flag_after_import(source: Source) -> Iterator[Hit]:
    imports = [n.lineno for n in source.nodes(ast.Import) if "habana_frameworks" in ast.unparse(n)]
    for node in source.nodes(ast.Assign):
        is_flag = "'PT_HPU_LAZY_MODE'" in ast.unparse(node.targets[0])
        if is_flag and imports and min(imports) < node.lineno:
            yield Hit("D6", node.lineno, (min(imports),))


def _rows_do_not_divide(source: Source) -> Iterator[Hit]:
    """Find a number of ranks that is written down: of an option ``--ws``, or ``world_size = 2``."""
    defaults = [(name, _default(call)) for name, call in _options(source)]
    assigned = [(dotted(node.targets[0]), node.value) for node in source.nodes(ast.Assign)]
    worlds = [node for name, node in defaults + assigned if _WORLD.fullmatch(name)]
    ranks = next((number for node in worlds if (number := _integer(node))), 1)
    is_sharded = re.search(r"FullyShardedDataParallel|fully_shard|thunder", source.text)
    for call in _calls(source, "Linear") if is_sharded else ():
        columns, rows = [*map(_integer, call.args[:2]), 0, 0][:2]
        if columns and rows and rows % ranks:
            yield Hit("D8", call.lineno, (columns, rows, ranks))


def _workers_have_no_seed(source: Source) -> Iterator[Hit]:
    functions = {node.name: node for node in source.nodes(ast.FunctionDef)}
    seeds = {name for name, node in functions.items() if "manual_seed(" in ast.unparse(node)}
    for call in _calls(source, "spawn"):
        worker = functions.get(dotted(call.args[0])) if call.args else None
        inner = [dotted(n.func) for n in ast.walk(worker or call) if isinstance(n, ast.Call)]
        if worker and not seeds & {worker.name, *inner}:
            yield from (
                Hit("D21-seed", c.lineno, (worker.name,)) for c in _calls(source, "manual_seed")
            )


def _option_is_not_read(source: Source) -> Iterator[Hit]:
    """Find such options in a program that reads ``args.name``; sys.argv may be read, too."""
    read = {n.attr for n in source.nodes(ast.Attribute) if dotted(n.value) == "args"}
    texts = [node.value for node in source.nodes(ast.Constant)]
    for name, call in _options(source):
        if read and name.replace("-", "_") not in read and texts.count(f"--{name}") == 1:
            yield Hit("D21-unused", call.lineno, (name,))


def _accumulates_inverted(source: Source) -> Iterator[Hit]:
    """``no_sync()`` where ``step % n == 0`` holds, by an if, a conditional or a name of it."""
    assigned = {dotted(node.targets[0]): node for node in source.nodes(ast.Assign)}
    for node in source.nodes(ast.If, ast.IfExp):
        place = assigned.get(dotted(node.test), node)
        test = place.value if isinstance(place, ast.Assign) else node.test
        counts = [n.right for n in ast.walk(test) if _is_remainder(n)]
        if not isinstance(test, ast.Compare) or not counts:
            continue
        one_in_n = node.body if isinstance(test.ops[0], ast.Eq) else node.orelse
        branch = one_in_n if isinstance(one_in_n, list) else [one_in_n]
        if any("no_sync" in ast.unparse(part).partition("\n")[0] for part in branch):
            yield Hit("D25", place.lineno, (ast.unparse(test), ast.unparse(counts[0])))


def _is_remainder(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def _sharded(source: Source) -> Iterator[tuple[str, int]]:
    """Names of models that FSDP1 or FSDP2 shards, each with its line."""
    for node in source.nodes(ast.Assign):
        if isinstance(node.value, ast.Call) and _SHARDS.search(dotted(node.value.func)):
            yield dotted(node.targets[0]), node.lineno
    for call in _calls(source, "fully_shard"):
        if call.args:
            yield dotted(call.args[0]), call.lineno


def _optimizer_before_shards(source: Source) -> Iterator[Hit]:
    sharded = dict(_sharded(source))
    for node in source.nodes(ast.Assign):
        text, name = ast.unparse(node.value), dotted(node.targets[0])
        owner = re.match(r"[\w.]+\(.*?\b(\w+)\.(?:named_)?parameters\(\)", text)
        line = sharded.get(owner[1], 0) if owner and _OPTIMIZER.search(name) else 0
        if owner and node.lineno < line:
            yield Hit("D31", node.lineno, (name, owner[1], line))


def _called_on_one_rank(source: Source) -> Iterator[Hit]:
    """Find collectives within ``if rank == 0:`` or ``if accelerator.is_main_process:``."""
    sharded = {name for name, _ in _sharded(source)}
    calls = {*sharded, *(f"{name}.state_dict" for name in sharded), *_OF_ALL_RANKS}
    for branch in source.nodes(ast.If):
        if _ONE_RANK.search(ast.unparse(branch.test)):
            for node in (inner for part in branch.body for inner in ast.walk(part)):
                if isinstance(node, ast.Call) and dotted(node.func) in calls:
                    yield Hit("D33", node.lineno, (ast.unparse(node),))


def _is_one_unit(source: Source) -> Iterator[Hit]:
    """One call for a model that has blocks; FSDP1's for one of transformers is D27."""
    if not _BLOCKS.search(source.text):
        return
    wrapped = [call for call in source.nodes(ast.Call) if _SHARDS.search(dotted(call.func))]
    is_named = "wrap_policy" in source.text or "transformers" in source.text
    if len(wrapped) == 1 and not is_named:
        policy = "auto_wrap_policy=ModuleWrapPolicy({…}), with the class of the blocks"
        yield Hit("D35", wrapped[0].lineno, (dotted(wrapped[0].func), policy))
    loops = source.nodes(ast.For, ast.ListComp)
    in_loops = [node for loop in loops for node in ast.walk(loop)]
    calls = [*_calls(source, "fully_shard")]
    if len(calls) == 1 and calls[0] not in in_loops and ".apply(" not in source.text:
        yield Hit(
            "D35", calls[0].lineno, ("fully_shard", "fully_shard(block) for each block first")
        )


def _is_never_zero(source: Source) -> Iterator[Hit]:
    for loop in source.nodes(ast.For, ast.While):
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        steps = {dotted(call.func).rpartition(".")[2]: call.lineno for call in calls}
        if {"backward", "step"} <= steps.keys() and not _ZERO.search(source.text):
            yield Hit("D36", steps["backward"])


_SHARDS = re.compile(r"(?:^|\.)(?:FSDP|FullyShardedDataParallel)$")
_OPTIMIZER = re.compile(r"(?i)^opt|optim")
_ONE_RANK = re.compile(r"rank\w*(?:\(\))? == 0|\bnot \w*rank\b|is_(?:local_)?main_process")
_OF_ALL_RANKS = {f"accelerator.{name}" for name in ("get_state_dict", "save_state", "save_model")}
_BLOCKS = re.compile(
    r"ModuleList|nn\.Transformer|Block\(|Layer\(|transformers|\.(?:layers|blocks)\b"
)
_ZERO = re.compile(r"zero_grad|\.grad = None|deepspeed")


def _calls(source: Source, name: str) -> Iterator[ast.Call]:
    """Find calls of a function of this name, whatever it is reached through."""
    calls = source.nodes(ast.Call)
    return (call for call in calls if dotted(call.func).rpartition(".")[2] == name)


def _options(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Return argparse's options, by their long names."""
    for call in _calls(source, "add_argument"):
        for name in call.args:
            if isinstance(name, ast.Constant) and str(name.value).startswith("--"):
                yield str(name.value)[2:], call


def _integer(node: ast.expr | None) -> int:
    """A number that is written down; 0 for anything else."""
    value = node.value if isinstance(node, ast.Constant) else 0
    return value if isinstance(value, int) else 0


def _default(call: ast.Call) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)


CHECKS = (
    _evaluates_once,
    _target_is_no_module,
    _flag_after_import,
    _rows_do_not_divide,
    _workers_have_no_seed,
    _option_is_not_read,
    _accumulates_inverted,
    _optimizer_before_shards,
    _called_on_one_rank,
    _is_one_unit,
    _is_never_zero,
)
