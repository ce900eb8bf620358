"""Adapters of ``peft`` on a sharded model: made, trained, saved, used without us, loaded back.

The truth is always peft on a plain model of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.protocol import Comm
from shardwise.hf.adapters import add_adapter, init_adapter, is_adapters, load_adapter, save_adapter
from tests.copies import equal, error_text, seeded
from tests.hf.folders import SHAPE
from tests.nets import Batch, tokens
from tests.parity.plain import ADAMW, Recipe, one_by_one
from tests.parity.sharded import How, assert_equal, on_threads
from tests.ranks import run_threads

# peft asks transformers for what this one has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

WORLD = 2
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**options: Any) -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE | {"vocab_size": 61, **options}))


def lora(**options: Any) -> peft.LoraConfig:
    shape: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": LINEARS, **options}
    return peft.LoraConfig(**shape, task_type="CAUSAL_LM")


def adapted(config: peft.LoraConfig, seed: int = 0) -> nn.Module:
    """The same frozen model, with an adapter that differs by seed."""
    base = seeded(llama)
    torch.manual_seed(seed)
    model: nn.Module = peft.get_peft_model(base, config)
    return model


def answer(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens(5, (2, 7), 61)).logits
    return logits.clone()


def train(sharded: sw.Sharded, rank: int, count: int = 4) -> None:
    model = sharded.model
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for number in range(count):
        ids = tokens(10 * number + rank, (2, 7), 61)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(config: peft.LoraConfig, fn: Any, seed: int = 0, world: int = WORLD) -> list[Any]:
    models = [adapted(config, seed) for _ in range(world)]
    return run_threads(world, lambda comm: fn(comm, models[comm.rank]), timeout=60)


def saved(
    config: peft.LoraConfig, folder: Path, world: int = WORLD
) -> tuple[dict[str, Tensor], Tensor]:
    """Train on all ranks and save the adapter as peft does: its whole state, and an answer."""

    def rank(comm: Comm, model: Any) -> tuple[dict[str, Tensor], Tensor]:
        sharded = sw.shard(model, comm=comm)
        train(sharded, comm.rank)
        save_adapter(sharded, folder)
        return sharded.state_dict(), answer(model)

    first: tuple[dict[str, Tensor], Tensor] = on_ranks(config, rank, world=world)[0]
    return first


CONFIGS = {"linears": lora(), "and the head": lora(modules_to_save=["lm_head"])}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_adapters_folder_is_complete_and_plain_peft_loads_it(
    config: peft.LoraConfig, world: int, tmp_path: Path
) -> None:
    states, logits = saved(config, tmp_path, world)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    plain = adapted(config)
    expected = get_peft_model_state_dict(plain, state_dict=states, save_embedding_layers=False)
    assert set(stored) == set(expected)
    assert len(stored) == 2 * 2 * len(LINEARS) + bool(config.modules_to_save)
    for name, value in stored.items():
        assert torch.equal(value, expected[name]), name
        assert torch.count_nonzero(value) > 0.9 * value.numel(), name  # B begins at zero
    loaded = peft.PeftModel.from_pretrained(seeded(llama), tmp_path)
    assert torch.equal(answer(loaded), logits)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # all may be read alike


# --- made on the meta device ------------------------------------------------------------------

KINDS: dict[str, tuple[bool, dict[str, Any]]] = {  # are embeddings tied, and the adapter's options
    "normal": (False, {"init_lora_weights": "gaussian", "use_rslora": True}),
    "DoRA": (False, {"use_dora": True}),
    "a head": (False, {"modules_to_save": ["lm_head"]}),
    "tied embeddings": (True, {"modules_to_save": ["embed_tokens"]}),
    "tokens": (False, {"trainable_token_indices": [3, 60]}),
    "tied tokens": (True, {"trainable_token_indices": [3, 60]}),
    "an embedding": (False, {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True}),
    "not yet": (False, {"init_lora_weights": False}),
    "orthogonal": (False, {"init_lora_weights": "orthogonal", "r": 4}),
}


def of_values(base: nn.Module, plain: nn.Module) -> Callable[[nn.Module], None]:
    """An ``init`` for ``shard()``: values of ``plain`` by name, and zeros for what is added."""
    paths = {module: path for path, module in base.named_modules()}
    params = plain.named_parameters(remove_duplicate=False)
    values = {**dict(params), **dict(plain.named_buffers())}

    def fill(module: nn.Module) -> None:
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in own:
            value = values.get(f"{paths.get(module)}.{name}")
            tensor.data.copy_(torch.zeros(()) if value is None else value)

    return fill


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("tied", "options"), KINDS.values(), ids=KINDS)
def test_one_made_on_the_meta_device_has_the_values_that_peft_gives_it(
    tied: bool, options: dict[str, Any], world: int
) -> None:
    config = lora(**options)
    plain: Any = seeded(lambda: llama(tie_word_embeddings=tied))
    with torch.device("meta"):
        bases = [llama(tie_word_embeddings=tied) for _ in range(world)]
    inits = [of_values(base, plain) for base in bases]
    models = [add_adapter(base, config)[0] for base in bases]
    config.ensure_weight_tying = "modules_to_save" in options and tied
    torch.manual_seed(7)
    expected = peft.get_peft_model(plain, config)
    torch.manual_seed(7)

    def rank(comm: Comm) -> dict[str, Tensor]:
        sharded = sw.shard(models[comm.rank], comm=comm, init=inits[comm.rank])
        init_adapter(sharded)
        return dict(sharded.state_dict()) | dict(sharded.model.named_buffers())

    buffers = dict(expected.named_buffers())
    for state in run_threads(world, rank):
        assert set(state) == set(expected.state_dict()) | set(buffers)
        for name, value in (*expected.state_dict().items(), *buffers.items()):
            assert torch.equal(state[name], value), name


def test_what_is_frozen_is_not_gathered() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[int, int]:
        sharded = sw.shard(model, comm=comm)
        comm.counters.reset()
        sharded.state_dict(names=is_adapters(sharded), rank0_only=True)
        sent = sum(comm.counters.bytes_sent.values())
        return sent, sum(b.shard.nbytes for b in sharded.buckets if b.trainable)

    for sent, adapters in on_ranks(lora(), rank):
        assert sent == adapters * (WORLD - 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("saver", ["sharded", "plain"])
def test_it_is_loaded_into_a_sharded_model(
    config: peft.LoraConfig, saver: str, tmp_path: Path
) -> None:
    if saver == "sharded":
        logits = saved(config, tmp_path)[1]
    else:
        plain: Any = adapted(replace(config, init_lora_weights=False), seed=5)
        plain.save_pretrained(tmp_path)
        logits = answer(plain)

    def rank(comm: Comm, model: Any) -> Tensor:
        sharded = sw.shard(model, comm=comm)
        load_adapter(sharded, tmp_path)
        return answer(model)

    assert all(torch.equal(answered, logits) for answered in on_ranks(config, rank, seed=9))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_so_is_one_with_the_embeddings_that_peft_stores_beside_it(tmp_path: Path) -> None:
    config = lora(target_modules=["embed_tokens", "lm_head"], init_lora_weights=False)
    plain: Any = adapted(config, seed=5)
    plain.save_pretrained(tmp_path)

    def rank(comm: Comm, model: Any) -> Tensor:
        load_adapter(sw.shard(model, comm=comm), tmp_path)
        return answer(model)

    assert all(torch.equal(one, answer(plain)) for one in on_ranks(config, rank, seed=9))


def test_one_of_another_shape_is_not_loaded(tmp_path: Path) -> None:
    adapted(lora(target_modules=["q_proj"])).save_pretrained(tmp_path)  # type: ignore[operator]

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: load_adapter(sharded, tmp_path))

    for text in on_ranks(lora(target_modules=["q_proj", "v_proj"]), rank):
        assert "4 of 8 tensors differ, first base_model.model.model.layers.0.self_attn.v_pr" in text
        assert "stored none, needed shape (3, 32)" in text
    for text in on_ranks(lora(target_modules=["q_proj"], r=5), rank):
        assert "4 of 4 tensors differ" in text
        assert "stored shape (3, 32), needed shape (5, 32)" in text


def test_one_of_two_adapters(tmp_path: Path) -> None:
    models: list[Any] = [adapted(lora()) for _ in range(WORLD)]
    for model in models:
        torch.manual_seed(3)
        model.add_adapter("second", lora(init_lora_weights=False))

    def rank(comm: Comm) -> dict[str, Tensor]:
        sharded = sw.shard(models[comm.rank], comm=comm)
        save_adapter(sharded, tmp_path, "second")
        return sharded.state_dict()

    states = run_threads(WORLD, rank, timeout=60)[0]
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert len(stored) == 2 * 2 * len(LINEARS)
    for name, value in stored.items():
        assert torch.equal(value, states[name.replace(".weight", ".second.weight")])


def test_the_model_goes_on_afterwards_and_files_are_replaced(tmp_path: Path) -> None:
    def rank(comm: Comm, model: Any) -> None:
        sharded = sw.shard(model, comm=comm)
        save_adapter(sharded, tmp_path)
        train(sharded, comm.rank)
        save_adapter(sharded, tmp_path)

    on_ranks(lora(), rank)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert all(value.any() for value in stored.values())
    assert not [path for path in tmp_path.parent.iterdir() if "unfinished" in path.name]


def test_a_model_without_that_adapter_is_refused(tmp_path: Path) -> None:
    models = [seeded(llama) for _ in range(WORLD)]

    def without(comm: Comm) -> str:
        sharded = sw.shard(models[comm.rank], comm=comm)
        return error_text(sw.CheckpointError, lambda: save_adapter(sharded, tmp_path))

    def other(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: save_adapter(sharded, tmp_path, "second"))

    assert "it has none" in run_threads(WORLD, without)[1]
    assert "no peft adapter 'second'; it has 'default'" in on_ranks(lora(), other)[1]


@pytest.mark.parametrize("error", [AssertionError, AttributeError, ImportError, ValueError])
def test_what_peft_raises_is_raised_on_every_rank(error: type[Exception], tmp_path: Path) -> None:
    models = [adapted(lora()) for _ in range(WORLD)]

    def rank(comm: Comm) -> str:
        model: Any = models[comm.rank]
        sharded = sw.shard(model, comm=comm)

        def fails(*_: object, **__: object) -> None:
            raise error("of its own")

        model.save_pretrained = fails
        return error_text(sw.CheckpointError, lambda: save_adapter(sharded, tmp_path / "adapter"))

    texts = run_threads(WORLD, rank)
    assert all(f"{error.__name__}: of its own" in text for text in texts)


def test_a_folder_without_an_adapter_says_what_it_holds(tmp_path: Path) -> None:
    sharded = sw.shard(adapted(lora()))
    absent = error_text(sw.CheckpointError, lambda: load_adapter(sharded, tmp_path / "absent"))
    assert "absent has no adapter_model.safetensors, so there is no adapter to load" in absent
    assert "it is empty, or no folder. Name a folder that save_adapter" in absent
    (tmp_path / "model.safetensors").touch()
    base = error_text(sw.CheckpointError, lambda: load_adapter(sharded, tmp_path))
    assert "no adapter to load: it holds model.safetensors. Name" in base


def two_adapters() -> Any:
    model: Any = adapted(lora())
    model.add_adapter("other", lora(init_lora_weights=False))
    return model


def switched(model: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and values of a training that turns from one adapter to the other and back.

    Each loss compares with the base model, for which peft switches all adapters off and on.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), list[float]()
    for number, adapter in enumerate(["other", "other", "default", "other"]):
        model.set_adapter(adapter)  # freezes the other one
        ids = tokens(number, (2, 7), 61)
        with model.disable_adapter(), torch.no_grad():
            base = model(input_ids=ids).logits
        out = model(input_ids=ids, labels=ids)
        (out.loss + 1e-2 * (out.logits - base).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


# --- trained ------------------------------------------------------------------------------------


def labelled(seed: int, rows: int) -> Batch:
    ids = tokens(seed, (rows, 7), 61)
    return ids, ids


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"use_dora": True}], ids=["LoRA", "DoRA"]
)
def test_it_trains_as_on_one_process(options: dict[str, Any], strategy: str, world: int) -> None:
    recipe = Recipe(partial(adapted, lora(**options)), labelled, ADAMW, loss_of, steps=3)
    ranks = on_threads(world, recipe, How(strategy))
    assert_equal(ranks, one_by_one(recipe, world), strategy)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
    return loss


def test_a_frozen_base_is_gathered_once_within_a_budget_of_bytes() -> None:
    def rank(comm: Comm, model: nn.Module) -> tuple[int, int, str]:
        sharded = sw.shard(model, comm=comm, unsharded=1 << 20)
        train(sharded, comm.rank, count=2)
        comm.counters.reset()
        train(sharded, comm.rank, count=1)
        trained = sum(b.full.numel() * 4 for b in sharded.buckets if b.trainable)
        return comm.counters.bytes_sent["gather"], trained, str(sharded.schedule)

    for sent, trained, schedule in on_ranks(lora(), rank):
        assert sent <= 2 * trained // WORLD  # forward and backward; nothing of the base
        assert "less: some units stay unsharded" in schedule.splitlines()[0]


def test_a_checkpoint_of_the_adapter_alone_is_enough_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(comm: Comm, model: nn.Module, first: int) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        of_adapter = is_adapters(sharded)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        sharded.resume(tmp_path, optimizer, sw.Training(), names=of_adapter)
        for number in range(first, 3):
            loss_of(model, labelled(number, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                sharded.save(tmp_path / "step-1", optimizer, sw.Training(), names=of_adapter)
        return sharded.state_dict()

    expected = on_ranks(lora(), partial(rank, first=0))[0]
    resumed = on_ranks(lora(), partial(rank, first=1), seed=9)[0]
    assert "left out" not in caplog.text
    assert equal(resumed, expected)


# --- the order of changes -------------------------------------------------------------------------


def test_adapters_after_shard_are_refused() -> None:
    model: Any = seeded(llama)
    sw.shard(model)
    assert "quantise the model, prepare" in error_text(
        sw.ConfigError, lambda: add_adapter(model, lora())
    )
    adapted_late: nn.Module = peft.get_peft_model(model, lora())
    text = error_text(sw.ConfigError, lambda: answer(adapted_late))
    assert "adapters were added after shard()" in text
    assert "get_peft_model, shard(), and then the optimizer" in text


def test_an_optimizer_from_before_the_adapters_is_refused() -> None:
    base = seeded(llama)
    optimizer = torch.optim.AdamW(base.parameters())
    model: Any = peft.get_peft_model(base, lora())
    sw.shard(model)
    loss_of(model, labelled(0, 2)).backward()
    text = error_text(sw.OptimizerError, optimizer.step)
    assert "none that is trained: it was made before the adapters were added. The order" in text


def test_preparing_for_k_bit_training_after_the_adapters_is_refused() -> None:
    prepare: Any = peft.prepare_model_for_kbit_training
    model = prepare(adapted(lora()))
    text = error_text(sw.ConfigError, lambda: sw.shard(model))
    assert "prepare_model_for_kbit_training(), or requires_grad_(False), froze the adapter" in text


def test_initial_values_that_change_the_base_are_refused() -> None:
    text = error_text(sw.ConfigError, lambda: add_adapter(llama(), lora(init_lora_weights="pissa")))
    assert "Choose one of True, False, 'gaussian', 'orthogonal'" in text


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "orthogonal"},
        {"target_modules": "(q_proj"},
        {"trainable_token_indices": [10**6]},
    ],
    ids=["an odd rank", "no regular expression", "no such token"],
)
def test_a_configuration_that_peft_refuses_is_an_error_of_ours(options: dict[str, Any]) -> None:
    options = {"r": 3, "target_modules": ["q_proj"], **options}
    config = peft.LoraConfig(**options)
    text = error_text(sw.ConfigError, lambda: add_adapter(llama(), config))
    assert "peft could not add the adapter: " in text


def test_adapters_are_switched_while_they_train_as_on_a_plain_model() -> None:
    before = two_adapters().state_dict()
    losses, values = switched(two_adapters())
    changed = [name for name, value in values.items() if not torch.equal(value, before[name])]
    assert {name.split(".")[-2] for name in changed} == {"default", "other"}
    models = [two_adapters() for _ in range(WORLD)]

    def rank(comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
        sw.shard(models[comm.rank], comm=comm)
        return switched(models[comm.rank])

    for sharded_losses, sharded_values in run_threads(WORLD, rank):  # equal batches: exact means
        assert sharded_losses == losses
        assert {n for n, v in sharded_values.items() if not torch.equal(v, values[n])} == set()


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_an_adapter_is_a_folder_of_peft(tied: bool, tmp_path: Path) -> None:
    """It is resumed from, too; AutoModelForCausalLM finds the base by its configuration."""
    shape: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    shape["tie_word_embeddings"] = tied
    whole: Any = hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=50, num_attention_heads=2, num_key_value_heads=1, **shape)
    )
    whole.save_pretrained(tmp_path / "base")
    targets: Any = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    targets["ensure_weight_tying"] = tied  # peft stores the one weight by both of its names

    def base() -> Any:
        return hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    def built(value: float) -> Any:
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **targets)
        model = peft.get_peft_model(base(), config)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.fill_(value)
        return model

    sharded = sw.shard(built(3.0))
    sharded.save(tmp_path / "run" / "step-1", training=sw.Training(), names=is_adapters(sharded))
    step = tmp_path / "run" / "step-1"
    assert [path.name for path in step.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert not (step / "config.json").exists()
    by_peft = peft.PeftModel.from_pretrained(base(), str(step))
    by_transformers: Any = hf.AutoModelForCausalLM.from_pretrained(str(step))
    resumed = sw.shard(built(0.0))
    resumed.resume(tmp_path / "run", names=is_adapters(resumed))
    for model in (by_peft, by_transformers, resumed.model):
        states = model.state_dict().items()
        adapted = [v for name, v in states if "lora" in name or "modules_to_save" in name]
        assert len(adapted) == 3 + tied
        assert all(bool((value == 3.0).all()) for value in adapted)
