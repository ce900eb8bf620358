"""The head of a causal language model, which computes a loss in place of logits.

Logits are needed where there is a label, and a model makes them everywhere. Here the model is
called as always, and its head gets all hidden states. In that one call it computes the loss, so
adapters, quantised and tied weights and units are what they are in every call.

A model that changes its logits afterwards would change the loss instead. So this is for classes
with which tests have compared it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwise.api.sharded import Sharded
from shardwise.plan.in_slot import is_in_slot

TESTED = frozenset({
    *("Decoder", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "GemmaForCausalLM", "LlamaForCausalLM"),
    *("MistralForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM"),
    *("Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM"),
})  # fmt: skip
CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def causal_model(model: nn.Module) -> Any:
    """The model of ``transformers`` inside one of ``peft``, or ``model`` itself."""
    of_peft: Any = model
    return of_peft.base_model.model if _is_of_peft(model) else model


def head_of(model: nn.Module) -> Any:
    """The layer that makes logits of hidden states."""
    return causal_model(model).get_output_embeddings()


def why_all_logits(sharded: Sharded) -> str:
    """The reason why a model has to compute the logits of all places; ``""`` if it need not."""
    model: Any = sharded.model
    if sharded.options.compile:
        return "it is compiled"
    adapters = model.peft_config.values() if _is_of_peft(model) else ()
    if any(config.is_prompt_learning for config in adapters):
        return "a learned prompt is in front of its tokens"
    model = causal_model(model)
    name, module = type(model).__name__, type(model).forward.__module__
    if name not in TESTED or not module.startswith(("transformers.models.", "shardwise.")):
        config = getattr(model, "config", None)
        changes = [key for key in CHANGES_LOGITS if getattr(config, key, None) is not None]
        return f"{name} changes them ({changes[0]})" if changes else f"{name} is not a tested class"
    forward = vars(head_of(model)).get("forward")
    is_own = forward is None or is_in_slot(forward)
    return "" if is_own else "the forward of its head is replaced"


def _is_of_peft(model: nn.Module) -> bool:
    return type(model).__module__.startswith("peft.")


@contextmanager
def in_place_of_logits(
    head: nn.Module, compute: Callable[[Tensor], Tensor]
) -> Iterator[list[Tensor]]:
    """Replace the next result of ``head`` by ``compute(hidden)``; it is added to the list."""
    computed: list[Tensor] = []
    replaced = {name: value for name, value in vars(head).items() if name == "forward"}

    def restore() -> None:
        vars(head).pop("forward", None)
        vars(head).update(replaced)

    def forward(hidden: Tensor) -> Tensor:
        restore()
        computed.append(compute(hidden))
        return computed[0]

    head.forward = forward
    try:
        yield computed
    finally:
        restore()
