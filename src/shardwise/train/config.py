"""The classes that a recipe is read into: frozen, complete, without unknown keys.

A plain dictionary would train at the default rate when a key is misspelt. Here every value has one
place, one type and one description, and conditions on two values are checked before any process
starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardwise.errors import ConfigError
from shardwise.strategies import placement_of

__all__ = [
    "HUB",
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "Key",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "PrefetchConfig",
    "Recipe",
    "RunConfig",
    "SampleConfig",
    "ShardingConfig",
    "StreamingConfig",
    "TokenizerConfig",
    "keys",
]

Positive = Annotated[int, Field(gt=0)]
Offloaded = Literal["parameters", "gradients", "optimizer"]
HUB = "hf://datasets/"
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _dtype_name(value: object) -> object:
    """``bf16`` and ``torch.bfloat16`` are ``bfloat16``."""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    return SHORT.get(name, name) if isinstance(name, str) else name


DtypeName = Annotated[
    Literal["float64", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"],
    BeforeValidator(_dtype_name),
]
DeviceName = Annotated[
    Literal["cpu", "cuda", "xpu", "hpu"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]


class Section(BaseModel):
    """Base of all sections: no unknown keys, no changes, no infinities."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value  # in YAML, a section whose lines are all comments

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_not_a_number(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation not in (bool, bool | str):
            raise ConfigError(
                f"this is {value}: YAML reads yes, no, on, off, true and false as booleans; "
                "write a value, or put the word in quotes."
            )
        return value


class ModelConfig(Section):
    """The shape of the decoder."""

    width: Positive = Field(256, description="hidden size")
    layers: Positive = Field(4, description="number of blocks")
    heads: Positive = Field(4, description="query heads; they divide width")
    kv_heads: Positive = Field(2, description="key and value heads; they divide heads")
    hidden: Positive = Field(704, description="FFN size (SwiGLU), about 8/3 of width")
    tied: bool = Field(True, description="tie output head to embedding")
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def parameters(self, vocabulary: int) -> int:
        """Parameters of the decoder: embedding, blocks, last norm, and the head if not tied."""
        attention = 2 * self.width * (self.width + self.kv_heads * self.head_size)
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        tables = vocabulary * self.width * (1 if self.tied else 2)
        return tables + self.layers * block + self.width

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
        2048, ge=257, description="vocabulary size to train, at least 257: 256 bytes, the end token"
    )
    end: str = Field("<|endoftext|>", min_length=1, description="token at the end of a document")


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


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay to a fraction of the peak."""

    lr: float = Field(2e-3, gt=0, description="peak learning rate")
    warmup: int = Field(20, ge=0, description="warm-up steps, from 0 to the peak")
    floor: float = Field(0.1, ge=0, le=1, description="minimum learning rate, as a fraction of lr")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the two moments")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="on matrices only")
    clip: float = Field(1.0, gt=0, description="clip gradients to this norm")
    loss_scale: float | None = Field(
        None, ge=0, description="initial loss scale; null = 65536 with float16 compute; 0 = none"
    )

    @model_validator(mode="after")
    def _moments_decay(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {list(self.betas)}; both must lie in [0, 1).")
        return self


class PrefetchConfig(Section):
    """How far ahead units are gathered; the fields of ``shardwise.Prefetch``."""

    forward: int | None = Field(None, ge=0, description="bytes; null = the largest unit, 0 = off")
    backward: int | None = Field(None, ge=0, description="bytes; null = the largest unit, 0 = off")
    when: Literal["pre", "post"] = Field("pre", description="backward: before or after gradients")
    limit: Positive | None = Field(None, description="gathers in flight; null = no limit")


class PrecisionConfig(Section):
    """Dtypes; the fields of ``shardwise.Precision``. null keeps each tensor's dtype."""

    stored: DtypeName | None = Field(None, description="shards and optimizer state")
    compute: DtypeName | None = Field(None, description="gathered parameters and inputs")
    wire: DtypeName | None = Field(None, description="gradients in collectives")
    gather_wire: DtypeName | None = Field(None, description="int8 or float8_e4m3fn: parameters too")
    sum: DtypeName | None = Field(None, description="sums of gradients")
    buffers: DtypeName | None = Field(None, description="floating-point buffers")
    output: DtypeName | None = Field(None, description="outputs of the model")
    average: Literal["postdivide", "predivide", "sqrt", "avg"] | None = Field(
        None, description="how the mean over ranks is formed"
    )
    keep: tuple[str, ...] = Field((), description="modules that stay in float32, such as norm*")

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``shardwise.Precision``."""
        import torch  # a recipe is read and validated without it

        dtypes = self.model_dump(exclude={"average", "keep"})
        values = {name: value and getattr(torch, value) for name, value in dtypes.items()}
        return {**values, "average": self.average, "keep": self.keep}


def _short_precision(value: object) -> object:
    """``fp32``, ``bf16`` and ``fp16`` as a table of dtypes."""
    if not isinstance(value, str):
        return value
    if value not in ("fp32", "bf16", "fp16"):
        raise ConfigError(
            f"{value!r} is none of fp32, bf16 and fp16; for anything else write a table of dtypes, "
            "such as {compute: bfloat16, wire: float32}."
        )
    return {} if value == "fp32" else {"compute": SHORT[value]}


def _whole_number(value: object) -> object:
    """``--sharding.wrap 100000`` arrives as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


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
    activation_checkpointing: bool = Field(False, description="recompute blocks in backward")
    activation_offload: bool = Field(False, description="and their inputs wait in host memory")
    compile: bool | str = Field(False, description="units, by the device's backend or this one")
    offload: tuple[Offloaded, ...] = Field((), description="kept in host memory")
    prefetch: PrefetchConfig = Field(PrefetchConfig(), description="how far ahead")
    precision: Annotated[PrecisionConfig, BeforeValidator(_short_precision)] = Field(
        PrecisionConfig(), description="fp32, bf16 or fp16 (compute only), or field by field"
    )


