"""Decoders of published results by name: their sizes.

Layers, width, heads, heads of keys and values, feed-forward, vocabulary: as in the config.json of
each, or in the publication.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int  # of the feed-forward network
    vocabulary: int
    head_size: int
    gated: bool = True  # SwiGLU and RMSNorm with rotary positions; else GELU and LayerNorm
    tied: bool = False

    @property
    def block_parameters(self) -> int:
        """Parameters of the products of one block."""
        attended = self.head_size * (self.heads + self.kv_heads)
        return self.width * (2 * attended + (2 + self.gated) * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters but norms and positions."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * self.block_parameters + tables


def _llama(*sizes: int, head_size: int = 0, tied: bool = False) -> Shape:
    layers, width, heads, kv_heads, hidden, vocabulary = sizes
    size = head_size or width // heads
    return Shape(layers, width, heads, kv_heads, hidden, vocabulary, size, tied=tied)


def gpt(*sizes: int, kv_heads: int = 0, tied: bool = True) -> Shape:
    """A decoder of GPT's kind, whose feed-forward network is four times as wide as it is.

    Args:
        sizes: layers, width, heads, and the vocabulary if it is not that of MPT.
    """
    layers, width, heads, vocabulary = (*sizes, 50_368)[:4]
    whole = (layers, width, heads, kv_heads or heads, 4 * width, vocabulary, width // heads)
    return Shape(*whole, gated=False, tied=tied)


SHAPES = {
    r"(mpt|mosaicgpt)-125m": gpt(12, 768, 12),
    r"(mpt|mosaicgpt)-350m": gpt(24, 1024, 16),
    r"(mpt|mosaicgpt)-760m": gpt(24, 1536, 12),
    r"(mpt|mosaicgpt)-1b": gpt(24, 2048, 16),
    r"(mpt|mosaicgpt)-3b": gpt(32, 2560, 20),
    r"(mpt|mosaicgpt)-7b": gpt(32, 4096, 32),
    r"(mpt|mosaicgpt)-13b": gpt(40, 5120, 40),
    r"(mpt|mosaicgpt)-30b": gpt(48, 7168, 56),
    r"(mpt|mosaicgpt)-70b": gpt(80, 8192, 64),
    r"gpt-?2-medium": gpt(24, 1024, 16, 50_257),
    r"gpt-?2-large": gpt(36, 1280, 20, 50_257),
    r"gpt-?2-xl": gpt(48, 1600, 25, 50_257),
    r"gpt-?2-1\.6b": gpt(48, 1600, 25, 50_257),
    r"gpt-?2?-1\.5b": gpt(48, 1600, 25, 50_257),
    r"gpt-?2-(774|762)m": gpt(36, 1280, 20, 50_257),
    r"gpt-?[23]?-(345|35\d)m": gpt(24, 1024, 16, 50_257),
    r"gpt-?[23]?-12[4-6]m": gpt(12, 768, 12, 50_257),
    r"gpt-?2(-small|$)": gpt(12, 768, 12, 50_257),
    # Brown et al. 2020, table 2.1
    r"gpt-?3?-760m": gpt(24, 1536, 16, 50_257),
    r"gpt-?3?-1\.3b": gpt(24, 2048, 16, 50_257),
    r"gpt-?3?-2\.7b": gpt(32, 2560, 32, 50_257),
    r"gpt-?3?-6\.7b": gpt(32, 4096, 32, 50_257),
    r"gpt-?3?-13b": gpt(40, 5120, 40, 50_257),
    r"gpt-?3?-5b": gpt(24, 4096, 32, 51_200),
    r"gpt-?3?-175b": gpt(96, 12288, 96, 50_257),
    # Narayanan et al. 2021, table 1; Korthikanti et al. 2022, table 3
    r"gpt-?3?-1\.7b": gpt(24, 2304, 24, 51_200),
    r"gpt-?3?-3\.6b": gpt(30, 3072, 32, 51_200),
    r"gpt-?3?-7\.5b": gpt(36, 4096, 32, 51_200),
    r"gpt-?3?-18\.4b": gpt(40, 6144, 48, 51_200),
    r"gpt-?3?-22b": gpt(48, 6144, 64, 51_200),
    r"gpt-?3?-39(\.1)?b": gpt(48, 8192, 64, 51_200),
    r"gpt-?neo-125m": gpt(12, 768, 12, 50_257),
    r"gpt-?neo-1\.3b": gpt(24, 2048, 16, 50_257),
    r"gpt-?neo-2\.7b": gpt(32, 2560, 20, 50_257),
    r"codegen-350m": gpt(20, 1024, 16, 51_200, tied=False),
    r"codegen-2b": gpt(32, 2560, 32, 51_200, tied=False),
    r"codegen-6b": gpt(33, 4096, 16, 51_200, tied=False),
    r"codegen-16b": gpt(34, 6144, 24, 51_200, tied=False),
    r"starcoder(base)?(-15(\.5)?b|$)": gpt(40, 6144, 48, 49_152, kv_heads=1),
    r"starcoder(base)?-1b": gpt(24, 2048, 16, 49_152, kv_heads=1),
    r"starcoder(base)?-3b": gpt(36, 2816, 22, 49_152, kv_heads=1),
    r"starcoder(base)?-7b": gpt(42, 4096, 32, 49_152, kv_heads=1),
    r"starcoder-?2-3b": gpt(30, 3072, 24, 49_152, kv_heads=2),
    r"starcoder-?2-7b": gpt(32, 4608, 36, 49_152, kv_heads=4, tied=False),
    r"starcoder-?2-15b": gpt(40, 6144, 48, 49_152, kv_heads=4, tied=False),
    r"stablelm.*alpha-3b": gpt(16, 4096, 32, 50_688, tied=False),
    r"stablelm.*alpha-7b": gpt(16, 6144, 48, 50_432, tied=False),
    r"galactica-1\.3b": gpt(24, 2048, 32, 50_000),
    r"galactica-6\.7b": gpt(32, 4096, 32, 50_000),
    r"galactica-30b": gpt(48, 7168, 56, 50_000),
    r"redpajama.*-3b": gpt(32, 2560, 32, 50_432, tied=False),
    r"redpajama.*-7b": gpt(32, 4096, 32, 50_432, tied=False),
    r"cerebras-gpt-111m": gpt(10, 768, 12, 50_257),
    r"cerebras-gpt-256m": gpt(14, 1088, 17, 50_257),
    r"cerebras-gpt-590m": gpt(18, 1536, 12, 50_257),
    r"gpt-1t": gpt(128, 25600, 160, 50_257),
    r"llama-?3(\.\d)?-405b": _llama(126, 16384, 128, 8, 53248, 128_256),
    r"llama-?3(\.\d)?-70b": _llama(80, 8192, 64, 8, 28672, 128_256),
    r"llama-?3(\.\d)?-8b": _llama(32, 4096, 32, 8, 14336, 128_256),
    r"llama-?3\.2-3b": _llama(28, 3072, 24, 8, 8192, 128_256, tied=True),
    r"llama-?3\.2-1b": _llama(16, 2048, 32, 8, 8192, 128_256, tied=True),
    r"(code)?llama-?(2-)?34b": _llama(48, 8192, 64, 8, 22016, 32_000),
    r"llama-3b": _llama(26, 3200, 32, 32, 8640, 32_000),  # OpenLLaMA
    r"llama-?(1-)?(30|33)b": _llama(60, 6656, 52, 52, 17920, 32_000),
    r"llama-?(1-)?65b": _llama(80, 8192, 64, 64, 22016, 32_000),
    r"(llama-?2?|codellama)-?70b": _llama(80, 8192, 64, 8, 28672, 32_000),
    r"llama-?(2-?)?13b": _llama(40, 5120, 40, 40, 13824, 32_000),
    r"llama-?(2-?)?7b": _llama(32, 4096, 32, 32, 11008, 32_000),
    r"tinyllama": _llama(22, 2048, 32, 4, 5632, 32_000),
    r"mistral-7b": _llama(32, 4096, 32, 8, 14336, 32_000),
    r"yi-(1\.5-)?34b": _llama(60, 7168, 56, 8, 20480, 64_000),
    r"smollm.*1\.7b": _llama(24, 2048, 32, 32, 8192, 49_152, tied=True),
    r"qwen1\.5-0\.5b": _llama(24, 1024, 16, 16, 2816, 151_936, tied=True),
    r"qwen(1\.5)?-1\.8b": _llama(24, 2048, 16, 16, 5504, 151_936),
    r"qwen1\.5-4b": _llama(40, 2560, 20, 20, 6912, 151_936),
    r"qwen(1\.5)?-7b": _llama(32, 4096, 32, 32, 11008, 151_936),
    r"qwen(1\.5)?-14b": _llama(40, 5120, 40, 40, 13696, 152_064),
    r"qwen1\.5-32b": _llama(64, 5120, 40, 8, 27392, 152_064),
    r"qwen(1\.5)?-72b": _llama(80, 8192, 64, 64, 24576, 152_064),
    r"qwen2(\.5)?-0\.5b": _llama(24, 896, 14, 2, 4864, 151_936, tied=True),
    r"qwen2(\.5)?-1\.5b": _llama(28, 1536, 12, 2, 8960, 151_936, tied=True),
    r"qwen2(\.5)?-3b": _llama(36, 2048, 16, 2, 11008, 151_936, tied=True),
    r"qwen2(\.5)?-7b": _llama(28, 3584, 28, 4, 18944, 152_064),
    r"qwen2(\.5)?-14b": _llama(48, 5120, 40, 8, 13824, 152_064),
    r"qwen2(\.5)?-32b": _llama(64, 5120, 40, 8, 27648, 152_064),
    r"qwen2(\.5)?-72b": _llama(80, 8192, 64, 8, 29568, 152_064),
    r"qwen3-0\.6b": _llama(28, 1024, 16, 8, 3072, 151_936, head_size=128, tied=True),
    r"qwen3-1\.7b": _llama(28, 2048, 16, 8, 6144, 151_936, head_size=128, tied=True),
    r"qwen3-4b": _llama(36, 2560, 32, 8, 9728, 151_936, head_size=128, tied=True),
    r"qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151_936, head_size=128),
    r"qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151_936, head_size=128),
    r"qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151_936, head_size=128),
    r"gpt-?neox-20b": gpt(44, 6144, 64, 50_432, tied=False),
    r"gpt-?j-6b": gpt(28, 4096, 16, 50_400, tied=False),
    r"pythia-70m": gpt(6, 512, 8, 50_304, tied=False),
    r"pythia-160m": gpt(12, 768, 12, 50_304, tied=False),
    r"pythia-410m": gpt(24, 1024, 16, 50_304, tied=False),
    r"pythia-1b": gpt(16, 2048, 8, 50_304, tied=False),
    r"pythia-1\.4b": gpt(24, 2048, 16, 50_304, tied=False),
    r"pythia-(2\.8|3)b": gpt(32, 2560, 32, 50_688, tied=False),
    r"pythia-(6\.9|7)b": gpt(32, 4096, 32, 50_688, tied=False),
    r"pythia-12b": gpt(36, 5120, 40, 50_688, tied=False),
    r"opt-125m": gpt(12, 768, 12, 50_272),
    r"opt-350m": gpt(24, 1024, 16, 50_272),
    r"opt-1\.3b": gpt(24, 2048, 32, 50_272),
    r"opt-2\.7b": gpt(32, 2560, 32, 50_272),
    r"opt-6\.7b": gpt(32, 4096, 32, 50_272),
    r"opt-13b": gpt(40, 5120, 40, 50_272),
    r"opt-30b": gpt(48, 7168, 56, 50_272),
    r"opt-66b": gpt(64, 9216, 72, 50_272),
    r"opt-175b": gpt(96, 12288, 96, 50_272),
    r"bloom-560m": gpt(24, 1024, 16, 250_880),
    r"bloom-1(b1|\.1b)": gpt(24, 1536, 16, 250_880),
    r"bloom-1(b7|\.7b)": gpt(24, 2048, 16, 250_880),
    r"bloom-3b": gpt(30, 2560, 32, 250_880),
    r"bloom-7\.?1?b1?": gpt(30, 4096, 32, 250_880),
    r"bloom-176b": gpt(70, 14336, 112, 250_880),
    r"falcon-7b": gpt(32, 4544, 71, 65_024, kv_heads=1),
    r"falcon-40b": gpt(60, 8192, 128, 65_024, kv_heads=8),
    r"falcon-180b": gpt(80, 14848, 232, 65_024, kv_heads=8),
    r"falcon-?3-1b": _llama(18, 2048, 8, 4, 8192, 131_072, head_size=256),
    r"falcon-?3-3b": _llama(22, 3072, 12, 4, 9216, 131_072, head_size=256),
    r"falcon-?3-7b": _llama(28, 3072, 12, 4, 23040, 131_072, head_size=256),
    r"falcon-?3-10b": _llama(40, 3072, 12, 4, 23040, 131_072, head_size=256),
    r"phi-1[.-]5": gpt(24, 2048, 32, 51_200, tied=False),
    r"phi-2": gpt(32, 2560, 32, 51_200, tied=False),
    r"phi-3-mini": _llama(32, 3072, 32, 32, 8192, 32_064),
    r"phi-3-medium": _llama(40, 5120, 40, 10, 17920, 32_064),
    r"phi-4-mini": _llama(32, 3072, 24, 8, 8192, 200_064, tied=True),
    r"phi-4(-14b|$)": _llama(40, 5120, 40, 10, 17920, 100_352),
    r"gemma-?3-1b": _llama(26, 1152, 4, 1, 6912, 262_144, head_size=256, tied=True),
    r"gemma-?3-4b": _llama(34, 2560, 8, 4, 10240, 262_208, head_size=256, tied=True),
    r"gemma-?3-12b": _llama(48, 3840, 16, 8, 15360, 262_208, head_size=256, tied=True),
    r"gemma-?3-27b": _llama(62, 5376, 32, 16, 21504, 262_208, head_size=128, tied=True),
    r"gemma-2b": _llama(18, 2048, 8, 1, 16384, 256_000, head_size=256, tied=True),
    r"gemma-7b": _llama(28, 3072, 16, 16, 24576, 256_000, head_size=256, tied=True),
    r"gemma-?2-2b": _llama(26, 2304, 8, 4, 9216, 256_000, head_size=256, tied=True),
    r"gemma-?2-9b": _llama(42, 3584, 16, 8, 14336, 256_000, head_size=256, tied=True),
    r"gemma-?2-27b": _llama(46, 4608, 32, 16, 36864, 256_000, head_size=128, tied=True),
    r"olmo-1b": _llama(16, 2048, 16, 16, 8192, 50_304, tied=True),
    r"olmo-7b": _llama(32, 4096, 32, 32, 11008, 50_304),
    r"olmo-?2-7b": _llama(32, 4096, 32, 32, 11008, 100_352),
    r"olmo-?2-13b": _llama(40, 5120, 40, 40, 13824, 100_352),
    r"olmo-?2-1b": _llama(16, 2048, 16, 16, 8192, 100_352),
    r"olmo-?2-32b": _llama(64, 5120, 40, 8, 27648, 100_352),
    r"internlm2-1\.8b": _llama(24, 2048, 16, 8, 8192, 92_544),
    r"internlm2-7b": _llama(32, 4096, 32, 8, 14336, 92_544),
    r"internlm2-20b": _llama(48, 6144, 48, 8, 16384, 92_544),
    r"internlm-7b": _llama(32, 4096, 32, 32, 11008, 103_168),
    r"internlm-20b": _llama(60, 5120, 40, 40, 13824, 103_168),
    r"baichuan-?2-7b": _llama(32, 4096, 32, 32, 11008, 125_696),
    r"baichuan-?2-13b": _llama(40, 5120, 40, 40, 13696, 125_696),
    r"baichuan-13b": _llama(40, 5120, 40, 40, 13696, 64_000),
    r"chatglm-?[23]-6b": _llama(28, 4096, 32, 2, 13696, 65_024),
    r"glm-?4-9b": _llama(40, 4096, 32, 2, 13696, 151_552),
    r"stablelm(-2)?-1\.6b": _llama(24, 2048, 32, 32, 5632, 100_352),
    r"stablelm-3b": _llama(32, 2560, 32, 32, 6912, 50_304),
    r"command-r(-35b|$)": _llama(40, 8192, 64, 64, 22528, 256_000, tied=True),
    r"aquila2?-7b": _llama(32, 4096, 32, 32, 11008, 143_973),
    r"nemotron(-?4)?-8b": gpt(32, 4096, 32, 256_000, tied=False),
    r"nemotron(-?4)?-15b": gpt(32, 6144, 48, 256_000, kv_heads=8, tied=False),
    r"aya-23-8b": _llama(32, 4096, 32, 8, 14336, 256_000, tied=True),
    r"exaone-3(\.\d)?-(7\.8|8)b": _llama(32, 4096, 32, 8, 14336, 102_400),
    r"solar-10\.7b": _llama(48, 4096, 32, 8, 14336, 32_000),
    r"minicpm-2b": _llama(40, 2304, 36, 36, 5760, 122_753, tied=True),
    r"baichuan-7b": _llama(32, 4096, 32, 32, 11008, 64_000),
    r"yi-(1\.5-)?6b": _llama(32, 4096, 32, 4, 11008, 64_000),
    r"yi-(1\.5-)?9b": _llama(48, 4096, 32, 4, 11008, 64_000),
    r"deepseek-1\.3b": _llama(24, 2048, 16, 16, 5504, 32_256),
    r"deepseek-6\.7b": _llama(32, 4096, 32, 32, 11008, 32_256),
    r"deepseek-33b": _llama(62, 7168, 56, 8, 19200, 32_256),
    r"deepseek-(llm-)?7b": _llama(30, 4096, 32, 32, 11008, 102_400),
    r"deepseek-(llm-)?67b": _llama(95, 8192, 64, 8, 22016, 102_400),
    r"mistral-large": _llama(88, 12288, 96, 8, 28672, 32_768, head_size=128),
    r"ministral-8b": _llama(36, 4096, 32, 8, 12288, 131_072),
    r"mistral-nemo": _llama(40, 5120, 32, 8, 14336, 131_072, head_size=128),
    r"mistral-small": _llama(40, 5120, 32, 8, 32768, 131_072, head_size=128),
    r"granite-3(\.\d)?-2b": _llama(40, 2048, 32, 8, 8192, 49_155, tied=True),
    r"granite-3(\.\d)?-8b": _llama(40, 4096, 32, 8, 12800, 49_155, tied=True),
    r"smollm2?-135m": _llama(30, 576, 9, 3, 1536, 49_152, tied=True),
    r"smollm2?-360m": _llama(32, 960, 15, 5, 2560, 49_152, tied=True),
    r"smollm3-3b": _llama(36, 2048, 16, 4, 11008, 128_256, tied=True),
    # github.com/AI-Hypercomputer/maxtext: global_parameter_scale of 16 to 128
    r"maxtext-16b": _llama(32, 4096, 64, 64, 28672, 32_000, head_size=128),
    r"maxtext-32b": _llama(32, 8192, 64, 64, 28672, 32_000, head_size=128),
    r"maxtext-64b": _llama(64, 8192, 64, 64, 28672, 32_000, head_size=128),
    r"maxtext-128b": _llama(64, 8192, 128, 128, 57344, 32_000, head_size=128),
}

MIXTURES = (
    r"moe|\dx\d|-a\d+(\.\d+)?b|mixtral|gpt-oss|deepseek-(v[23]|r1(?!-distill))|dbrx|grok"
    r"|intellect-3|llama-?4|kimi-k2|jamba|arctic"
)
OTHERS = (
    r"bert(a|-|$)|\b(flan-|m|code|by)?t5\b|\bul2\b|\bbart\b|\bvit\b|clip|whisper|swin|resnet"
    r"|diffusion|sdxl|flux|\bdit\b|wan2|mamba|rwkv|\bvl\b|vision|llava|pixtral|internvl"
)
WITHOUT = r"-(meta|base|hf|instruct|chat|it|coder|math|dense|nemotron|v\d(\.\d)?|\d{4})(?=-|$)"
ALIKE = {  # names of models of the same shape
    r"deepseek-r1-distill-qwen": "qwen2.5",
    r"deepseek-r1-distill-llama": "llama-3.1",
    r"vicuna|alpaca|wizardlm|guanaco|koala|open-?llama": "llama",
    r"zephyr": "mistral",
    r"bloomz": "bloom",
    r"dolly": "pythia",
    r"internlm2(\.5|-5)": "internlm2",
    r"phi-3\.5": "phi-3",
    r"gpt-?3-xl": "gpt-3",
}


def plain_name(name: str) -> str:
    """The name in small letters, with dashes, and without what tells no shape."""
    plain = _dashed(name)
    for pattern, other in ALIKE.items():
        plain = re.sub(pattern, other, plain)
    return re.sub(WITHOUT, "", plain)


def _dashed(name: str) -> str:
    return re.sub(r"[ _/()]+", "-", name.lower()).strip("-")


def shape_named(name: str) -> Shape | None:
    """The shape of a known decoder; ``None`` for others."""
    plain = plain_name(name)
    of_name = (s for pattern, s in SHAPES.items() if re.search(pattern + r"(?![\d.])", plain))
    return next(of_name, None)


def no_decoder(name: str) -> str | None:
    """Why a model of this name is no dense causal decoder of text, if it is none."""
    if re.search(MIXTURES, _dashed(name)):
        return "a mixture of experts"
    return "no causal decoder of text alone" if re.search(OTHERS, _dashed(name)) else None


def few(shape: Shape, layers: int) -> Shape:
    """The same with so many layers."""
    return replace(shape, layers=layers)
