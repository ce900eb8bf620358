"""Defects that take a calculation: numbers that are compared, and names that are followed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.dialects.settings import Expression, dotted
from shardwise.hf.targets import instead
from shardwise.lint.source import Hit, Source

__all__ = ["CHECKS"]

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
    """In a file that loads models of one kind. A text in a program is an expression of theirs."""
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
    """By a number of ranks that is written down: of an option ``--ws``, or ``world_size = 2``."""
    defaults = [(name, _keyword(call, "default")) for name, call in _options(source)]
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
    """In a program that reads some option as ``args.name``; one may be looked for in sys.argv."""
    read = {n.attr for n in source.nodes(ast.Attribute) if dotted(n.value) == "args"}
    texts = [node.value for node in source.nodes(ast.Constant)]
    for name, call in _options(source):
        if read and name.replace("-", "_") not in read and texts.count(f"--{name}") == 1:
            yield Hit("D21-unused", call.lineno, (name,))


def _calls(source: Source, name: str) -> Iterator[ast.Call]:
    """Of a function of this name, whatever it is reached through."""
    calls = source.nodes(ast.Call)
    return (call for call in calls if dotted(call.func).rpartition(".")[2] == name)


def _options(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Of argparse, by their long names."""
    for call in _calls(source, "add_argument"):
        for name in call.args:
            if isinstance(name, ast.Constant) and str(name.value).startswith("--"):
                yield str(name.value)[2:], call


def _integer(node: ast.expr | None) -> int:
    """A number that is written down; 0 for anything else."""
    value = node.value if isinstance(node, ast.Constant) else 0
    return value if isinstance(value, int) else 0


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


CHECKS = (
    *(
        _evaluates_once,
        _target_is_no_module,
        _flag_after_import,
        _rows_do_not_divide,
        _workers_have_no_seed,
    ),
    _option_is_not_read,
)
