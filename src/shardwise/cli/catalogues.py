"""Runs and checkpoints as a person reads them: pure functions to lines of text.

Everything that comes from a file passes through ``shown``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from shardwise.checkpoint import json_codec
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.run_folder import Listed, Run
from shardwise.checkpoint.safetensors_format import DTYPES
from shardwise.checkpoint.save_plan import MODEL, OPTIMIZER
from shardwise.cli.folded import counted, fold, named, shown
from shardwise.cli.tables import table
from shardwise.convert.catalogue import Catalogue, Damage, Listing, OneFile
from shardwise.errors import CheckpointError
from shardwise.listing import size

__all__ = ["WIDTH", "damage_lines", "dtype_name", "lines_of", "run_lines", "short"]

WIDTH = 96
NAME = 50  # characters of a name that stands in a column
COLUMN = 12
TITLES = {
    "model": "weights",
    "optimizer": "optimizer state",
    "ranks": "each rank's own",
}


def dtype_name(code: str) -> str:
    """``"BF16"`` → ``"bfloat16"``; what torch does not have, as it is stored."""
    return str(DTYPES.get(code, code)).removeprefix("torch.")


def short(value: object, width: int = WIDTH) -> str:
    """A value of a file on one line of at most ``width`` characters."""
    text = shown(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def _entry(word: str, text: str) -> str:
    return f"{word:<{COLUMN}}{text}"


# --- a run -----------------------------------------------------------------------------------


def run_lines(run: Run) -> list[str]:
    """A line for each checkpoint, and what else lies there."""
    whole = sum(not listed.problem for listed in run.checkpoints)
    nbytes = size(sum(listed.nbytes for listed in run.checkpoints))
    count = counted(len(run.checkpoints), "checkpoint")
    lines = [f"{shown(run.folder)}: {count}, {whole} complete, {nbytes}", ""]
    if run.checkpoints:
        head = ["checkpoint", "step", "size", "ranks", "strategy", "metric", "saved", "state"]
        lines += table([_run_row(listed, run) for listed in run.checkpoints], head)
    for listed in run.checkpoints:
        if listed.problem:
            lines += ["", f"{listed.name}: {shown(listed.problem)}"]
    if run.latest is not None and run.latest not in {c.name for c in run.checkpoints}:
        lines += ["", f"latest points at {shown(run.latest)}, which is none of them"]
    lines += [""] if run.leftovers else []
    for left, written in run.leftovers:
        lines.append(f"{shown(left.path.name)}: {_what_is_left(left.kind, left.is_lost, written)}")
    return lines


def _run_row(listed: Listed, run: Run) -> list[str]:
    state = "NOT COMPLETE" if listed.problem else "complete"
    state += ", latest" if listed.name == run.latest else ""
    cells: list[object] = [listed.name, f"{listed.step:,}", size(listed.nbytes)]
    made = listed.manifest
    if made is None:
        cells += ["", "", "", ""]
    else:
        metric = "" if made.metric is None else f"{made.metric:.5g}"
        saved = made.created[:16].replace("T", " ")
        cells += [f"{made.world:,}", made.strategy, metric, saved]
    return [*map(shown, cells), state]


def _what_is_left(kind: str, is_lost: bool, written: bool) -> str:
    if kind == "partial":
        if written:
            return "is being written"
        return "left by a save that did not end; the next save removes it"
    if is_lost:
        return "the only one of its name, and found by it; a crash came between two renames"
    return "on its way out when something stopped it; the next save removes it"


# --- a checkpoint ----------------------------------------------------------------------------


def lines_of(catalogue: Catalogue, every_name: bool = False) -> list[str]:
    """All of a checkpoint; repeated layers are folded unless ``every_name``."""
    lines = [*_title(catalogue), "", *_files(catalogue)]
    for stem in catalogue.groups:
        lines += ["", *_group(catalogue, stem, every_name)]
    if catalogue.aliases:
        lines += ["", "tied: stored once, under the second name"]
        for alias, name in catalogue.aliases.items():
            lines.append(f"  {shown(alias)} is {shown(name)}")
    if catalogue.training is not None:
        lines += ["", *_training(catalogue.training)]
    return lines


def _title(catalogue: Catalogue) -> list[str]:
    made = catalogue.manifest
    state = "NOT COMPLETE" if catalogue.problems else "complete"
    if made is None:
        state = state if catalogue.problems else "has no manifest, so bytes cannot be checked"
        lines = [f"{shown(catalogue.path)}  {state}"]
    else:
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        step = "" if made.step is None else f"step {made.step:,}, "
        ranks = f"{made.world:,} rank{'s' * (made.world != 1)}"
        lines = [
            f"{shown(catalogue.path)}  {state}",
            _entry(
                "format",
                f"{made.format} {made.version}, {made.checksum} of every {size(made.block)}",
            ),
            _entry("written", f"{step}{shown(made.created)}, by {ranks}, {shown(made.strategy)}"),
            _entry("versions", shown(versions)),
        ]
        if made.metric is not None:
            lines.append(_entry("metric", f"{made.metric:.6g}"))
        lines += [_entry("kind", shown(made.line)), _entry("placement", _placement(made))]
    return lines + [_entry("problem", shown(problem)) for problem in catalogue.problems]


def _placement(made: Manifest) -> str:
    """Who held what when it was written."""
    if made.world == 1:
        return "one rank held all of it"
    if made.strategy == "no_shard":
        return f"each of {made.world:,} ranks held all of it"
    cut = f"parameters and their optimizer state were cut over {made.world:,} ranks"
    return f"{cut}; buffers rank 0's"


def _files(catalogue: Catalogue) -> list[str]:
    head = ["file", "bytes", "blocks", "digest", "state"]
    lines = table(map(_file_row, catalogue.files), head)
    if catalogue.strangers:
        names = ", ".join(map(shown, catalogue.strangers))
        lines.append(f"not of the checkpoint: {names}")
    return lines


def _file_row(file: OneFile) -> list[str]:
    nbytes = f"{file.expected if file.expected is not None else file.size or 0:,}"
    state = "present" if file.is_whole else f"CUT, has {file.size or 0:,}"
    state = "MISSING" if file.size is None else state
    return [short(file.name, NAME), nbytes, f"{file.blocks or ''}", file.digest[:12], state]


def _group(catalogue: Catalogue, stem: str, every_name: bool) -> list[str]:
    listing = catalogue.groups[stem]
    nbytes, dtypes = Counter[str](), Counter[str]()
    for _, stored in listing.values():
        nbytes[stored.dtype] += stored.stop - stored.start
        dtypes[stored.dtype] += 1
    parts = [f"{dtypes[code]:,} {dtype_name(code)} {size(nbytes[code])}" for code in nbytes]
    what = f" ({', '.join(parts)})" * bool(parts)
    title = f"{TITLES.get(stem, shown(stem))}: {counted(len(listing), 'tensor')}, "
    lines = [f"{title}{size(nbytes.total())}{what}"]
    if every_name:
        return lines + [
            f"  {named(name)}  {list(stored.shape)} {dtype_name(stored.dtype)}  {shown(file)} "
            f"{stored.start:,}–{stored.stop:,}"
            for name, (file, stored) in listing.items()
        ]
    if stem == OPTIMIZER:
        weights = catalogue.groups.get(MODEL, {})
        return lines + _states(listing, weights, catalogue.scalars.get(stem, {}))
    kinds = ((name, (s.shape, dtype_name(s.dtype))) for name, (_, s) in listing.items())
    rows = [
        [f"  {named(name)}", f"{count:,} × " * (count > 1) + str(list(shape)), dtype]
        for name, count, (shape, dtype) in fold(kinds)
    ]
    return lines + table(rows)


def _states(listing: Listing, weights: Listing, scalars: Mapping[str, Any]) -> list[str]:
    """What is kept for which parameters; parameters with the same states are said once."""
    params: dict[str, list[tuple[str, str]]] = {}
    for name, (_, stored) in listing.items():
        key, _, param = name.partition("/")
        own = weights.get(param)
        same = own is not None and own[1].shape == stored.shape and stored.shape != ()
        form = "in its shape" if same else str(list(stored.shape)) if stored.shape else "one number"
        params.setdefault(param, []).append((f"{form}, {dtype_name(stored.dtype)}", key))
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for param, kind in params.items():
        kinds.setdefault(tuple(sorted(kind)), []).append(param)
    lines = []
    for states, names in kinds.items():
        each = f"each of {len(names):,} parameters" if len(names) > 1 else "1 parameter"
        lines.append(f"  for {each}:")
        forms = dict.fromkeys(form for form, _ in states)
        for form in forms:
            keys = [key for other, key in states if other == form]
            values = [scalars[n] for key in keys for p in names if (n := f"{key}/{p}") in scalars]
            lines.append(f"    {shown(', '.join(keys))}: {form}{_span(values)}")
        if len(kinds) > 1:
            lines += [f"      {named(name)}" for name, _, _ in fold((n, ()) for n in names)]
    return lines


def _span(values: Sequence[Any]) -> str:
    """All the same value, or the least and the most."""
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
        "  " + _entry(key, short(_decoded(state[key]), WIDTH - COLUMN - 2))
        for key in ("step", "world", "position", "scheduler", "scaler", "config", "local")
        if state.get(key) not in (None, [None] * len(_list(state.get("local"))))
    ]
    for record in _dicts(state.get("optimizers")):
        lines.append("  " + _entry("optimizer", shown(record.get("class"))))
        for number, group in enumerate(_dicts(record.get("groups"))):
            count, options = len(_list(group.get("params"))), group.get("options")
            parts = options.items() if isinstance(options, dict) else ()
            text = ", ".join(f"{key} {_decoded(value)}" for key, value in parts)
            text = f"group {number}: {counted(count, 'parameter')}, {shown(text)}"
            lines += wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines


def _decoded(value: Any) -> str:
    """As Python writes it; as JSON does where it cannot be decoded."""
    try:
        return repr(json_codec.decode(value))
    except CheckpointError:
        return json.dumps(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (one for one in _list(value) if isinstance(one, dict))


# --- damage ----------------------------------------------------------------------------------


def damage_lines(damage: Iterable[Damage]) -> list[str]:
    """What is damaged, by file, bytes and tensors."""
    return [line for one in damage for line in _damaged(one)]


def _damaged(one: Damage) -> Sequence[str]:
    whose = [named(name) for name, _, _ in fold((name, ()) for name in one.tensors)]
    whose = ["the header", *whose] if one.header else whose
    bytes_of = f"bytes {one.start:,} to {one.stop:,}"
    what = f"DAMAGED {shown(one.file)}: {bytes_of} are not those that were written; they hold"
    if one.unreadable:
        what = (
            f"NOT READ {shown(one.file)}: {bytes_of} could not be read, so nobody knows whether "
            f"they are as they were written: {shown(one.unreadable)} They hold"
        )
    return what, f"    {', '.join(whose) or 'no tensors'}"
