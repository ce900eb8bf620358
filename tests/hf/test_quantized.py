"""4- and 8-bit bases: the bits are those of bitsandbytes, and training is that of one process.

The truth is bitsandbytes' own layers in one process, with adapters of peft around them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.hf.adapters import save_adapter
from shardwise.hf.preparation import check_compute, prepare, quantized_layers
from shardwise.hf.quantized import adopt, quantize, quantize_codes, share_scales
from shardwise.memory.shard_tensor.adapter_order import ORDER
from shardwise.plan.bytes import table_of
from shardwise.plan.draw import draw
from tests.copies import clones, equal, error_text, seeded
from tests.fake import FakeComm
from tests.hf.folders import SHAPE
from tests.hf.quantising import quantising_one_at_a_time, updating_alone
from tests.nets import tokens
from tests.ranks import run_threads
from tests.steps import STRATEGIES, assert_gradients, averaged

one_at_a_time = quantising_one_at_a_time
pytestmark = [
    pytest.mark.usefixtures("one_at_a_time"),
    # peft asks transformers for what this one has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
]

bnb: Any = pytest.importorskip("bitsandbytes")
functional = bnb.functional

LINEARS = ["q_proj", "v_proj", "down_proj"]


def bits(form: str = "nf4", double: bool = True, **options: Any) -> Any:
    if form == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True, **options)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=form,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
        **options,
    )


def llama(**options: Any) -> Any:
    shape = SHAPE | {"vocab_size": 61, "hidden_size": 40, "intermediate_size": 72}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | options))


def by_bitsandbytes(config: Any) -> Any:
    """The same model as transformers quantises it: bitsandbytes' own layers, whole."""
    model = seeded(llama)
    for name, module in [*model.named_modules()]:
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        shape = module.in_features, module.out_features
        if config.load_in_8bit:
            layer = bnb.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False)
            weight: Any = bnb.nn.Int8Params(module.weight.data, requires_grad=False)
        else:
            form, double = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
            layer = bnb.nn.Linear4bit(*shape, False, config.bnb_4bit_compute_dtype, double, form)
            weight = bnb.nn.Params4bit(
                module.weight.data, quant_type=form, compress_statistics=double
            )
        layer.weight = weight.to("cpu")
        model.set_submodule(name, layer)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    return model


def ours(config: Any, seed: int = 0) -> Any:
    model = seeded(llama, seed)
    quantize(model, config)
    return model


def adapted(base: Any, seed: int = 1) -> Any:
    peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=3, target_modules=LINEARS, init_lora_weights=False)
    return peft.get_peft_model(base, config)


def step(model: Any, batch: tuple[Tensor, ...]) -> None:
    model(input_ids=batch[0], labels=batch[0], use_cache=False).loss.backward()


def batch(number: int, rank: int) -> tuple[Tensor]:
    return (tokens(10 * number + rank, (2, 7), 61),)


def logits(model: Any, number: int) -> Tensor:
    out: Tensor = model(input_ids=batch(number, 0)[0], use_cache=False).logits
    return out.detach().clone()


@cache
def one_process(form: str, double: bool, world: int, steps: int = 2) -> list[Any]:
    """Gradients of each step of bitsandbytes' layers in one process, and the adapters after it."""
    model, done = adapted(by_bitsandbytes(bits(form, double))), []
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    for number in range(steps):
        gradients = averaged(model, step, [batch(number, rank) for rank in range(world)])
        for name, param in trained.items():
            param.grad = gradients[name]
        optimizer.step()
        done.append((gradients, clones({n: p.detach() for n, p in trained.items()})))
    return done


CASES = [
    ("nf4", True, 2, "full_shard", {}),
    ("fp4", False, 3, "full_shard", {}),
    ("int8", False, 2, "full_shard", {}),
    pytest.param("nf4", True, 2, "zero1", {}, marks=pytest.mark.prove),
    pytest.param("nf4", True, 1, "full_shard", {}, marks=pytest.mark.prove),
    ("nf4", True, 3, "full_shard", {"activation_checkpointing": True}),
]


