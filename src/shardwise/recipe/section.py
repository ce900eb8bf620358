"""Base of a recipe's sections, and the types of its values.

A plain dictionary would train at the default rate when a key is misspelt. Here every value has one
place, one type and one description.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardwise.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Epochs = Annotated[float, PlainSerializer(lambda n: int(n) if n == int(n) else n)]  # 3, not 3.0

SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _dtype_name(value: object) -> object:
    """``bf16`` and ``torch.bfloat16`` are ``bfloat16``."""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    return SHORT.get(name, name) if isinstance(name, str) else name


DtypeName = Annotated[
    Literal["float64", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"],
    BeforeValidator(_dtype_name),
]

FloatName = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"], BeforeValidator(_dtype_name)
]

DeviceName = Annotated[
    Literal["cpu", "cuda", "xpu", "hpu"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]

_SECRET = re.compile(r"://[^/\s@]*:[^/\s@]+@|\bhf_\w{20,}")  # of a URL's user; of the hub


def times(factor: float, number: int | Fraction) -> int:
    """Return their product, rounded up; the factor is the decimal number that it is written as.

    A float is a little more or less: 1.1 * 100 is 110.00000000000001.
    """
    return math.ceil(Fraction(str(factor)) * number)


class Section(BaseModel):
    """Base of all sections: no unknown keys, no changes, no infinities."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_by_name=True,
        serialize_by_alias=True,  # a key may be a word that Python keeps for itself
    )

    def given(self) -> list[str]:
        """Names of the keys that differ from their default."""
        fields = type(self).model_fields
        return [name for name, field in fields.items() if getattr(self, name) != field.default]

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value  # in YAML, a section whose lines are all comments

    @field_validator("*", mode="before")
    @classmethod
    def _no_secret_is_written(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str) and _SECRET.search(value):
            raise ConfigError(
                f"{info.field_name} holds what looks like a secret, and the recipe is written into "
                "the run's folder; put it into an environment variable, such as HF_TOKEN."
            )
        return value

    @field_validator("folder", "source", "validation_source", "resume", check_fields=False)
    @classmethod
    def _home_is_there(cls, value: str | None, info: ValidationInfo) -> str | None:
        try:
            Path(value or "").expanduser()
        except RuntimeError:
            user = str(value).partition("/")[0]
            raise ConfigError(
                f"{info.field_name} is {value}, and {user} has no home folder on this machine; "
                f"write the whole path, or ./{value} for a folder of that name."
            ) from None
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_not_a_number(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and bool not in (field.annotation, *get_args(field.annotation)):
            raise ConfigError(
                f"this is {value}: YAML reads yes, no, on, off, true and false as booleans; "
                "write a value, or put the word in quotes."
            )
        return value
