"""``shardwise data show``: a row of the training split, token by token.

What is trained on is within ⟦ ⟧ and green; the rest is only read. A mistake in a mask, a template
or an end token does not stop a run, and shows here.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from shardwise.cli.format_records import format_record
from shardwise.cli.tables import table
from shardwise.comm.transports.local import LocalComm
from shardwise.errors import ConfigError
from shardwise.recipe.data_config import DataConfig
from shardwise.train.batches import IGNORED, RowSource
from shardwise.train.data import Data, prepare
from shardwise.train.folder import Folder
from shardwise.train.model_folder import with_tokenizer
from shardwise.train.packed import SampleRows
from shardwise.train.streams import StreamedRows

if TYPE_CHECKING:
    from shardwise.recipe.recipe import Recipe

TEMPLATES = {
    "text": "none, documents one after the other",
    "completion": "prompt, then completion",
    "alpaca": "that of Stanford Alpaca",
    "messages": "the chat template of the tokenizer",
    "sharegpt": "the chat template of the tokenizer",
}


class Token(NamedTuple):
    """One place of a row; ``trained``: its prediction is in the loss."""

    place: int
    segment: int
    position: int
    id: int
    trained: bool


def run_data_show(recipe: Recipe, number: int, rehearse: bool = False) -> None:
    """Print row ``number`` of the training split, counted from 0; that of a rehearsal, if asked.

    Raises:
        ConfigError: there is no such row, or text is streamed.
    """
    if rehearse:
        from shardwise.train.rehearsal import Rehearsal

        with TemporaryDirectory() as folder:
            _show(Rehearsal(recipe, Path(folder)).small(), number)
    else:
        _show(recipe, number)


def _show(recipe: Recipe, number: int) -> None:
    recipe = with_tokenizer(recipe)
    data = prepare(recipe, LocalComm(), Folder(Path(recipe.run.folder).expanduser()))
    rows, console = data.training, Console(highlight=False, soft_wrap=True)
    if isinstance(rows, StreamedRows):
        raise ConfigError(
            "rows of streamed text exist only while a model trains; leave data.streaming out."
        )
    if not 0 <= number < len(rows):
        raise ConfigError(f"there is no row {number}; the training split has 0 to {len(rows) - 1}.")
    assert data.report is not None
    for line in format_record(data.report):
        console.print(Text(line))
    tokens, end = row_tokens(rows, number), recipe.tokenizer.end
    for text in _head(recipe.data, tokens, rows, number, end):
        console.print(text)
    for _, sample in groupby(tokens, key=lambda token: token.segment):
        _print_sample(list(sample), data, end, console)


def row_tokens(rows: RowSource, number: int) -> list[Token]:
    """The tokens of row ``number``, without its padding."""
    batch = rows.take(np.array([number]))
    ids, targets = batch.ids[0].tolist(), batch.targets[0].tolist()
    length = len(ids)
    if isinstance(rows, SampleRows):
        length = int(rows.examples.lengths[rows.groups[number]].sum())
    segments = [0] * length if batch.segments is None else batch.segments[0].tolist()
    positions = range(length) if batch.positions is None else batch.positions[0].tolist()
    trained = [False, *(target != IGNORED for target in targets)]
    columns = range(length), segments, positions, ids, trained
    return [Token(*values) for values in zip(*columns, strict=False)][:length]


def _head(
    config: DataConfig, tokens: list[Token], rows: RowSource, number: int, end: str
) -> list[Text]:
    trained = rows.targets(np.array([number]))
    after = trained - sum(token.trained for token in tokens)
    places = "⟦…⟧ and the first token of the next row" if after else "⟦…⟧"
    loss_on = "all" if config.format == "text" else config.loss_on
    return [
        Text(""),
        Text(f"row {number} of {len(rows)}: {len(tokens)} tokens, {trained} trained on ({places})"),
        Text(f"template  {TEMPLATES[config.format]}; end token {end}; loss on {loss_on}"),
    ]


def _print_sample(sample: list[Token], data: Data, end: str, console: Console) -> None:
    """The text of one sample, and a line for each of its tokens."""
    text = Text()
    for trained, run in groupby(sample, key=lambda token: token.trained):
        decoded = data.tokenizer.decode([token.id for token in run], skip_special_tokens=False)
        text.append(f"⟦{decoded}⟧" if trained else decoded, style="green" if trained else "dim")
    console.print("", text, "", sep="\n")
    last = data.tokenizer.token_to_id(end)
    cells = [
        (
            repr(data.tokenizer.decode([token.id], skip_special_tokens=False)),
            *map(str, (token.place, token.segment, token.position, token.id)),
            " ".join(["trained"] * token.trained + ["end"] * (token.id == last)),
        )
        for token in sample
    ]
    head = ("token", "place", "segment", "position", "id", "")
    title, rule, *lines = table(cells, head)
    console.print(Text(f"{title}\n{rule}"))
    for token, line in zip(sample, lines, strict=True):
        console.print(Text(line, style="green" if token.trained else "dim"))
