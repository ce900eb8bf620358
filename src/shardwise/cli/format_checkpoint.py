"""Prints runs and checkpoints: pure functions that return lines of text.

Everything that comes from a file passes through ``escape``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.safetensors_format import DTYPES
from shardwise.checkpoint.save_plan import MODEL, OPTIMIZER
from shardwise.cli.format_names import escape, escape_name
from shardwise.cli.runs import Listed, Run
from shardwise.cli.tables import table
from shardwise.convert.catalogue import Catalogue, Damage, Listing, OneFile
from shardwise.errors import CheckpointError
from shardwise.plan.printed import size
from shardwise.plan.units.names import group_names
from shardwise.train.records import plural

WIDTH = 96
NAME_WIDTH = 50  # characters of a name that stands in a column
LABEL_WIDTH = 12
TITLES = {"model": "weights", "optimizer": "optimizer state", "ranks": "each rank's own"}


def dtype_name(code: str) -> str:
    """``"BF16"`` → ``"bfloat16"``; what torch does not have, as it is stored."""
    return str(DTYPES.get(code, code)).removeprefix("torch.")


def shorten(value: object, width: int = WIDTH) -> str:
    """``value`` escaped, on one line of at most ``width`` characters."""
    text = escape(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def _field(word: str, text: str) -> str:
    return f"{word:<{LABEL_WIDTH}}{text}"


# --- a run -----------------------------------------------------------------------------------


def format_run(run: Run) -> list[str]:
    """A table of the run's checkpoints, their problems, and leftovers of interrupted saves."""
    whole = sum(not listed.problem for listed in run.checkpoints)
    nbytes = size(sum(listed.nbytes for listed in run.checkpoints))
    count = plural(len(run.checkpoints), "checkpoint")
    lines = [f"{escape(run.folder)}: {count}, {whole} complete, {nbytes}", ""]
    if run.checkpoints:
        head = ["checkpoint", "step", "size", "ranks", "strategy", "metric", "saved", "state"]
        lines += table([_run_row(listed, run) for listed in run.checkpoints], head)
    for listed in run.checkpoints:
        if listed.problem:
            lines += ["", f"{listed.name}: {escape(listed.problem)}"]
    if run.latest is not None and run.latest not in {c.name for c in run.checkpoints}:
        latest = escape(run.latest)
        lines += ["", f"latest points at {latest}, which is not a checkpoint of the run"]
    lines += [""] if run.leftovers else []
    for leftover, written in run.leftovers:
        state = _leftover_state(leftover.kind, leftover.is_lost, written)
        lines.append(f"{escape(leftover.path.name)}: {state}")
    return lines


def _run_row(listed: Listed, run: Run) -> list[str]:
    state = "NOT COMPLETE" if listed.problem else "complete"
    state += ", latest" if listed.name == run.latest else ""
    step = "" if listed.step is None else f"{listed.step:,}"
    cells: list[object] = [listed.name, step, size(listed.nbytes)]
    manifest = listed.manifest
    if manifest is None:
        cells += ["", "", "", ""]
    else:
        metric = "" if manifest.metric is None else f"{manifest.metric:.5g}"
        saved = manifest.created[:16].replace("T", " ")
        cells += [f"{manifest.world:,}", manifest.strategy, metric, saved]
    return [*map(escape, cells), state]


def _leftover_state(kind: str, is_lost: bool, written: bool) -> str:
    if kind == "partial":
        if written:
            return "is being written"
        return "left by an interrupted save; the next save removes it"
    if is_lost:
        return "the only copy of its checkpoint, which is loaded by name; a rename was interrupted"
    return "a replaced checkpoint whose removal was interrupted; the next save removes it"


# --- a checkpoint ----------------------------------------------------------------------------


