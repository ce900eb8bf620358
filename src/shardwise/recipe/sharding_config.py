"""A recipe's section about sharding: the arguments of ``shardwise.shard``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from shardwise.config.strategies import placement_of
from shardwise.errors import ConfigError
from shardwise.recipe.section import SHORT, DtypeName, Positive, Section


class PrefetchConfig(Section):
    """Number of units gathered ahead; the fields of ``shardwise.Prefetch``."""

    forward: int | None = Field(
        None, ge=0, description="bytes; null = the largest unit (zero1: all units), 0 = off"
    )
    backward: int | None = Field(None, ge=0, description="bytes; null = the largest unit, 0 = off")
    when: Literal["pre", "post"] = Field("pre", description="backward: before or after gradients")
    limit: Positive | None = Field(None, description="gathers in flight; null = no limit")


class PrecisionConfig(Section):
    """Dtypes; the fields of ``shardwise.Precision``. null keeps each tensor's dtype."""

    stored_dtype: DtypeName | None = Field(None, description="shards and optimizer state")
    param_dtype: DtypeName | None = Field(None, description="gathered parameters and inputs")
    reduce_dtype: DtypeName | None = Field(None, description="gradients in collectives")
    sum_dtype: DtypeName | None = Field(None, description="sums of gradients")
    buffer_dtype: DtypeName | None = Field(None, description="floating-point buffers")
    output_dtype: DtypeName | None = Field(None, description="outputs of the model")
    average: Literal["postdivide", "predivide", "sqrt", "avg"] | None = Field(
        None, description="how the mean over ranks is formed"
    )
    cast_forward_inputs: bool = Field(True, description="cast inputs of units to param_dtype")
    keep_in_fp32_modules: tuple[str, ...] = Field((), description="modules, such as norm*")

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``shardwise.Precision``."""
        import torch  # a recipe is read and validated without it

        others = {"average", "cast_forward_inputs", "keep_in_fp32_modules"}
        dtypes = self.model_dump(exclude=others)
        values = {name: value and getattr(torch, value) for name, value in dtypes.items()}
        return {**values, **{name: getattr(self, name) for name in others}}


def _no_switches(value: object) -> object:
    """Replace the list of an earlier version by its word; anything else stays."""
    if isinstance(value, list):
        mode = "everything" if "parameters" in value else "optimizer" if value else "none"
        raise ValueError(f"it is one word, and no list; write offload: {mode}")
    return value


def _short_precision(value: object) -> object:
    """``fp32``, ``bf16`` and ``fp16`` as a table of dtypes."""
    if not isinstance(value, str):
        return value
    if value not in ("fp32", "bf16", "fp16"):
        raise ConfigError(
            f"{value!r} is none of fp32, bf16 and fp16; for anything else write a table of dtypes, "
            "such as {param_dtype: bfloat16, reduce_dtype: float32}."
        )
    return {} if value == "fp32" else {"param_dtype": SHORT[value]}


def _whole_number(value: object) -> object:
    """``--sharding.wrap 100000`` arrives as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _switch(value: object) -> object:
    """``--sharding.compile true`` arrives as text, and names no backend."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _known_strategy(value: str) -> str:
    return placement_of(value).name


class ShardingConfig(Section):
    """The arguments of ``shardwise.shard``."""

    strategy: Annotated[str, AfterValidator(_known_strategy)] = Field(
        "full_shard",
        description="no_shard, zero1, shard_grad_op, full_shard; with copies on other hosts "
        "hybrid_shard, hybrid_shard_zero2, hybrid_full",
    )
    mesh: tuple[Positive, Positive] | None = Field(
        None, description="a hybrid's copies and the ranks of each; null = a copy on each host"
    )
    wrap: Annotated[str | list[str] | Positive, BeforeValidator(_whole_number)] = Field(
        "auto",
        description="units: auto, module classes such as [Block], or a minimum parameter count",
    )
    bucketing: Literal["block", "layer", "none"] = Field("block", description="size of a bucket")
    activation_checkpointing: bool | Positive = Field(
        False, description="recompute blocks in backward; a number n = every n-th block"
    )
    activation_offload: bool = Field(False, description="and their inputs wait in host memory")
    compile: Annotated[bool | str, BeforeValidator(_switch)] = Field(
        False, description="units, by the device's backend or this one"
    )
    buffers: Literal["local", "broadcast", "average"] = Field(
        "local", description="of ranks: their own, rank 0's, or their mean, after each step"
    )
    unsharded: Annotated[
        str | list[str] | Annotated[int, Field(ge=0)] | None, BeforeValidator(_whole_number)
    ] = Field(
        None,
        description="units that stay gathered: names, classes, or bytes, frozen ones first; "
        "null = 16 MiB",
    )
    sync_each_micro_batch: bool = Field(
        False, description="reduce gradients after each micro-batch, not once per step"
    )
    offload: Annotated[
        Literal["none", "optimizer", "everything"], BeforeValidator(_no_switches)
    ] = Field("none", description="kept in host memory: optimizer state, or parameters, too")
    prefetch: PrefetchConfig = Field(PrefetchConfig(), description="how far ahead")
    precision: Annotated[PrecisionConfig, BeforeValidator(_short_precision)] = Field(
        PrecisionConfig(), description="fp32, bf16 or fp16 (param_dtype only), or field by field"
    )
