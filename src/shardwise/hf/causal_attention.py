"""Attention that is causal by its kernel's own flag: a mask is made by looking at values.

A model on the meta device has no values, so with the masks of ``transformers`` its forward would
stop. Padding, packed samples and sliding windows are left out: every token attends to all before.
"""

from __future__ import annotations

from typing import Any

NAME = "causal_by_the_kernel"


def make_causal(model: Any) -> None:
    """Make the attention of a model of ``transformers`` need no mask; on the meta device only."""
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        """Attention as torch's kernel computes it; others cap its scores in the same kernel."""
        kwargs.pop("softcap", None)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register(NAME, attend)
    for module in model.modules():  # parts have a configuration of their own
        config: Any = getattr(module, "config", None)
        # A class that does not look attention up asks for "sdpa" by name, and calls it itself.
        looks_up = getattr(module, "_supports_attention_backend", False)
        if looks_up or getattr(config, "_attn_implementation", "sdpa") != "sdpa":
            config._attn_implementation = NAME  # the setter looks whether a kernel is installed
        if isinstance(module, PreTrainedModel):  # a warning that looks at values
            module.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[method-assign]
