"""Streams: the same global batches on every number of ranks, from every position."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import datasets
import pytest

from shardwise.errors import ConfigError
from shardwise.recipe.recipe import Recipe
from shardwise.train import tokenizer as bpe
from shardwise.train.corpus import is_held_out
from shardwise.train.streamed_text import open_text
from shardwise.train.streams import Position, StreamBatches, StreamedRows, streams_per_rank
from tests.train.tiny import documents, tiny_recipe

Row = tuple[int, ...]
STREAMED = ("data.max_bytes=3000", "data.streaming.streams=4", "data.streaming.shuffle=5")
TOKENIZER = bpe.load(bpe.train(documents(), 300))


def source_in(folder: Path, *overrides: str) -> StreamedRows:
    recipe = tiny_recipe(folder, *STREAMED, *overrides)
    return StreamedRows(open_text(recipe.data), TOKENIZER, recipe)


@contextmanager
def ranks_of(
    source: StreamedRows, world: int, positions: list[Position] | None = None
) -> Iterator[list[StreamBatches]]:
    with ExitStack() as stack:
        ranks = [StreamBatches(source, rank, world) for rank in range(world)]
        for batches in ranks:
            stack.enter_context(closing(batches))
            batches.start(positions or [])
        yield ranks


def global_batch(ranks: list[StreamBatches]) -> list[Row]:
    """The rows of the next step, in the order of ranks and micro-batches."""
    return [
        tuple(row) for batches in ranks for micro in batches.step(0) for row in micro.ids.tolist()
    ]


def all_positions(ranks: list[StreamBatches]) -> list[Position]:
    """The positions as they come out of a checkpoint."""
    text = json.dumps([position for batches in ranks for position in batches.positions()])
    positions: list[Position] = json.loads(text)
    return positions


def steps_of(source: StreamedRows, world: int, steps: int) -> list[list[Row]]:
    with ranks_of(source, world) as ranks:
        return [global_batch(ranks) for _ in range(steps)]


# --- the same rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_the_global_batch_is_the_same_on_every_number_of_ranks(tmp_path: Path, world: int) -> None:
    source = source_in(tmp_path)
    assert steps_of(source, world, 12) == steps_of(source, 1, 12)


@pytest.mark.parametrize("format_name", ["generator", "jsonl", "parquet"])
def test_from_every_position_the_same_rows_follow_at_any_number_of_ranks(
    tmp_path: Path, format_name: str
) -> None:
    source = source_in(tmp_path, "run.seed=3")
    if format_name != "generator":  # what the hub streams: its own readers, in Arrow's batches
        rows = datasets.Dataset.from_dict({"text": documents()})
        for number in range(4):
            part = rows.shard(4, number)
            file = tmp_path / f"{number}.{format_name}"
            _ = part.to_json(file) if format_name == "jsonl" else part.to_parquet(file)
        files = sorted(map(str, tmp_path.glob(f"*.{format_name}")))
        loader = "json" if format_name == "jsonl" else "parquet"
        dataset = datasets.load_dataset(loader, data_files=files, split="train", streaming=True)
        source = StreamedRows(
            type(source.text)(source.text.config, dataset, ""), TOKENIZER, source.recipe
        )
    steps = steps_of(source, 1, 10)  # more than one epoch
    with ranks_of(source, 2) as ranks:
        for step in range(9):
            assert global_batch(ranks) == steps[step]
            with ranks_of(source, (1, 2, 4)[step % 3], all_positions(ranks)) as resumed:
                assert global_batch(resumed) == steps[step + 1]


def test_each_document_is_trained_on_once_in_an_epoch_by_one_stream(tmp_path: Path) -> None:
    source = source_in(tmp_path, "data.streaming.epochs=1", "batch.rows=4")
    streams: list[list[int]] = [[], [], [], []]
    with ranks_of(source, 4) as ranks:
        while not any(batches.ended() for batches in ranks):
            for stream, row in zip(streams, global_batch(ranks), strict=True):
                stream.extend(row)
    training = {text for text in documents() if not is_held_out(text, 0.2)}
    assert 0 < len(training) < 60
    whole = [
        text
        for stream in streams  # the last document may be cut
        for text in TOKENIZER.decode(stream, skip_special_tokens=False).split(bpe.END)[:-1]
    ]
    assert len(whole) == len(set(whole)) > 0.8 * len(training)
    assert set(whole) <= training


def test_documents_are_shuffled_by_the_seed_and_differently_in_each_epoch(tmp_path: Path) -> None:
    def order(*overrides: str) -> list[list[Row]]:
        return steps_of(source_in(tmp_path, "batch.rows=4", *overrides), 1, 20)

    assert order("run.seed=1") == order("run.seed=1")
    assert order("run.seed=1") != order("run.seed=2")
    in_order = order("run.seed=1", "data.streaming.shuffle=1")
    assert in_order == order("run.seed=2", "data.streaming.shuffle=1") != order("run.seed=1")


# --- shards that are not even --------------------------------------------------------------------


def test_a_stream_that_ends_first_begins_again_and_no_rank_has_a_batch_less(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *STREAMED, "data.streaming.streams=2")
    text = tmp_path / "uneven"
    text.mkdir()
    (text / "long.txt").write_text("".join(documents(60)), "utf-8")
    (text / "short.txt").write_text("".join(documents(2)), "utf-8")
    data = recipe.data.model_copy(update={"source": str(text), "validation": 1e-9})
    recipe = recipe.model_copy(update={"data": data})
    source = StreamedRows(open_text(data), TOKENIZER, recipe)
    with ranks_of(source, 2) as ranks:
        for _ in range(10):
            assert not any(batches.ended() for batches in ranks)
            assert len(global_batch(ranks)) == 12
        epochs = [position["epoch"] for position in all_positions(ranks)]
    assert (min(epochs), max(epochs) > 2) == (0, True)


def test_a_stream_without_text_is_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *STREAMED)
    for file in sorted((tmp_path / "text").iterdir())[3:]:
        file.unlink()
    source = StreamedRows(open_text(recipe.data), TOKENIZER, recipe)
    with (
        ranks_of(source, 1) as ranks,
        pytest.raises(ConfigError, match=r"stream \d of 4 has no text to train on \(3 shards\)"),
    ):
        ranks[0].step(0)


# --- what does not fit ---------------------------------------------------------------------------


def test_ranks_divide_streams(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *STREAMED)
    assert [streams_per_rank(recipe, ranks) for ranks in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ConfigError, match=r"streams is 4, which 3 ranks .*; start 1 or 2 or 4"):
        streams_per_rank(recipe, 3)
    assert streams_per_rank(tiny_recipe(tmp_path), 3) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.max_bytes=9", "data.streaming.streams=5"), "12 and data.streaming.streams is 5"),
        (("data.streaming.streams=4",), "streaming needs data.max_bytes"),
        (("data.streaming.shuffle=4",), "settings and no streams"),
        (("data.source=hf://datasets/a/b",), "set data.streaming.streams"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_recipe(tmp_path, *overrides)


def test_a_recipe_with_streams_survives_being_written(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *STREAMED)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
