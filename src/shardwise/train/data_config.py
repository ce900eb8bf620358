"""A recipe's sections about text and batches."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shardwise.errors import ConfigError
from shardwise.train.section import Positive, Section

HUB = "hf://datasets/"


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
    """The text to train on."""

    source: str = Field(
        "stdlib",
        min_length=1,
        description="'stdlib' (Python's own source), a file, a folder of text, JSONL or parquet, "
        "or with streaming a data set of the hub: hf://datasets/OWNER/NAME/CONFIG",
    )
    field: str = Field("text", min_length=1, description="the text's field in JSONL and parquet")
    max_bytes: Positive | None = Field(
        None,
        description="stop reading after this much text; null = read all; with streaming, the text "
        "that is read before, for the tokenizer and validation",
    )
    validation: float = Field(0.03, gt=0, lt=1, description="fraction of documents held out")
    context: int = Field(256, ge=2, description="tokens in a row; documents are packed into rows")
    streaming: StreamingConfig = Field(StreamingConfig(), description="read while training")

    @model_validator(mode="after")
    def _streaming_is_complete(self) -> Self:
        if self.streaming.streams is None:
            if self.source.startswith(HUB):
                raise ConfigError(
                    f"source {self.source} is read while the model trains; set "
                    "data.streaming.streams, such as 16."
                )
            if self.streaming != StreamingConfig():
                raise ConfigError("streaming has settings and no streams; set streaming.streams.")
        elif self.max_bytes is None:
            raise ConfigError(
                "streaming needs data.max_bytes: so much text is read before training, for the "
                "tokenizer and the validation rows; 20_000_000 is enough for both."
            )
        return self


class BatchConfig(Section):
    """Batch sizes: rows = micro × accumulation × ranks."""

    rows: Positive = Field(16, description="global batch size, over all ranks")
    micro: Positive = Field(8, description="micro-batch size: rows in one forward pass of one rank")