def format_checkpoint(catalogue: Catalogue, list_all: bool = False) -> list[str]:
    """A whole checkpoint; tensors of repeated layers are one line unless ``list_all``."""
    lines = [*_header(catalogue), "", *_files(catalogue)]
    for stem in catalogue.groups:
        lines += ["", *_group(catalogue, stem, list_all)]
    if catalogue.aliases:
        lines += ["", "tied: stored once, under the second name"]
        for alias, name in catalogue.aliases.items():
            lines.append(f"  {escape(alias)} is {escape(name)}")
    if catalogue.training is not None:
        lines += ["", *_training(catalogue.training)]
    return lines


def _header(catalogue: Catalogue) -> list[str]:
    manifest = catalogue.manifest
    state = "NOT COMPLETE" if catalogue.problems else "complete"
    if manifest is None:
        state = state if catalogue.problems else "has no manifest, so bytes cannot be checked"
        lines = [f"{escape(catalogue.path)}  {state}"]
    else:
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        step = "" if manifest.step is None else f"step {manifest.step:,}, "
        ranks = plural(manifest.world, "rank")
        lines = [
            f"{escape(catalogue.path)}  {state}",
            _field(
                "format",
                f"{manifest.format} {manifest.version}, {manifest.checksum} of every "
                f"{size(manifest.block)}",
            ),
            _field(
                "written",
                f"{step}{escape(manifest.created)}, by {ranks}, {escape(manifest.strategy)}",
            ),
            _field("versions", escape(versions)),
        ]
        if manifest.metric is not None:
            lines.append(_field("metric", f"{manifest.metric:.6g}"))
        lines += [_field("kind", escape(manifest.line)), _field("placement", _placement(manifest))]
    return lines + [_field("problem", escape(problem)) for problem in catalogue.problems]


def _placement(manifest: Manifest) -> str:
    """Say how the state was placed on the ranks that wrote it."""
    if manifest.world == 1:
        return "all on one rank"
    if manifest.strategy == "no_shard":
        return f"replicated on each of {manifest.world:,} ranks"
    sharded = f"parameters and their optimizer state sharded over {manifest.world:,} ranks"
    return f"{sharded}; buffers of rank 0"


def _files(catalogue: Catalogue) -> list[str]:
    head = ["file", "bytes", "blocks", "digest", "state"]
    lines = table(map(_file_row, catalogue.files), head)
    if catalogue.strangers:
        names = ", ".join(map(escape, catalogue.strangers))
        lines.append(f"not part of the checkpoint: {names}")
    return lines


def _file_row(file: OneFile) -> list[str]:
    nbytes = f"{file.expected if file.expected is not None else file.size or 0:,}"
    state = "present" if file.is_whole else f"CUT, has {file.size or 0:,}"
    state = "MISSING" if file.size is None else state
    return [shorten(file.name, NAME_WIDTH), nbytes, f"{file.blocks or ''}", file.digest[:12], state]


def _group(catalogue: Catalogue, stem: str, list_all: bool) -> list[str]:
    listing = catalogue.groups[stem]
    nbytes, dtypes = Counter[str](), Counter[str]()
    for _, stored in listing.values():
        nbytes[stored.dtype] += stored.stop - stored.start
        dtypes[stored.dtype] += 1
    parts = [f"{dtypes[code]:,} {dtype_name(code)} {size(nbytes[code])}" for code in nbytes]
    details = f" ({', '.join(parts)})" * bool(parts)
    title = f"{TITLES.get(stem, escape(stem))}: {plural(len(listing), 'tensor')}, "
    lines = [f"{title}{size(nbytes.total())}{details}"]
    if list_all:
        return lines + [
            f"  {escape_name(name)}  {list(stored.shape)} {dtype_name(stored.dtype)}  "
            f"{escape(file)} {stored.start:,}–{stored.stop:,}"
            for name, (file, stored) in listing.items()
        ]
    if stem == OPTIMIZER:
        weights = catalogue.groups.get(MODEL, {})
        return lines + _optimizer_states(listing, weights, catalogue.scalars.get(stem, {}))
    kinds = ((name, (s.shape, dtype_name(s.dtype))) for name, (_, s) in listing.items())
    rows = [
        [f"  {escape_name(name)}", f"{count:,} × " * (count > 1) + str(list(shape)), dtype]
        for name, count, (shape, dtype) in group_names(kinds)
    ]
    return lines + table(rows)