class CheckpointConfig(Section):
    """Saving and resuming."""

    save_every: int = Field(
        100, ge=0, description="steps between checkpoints, and one at the end; 0 = on request"
    )
    save_total_limit: Positive | None = Field(2, description="newest ones to keep; null = all")
    keep_best: bool = Field(
        False, description="save at the lowest validation loss so far, and keep that checkpoint"
    )
    asynchronous: bool = Field(False, description="write while training continues")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto = the newest checkpoint in run.folder; never; or the path of another run "
        "or checkpoint",
    )


class SampleConfig(Section):
    """The text generated at the end."""

    prompt: str = Field("def ", min_length=1, description="beginning of the sample")
    tokens: int = Field(96, ge=0, description="length of the sample; 0 = no sample")
    temperature: float = Field(0.0, ge=0, description="0 = greedy decoding")


class RunConfig(Section):
    """Length of the run, intervals, and the folder."""

    folder: str = Field("runs/train", min_length=1, description="folder of all output")
    overwrite: bool = Field(
        False, description="delete an earlier run, checkpoints included; an interrupted one resumes"
    )
    device: DeviceName | None = Field(
        None, description="cpu, cuda, xpu, hpu; null = what is available"
    )
    steps: Positive = Field(200, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, data order and sample")
    log_every: Positive = Field(10, description="steps between log lines")
    eval_every: int = Field(0, ge=0, description="steps between validations; 0 = only at the end")
    eval_rows: Positive = Field(64, description="rows of the validation split to use")


class Recipe(Section):
    """Everything that defines a run, except the number of processes."""

    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sharding: ShardingConfig = ShardingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _rates_rise_before_they_fall(self) -> Self:
        if self.optimizer.warmup >= self.run.steps and self.optimizer.warmup > 0:
            raise ConfigError(
                f"optimizer.warmup is {self.optimizer.warmup} and run.steps is {self.run.steps}: "
                "the learning rate would never reach its peak; use fewer warm-up steps."
            )
        return self

    @model_validator(mode="after")
    def _every_stream_gives_as_many_rows(self) -> Self:
        rows, streams = self.batch.rows, self.data.streaming.streams
        if streams and rows % streams:
            raise ConfigError(
                f"batch.rows is {rows} and data.streaming.streams is {streams}: a step takes as "
                "many rows from each stream, so streams must divide rows."
            )
        return self

    @model_validator(mode="after")
    def _the_best_is_looked_for(self) -> Self:
        if self.checkpoint.keep_best and not self.run.eval_every:
            raise ConfigError(
                "checkpoint.keep_best is true and run.eval_every is 0, so there would be one "
                "validation and nothing to choose from; set run.eval_every to a number of steps."
            )
        return self


class Key(NamedTuple):
    """One key such as ``optimizer.lr``, its default and its description."""

    name: str
    default: object
    sentence: str


def keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Key]:
    """Every key of a recipe, in order of definition."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield Key(prefix + name, field.default, field.description or "")
