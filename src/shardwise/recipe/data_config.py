"""A recipe's sections about text and batches."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, Self

from pydantic import Field, model_validator

from shardwise.errors import ConfigError, nearest
from shardwise.recipe.section import Positive, Section

HUB = "hf://datasets/"
BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
BUILDERS |= {".arrow": "arrow", ".csv": "csv"}
"""What reads a file of samples, by the end of its name."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "input", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
}
"""The columns of each format of samples."""
OF_SAMPLES = ("split", "columns", "packing", "loss_on", "validation_source")
OF_TEXT = ("field", "max_bytes")


class StreamingConfig(Section):
    """Reading text while the model trains."""

    streams: Positive | None = Field(
        None,
        description="parts in which text is read during training; ranks divide them, and they "
        "divide batch.rows; null = read all of it before",
    )
    shuffle: Positive = Field(1000, description="documents that are shuffled together; 1 = none")
    epochs: Positive | None = Field(None, description="passes over the text; null = run.steps")


class DataConfig(Section):
    """The text or the samples to train on."""

    format: Literal["text", "completion", "alpaca", "messages", "sharegpt"] = Field(
        "text",
        description="text = documents; or samples, of which the answers are trained on: "
        "completion, alpaca, messages, sharegpt",
    )
    source: str = Field(
        "stdlib",
        min_length=1,
        description="'stdlib' (Python's own source), a file, a folder of text, JSONL or parquet, "
        "or with streaming a data set of the hub: hf://datasets/OWNER/NAME/CONFIG_OR_FILE",
    )
    field: str = Field("text", min_length=1, description="the text's field in JSONL and parquet")
    max_bytes: Positive | None = Field(
        None,
        description="stop reading after this much text; null = read all; with streaming, the text "
        "that is read before, for the tokenizer and validation",
    )
    split: str = Field("train", min_length=1, description="of a data set of samples")
    columns: dict[str, str] = Field(
        {}, description="of samples: the format's column → its name in the data, if another"
    )
    validation: float = Field(
        0.03,
        gt=0,
        lt=1,
        description="fraction held out: documents by a hash of their text, the first samples",
    )
    validation_source: str | None = Field(
        None, min_length=1, description="samples for validation, in place of data.validation"
    )
    context: int = Field(
        256, ge=2, description="tokens in a row; documents are packed into rows, samples are cut"
    )
    packing: bool | Literal["concatenate"] = Field(
        True,
        description="several samples in a row, without attention between them; false = one in a "
        "row; concatenate = one stream, cut into rows, in which attention crosses samples",
    )
    loss_on: Literal["assistant", "all"] = Field(
        "assistant", description="of samples: answers, or prompts as well"
    )
    streaming: StreamingConfig = Field(StreamingConfig(), description="read while training")

    @model_validator(mode="after")
    def _keys_fit_the_format(self) -> Self:
        of_others = OF_SAMPLES if self.format == "text" else OF_TEXT
        fields = type(self).model_fields
        for name in of_others:
            if getattr(self, name) != fields[name].default:
                raise ConfigError(
                    f"format is {self.format}, for which data.{name} means nothing; leave it out, "
                    f"or set data.format {'alpaca, for example' if name in OF_SAMPLES else 'text'}."
                )
        if self.format != "text" and self.source == "stdlib":
            raise ConfigError(
                f"format is {self.format} and source is stdlib, which is text; name the samples "
                f"with data.source: a file or folder of JSONL or parquet, or {HUB}OWNER/NAME."
            )
        is_local = not self.source.startswith(HUB)
        is_file = PurePath(self.source.removesuffix(".gz")).suffix in BUILDERS
        if is_local and is_file and self.split != fields["split"].default:
            raise ConfigError(
                f"split is {self.split!r}, and source {self.source} is one file, all rows of which "
                "are read; leave data.split out, or name a folder or data set with that split."
            )
        for name in self.columns:
            if name not in COLUMNS[self.format]:
                known = ", ".join(COLUMNS[self.format])
                raise ConfigError(
                    f"columns has {name!r}, which {self.format} does not read; its columns are "
                    f"{known}. Did you mean {nearest(name, COLUMNS[self.format])[0]}?"
                )
        return self

    @model_validator(mode="after")
    def _streaming_is_complete(self) -> Self:
        streams = self.streaming.streams
        if self.format == "text" and streams is None and self.source.startswith(HUB):
            raise ConfigError(
                f"source {self.source} is read while the model trains; set "
                "data.streaming.streams, such as 16."
            )
        if streams is None and self.streaming.given():
            raise ConfigError("streaming has settings and no streams; set streaming.streams.")
        if streams is None:
            return self
        if self.format == "text" and self.max_bytes is None:
            raise ConfigError(
                "streaming needs data.max_bytes: so much text is read before training, for the "
                "tokenizer and the validation rows; 20_000_000 is enough for both."
            )
        if self.format != "text" and self.validation_source is None:
            raise ConfigError(
                "streaming reads samples while the model trains, so none can be set aside before; "
                "name those for validation with data.validation_source."
            )
        if self.format != "text" and self.packing == "concatenate":
            raise ConfigError(
                "packing is concatenate, and streamed samples are not; set data.packing true or "
                "false, or leave data.streaming out."
            )
        return self


class BatchConfig(Section):
    """Batch sizes: rows = micro × accumulation × ranks."""

    rows: Positive = Field(16, description="global batch size, over all ranks")
    micro: Positive = Field(8, description="micro-batch size: rows in one forward pass of one rank")
    logits: Literal["labelled", "all"] = Field(
        "labelled",
        description="where the head runs: at places with a target, if the model's class "
        "is tested with that; or at all",
    )
