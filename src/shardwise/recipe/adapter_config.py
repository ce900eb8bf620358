"""A recipe's section about an adapter: LoRA, as peft has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from shardwise.errors import ConfigError
from shardwise.recipe.section import Positive, Section

if TYPE_CHECKING:
    from peft import LoraConfig


class AdapterConfig(Section):
    """LoRA on a frozen model; without a rank the whole model is trained."""

    rank: Positive | None = Field(None, description="rank of the added matrices; null = no adapter")
    alpha: float = Field(16.0, gt=0, description="what is added is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into the added matrices")
    bias: Literal["none", "all", "lora_only"] = Field("none", description="which biases train, too")
    targets: tuple[str, ...] | str = Field(
        "all-linear", description="names of modules, a regular expression, or all-linear"
    )
    rslora: bool = Field(False, description="scale by alpha / the root of rank")
    dora: bool = Field(False, description="train the norm of each row apart from its direction")
    modules_to_save: tuple[str, ...] = Field(
        (), description="names of modules that are trained as a whole and saved with the adapter"
    )
    init: Literal["default", "gaussian", "orthogonal"] = Field(
        "default", description="of the first matrix: Kaiming uniform, or normal; or of both"
    )
    new_tokens: tuple[str, ...] = Field(
        (), description="added to the tokenizer, with embeddings that are trained"
    )

    @model_validator(mode="after")
    def _rank_is_given(self) -> Self:
        if self.rank is None and (given := self.given()):
            raise ConfigError(
                f"rank is null, so there is no adapter, and {', '.join(given)} has no effect; "
                "set adapter.rank to a number such as 8, or remove the section."
            )
        return self

    def config(self) -> LoraConfig | None:
        """Return peft's configuration; ``None`` without an adapter."""
        if self.rank is None:
            return None
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            bias=self.bias,
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
            use_rslora=self.rslora,
            use_dora=self.dora,
            modules_to_save=list(self.modules_to_save) or None,
            init_lora_weights=True if self.init == "default" else self.init,
        )
