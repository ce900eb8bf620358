"""Records as a person reads them: pure functions from a record to lines of text.

Each line stands alone, so it survives a log file, `tee` and `grep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardwise.cli.tables import table
from shardwise.train.metrics import (
    Built,
    Busy,
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
    count,
)

__all__ = ["clock", "lines", "step_line"]

MANY = 4  # ranks that get a column each
COLUMN = 9  # width of the first word of a line


def lines(record: Record) -> list[str]:
    """What to print for ``record``."""
    return _LINES[type(record)](record)


def _first(word: str, text: str) -> str:
    """``text`` behind its word; later lines are indented as far."""
    return f"{word:<{COLUMN}} " + text.replace("\n", "\n" + " " * (COLUMN + 1))


def _prepared(r: Prepared) -> list[str]:
    size = f"first {_size(r.nbytes)} (data.max_bytes); more was not read"
    text = f"{r.source}: {count(r.files, 'file')}, {size if r.capped else _size(r.nbytes)}"
    origin = "from the last run" if r.cached else "trained on the training split"
    dropped = f"last {r.dropped[0]} + {r.dropped[1]} dropped"
    return [
        _first("text", text),
        *(_first("left out", str(out)) for out in r.left_out),
        _first("split", f"{_both(r.documents)} documents, by a hash of their text"),
        _first("tokenizer", f"BPE vocabulary {r.vocabulary:,}, {origin}"),
        _first("tokens", f"{_both(r.tokens)} tokens, {dropped} ({r.seconds:.1f} s)"),
        _first(
            "rows",
            f"{_both(r.rows)} sequences of {r.context:,} tokens, packed without document masking",
        ),
    ]


def _both(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} train + {counts[1]:,} validation"


def _built(r: Built) -> list[str]:
    ranks = count(r.ranks, "rank")
    accumulation = count(r.accumulation, "accumulation step")
    return [
        _first("model", f"{r.parameters:,} parameters, {r.strategy} over {ranks}"),
        _first(
            "batch", f"global batch {r.rows} = micro-batch {r.micro} × {accumulation} × {ranks}"
        ),
        _first(
            "schedule",
            f"{count(r.steps, 'step')} of {r.rows * r.context:,} tokens, {r.epochs:.2f} epochs",
        ),
        _first("tokens/s", "over all ranks, in recent steps, without validation and saving"),
        "",
    ]


def step_line(r: Stepped, width: int | None = None) -> str:
    """A step in at most ``width`` columns: what matters least is left out, ETA last of all."""
    digits = len(f"{r.steps:,}")
    parts = {
        "step": f"step {r.step:>{digits},}/{r.steps:,}",
        "loss": f"loss {r.loss:7.4f}",
        "lr": f"lr {r.lr:.2e}",
        "norm": f"grad norm {r.grad_norm:6.3f}",
        "speed": f"{r.tokens_per_second:>7,.0f} tokens/s",
        "memory": f"memory {r.memory / 1e6:,.0f} MB",
        "eta": f"ETA {clock(r.seconds_left)}",
    }
    for least in ("norm", "lr", "memory", "speed", "loss"):
        if width is None or len("  ".join(parts.values())) <= width:
            break
        del parts[least]
    return "  ".join(parts.values())


def _evaluated(r: Evaluated) -> str:
    perplexity = f"{r.perplexity:,.2f}" if math.isfinite(r.perplexity) else "inf"
    return (
        f"step {r.step:,}  validation loss {r.loss:.4f}  "
        f"unigram baseline {r.unigram_entropy:.2f}  "
        f"perplexity {perplexity}  accuracy {r.accuracy:.1%}"
    )


def _saved(r: Saved) -> str:
    gone = f"; {', '.join(r.removed)} removed" if r.removed else ""
    return f"saved {r.path} ({_size(r.nbytes)}, {r.seconds:.1f} s){gone}"


def _resumed(r: Resumed) -> str:
    return f"resumed at step {r.step:,}, sample {r.sample:,}, from {r.path}"


def _stopped(r: Stopped) -> str:
    saved = "checkpoint saved; rerun the same command to resume"
    lost = "NOT SAVED: rerun the same command to resume from the last checkpoint"
    return f"stopped at step {r.step:,}/{r.steps:,}, {saved if r.saved else lost}"


def _complete(r: Complete) -> str:
    return _first(
        "done",
        f"{r.folder} is already complete ({count(r.steps, 'step')}): raise run.steps to train "
        "longer, or start over with --run.overwrite true (deletes this run)",
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
    return table(body, ["bytes", *heads, "one process", "share"])


def _finished(r: Finished) -> list[str]:
    took = f"saved in {r.folder} after {clock(r.seconds)}: "
    return ["", _first("done", took + ", ".join(r.files))]


_LINES: dict[type, Callable[[Any], list[str]]] = {
    Prepared: _prepared,
    Built: _built,
    Stepped: lambda r: [step_line(r)],
    Evaluated: lambda r: [_evaluated(r)],
    Sampled: lambda r: ["", _first("sample", r.prompt + r.text)],
    Placed: lambda r: ["", *_placed(r)],
    Warned: lambda r: [_first("warning", r.message)],
    Busy: lambda r: [_first("busy", f"{r.what}, {r.seconds:.0f} s so far")],
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
