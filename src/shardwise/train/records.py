"""Records: the events of a run that are printed, written to metrics.jsonl and plotted.

The loop emits records and prints nothing, so it needs no check for the rank or the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.train.comparison import Compared, Predicted
from shardwise.train.mirror import Mirrored
from shardwise.train.worker import Exchanged


def plural(number: int, noun: str) -> str:
    """``1 file``, ``1,200 files``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True)
class LeftOut:
    """Text that could not be used, for one reason.

    Attributes:
        reason: in a few words, such as ``not UTF-8``.
        files, rows: numbers of them; a row of a text file is a line.
        places: the first few.
    """

    reason: str
    files: int = 0
    rows: int = 0
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = ((self.files, "file"), (self.rows, "row"))
        counts = " and ".join(plural(number, noun) for number, noun in pairs if number)
        more = ", …" * (self.files + self.rows > 1)
        return f"{counts}, {self.reason} ({self.places[0]}{more})"


@dataclass(frozen=True)
class Prepared:
    """The data is ready.

    Attributes:
        source: of the text.
        files, nbytes: that were read.
        left_out: text that could not be used.
        capped: reading stopped at data.max_bytes.
        documents: in the training and the validation split.
        tokens: in the two splits, end tokens included.
        rows: of ``context`` tokens, in the two splits.
        dropped: tokens at the end of each split that do not fill a row.
        vocabulary: size of the tokenizer's vocabulary.
        origin: of the tokenizer, in a few words.
        seconds: for reading, training the tokenizer and encoding.
    """

    source: str
    files: int
    nbytes: int
    left_out: tuple[LeftOut, ...]
    capped: bool
    documents: tuple[int, int]
    tokens: tuple[int, int]
    rows: tuple[int, int]
    context: int
    dropped: tuple[int, int]
    vocabulary: int
    origin: str
    seconds: float


@dataclass(frozen=True)
class PreparedSamples:
    """The samples are ready; pairs are of the training and the validation split.

    Attributes:
        source, format, packing: as in the recipe.
        samples: that are trained on.
        left_out: rows that could not be used.
        unread: columns that the format does not read.
        cut: samples that were longer than ``context``, and tokens of theirs that were cut off.
        tokens, trained: all tokens of the samples, and those that are trained on.
        rows: of ``context`` tokens.
        unused: tokens at the end that fill no row if samples are concatenated; else the empty
            places of all rows.
        vocabulary, origin, seconds: as in ``Prepared``.
    """

    source: str
    format: str
    samples: tuple[int, int]
    left_out: tuple[LeftOut, ...]
    unread: tuple[str, ...]
    cut: tuple[int, int]
    tokens: tuple[int, int]
    trained: tuple[int, int]
    rows: tuple[int, int]
    context: int
    packing: bool | str
    unused: tuple[int, int]
    vocabulary: int
    origin: str
    seconds: float


@dataclass(frozen=True)
class Streamed:
    """The data is read while the model trains; what was read before is ready.

    Attributes:
        source: of the text.
        shards: files, or parts of the hub's data set.
        streams, ranks: each rank reads its own ``streams / ranks`` of the streams.
        shuffle: documents that are shuffled together.
        nbytes: of text that was read before, for the tokenizer and validation.
        validation: tokens of it that are held out.
        vocabulary, origin, seconds: as in ``Prepared``.
    """

    source: str
    shards: int
    streams: int
    ranks: int
    shuffle: int
    nbytes: int
    validation: int
    vocabulary: int
    origin: str
    seconds: float


@dataclass(frozen=True)
class BuiltUnit:
    """A unit of the sharded model.

    Attributes:
        name: ``""`` for the root.
        numel: elements of its parameters.
        gathered, shard: bytes of all of it as computed in, and of what one rank keeps, padded.
    """

    name: str
    numel: int
    gathered: int
    shard: int


