"""Records as a person reads them: pure functions from a record to lines of text.

Each line stands alone, so it survives a log file, `tee` and `grep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.train.metrics import (
    Built,
    Bytes,
    Complete,
    Evaluated,
    Finished,
    Placed,
    Prepared,
    Record,
    Resumed,
    Sampled,
    Saved,
    Stepped,
    Stopped,
    Warned,
)

__all__ = ["clock", "lines", "table"]

MANY = 4  # ranks that get a column each
COLUMN = 9  # width of the first word of a line


def lines(record: Record) -> list[str]:
    """What to print for ``record``."""
    return _LINES[type(record)](record)


def _first(word: str, text: str) -> str:
    """``text`` behind its word; later lines are indented as far."""
    return f"{word:<{COLUMN}} " + text.replace("\n", "\n" + " " * (COLUMN + 1))


def _prepared(r: Prepared) -> list[str]:
    limit = ", up to data.max_bytes" if r.capped else ""
    skipped = f", {r.skipped:,} left out (not UTF-8 text)" if r.skipped else ""
    return [
        _first("text", f"{r.source}: {r.files:,} files{skipped}, {_size(r.nbytes)}{limit}"),
        _first(
            "split",
            f"{r.documents[0]:,} documents to train on, {r.documents[1]:,} held out for "
            "validation, by a hash of their text",
        ),
        _first(
            "tokens",
            f"{r.tokens[0]:,} and {r.tokens[1]:,}, {r.vocabulary:,} different, tokenizer "
            f"{'from the last run' if r.cached else 'learnt from the training split'} "
            f"({r.seconds:.1f} s)",
        ),
        _first(
            "rows",
            f"packed into {r.rows[0]:,} and {r.rows[1]:,} rows; attention crosses documents within "
            f"a row (tails of {r.dropped[0]} and {r.dropped[1]} tokens dropped)",
        ),
    ]


def _built(r: Built) -> list[str]:
    ranks = f"{r.ranks} rank{'s' * (r.ranks != 1)}"
    return [
        _first("model", f"{r.parameters:,} parameters, {r.strategy} over {ranks}"),
        _first(
            "batch",
            f"{r.rows} rows = {r.micro} micro × {r.accumulation} accumulation × {ranks}; "
            f"{r.rows * r.context:,} tokens a step, {r.steps:,} steps, {r.epochs:.2f} epochs",
        ),
        _first("tokens/s", "over all ranks, without the first 3 steps and without validation"),
        "",
    ]


def _stepped(r: Stepped) -> str:
    digits = len(f"{r.steps:,}")
    return "  ".join(
        (
            f"step {r.step:>{digits},}/{r.steps:,}",
            f"loss {r.loss:7.4f}",
            f"lr {r.lr:.2e}",
            f"grad norm {r.grad_norm:6.3f}",
            f"{r.tokens_per_second:>7,.0f} tokens/s",
            f"memory {r.memory / 2**20:,.0f} MiB",
            f"ETA {clock(r.seconds_left)}",
        )
    )


def _evaluated(r: Evaluated) -> str:
    perplexity = f"{r.perplexity:,.2f}" if math.isfinite(r.perplexity) else "inf"
    return (
        f"step {r.step:,}  validation loss {r.loss:.4f} (unigram entropy {r.unigram_entropy:.4f} "
        f"of the same {r.tokens:,} tokens)  perplexity {perplexity}  accuracy {r.accuracy:.1%}"
    )


def _saved(r: Saved) -> str:
    gone = f"; {', '.join(r.removed)} removed" if r.removed else ""
    return f"saved {r.path} ({_size(r.nbytes)}, {r.seconds:.1f} s){gone}"


def _resumed(r: Resumed) -> str:
    return f"resumed at step {r.step:,}, sample {r.sample:,}, from {r.path}"


def _stopped(r: Stopped) -> str:
    then = "the same command goes on" if r.saved else "NOT SAVED: the same command goes back"
    return f"stopped at step {r.step:,}/{r.steps:,} as asked; {then}"


def _complete(r: Complete) -> str:
    return _first(
        "done",
        f"the run in {r.folder} has taken all its {r.steps:,} steps. More of them: raise "
        "run.steps. All anew: --run.overwrite true.",
    )


def _placed(r: Placed) -> list[str]:
    ranks = len(r.rows[0].per_rank)
    total = Bytes(
        "all",
        tuple(sum(row.per_rank[rank] for row in r.rows) for rank in range(ranks)),
        sum(row.whole for row in r.rows),
    )
    heads = [f"rank {n}" for n in range(ranks)] if ranks <= MANY else ["least", "most"]
    body = []
    for row in (*r.rows, total):
        shown = row.per_rank if ranks <= MANY else (min(row.per_rank), max(row.per_rank))
        share = max(row.per_rank) / row.whole if row.whole else 1.0
        body.append([row.kind, *(f"{n:,}" for n in shown), f"{row.whole:,}", f"{share:.1%}"])
    return table(["bytes", *heads, "one process", "share"], body)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, rule, *body)
    ]


def _finished(r: Finished) -> list[str]:
    took = f"saved in {r.folder} after {clock(r.seconds)}: "
    return ["", _first("done", took + ", ".join(r.files))]


_LINES: dict[type, Callable[[Any], list[str]]] = {
    Prepared: _prepared,
    Built: _built,
    Stepped: lambda r: [_stepped(r)],
    Evaluated: lambda r: [_evaluated(r)],
    Sampled: lambda r: ["", _first("sample", r.prompt + r.text)],
    Placed: lambda r: ["", *_placed(r)],
    Warned: lambda r: [_first("warning", r.message)],
    Saved: lambda r: [_saved(r)],
    Resumed: lambda r: [_resumed(r)],
    Stopped: lambda r: [_stopped(r)],
    Complete: lambda r: [_complete(r)],
    Finished: _finished,
}


def clock(seconds: float) -> str:
    """``3725`` → ``"1:02:05"``, ``65`` → ``"1:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 100_000 else f"{nbytes / 1e3:,.1f} kB"