@pytest.mark.parametrize(("form", "double", "world", "strategy", "options"), CASES)
def test_training_adapters_on_shards_is_that_of_one_process(
    form: str, double: bool, world: int, strategy: str, options: dict[str, Any]
) -> None:
    expected = one_process(form, double, world)
    models = [adapted(ours(bits(form, double))) for _ in range(world)]

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sharded = sw.shard(model, strategy, comm=comm, **options)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for number, (gradients, after) in enumerate(expected):
            step(model, batch(number, comm.rank))
            assert_gradients(model, {n: gradients.get(n) for n, _ in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            states = sharded.state_dict()
            assert all(torch.equal(states[name], value) for name, value in after.items())

    run_threads(world, rank)


# --- each rank's own blocks -------------------------------------------------------------------


def whole(values: Tensor, config: Any) -> tuple[Tensor, Any]:
    """Codes and state of a whole weight, as bitsandbytes quantises it."""
    if config.load_in_8bit:
        codes, absmax, _ = functional.int8_vectorwise_quant(values.half())
        return codes, absmax
    form, double = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
    quantised: tuple[Tensor, Any] = functional.quantize_4bit(
        values, quant_type=form, compress_statistics=double
    )
    return quantised


class Odd(nn.Module):
    """Weights whose blocks fit no number of ranks; one has an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 451, dtype=torch.bfloat16), nn.Linear(451, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(self.up(x).float()))
        return out


def zeros(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.zero_()


def shards_of(comm: Comm, values: dict[str, Tensor], config: Any, **options: Any) -> sw.Sharded:
    """An ``Odd`` from the meta device, whose ranks have read and quantised their own blocks."""
    with torch.device("meta"):
        model = Odd()
    quantize(model, config)
    sharded = sw.shard(model, comm=comm, init=zeros, **options)
    for name, layer in quantized_layers(model).items():
        ranges: list[tuple[int, int]] = []

        def read(first: int, last: int) -> Tensor:
            ranges.append((first, last))  # noqa: B023
            return values[f"{name}.weight"].reshape(-1)[first:last]  # noqa: B023

        share_scales(layer, quantize_codes(layer, read))
        ((first, last),) = ranges
        own = layer.weight.numel() * layer.block // layer.nbytes_of(layer.block)
        is_cut = "bucketing" in options or config.load_in_8bit  # inside blocks
        assert last - first <= own + is_cut * 2 * layer.block
    return sharded


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("form", "double"), [("nf4", True), ("nf4", False), ("fp4", True), ("int8", False)]
)
@pytest.mark.parametrize("options", [{}, {"bucketing": "none"}, {"strategy": "no_shard"}])
def test_each_rank_quantises_its_own_blocks_to_the_bits_of_the_whole(
    world: int, form: str, double: bool, options: dict[str, Any]
) -> None:
    """Also where a boundary cuts a block: then both ranks quantise it."""
    config, values = bits(form, double), seeded(Odd).state_dict()

    def rank(comm: Comm) -> dict[str, Any]:
        return shards_of(comm, values, config, **options).state_dict()

    for states in run_threads(world, rank):
        for name in ("up", "down"):
            codes, state = whole(values[f"{name}.weight"], config)
            assert torch.equal(states[f"{name}.weight"].view(-1), codes.view(torch.uint8).view(-1))
            scales = states[f"{name}.scales"]
            if not double:
                absmax = state if form == "int8" else state.absmax
                assert torch.equal(scales, absmax.view(torch.uint8))
                continue
            floats = torch.cat([state.offset.view(1), state.state2.absmax])
            assert torch.equal(scales, torch.cat([floats.view(torch.uint8), state.absmax]))


def test_four_bit_codes_are_cut_between_blocks() -> None:
    for world in range(1, 10):
        with torch.device("meta"):
            model = Odd()
        quantize(model, bits())
        sharded = sw.shard(model, comm=FakeComm(0, world), init=zeros)
        slots = [(b.layout, slot) for b in sharded.buckets for slot in b.layout.slots]
        cut = [(layout, slot) for layout, slot in slots if slot.shape[1:] == (1,)]
        starts = [layout.owned(s, rank)[0] for layout, s in cut for rank in layout.owners(s)]
        assert len(starts) >= world
        assert not any(start % 32 for start in starts)


# --- around the layers ------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "double"), [("fp4", True), ("nf4", False), ("int8", False)])
def test_what_transformers_has_quantised_is_adopted_with_its_bits(form: str, double: bool) -> None:
    config = bits(form, double)
    plain, adopted, quantised = by_bitsandbytes(config), by_bitsandbytes(config), ours(config)
    table = adopt(adopted)
    assert table.layers == 14
    for name, param in quantised.named_parameters():
        assert torch.equal(adopted.get_parameter(name), param), name
    adapted_twice = [adapted(plain), adapted(adopted)]  # peft knows both for what they are
    kinds = [{type(m).__name__ for m in model.modules()} for model in adapted_twice]
    assert all(("Linear8bitLt" if form == "int8" else "Linear4bit") in kind for kind in kinds)
    assert torch.equal(*(logits(model, 0) for model in adapted_twice))


def test_the_table_of_a_quantised_model_adds_up() -> None:
    model = seeded(llama)
    before = sum(param.nbytes for param in model.parameters())
    table = quantize(model, bits("fp4"))
    assert table.before + table.other == before
    after = table.codes + table.scales + table.other
    assert after == sum(param.nbytes for param in model.parameters())
    form = "fp4 with scales in 8 bits, computed in float32, stored as bytes"
    *lines, note = str(table).splitlines()
    assert lines == [
        f"14 linear layers quantised: {form}",
        "their weights: 105.0 KiB before, 13.6 KiB after (13.1 KiB codes, 534 B scales)",
        "all other parameters: 19.8 KiB; linear layers kept as they are: lm_head",
    ]
    assert note.startswith("fp4 is bitsandbytes' default; nf4 has less error")


# --- bytes ------------------------------------------------------------------------------------


def on_meta(build: Any, config: Any) -> Any:
    with torch.device("meta"):
        model = build()
        quantize(model, config)
        return adapted(model)


def test_the_bytes_predicted_on_the_meta_device_are_what_a_rank_holds() -> None:
    world, config = 3, bits()
    models = [adapted(ours(config)) for _ in range(world)]

    def rank(comm: Comm) -> tuple[int, int, int]:
        model = models[comm.rank]
        sharded = sw.shard(model, comm=comm)
        full = sum(bucket.full.untyped_storage().nbytes() for bucket in sharded.buckets)
        assert full == 0  # nothing is gathered at rest
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        step(model, batch(0, comm.rank))
        optimizer.step()
        state = [v for values in optimizer.state.values() for v in values.values()]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        at_rest = sum(bucket.shard.nbytes for bucket in sharded.buckets)
        return at_rest, sum(g.nbytes for g in grads), sum(v.nbytes for v in state)

    for number, measured in enumerate(run_threads(world, rank)):
        row = table_of(on_meta(llama, config), (number, world))[STRATEGIES.index("full_shard")]
        assert measured == (row.parameters + row.padding, row.gradients, row.optimizer)


def test_a_rank_of_eight_holds_an_eighth_of_llama_3_8b_in_four_bits() -> None:
    """With its scales; nothing of it is allocated here."""

    def eight_billion() -> Any:
        return llama(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ).bfloat16()

    model = on_meta(eight_billion, bits())
    layers = quantized_layers(model).values()
    assert len(layers) == 224
    codes, scales = sum(m.weight.nbytes for m in layers), sum(m.scales.nbytes for m in layers)
    assert (codes, scales) == (3_489_660_928, 110_756_736)
    blueprint = draw(model, "full_shard", None, (0, 8))
    of_bytes = [b for b in blueprint.buckets if b.dtypes.stored is torch.uint8]
    elements = sum(spec.layout.shard_numel for spec in of_bytes)
    assert codes + scales <= 8 * elements < 1.001 * (codes + scales)


# --- before the shards ------------------------------------------------------------------------


def test_preparing_freezes_and_casts_all_but_the_bytes() -> None:
    model: Any = seeded(llama).bfloat16()
    quantize(model, bits())
    layers = {name: clones(layer.state_dict()) for name, layer in quantized_layers(model).items()}
    table = prepare(model)
    assert str(table).splitlines() == [
        "dtype              before           after",
        "bfloat16            5,080               0",
        "float32                 0           5,080",
        "uint8              13,974          13,974",
    ]
    assert not any(param.requires_grad for param in model.parameters())
    for name, layer in quantized_layers(model).items():
        assert equal(layer.state_dict(), layers[name])
    prepare(model, use_gradient_checkpointing=True)  # recomputed from inputs, which need gradients
    assert model.get_input_embeddings()(*batch(0, 0)).requires_grad


def test_each_wrong_order_is_named() -> None:
    config = bits()
    assert ORDER in error_text(sw.ConfigError, lambda: prepare(seeded(llama)))
    with_adapters = adapted(ours(config))
    assert "has adapters of peft" in error_text(sw.ConfigError, lambda: prepare(with_adapters))
    plain = peft.get_peft_model(seeded(llama), peft.LoraConfig(target_modules=LINEARS))
    text = error_text(sw.ConfigError, lambda: quantize(plain, config))
    assert text == (
        "quantize() was called on a model that has adapters of peft, which would be replaced or "
        f"frozen. {ORDER}"
    )
    sharded = ours(config)
    sw.shard(sharded, comm=FakeComm(0, 2))
    for call in (lambda: prepare(sharded), lambda: adopt(sharded)):
        assert "is sharded, so each rank" in error_text(sw.ConfigError, call)
    whole = seeded(llama)
    sw.shard(whole, comm=FakeComm(0, 2))
    assert ORDER in error_text(sw.ConfigError, lambda: quantize(whole, config))
    assert "Call it once" in error_text(sw.ConfigError, lambda: quantize(ours(config), config))


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    def of(**options: Any) -> Any:
        return transformers.BitsAndBytesConfig(**options)

    fp16 = of(load_in_8bit=True, llm_int8_has_fp16_weight=True)
    assert "Leave it out" in error_text(sw.ConfigError, lambda: quantize(seeded(llama), fp16))
    assert "load_in_4bit=True" in error_text(sw.ConfigError, lambda: quantize(seeded(llama), of()))
    none = bits(llm_int8_skip_modules=["model", "lm_head"])
    assert "Shorten llm_int8_skip_modules" in error_text(
        sw.ConfigError, lambda: quantize(seeded(llama), none)
    )
    misspelt = bits(llm_int8_skip_modules=["lm_heed"])
    text = error_text(sw.ConfigError, lambda: quantize(seeded(llama), misspelt))
    assert "names 'lm_heed', and no module of LlamaForCausalLM has this name" in text
    assert "Nearest are lm_head, " in text
    stored = quantize(seeded(llama), bits(bnb_4bit_quant_storage=torch.bfloat16))
    assert stored.notes[0].startswith("bnb_4bit_quant_storage=torch.bfloat16 has no effect")
    divided = by_bitsandbytes(bits())
    divided.hf_device_map = {"model": 0, "lm_head": 1}
    assert 'device_map={"": LOCAL_RANK}' in error_text(sw.ConfigError, lambda: adopt(divided))
    assert "no layer that bitsandbytes" in error_text(sw.ConfigError, lambda: adopt(seeded(llama)))
    early = bnb.nn.Linear4bit(8, 8, False)
    assert "not quantised yet" in error_text(sw.ConfigError, lambda: adopt(nn.Sequential(early)))
    half = of(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    check_compute(half, torch.bfloat16)
    check_compute(half, None)
    text = error_text(sw.ConfigError, lambda: check_compute(half, torch.float16))
    assert text.startswith("training computes in float16, and 4-bit layers in bfloat16")


def test_tied_weights_and_transposed_ones() -> None:
    gpt2: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)
    )
    values = gpt2.transformer.h[0].attn.c_attn.weight.detach().T.contiguous()
    table = quantize(gpt2, bits("nf4", double=False))
    assert (table.layers, table.kept) == (4, ("lm_head",))
    layer = gpt2.transformer.h[0].attn.c_attn
    assert layer.transposed
    assert torch.equal(layer.weight, whole(values, bits("nf4", double=False))[0])


# --- to disk and back -------------------------------------------------------------------------


def test_a_run_is_saved_and_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    """With a paged 8-bit optimizer; its adapter answers in plain peft on bitsandbytes' layers."""
    config, answers = bits(), list[Tensor]()

    def optimizer_of(model: Any) -> Any:
        trained = [param for param in model.parameters() if param.requires_grad]
        return updating_alone(bnb.optim.PagedAdamW8bit(trained, lr=0.01, min_8bit_size=100))

    def rank(comm: Comm, model: Any, first: int) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm, blocksize=256)
        optimizer = optimizer_of(model)
        if first:
            sharded.load(tmp_path / "half", optimizer)
        for number in range(first, 4):
            step(model, batch(number, 0))  # the same on all ranks, so means are equal
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and not first:
                sharded.save(tmp_path / "half", optimizer)
        save_adapter(sharded, tmp_path / f"adapter{first}")
        answers.append(logits(model, 9))
        return sharded.state_dict()

    done = []
    for first, world in ((0, 2), (2, 1)):
        models = [adapted(ours(config, seed=first), seed=1 + first) for _ in range(world)]
        done += run_threads(world, lambda comm: rank(comm, models[comm.rank], first))  # noqa: B023
    assert all(equal(states, done[0]) for states in done[1:])
    plain = peft.PeftModel.from_pretrained(by_bitsandbytes(config), tmp_path / "adapter2")
    plain.train()  # in eval mode its CPU kernel computes in bfloat16
    assert all(torch.equal(logits(plain, 9), answer) for answer in answers)
