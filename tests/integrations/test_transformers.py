"""transformers' Trainer with our engine: the numbers, files and refusals of its drop-in.

One process of transformers' own Trainer is compared with two and three ranks of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator as TheirAccelerator
from peft import PeftModel
from safetensors.torch import load_file

import shardwise as sw
from shardwise.integrations.handover import handle
from shardwise.integrations.transformers import Trainer, arguments_of, written_as_they_are
from tests.copies import assert_near
from tests.integrations import trainer_runs as jobs
from tests.integrations.started import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

Runs = dict[str, dict[str, Any]]
STARTED = [(1, "plain,lora,loop"), (2, "full,resumed,lora,loop")]
PROVED = [(2, "from_plain,bf16,evaluated,paged"), (3, "full,further"), (1, "to_plain,paged")]
prove = pytest.mark.prove


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder: Path, request: pytest.FixtureRequest) -> Runs:
    module = jobs.__name__
    started = STARTED + PROVED * bool(request.config.getoption("prove"))
    on_ranks(module=module, imports=f"import {module}", jobs=started, folder=folder)
    return {path.stem: torch.load(path, weights_only=False) for path in folder.glob("*.pt")}


def near(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Equal parameters, and equal numbers in the log where both have them."""
    assert_near(one["params"], other["params"], tolerance)
    names = "loss", "grad_norm", "learning_rate", "total_flos"
    for name in names:
        logged = [[line[name] for line in run["log"] if name in line] for run in (one, other)]
        assert logged[0] == pytest.approx(logged[1], rel=1e-4), name


# --- the numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=prove)])
def test_ranks_train_as_one_process_of_transformers_does(runs: Runs, world: int) -> None:
    """With accumulation, clipping, a schedule, and means over unequal counts of tokens."""
    near(runs[f"full-{world}"], runs["plain-1"])
    assert min(line["grad_norm"] for line in runs["plain-1"]["log"] if "loss" in line) > 0.5


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(runs: Runs) -> None:
    """Model, optimizer, schedule, data position and, by its dropout, each rank's generator."""
    for run in (runs["resumed-2"], runs["lora-2"]):
        assert run["whole"]["params"].keys() == run["again"]["params"].keys()
        for name, value in run["whole"]["params"].items():
            assert torch.equal(value, run["again"]["params"][name]), name


@prove
def test_checkpoints_go_to_transformers_and_back_and_to_other_numbers_of_ranks(runs: Runs) -> None:
    near(runs["from_plain-2"], {**runs["plain-1"], "log": runs["from_plain-2"]["log"]})
    near(runs["further-3"], runs["to_plain-1"])


def test_limits_of_saving_hold(runs: Runs) -> None:
    assert runs["full-2"]["files"] == ["checkpoint-4", "final"]