def _optimizer_states(listing: Listing, weights: Listing, scalars: Mapping[str, Any]) -> list[str]:
    """The optimizer's tensors by parameter; parameters with the same tensors are one entry."""
    params: dict[str, list[tuple[str, str]]] = {}
    for name, (_, stored) in listing.items():
        key, _, param = name.partition("/")
        parameter = weights.get(param)
        same = parameter is not None and parameter[1].shape == stored.shape and stored.shape != ()
        form = "in its shape" if same else str(list(stored.shape)) if stored.shape else "one number"
        params.setdefault(param, []).append((f"{form}, {dtype_name(stored.dtype)}", key))
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for param, kind in params.items():
        kinds.setdefault(tuple(sorted(kind)), []).append(param)
    lines = []
    for states, names in kinds.items():
        parameters = f"each of {len(names):,} parameters" if len(names) > 1 else "1 parameter"
        lines.append(f"  for {parameters}:")
        forms = dict.fromkeys(form for form, _ in states)
        for form in forms:
            keys = [key for text, key in states if text == form]
            values = [scalars[n] for key in keys for p in names if (n := f"{key}/{p}") in scalars]
            lines.append(f"    {escape(', '.join(keys))}: {form}{_value_range(values)}")
        if len(kinds) > 1:
            lines += [
                f"      {escape_name(name)}" for name, _, _ in group_names((n, ()) for n in names)
            ]
    return lines


def _value_range(values: Sequence[Any]) -> str:
    """The one value, or the smallest and the largest; empty without numbers."""
    ordered = sorted(value for value in values if isinstance(value, int | float))
    if not ordered:
        return ""
    if ordered[0] == ordered[-1]:
        return f", {ordered[0]:g}"
    return f", {ordered[0]:g} to {ordered[-1]:g}"


# --- the training state ----------------------------------------------------------------------


def _training(state: Mapping[str, Any]) -> list[str]:
    lines = ["training state"]
    lines += [
        "  " + _field(key, shorten(_decoded(state[key]), WIDTH - LABEL_WIDTH - 2))
        for key in ("step", "world", "position", "scheduler", "scaler", "config", "local")
        if state.get(key) not in (None, [None] * len(_list(state.get("local"))))
    ]
    for record in _dicts(state.get("optimizers")):
        lines.append("  " + _field("optimizer", escape(record.get("class"))))
        for number, group in enumerate(_dicts(record.get("groups"))):
            count, options = len(_list(group.get("params"))), group.get("options")
            parts = options.items() if isinstance(options, dict) else ()
            text = ", ".join(f"{key} {_decoded(value)}" for key, value in parts)
            text = f"group {number}: {plural(count, 'parameter')}, {escape(text)}"
            lines += wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines


def _decoded(value: Any) -> str:
    """``repr`` of the decoded value; the JSON text where it cannot be decoded."""
    try:
        return repr(json_codec.decode(value))
    except CheckpointError:
        return json.dumps(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (item for item in _list(value) if isinstance(item, dict))


# --- damage ----------------------------------------------------------------------------------


def format_damage(damage: Iterable[Damage]) -> list[str]:
    """Each damaged file, and the tensors whose bytes are damaged."""
    return [line for one in damage for line in _format_one_damage(one)]


def _format_one_damage(damage: Damage) -> Sequence[str]:
    groups = group_names((name, ()) for name in damage.tensors)
    tensors = ", ".join(escape_name(name) for name, _, _ in groups)
    sentence = f"DAMAGED {escape(damage.file)}: bytes do not match their checksums; they are of"
    if damage.unreadable:
        sentence = (
            f"NOT READ {escape(damage.file)}: bytes could not be read, so nobody knows whether "
            f"they are as they were written: {escape(damage.unreadable)} They are of"
        )
    return sentence, f"    {tensors or 'no tensors'}"
