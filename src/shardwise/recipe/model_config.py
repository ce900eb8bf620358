"""A recipe's sections about the model and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, model_serializer, model_validator

from shardwise.errors import ConfigError
from shardwise.recipe.quantization_config import QuantizationConfig
from shardwise.recipe.section import FloatName, Positive, Section

OF_A_FOLDER = ("from", "revision", "dtype", "quantization")


class ModelConfig(Section):
    """A folder of `transformers`, or the shape of the decoder."""

    width: Positive = Field(256, description="hidden size")
    layers: Positive = Field(4, description="number of blocks")
    heads: Positive = Field(4, description="query heads; they divide width")
    kv_heads: Positive = Field(2, description="key and value heads; they divide heads")
    hidden: Positive = Field(704, description="FFN size (SwiGLU), about 8/3 of width")
    tied: bool = Field(True, description="tie output head to embedding")
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    source: str | None = Field(
        None,
        alias="from",
        min_length=1,
        description="a folder or a name on the hub, in place of the keys before",
    )
    revision: str | None = Field(
        None, min_length=1, description="with a name on the hub: a branch, tag or commit"
    )
    dtype: FloatName | None = Field(
        None, description="of the weights that are read; null = as the folder says"
    )
    quantization: QuantizationConfig = Field(
        QuantizationConfig(), description="of the linear layers of a frozen model"
    )

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @model_serializer(mode="wrap")
    def _keys_with_an_effect(self, serialise: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        """Return the keys with an effect: without a folder its own have none, with one others."""
        values = serialise(self)
        return {key: values[key] for key in values if (key in OF_A_FOLDER) is bool(self.source)}

    @model_validator(mode="after")
    def _from_a_folder_or_a_shape(self) -> Self:
        given = {*self.given()}
        if self.source is None and (others := given & {*OF_A_FOLDER}):
            raise ConfigError(
                f"{' and '.join(sorted(others))} are of a folder that is read, and model.from "
                "names none."
            )
        if self.source is not None and (others := given - {"source", *OF_A_FOLDER}):
            raise ConfigError(
                f"model.from reads the model in {self.source}, whose config.json says its shape; "
                f"remove {', '.join(sorted(others))}."
            )
        return self

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.width % self.heads or self.head_size % 2:
            raise ConfigError(
                f"width {self.width} over {self.heads} heads gives heads of size "
                f"{self.width / self.heads:g}; rotary positions need an even whole number."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} kv_heads equally; "
                "kv_heads must divide heads."
            )
        return self


class TokenizerConfig(Section):
    """The tokenizer: one of your own, or one that is trained on the training split."""

    source: str | None = Field(
        None, min_length=1, description="a tokenizer.json, or its folder; null = train one"
    )
    vocabulary: int = Field(
        2048,
        ge=257,
        lt=2**31,
        description="vocabulary size to train, at least 257: 256 bytes, the end token",
    )
    end: str = Field("<|endoftext|>", min_length=1, description="token at the end of a document")