@prove
def test_an_8_bit_optimizer_is_that_of_one_process_and_goes_on_bit_for_bit(runs: Runs) -> None:
    """``paged_adamw_8bit``: up to what rounding in the mean of gradients does to 8 bits."""
    whole, again = (runs["paged-2"][part]["params"] for part in ("whole", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    near(runs["paged-2"]["whole"], runs["paged-1"]["whole"], tolerance=5e-3)


def test_an_adapter_is_saved_as_peft_does_and_the_best_is_loaded(runs: Runs, folder: Path) -> None:
    near(runs["lora-2"]["whole"], runs["lora-1"]["whole"])
    saved = folder / "lora-2" / "whole" / "final"
    assert set(load_file(saved / "adapter_model.safetensors")) == set(
        runs["lora-2"]["whole"]["params"]
    )
    assert not (saved / "model.safetensors").exists()
    PeftModel.from_pretrained(jobs.llama(), str(saved))


@prove
def test_mixed_precision_and_settings_of_fsdp_are_ours(runs: Runs) -> None:
    run = runs["bf16-2"]
    assert (run["strategy"], run["compute"]) == ("shard_grad_op", "torch.bfloat16")
    losses = [[line["loss"] for line in r["log"] if "loss" in line] for r in (run, runs["plain-1"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] != losses[1]


@prove
def test_a_model_is_evaluated_before_and_after_it_is_trained_twice(runs: Runs) -> None:
    first, last = runs["evaluated-2"]["losses"]
    assert last < first


def test_a_loop_over_accelerate_is_that_of_one_process_and_goes_on_from_its_state(
    runs: Runs,
) -> None:
    alone, two = runs["loop-1"], runs["loop-2"]
    assert (alone["strategy"], two["strategy"]) == ("zero1", "zero1")
    assert_near(two["params"], alone["params"], 1e-4)  # of Adam, with its small eps
    for run in (alone, two):
        assert all(torch.equal(value, run["again"][name]) for name, value in run["params"].items())


# --- what it is given ------------------------------------------------------------------------


def trainer_of(folder: Path, model: Any = None, **changed: Any) -> Any:
    args = jobs.arguments(folder, **changed)
    return Trainer(model=model or jobs.llama(), args=args, train_dataset=jobs.rows())


def test_words_of_fsdp_and_8_bit_optimizers_are_arguments_of_shard(tmp_path: Path) -> None:
    settings = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    options = {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": settings, "optim": "adamw_8bit"}
    arguments = arguments_of(jobs.arguments(tmp_path, **options))
    assert str(arguments.pop("wrap")) == "by_class(LlamaDecoderLayer)"
    assert arguments == {"strategy": "shard_grad_op", "blocksize": 256}
    assert arguments_of(jobs.arguments(tmp_path)) == {}


class PlacesOfHead:
    """How many places each call of a head was given; it is one of a list of hooks."""

    def __init__(self, model: Any) -> None:
        self.counts = list[int]()
        model.get_output_embeddings().register_forward_hook(self)

    def __call__(self, head: Any, given: Any, out: torch.Tensor) -> None:
        self.counts.append(out.numel() // head.out_features)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    evaluated = [trainer.evaluate()["eval_loss"]]
    return [line["loss"] for line in trainer.state.log_history if "loss" in line] + evaluated


@pytest.mark.parametrize("options", [{}, {"average_tokens_across_devices": False}])
def test_the_head_makes_a_loss_in_place_of_logits_and_the_numbers_are_the_same(
    tmp_path: Path, alone: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Where logits are asked for, they are all there: in evaluations, and of ``return_outputs``."""
    options |= {"max_steps": 2, "save_strategy": "no", "prediction_loss_only": True}
    labelled, whole = (trainer_of(tmp_path, jobs.llama(), **options) for _ in range(2))
    whole.only_labelled = False
    labelled.eval_dataset = whole.eval_dataset = jobs.rows(10)
    places = [PlacesOfHead(one.model) for one in (labelled, whole)]
    with caplog.at_level("INFO", "shardwise"):
        assert losses(labelled) == pytest.approx(losses(whole), rel=1e-6)
    assert set(places[0].counts) == {0}  # a loss has no place
    assert min(places[1].counts) == 18
    assert "logits: of places with a label only" in caplog.text
    assert "logits: of all places: only_labelled is False" in caplog.text
    logits = labelled.predict(jobs.rows(3)).predictions
    assert logits is None
    labelled.args.prediction_loss_only = False
    assert labelled.predict(jobs.rows(3)).predictions.shape == (3, 9, 61)
    inputs = labelled._prepare_inputs(next(iter(labelled.get_train_dataloader())))
    _, outputs = labelled.compute_loss(labelled.model, inputs, return_outputs=True)
    assert outputs.logits.shape[-1] == 61


def test_a_loss_of_ones_own_has_all_logits_and_says_so(tmp_path: Path, alone: Any) -> None:
    class Theirs(transformers.Trainer):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return super().compute_loss(*args, **options)

    class Combined(Trainer, Theirs):
        pass

    def why(kind: Any = Trainer, model: Any = None, options: Any = None, **changed: Any) -> str:
        args = jobs.arguments(tmp_path, max_steps=1, save_strategy="no", **changed)
        model = model or jobs.llama()
        trainer = kind(model=model, args=args, train_dataset=jobs.rows(), **(options or {}))
        trainer.train()
        text: str = trainer.all_logits
        return text

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.float().flatten(0, 1).logsumexp(1).mean()

    assert why(Combined) == "Combined computes its own loss"
    assert why(options={"compute_loss_func": loss}) == "the loss is another one"
    assert why(label_smoothing_factor=0.1) == "the loss is another one"
    other = jobs.llama()
    other.loss_function = lambda logits, **_: logits.square().mean()
    assert why(model=other) == "the loss is another one"


def test_what_accelerate_launch_was_told_is_followed(
    tmp_path: Path, alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
    }
    for name, value in (variables | {"FSDP_STATE_DICT_TYP": "x"}).items():
        alone.setenv(name, value)
    trainer = trainer_of(tmp_path)
    assert trainer.accelerator.sharding == {"strategy": "shard_grad_op"}
    assert "FSDP_STATE_DICT_TYP: x has no effect: there is no such key" in caplog.text
    assert not trainer.is_fsdp_enabled


def test_a_model_of_another_accelerator_is_refused(tmp_path: Path, alone: Any) -> None:
    model = TheirAccelerator(cpu=True).prepare_model(jobs.llama())
    with pytest.raises(sw.ConfigError, match=r"prepared by another Accelerator, .* twice\. Leave"):
        trainer_of(tmp_path, model).train()


def test_evaluation_in_another_dtype_is_refused_before_training(tmp_path: Path, alone: Any) -> None:
    with pytest.raises(sw.ConfigError, match=r"bf16_full_eval .* with bf16=True it is evaluated"):
        trainer_of(tmp_path, bf16_full_eval=True)


def test_outputs_of_other_lengths_are_gathered_as_objects(tmp_path: Path, alone: Any) -> None:
    gather: Any = trainer_of(tmp_path, eval_use_gather_object=True).gather_function
    assert gather.keywords == {"use_gather_object": True}


def test_a_checkpoint_of_another_model_is_refused_by_its_name(tmp_path: Path, alone: Any) -> None:
    trainer_of(tmp_path, max_steps=2).train()
    deeper = jobs.llama(attention_bias=True)
    with pytest.raises(sw.CheckpointError, match=r"optimizer\.pt is no state of .* 21 parameters"):
        trainer_of(tmp_path, deeper).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_device_map_is_refused_with_the_reason(tmp_path: Path, alone: Any) -> None:
    model: Any = jobs.llama()
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(sw.ConfigError, match=r"1 of 2 parts .* lm_head.* Leave device_map out"):
        trainer_of(tmp_path, model).train()


def test_flags_of_model_parallelism_are_ignored_with_the_reason(
    tmp_path: Path, alone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = jobs.llama()
    model.is_parallelizable = model.model_parallel = True
    trainer_of(tmp_path, model, max_steps=1, save_strategy="no").train()
    assert "is_parallelizable and model_parallel of LlamaForCausalLM are ignored" in caplog.text


def test_a_model_that_is_sharded_already_is_trained_as_it_is(tmp_path: Path, alone: Any) -> None:
    model = jobs.llama()
    sharded = sw.shard(model, "zero1")
    trainer = trainer_of(tmp_path, model, max_steps=1, save_strategy="no")
    trainer.train()
    assert handle(trainer.model) is sharded


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_written_by_those_who_hold_them_and_nothing_is_gathered(
    tmp_path: Path, alone: Any, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.delattr(sw.Sharded, "state_dict")
    trainer = trainer_of(tmp_path, jobs.llama(tie_word_embeddings=tied), max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    with handle(trainer.model).full_params():
        for name, value in trainer.model.named_parameters():
            assert torch.equal(saved[name], value)


def test_weights_that_transformers_converts_are_written_by_it(alone: Any) -> None:
    experts: Any = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    config = transformers.Qwen3MoeConfig(vocab_size=61, intermediate_size=8, **sizes, **experts)
    model = transformers.Qwen3MoeForCausalLM(config)
    assert written_as_they_are(model) is None  # not sharded yet
    sw.shard(model)
    assert written_as_they_are(model) is None


def test_without_its_optimizer_a_checkpoint_is_resumed_with_a_warning(
    tmp_path: Path, alone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_of(tmp_path, max_steps=2, save_only_model=True).train()
    trainer_of(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert (
        "optimizer.pt is not there on every rank: the optimizer starts from scratch" in caplog.text
    )
