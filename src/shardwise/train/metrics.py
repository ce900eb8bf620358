"""What a run has to say: records.

The loop emits records and prints nothing; a terminal, a file and a picture each take
what they need. The ordinary way, printing from inside the loop, has to ask in every line which
rank it is on and whether somebody is looking.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "Built",
    "Busy",
    "Bytes",
    "Complete",
    "Emit",
    "Evaluated",
    "Finished",
    "LeftOut",
    "Placed",
    "Prepared",
    "Record",
    "Resumed",
    "Sampled",
    "Saved",
    "Stepped",
    "Stopped",
    "Warned",
    "count",
]


def count(number: int, noun: str) -> str:
    """``1 file``, ``1,200 files``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True)
class LeftOut:
    """What of the text could not be used, for one reason.

    Attributes:
        reason: in a few words, such as ``not UTF-8``.
        files, rows: how many. Of a file that is read as text, a row is a line.
        places: the first few.
    """

    reason: str
    files: int = 0
    rows: int = 0
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = ((self.files, "file"), (self.rows, "row"))
        counts = " and ".join(count(number, noun) for number, noun in pairs if number)
        more = ", …" * (self.files + self.rows > 1)
        return f"{counts}, {self.reason} ({self.places[0]}{more})"


@dataclass(frozen=True)
class Prepared:
    """The data is ready.

    Attributes:
        source: where the text came from.
        files, nbytes: what was read.
        left_out: what of the files could not be used.
        capped: there is more text than was read.
        documents: in the training and the validation split.
        tokens: the same, end tokens included.
        rows: the same, of ``context`` tokens; what did not fill a row was dropped.
        dropped: tokens dropped at the end of each split.
        vocabulary: tokens that the tokenizer knows.
        cached: the tokenizer was there already.
        seconds: all of it.
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
    cached: bool
    seconds: float


@dataclass(frozen=True)
class Built:
    """The model is built and sharded, and the shape of a step is known.

    Attributes:
        parameters: of the whole model.
        strategy, ranks: how it is sharded.
        rows, micro, accumulation: rows = micro × accumulation × ranks.
        context: tokens in a row.
        steps, epochs: how long it will train; epochs = passes over the training split.
    """

    parameters: int
    strategy: str
    ranks: int
    rows: int
    micro: int
    accumulation: int
    context: int
    steps: int
    epochs: float


@dataclass(frozen=True)
class Stepped:
    """One optimizer step.

    Attributes:
        step, steps: this one (the first is 1), and how many there will be.
        loss: mean over all tokens of the global batch, nats per token.
        lr, grad_norm: as used in this step; the norm is that before clipping.
        tokens_per_second: over all ranks, in recent steps; validation and saving do not count.
        memory: bytes in use by the rank that uses most.
        seconds_left: at that pace, with as much validation and saving as so far.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory: int
    seconds_left: float


@dataclass(frozen=True)
class Evaluated:
    """The validation rows, after a step.

    Attributes:
        step: after which it was measured.
        loss: nats per token, over exactly ``tokens`` tokens.
        accuracy: share of tokens that were the likeliest.
        unigram_entropy: nats per token of the same tokens, from their own frequencies: the
            lowest loss that is possible without looking at what came before.
        tokens: that were predicted.
        seconds: it took.
    """

    step: int
    loss: float
    accuracy: float
    unigram_entropy: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.inf if self.loss > 700 else math.exp(self.loss)


@dataclass(frozen=True)
class Sampled:
    """Text that the model wrote."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Bytes:
    """One kind of training state: bytes on each rank, and in one unsharded process."""

    kind: str
    per_rank: tuple[int, ...]
    whole: int


@dataclass(frozen=True)
class Placed:
    """Where the training state lies, counted from its tensors at the end of the last step."""

    rows: tuple[Bytes, ...]


@dataclass(frozen=True)
class Warned:
    """Something that did not stop the run, and should be known."""

    message: str


@dataclass(frozen=True)
class Busy:
    """Something has been under way for ``seconds``, and goes on."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Finished:
    """The run is over and everything is written; ``seconds`` since it was started or resumed."""

    folder: str
    files: tuple[str, ...]
    seconds: float
    steps: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete.

    Attributes:
        step: after which it stands; in the background, later ones may have been taken since.
        path: its folder.
        nbytes: of all its files, over all ranks.
        seconds: from the beginning to the end of saving.
        removed: names of older checkpoints that went.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Resumed:
    """The run goes on.

    Attributes:
        step, sample: taken, and trained on, so far; a sample is a row, in the order of training.
        path: of the checkpoint.
        ranks: that saved it.
    """

    step: int
    sample: int
    path: str
    ranks: int


@dataclass(frozen=True)
class Stopped:
    """The run was asked to stop. ``saved``: and can go on from here."""

    step: int
    steps: int
    saved: bool


@dataclass(frozen=True)
class Complete:
    """There is nothing to do: the run in ``folder`` has taken all its steps before."""

    folder: str
    steps: int


Record = (
    Prepared
    | Built
    | Stepped
    | Evaluated
    | Sampled
    | Placed
    | Warned
    | Busy
    | Saved
    | Resumed
    | Stopped
    | Complete
    | Finished
)
Emit = Callable[[Record], None]