@dataclass(frozen=True)
class Built:
    """The model is built and sharded.

    Attributes:
        parameters: of the whole model.
        strategy, ranks: how it is sharded.
        rows, micro, accumulation: rows = micro × accumulation × ranks.
        context: tokens in a row.
        steps, epochs: of the run; passes over the training split, ``None`` if unknown.
        warmup: steps in which the learning rate rises.
        untimed: first steps that tokens/s leaves out.
        report: lines about a model that was read, and what an adapter's targets match.
        all_logits: why they are computed; ``""``: only those of places with a target.
        padded: rows have places that no sample fills, which tokens/s counts, too.
        dtypes: how many elements are stored, computed in, sent and summed in which, in words.
        rates: step and rate of the first, of that after the warm-up, of a middle one, of the last.
        units: in the order in which they are gathered.
        machine: of rank 0: its device and memory.
        versions: of what computes.
    """

    parameters: int
    strategy: str
    ranks: int
    rows: int
    micro: int
    accumulation: int
    context: int
    steps: int
    epochs: float | None
    warmup: int = 0
    untimed: int = 0
    report: str = ""
    all_logits: str = ""
    padded: bool = False
    dtypes: tuple[str, ...] = ()
    rates: tuple[tuple[int, float], ...] = ()
    units: tuple[BuiltUnit, ...] = ()
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stepped:
    """One optimizer step.

    Attributes:
        step, steps: this one, counted from 1, and the last one.
        loss: mean over all tokens of the global batch, nats per token.
        lr, grad_norm: of this step; the norm is that before clipping.
        tokens_per_second: over all ranks, in recent steps, without validation and saving.
        memory: bytes, of the rank that uses most.
        seconds_left: estimated, validation and saving included; ``None`` at the first steps.
        loss_scale: of this step; ``None`` without one.
        tokens: trained on so far, over all ranks, with the padding of rows.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory: int
    seconds_left: float | None
    loss_scale: float | None = None
    tokens: int = 0

    @property
    def skipped(self) -> bool:
        """Did scaled gradients overflow, so that a lower scale is tried? Below 1 there is none."""
        return (self.loss_scale or 0) >= 1 and not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Evaluated:
    """The validation rows, after a step.

    Attributes:
        step: after which it was measured.
        loss: nats per token, the mean over ``tokens`` predicted ones.
        accuracy: fraction of tokens with the highest logit.
        unigram_entropy: nats per token of the same tokens, from their own frequencies: the
            lowest possible loss of a model that ignores the context.
        seconds: of the validation.
    """

    step: int
    loss: float
    accuracy: float
    unigram_entropy: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Sampled:
    """Text that the model generated; ``continues``: the prompt is its beginning, no question."""

    prompt: str
    text: str
    continues: bool = True


@dataclass(frozen=True)
class Bytes:
    """One kind of training state: bytes on each rank, and in one unsharded process."""

    kind: str
    per_rank: tuple[int, ...]
    whole: int


@dataclass(frozen=True)
class Placed:
    """Bytes of the training state, measured from its tensors at the end of the last step."""

    rows: tuple[Bytes, ...]


@dataclass(frozen=True)
class Warned:
    """A warning; the run continues."""

    message: str


@dataclass(frozen=True)
class Busy:
    """A slow part has been running for ``seconds``, and continues."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Finished:
    """The run is finished and written; ``seconds`` of all its attempts together."""

    folder: str
    files: tuple[str, ...]
    seconds: float
    steps: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete.

    Attributes:
        step: of the checkpoint; during an asynchronous save later steps may have been taken.
        path: its folder.
        nbytes: of all its files, over all ranks.
        seconds: from the start to the end of saving.
        removed: names of older checkpoints that were removed.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Resumed:
    """The run was resumed.

    Attributes:
        step, sample: steps taken and samples trained on so far; a sample is a row.
        path: of the checkpoint.
        ranks: number of ranks that saved it.
    """

    step: int
    sample: int
    path: str
    ranks: int


@dataclass(frozen=True)
class Stopped:
    """The run stopped on request. ``saved``: it can be resumed from here."""

    step: int
    steps: int
    saved: bool


@dataclass(frozen=True)
class Complete:
    """There is nothing to do: the run in ``folder`` is finished."""

    folder: str
    steps: int


@dataclass(frozen=True)
class Replaced:
    """An earlier run in ``folder`` makes place for this one; ``steps`` if it had finished."""

    folder: str
    steps: int | None


Record = (
    Prepared
    | PreparedSamples
    | Streamed
    | Built
    | Stepped
    | Evaluated
    | Sampled
    | Placed
    | Predicted
    | Exchanged
    | Mirrored
    | Compared
    | Warned
    | Busy
    | Saved
    | Resumed
    | Stopped
    | Complete
    | Replaced
    | Finished
)
Emit = Callable[[Record], None]
