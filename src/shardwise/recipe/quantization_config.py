"""A recipe's section about a base in 4 or 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from shardwise.errors import ConfigError
from shardwise.recipe.section import Section

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

Bits = Annotated[
    Literal[4, 8], BeforeValidator(lambda value: {"4": 4, "8": 8}.get(str(value), value))
]
OF_4_BITS = ("type", "double", "compute")


class QuantizationConfig(Section):
    """Codes of bitsandbytes in place of the weights of a model that is read and stays frozen."""

    bits: Bits | None = Field(None, description="4 or 8; null = as the folder says")
    type: Literal["nf4", "fp4"] = Field("nf4", description="of 4 bits: nf4 or fp4")
    double: bool = Field(True, description="of 4 bits: quantise the scales, too")
    compute: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="of 4 bits: what these layers compute in"
    )
    skip: tuple[str, ...] | None = Field(
        None, description="layers that are not quantised; null = the head and tied ones"
    )

    @model_validator(mode="after")
    def _its_keys_have_an_effect(self) -> Self:
        given = {*self.given()}
        unread = {None: given, 8: given & {*OF_4_BITS}, 4: set[str]()}[self.bits]
        if unread:
            raise ConfigError(
                f"bits is {'null' if self.bits is None else self.bits}, so "
                f"{', '.join(sorted(unread))} has no effect; set model.quantization.bits: 4, or "
                "leave it out."
            )
        return self

    def config(self) -> BitsAndBytesConfig | None:
        """Return transformers' configuration; ``None`` where nothing is quantised."""
        if self.bits is None:
            return None
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=self.bits == 4,
            load_in_8bit=self.bits == 8,
            bnb_4bit_quant_type=self.type,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=self.compute,
            llm_int8_skip_modules=None if self.skip is None else list(self.skip),
        )
