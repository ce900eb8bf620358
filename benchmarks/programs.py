"""Small programs as their users write them: what is trained, with its data and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Task
from benchmarks.training import Batch, next_token_loss, token_batch


class Digits(nn.Module):
    """The network of PyTorch's MNIST example, without dropout: losses are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 1, 28, 28]`` → logits, ``[batch, 10]``."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2).flatten(1)
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


class Residual(nn.Module):
    """A norm and a small matrix beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` → the same."""
        out: Tensor = x + F.gelu(self.linear(self.norm(x)))
        return out


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Pixels, or ids → logits."""
        logits: Tensor = self.model(x).logits
        return logits


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 12, "intermediate_size": 256}
    shape |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 4, "num_labels": 10}
    return Logits(ViTForImageClassification(ViTConfig(**shape)))


def llama(layers: int, width: int, vocabulary: int, between: int) -> Any:
    """A Llama with random weights; ``between``: the width inside its feed-forward layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "use_cache": False}
    shape |= {"num_attention_heads": width // 64, "intermediate_size": between}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=vocabulary))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": 192, "n_layer": 6, "n_head": 6, "use_cache": False}
    return Logits(
        GPT2LMHeadModel(
            GPT2Config(**shape, vocab_size=4_096, n_positions=128, bos_token_id=0, eos_token_id=0)
        )
    )


class Translator(nn.Module):
    """A T5 that is taught to repeat what it reads."""

    def __init__(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        shape: dict[str, Any] = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_heads": 4}
        config = T5Config(**shape, num_layers=4, vocab_size=4_096, use_cache=False)
        self.model = T5ForConditionalGeneration(config)

    def forward(self, x: Tensor) -> Tensor:
        """Ids, ``[batch, tokens]`` → logits, ``[batch, tokens, vocabulary]``."""
        logits: Tensor = self.model(input_ids=x, decoder_input_ids=x).logits
        return logits


class Recommender(nn.Module):
    """Embeddings of categories before a small net: nearly all parameters, and no FLOP for them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, 16) for _ in range(8))
        self.net = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 8]`` categories → logits, ``[batch, 10]``."""
        rows = [table(x[:, number]) for number, table in enumerate(self.tables)]
        logits: Tensor = self.net(torch.cat(rows, dim=1))
        return logits


def _adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights="gaussian")
    return Logits(peft.get_peft_model(llama(6, 256, 4_096, 1_024), config))


def _classified(model: nn.Module, pair: Batch) -> Tensor:
    return F.cross_entropy(model(pair[0]), pair[1])


def _images(generator: torch.Generator, rows: int, *shape: int) -> Batch:
    pixels = torch.randn(rows, *shape, generator=generator)
    return pixels, torch.randint(10, (rows,), generator=generator)


def _categories(generator: torch.Generator) -> Batch:
    ids = torch.randint(20_000, (64, 8), generator=generator)
    return ids, torch.randint(10, (64,), generator=generator)


PROGRAMS: dict[str, Task] = {
    "mnist": Task(
        "MNIST's network, 16 images", Digits, lambda g: _images(g, 16, 1, 28, 28), _classified
    ),
    "vit": Task(
        "ViT, 12 layers of width 64, 8 images",
        _vit,
        lambda g: _images(g, 8, 3, 32, 32),
        _classified,
    ),
    "blocks": Task(
        "24 blocks of LayerNorm and Linear(32, 32)",
        lambda: nn.Sequential(*(Residual(32) for _ in range(24)), nn.Linear(32, 10)),
        lambda g: _images(g, 16, 32),
        _classified,
    ),
    "llama": Task(
        "Llama, 6 layers of width 256, 2 × 96 tokens",
        lambda: Logits(llama(6, 256, 4_096, 1_024)),
        lambda g: token_batch(g, 4_096, 2, 96),
        next_token_loss,
    ),
    "vocabulary": Task(
        "Llama, 2 layers of width 512, vocabulary 16,384",
        lambda: Logits(llama(2, 512, 16_384, 2_048)),
        lambda g: token_batch(g, 16_384, 2, 96),
        next_token_loss,
    ),
    "adapters": Task(
        "the first Llama with peft's LoRA on all layers",
        _adapted,
        lambda g: token_batch(g, 4_096, 2, 96),
        next_token_loss,
    ),
    "t5": Task(
        "T5, 4 + 4 layers of width 128",
        Translator,
        lambda g: token_batch(g, 4_096, 2, 64),
        next_token_loss,
    ),
    "gpt2": Task(
        "GPT-2, 6 layers of width 192, tied",
        _gpt2,
        lambda g: token_batch(g, 4_096, 2, 96),
        next_token_loss,
    ),
    "embeddings": Task(
        "8 embeddings of 20,000 × 16 and a small net", Recommender, _categories, _classified
    ),
}
