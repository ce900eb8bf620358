"""Prints records: pure functions from a record to lines of text.

Each line is complete in itself, for log files and `grep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwise.cli.format_names import escape
from shardwise.cli.tables import table
from shardwise.plan.printed import size
from shardwise.train.comparison import Compared, Predicted, beside
from shardwise.train.mirror import Mirrored
from shardwise.train.records import (
    Built,
    Busy,
    Bytes,
    Complete,
    Evaluated,
    Finished,
    Placed,
    Prepared,
    PreparedSamples,
    Record,
    Replaced,
    Resumed,
    Sampled,
    Saved,
    Stepped,
    Stopped,
    Streamed,
    Warned,
    plural,
)
from shardwise.train.worker import Exchanged

MAX_RANK_COLUMNS = 4  # ranks that get a column each
LABELLED = "of the places with a target only, some at a time"
LABEL_WIDTH = 9  # width of the first word of a line


def format_record(record: Record) -> list[str]:
    """The lines to print for ``record``."""
    return _FORMATTERS[type(record)](record)


def _labelled(word: str, text: str) -> str:
    """``text`` after its label; later lines are indented to the same column."""
    return f"{word:<{LABEL_WIDTH}} " + text.replace("\n", "\n" + " " * (LABEL_WIDTH + 1))


def _prepared(r: Prepared) -> list[str]:
    read = f"first {size(r.nbytes)} (data.max_bytes); more was not read"
    text = f"{r.source}: {plural(r.files, 'file')}, {read if r.capped else size(r.nbytes)}"
    dropped = f"last {r.dropped[0]} + {r.dropped[1]} dropped"
    return [
        _labelled("text", text),
        *(_labelled("left out", str(file)) for file in r.left_out),
        _labelled("split", f"{_per_split(r.documents)} documents, by a hash of their text"),
        _labelled("tokenizer", f"BPE vocabulary {r.vocabulary:,}, {r.origin}"),
        _labelled("tokens", f"{_per_split(r.tokens)} tokens, {dropped} ({r.seconds:.1f} s)"),
        _labelled(
            "rows",
            f"{_per_split(r.rows)} sequences of {r.context:,} tokens, "
            "packed without document masking",
        ),
    ]


def _prepared_samples(r: PreparedSamples) -> list[str]:
    samples, blocks, unused = r.samples[0], r.rows[0], r.unused[0]
    share = sum(r.trained) / sum(r.tokens)
    packed = f"packed {plural(samples, 'sample')} → {plural(blocks, 'block')} of {r.context:,}"
    if r.packing == "concatenate":
        rows = f"{packed} (tail {unused:,} tokens dropped); attention crosses samples"
    elif r.packing:
        empty = unused / (blocks * r.context)
        rows = f"{packed} ({empty:.1%} padding); each sample attends to itself only"
    else:
        rows = f"{plural(samples, 'sample')}, one in a row of up to {r.context:,} tokens"
    cut, tokens = r.cut
    return [
        _labelled("data", f"{r.source}: {_per_split(r.samples)} samples, {r.format}"),
        *[_labelled("not read", f"{', '.join(r.unread)}: {r.format} has no such column")]
        * bool(r.unread),
        *(_labelled("left out", str(rows)) for rows in r.left_out),
        *[_labelled("cut", f"{plural(cut, 'sample')} at data.context, {tokens:,} tokens lost")]
        * (cut > 0),
        _labelled("tokenizer", f"vocabulary {r.vocabulary:,}, {r.origin}"),
        _labelled(
            "tokens", f"{_per_split(r.tokens)} tokens, {share:.1%} trained on ({r.seconds:.1f} s)"
        ),
        _labelled("rows", f"{rows}; {r.rows[1]:,} for validation"),
    ]


def _streamed(r: Streamed) -> list[str]:
    own = r.streams // r.ranks
    first = f"rank 0 reads 0 to {own - 1}, " if own > 1 else ""
    each = f"{plural(own, 'stream')} on each of {plural(r.ranks, 'rank')}"
    whole = "each has shards of its own"
    if r.shards % r.streams:
        whole = f"each reads all shards and takes every {r.streams}th document"
    before = f"first {size(r.nbytes)} (data.max_bytes): " if r.nbytes else ""
    head = f"{before}{r.validation:,} tokens for validation"
    return [
        _labelled("text", f"{r.source}: {plural(r.shards, 'shard')}, read while training"),
        _labelled("streams", f"{r.streams}, {first}{each}; {whole}"),
        _labelled("shuffle", f"{plural(r.shuffle, 'document')} together, packed into rows"),
        _labelled("head", f"{head} ({r.seconds:.1f} s)"),
        _labelled("tokenizer", f"vocabulary {r.vocabulary:,}, {r.origin}"),
    ]


def _per_split(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} train + {counts[1]:,} validation"


def _built(r: Built) -> list[str]:
    ranks = plural(r.ranks, "rank")
    accumulation = plural(r.accumulation, "accumulation step")
    epochs = "" if r.epochs is None else f", {r.epochs:.2f} epochs"
    share = r.warmup / r.steps
    warmup = f", warm-up in the first {r.warmup} ({share:.1%})" if r.warmup else ""
    first = f"the first {r.untimed} steps, " if r.untimed > 1 else "the first step, " * r.untimed
    untimed = f"{first}validation and saving"
    padding = "padding included, " * r.padded
    return [
        *(_labelled("", escape(line)) for line in r.report.splitlines()),
        _labelled("model", f"{r.parameters:,} parameters, {r.strategy} over {ranks}"),
        *(_labelled("dtypes", dtypes) for dtypes in r.dtypes),
        _labelled(
            "batch", f"global batch {r.rows} = micro-batch {r.micro} × {accumulation} × {ranks}"
        ),
        _labelled(
            "schedule",
            f"{plural(r.steps, 'step')} of {r.rows * r.context:,} tokens{epochs}{warmup}",
        ),
        *(_labelled("lr", _rates(r.rates)) for _ in r.rates[:1]),
        _labelled("logits", f"of all places: {r.all_logits}" if r.all_logits else LABELLED),
        _labelled("tokens/s", f"over all ranks, {padding}in recent steps, without {untimed}"),
        _labelled("memory", "of the process that uses most; on an accelerator, of its device"),
        "",
    ]


def _rates(rates: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{rate:.2e} in step {step:,}" for step, rate in rates)


def format_step(r: Stepped, width: int | None = None) -> str:
    """A step in at most ``width`` columns; fields are dropped in a fixed order, never the ETA."""
    digits = len(f"{r.steps:,}")
    norm = "skipped: overflow" if r.skipped else f"grad norm {r.grad_norm:6.3f}"
    parts = {
        "step": f"step {r.step:>{digits},}/{r.steps:,}",
        "loss": f"loss {r.loss:7.4f}",
        "lr": f"lr {r.lr:.2e}",
        "norm": norm + (f"  loss scale {r.loss_scale:,.0f}" if r.loss_scale else ""),
        "speed": f"{r.tokens_per_second:>7,.0f} tokens/s",
        "memory": f"memory {size(r.memory)}",
        "eta": "" if r.seconds_left is None else f"ETA {clock(r.seconds_left)}",
    }
    for part in ("norm", "lr", "memory", "speed", "loss"):
        if width is None or len("  ".join(parts.values())) <= width:
            break
        del parts[part]
    return "  ".join(parts.values()).rstrip()


def _evaluated(r: Evaluated) -> str:
    perplexity = f"{r.perplexity:,.2f}" if math.isfinite(r.perplexity) else "inf"
    return (
        f"step {r.step:,}  validation loss {r.loss:.4f}  "
        f"unigram baseline {r.unigram_entropy:.2f}  "
        f"perplexity {perplexity}  accuracy {r.accuracy:.1%}"
    )


def _saved(r: Saved) -> str:
    removed = f"; {', '.join(r.removed)} removed" if r.removed else ""
    return f"saved {r.path} ({size(r.nbytes)}, {r.seconds:.1f} s){removed}"


def _stopped(r: Stopped) -> str:
    saved = "checkpoint saved; rerun the same command to resume"
    lost = "NOT SAVED: rerun the same command to resume from the last checkpoint"
    return f"stopped at step {r.step:,}/{r.steps:,}, {saved if r.saved else lost}"


def _complete(r: Complete) -> str:
    return _labelled(
        "done",
        f"{r.folder} is already complete ({plural(r.steps, 'step')}): raise run.steps or "
        "run.epochs to train longer, or start over with --run.overwrite true (deletes this run)",
    )


def _replaced(r: Replaced) -> str:
    had = "did not finish" if r.steps is None else f"finished at step {r.steps:,}"
    return _labelled(
        "replaces",
        f"the run in {r.folder} that {had}, since run.overwrite is true, and deletes it at the "
        "first save. To train that one longer: --run.overwrite false, and more --run.steps",
    )


def _predicted(r: Predicted) -> str:
    together = r.parameters + r.gradients + r.optimizer
    host = f"; {size(r.in_host)} in host memory" if r.in_host else ""
    return _labelled(
        "memory",
        f"each rank will keep {size(together)}: parameters "
        f"{size(r.parameters)}, gradients {size(r.gradients)}, optimizer state "
        f"{size(r.optimizer)}{host}; gathered besides, at most {size(r.gathered)}, and "
        "activations",
    )


def _compared(r: Compared) -> Iterator[str]:
    memory = beside(r.planned_memory, r.memory, size)
    rate = beside(r.planned_rate, r.rate, "{:,.0f}".format)
    mfu = beside(r.planned_mfu, r.mfu, "{:.1%}".format)
    yield _labelled("plan", f"memory {memory}; tokens/s {rate}; MFU {mfu}")
    for term in r.off:
        yield _labelled("off", term)
    if r.differs is not None:
        as_planned = f"the engine's bytes were as planned at each of {r.events:,} events"
        yield _labelled("events", r.differs or as_planned)


def _placed(r: Placed) -> list[str]:
    ranks = len(r.rows[0].per_rank)
    total = Bytes(
        "all",
        tuple(sum(row.per_rank[rank] for row in r.rows) for rank in range(ranks)),
        sum(row.whole for row in r.rows),
    )
    titles = [f"rank {n}" for n in range(ranks)] if ranks <= MAX_RANK_COLUMNS else ["least", "most"]
    rows = []
    for row in (*r.rows, total):
        per_rank = (
            row.per_rank if ranks <= MAX_RANK_COLUMNS else (min(row.per_rank), max(row.per_rank))
        )
        share = max(row.per_rank) / row.whole if row.whole else 1.0
        rows.append([row.kind, *(f"{n:,}" for n in per_rank), f"{row.whole:,}", f"{share:.1%}"])
    return table(rows, ["bytes", *titles, "one process", "share"])


def _sampled(r: Sampled) -> list[str]:
    if r.continues:
        return [_labelled("sample", r.prompt + r.text)]
    return [_labelled("prompt", r.prompt), _labelled("answer", r.text)]


def _finished(r: Finished) -> list[str]:
    saved = f"saved in {r.folder} after {clock(r.seconds)}: "
    return ["", _labelled("done", saved + ", ".join(r.files))]


def _mirrored(r: Mirrored) -> str:
    if r.error:
        return _labelled("warning", f"NOT UPLOADED, and the run goes on: {r.error}")
    return f"uploaded to {r.url} ({r.seconds:.1f} s)"


def _exchanged(r: Exchanged) -> str:
    workers = f"{plural(len(r.workers), 'worker')} ({', '.join(map(str, r.workers))})"
    return (
        f"step {r.step:,}  exchanged by {workers}, {size(r.sent)} sent, {size(r.received)} received"
    )


_FORMATTERS: dict[type, Callable[[Any], list[str]]] = {
    Prepared: _prepared,
    PreparedSamples: _prepared_samples,
    Streamed: _streamed,
    Built: _built,
    Stepped: lambda r: [format_step(r)],
    Evaluated: lambda r: [_evaluated(r)],
    Sampled: lambda r: ["", *_sampled(r)],
    Placed: lambda r: ["", *_placed(r)],
    Predicted: lambda r: [_predicted(r)],
    Mirrored: lambda r: [_mirrored(r)],
    Exchanged: lambda r: [_exchanged(r)],
    Compared: lambda r: list(_compared(r)),
    Warned: lambda r: [_labelled("warning", r.message)],
    Busy: lambda r: [_labelled("busy", f"{r.what}, {r.seconds:.0f} s so far")],
    Saved: lambda r: [_saved(r)],
    Resumed: lambda r: [f"resumed at step {r.step:,}, sample {r.sample:,}, from {r.path}"],
    Stopped: lambda r: [_stopped(r)],
    Complete: lambda r: [_complete(r)],
    Replaced: lambda r: [_replaced(r)],
    Finished: _finished,
}


def clock(seconds: float) -> str:
    """``3725`` → ``"1:02:05"``, ``65`` → ``"1:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
