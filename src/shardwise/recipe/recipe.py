"""The recipe: everything that defines a run, frozen, complete, without unknown keys.

Conditions on two values are checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, Field, model_validator

from shardwise.errors import ConfigError
from shardwise.recipe.adapter_config import AdapterConfig
from shardwise.recipe.data_config import BatchConfig, DataConfig
from shardwise.recipe.launch_config import LaunchConfig
from shardwise.recipe.logging_config import LoggingConfig
from shardwise.recipe.model_config import ModelConfig, TokenizerConfig
from shardwise.recipe.outer_config import OuterConfig
from shardwise.recipe.section import DeviceName, Epochs, Positive, Section, times
from shardwise.recipe.sharding_config import ShardingConfig

NotNegative = Annotated[int, Field(ge=0)]
_CONSTANT: dict[object, dict[str, Any]] = {  # what these schedules say of other keys
    "constant": {"warmup": 0, "floor": 1.0},
    "constant_with_warmup": {"floor": 1.0},
}


class OptimizerConfig(Section):
    """AdamW with linear warm-up, and decay to a fraction of the peak."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = Field(
        "adamw", description="adamw_8bit, paged_adamw_8bit: bitsandbytes', with moments in 8 bits"
    )
    lr: float = Field(2e-3, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant", "constant_with_warmup"] = Field(
        "cosine", description="after the warm-up; linear, constant, constant_with_warmup"
    )
    warmup: Annotated[int | float, Field(ge=0)] = Field(
        20, description="warm-up steps, from 0 to the peak; below 1, a fraction of all steps"
    )
    floor: float = Field(0.1, ge=0, le=1, description="minimum learning rate, as a fraction of lr")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the two moments")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="on matrices only")
    clip: float = Field(1.0, gt=0, description="clip gradients to this norm")
    ema: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="decay of a moving average of the weights, such as 0.999, which is validated "
        "and saved as the model; null = none",
    )
    loss_scale: float | None = Field(
        None,
        ge=0,
        lt=2.0**128,
        description="initial loss scale; null = 65536 with float16 compute; 0 = none",
    )

    @model_validator(mode="before")
    @classmethod
    def _constant_is_constant(cls, value: object) -> object:
        return (
            _CONSTANT.get(str(value.get("schedule")), {}) | value
            if isinstance(value, dict)
            else value
        )

    @model_validator(mode="after")
    def _the_schedule_reads_what_is_given(self) -> Self:
        for name, wanted in _CONSTANT.get(self.schedule, {}).items():
            if (given := getattr(self, name)) != wanted:
                other = "constant_with_warmup" if name == "warmup" else "cosine or linear"
                raise ConfigError(
                    f"schedule is {self.schedule}, which has no {name}, and {name} is {given}; "
                    f"leave it out, or write schedule: {other}."
                )
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise ConfigError(
                f"warmup is {self.warmup}; write a number of steps, or a fraction below 1."
            )
        return self

    def warmup_steps(self, steps: int) -> int:
        """Return the warm-up steps of a run of ``steps`` steps, at most all but the last one.

        A fraction is rounded up.
        """
        wanted = times(self.warmup, steps) if self.warmup < 1 else int(self.warmup)
        return min(wanted, steps - 1)

    @model_validator(mode="after")
    def _moments_decay(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {list(self.betas)}; both must lie in [0, 1).")
        return self


class CheckpointConfig(Section):
    """Saving and resuming."""

    save_every: NotNegative | Literal["epoch"] = Field(
        100, description="steps between checkpoints, or epoch, and one at the end; 0 = on request"
    )
    save_total_limit: Positive | None = Field(
        2, description="newest ones to keep, with the one it was resumed from; null = all"
    )
    keep_best: bool = Field(
        False, description="save at the lowest validation loss so far, and keep that checkpoint"
    )
    asynchronous: bool = Field(False, description="write while training continues")
    kind: Literal["sharded", "full"] = Field(
        "sharded",
        description="full: rank 0 alone writes, and reads for the others: hosts share no disk",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="URL, such as s3://BUCKET/RUN, to which checkpoints go as well, and from which "
        "the newest comes where run.folder has none",
    )

    @model_validator(mode="after")
    def _what_one_rank_writes_is_written_at_once(self) -> Self:
        if self.kind == "full" and self.asynchronous:
            raise ConfigError(
                "checkpoint.kind is full and checkpoint.asynchronous is true: training would wait "
                "while rank 0 writes everything. Set asynchronous: false, or kind: sharded."
            )
        return self

    resume: str = Field(
        "auto",
        min_length=1,
        description="auto = the newest checkpoint in run.folder; never; or the path of another run "
        "or checkpoint",
    )


class SampleConfig(Section):
    """The text generated at the end."""

    prompt: str | None = Field(
        None, min_length=1, description="beginning of the sample, or question; null = one of ours"
    )
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
    epochs: Epochs | None = Field(
        None, gt=0, description="passes over the training split, in place of run.steps"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, data order and sample")
    log_every: Positive = Field(10, description="steps between log lines")
    plan: bool = Field(
        True, description="plan a step before the first, and compare: shardwise plan"
    )
    throughput_warmup: NotNegative = Field(3, description="first steps that tokens/s leaves out")
    eval_every: NotNegative | Literal["epoch"] = Field(
        0, description="steps between validations, or epoch; 0 = only at the end"
    )
    eval_delay: Epochs = Field(
        0, ge=0, description="no validation before this step; with eval_every epoch: this epoch"
    )
    patience: Positive | None = Field(
        None, description="stop after so many validations without a lower loss; null = never"
    )
    eval_rows: Positive = Field(64, description="rows of the validation split to use")


class Recipe(Section):
    """Everything that defines a run; what ``launch`` says of machines changes no result."""

    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sharding: ShardingConfig = ShardingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    outer: OuterConfig = OuterConfig()
    run: RunConfig = RunConfig()
    logging: LoggingConfig = LoggingConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _a_quantised_base_has_an_adapter(self) -> Self:
        quantization, computed = self.model.quantization, self.sharding.precision.param_dtype
        if quantization.bits is not None and self.adapter.rank is None:
            raise ConfigError(
                f"model.quantization.bits is {quantization.bits} and adapter.rank is null: codes "
                "are not trained, so nothing would be. Set adapter.rank to a number such as 8."
            )
        if quantization.bits == 4 and {quantization.compute, computed} == {"float16", "bfloat16"}:
            raise ConfigError(
                f"sharding.precision computes in {computed}, and model.quantization.compute is "
                f"{quantization.compute}: each layer would cast its input and output, and have the "
                "range of the one and the precision of the other. Set both alike."
            )
        return self

    @model_validator(mode="after")
    def _an_adapter_has_a_base(self) -> Self:
        if self.adapter.rank is not None and self.model.source is None:
            raise ConfigError(
                f"adapter.rank is {self.adapter.rank} and model.from is null: an adapter is "
                "trained on a model that is read and stays as it is. Name it in model.from."
            )
        if self.adapter.new_tokens and self.tokenizer.source is not None:
            raise ConfigError(
                f"adapter.new_tokens are {', '.join(self.adapter.new_tokens)}, which are added to "
                f"the tokenizer of model.from, and tokenizer.source is {self.tokenizer.source}. "
                "Leave tokenizer.source out."
            )
        return self

    @model_validator(mode="after")
    def _a_tokenizer_that_is_trained_has_its_own_end(self) -> Self:
        given, end = self.tokenizer, TokenizerConfig().end
        if given.end != end and given.source is None and self.model.source is None:
            raise ConfigError(
                f"tokenizer.end is {given.end} and tokenizer.source is null: the tokenizer that is "
                f"trained then has the end token {end}. Leave tokenizer.end out, or name a "
                "tokenizer that has it in tokenizer.source."
            )
        return self

    @model_validator(mode="after")
    def _what_is_trained_computes_as_its_base(self) -> Self:
        precision, adapter = self.sharding.precision, self.adapter
        whole = bool(adapter.modules_to_save) or adapter.bias != "none"
        if whole and precision.stored_dtype is not None and precision.param_dtype is None:
            raise ConfigError(
                f"sharding.precision.stored_dtype is {precision.stored_dtype}, param_dtype is null "
                f"and adapter.{'modules_to_save' if adapter.modules_to_save else 'bias'} trains "
                "parts of the base: they would compute in another dtype than what is frozen. Set "
                f"param_dtype, such as {precision.stored_dtype}."
            )
        return self

    @model_validator(mode="after")
    def _epochs_have_a_length(self) -> Self:
        in_epochs = {
            "run.epochs": self.run.epochs and f"{self.run.epochs:g}",
            "run.eval_every": self.run.eval_every == "epoch" and "epoch",
            "checkpoint.save_every": self.checkpoint.save_every == "epoch" and "epoch",
        }
        for name, value in in_epochs.items():
            if value and self.data.streaming.streams:
                raise ConfigError(
                    f"{name} is {value}, and how long streamed text is, is not known; set "
                    "data.streaming.epochs, and lengths in steps."
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
    def _there_is_more_than_one_validation(self) -> Self:
        readers = {
            "checkpoint.keep_best": self.checkpoint.keep_best,
            "run.patience": self.run.patience,
            "run.eval_delay": self.run.eval_delay,
        }
        for name, value in readers.items():
            if value and not self.run.eval_every:
                raise ConfigError(
                    f"{name} is {value} and run.eval_every is 0, so there would be one validation "
                    "and nothing to choose from; set run.eval_every to a number of steps, or epoch."
                )
        return self


class Key(NamedTuple):
    """One key such as ``optimizer.lr``, its default, its description and the words it may have."""

    name: str
    default: object
    sentence: str
    values: tuple[str, ...] = ()


def keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Key]:
    """Every key of a recipe, in order of definition."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            key, values = prefix + (field.alias or name), tuple(_words(kind))
            yield Key(key, field.default, field.description or "", values)


def _words(kind: Any) -> Iterator[str]:
    """Return the words of a ``Literal``, wherever it is in an annotation."""
    for part in get_args(kind):
        yield from [part] if isinstance(part, str) else _words(part)
