"""``shardwise convert-config``: the report, and the files that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.recipe.read import flatten, read_recipe
from tests.dialects.test_docs import document
from tests.dialects.test_interpret import ASKED_V1, GAUDI

RECIPES = Path(__file__).parents[2] / "recipes"


def convert(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *arguments: str,
    code: int = 0,
    strict: bool = True,
) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["convert-config", *(["--strict"] * (strict and not code)), *arguments])
    out, error = capsys.readouterr()
    assert caught.value.code == code, error
    return out + error


def assert_refused(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, sentence: str
) -> None:
    """A file of this name and ``text`` is answered with the sentence, and no recipe is written."""
    (here / name).write_text(text, "utf-8")
    assert sentence in convert(capsys, here, name, code=1)
    assert not (here / name).with_suffix(".recipe.yaml").exists()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp_config.json").write_text(GAUDI, "utf-8")
    (tmp_path / "default_config.yaml").write_text(ASKED_V1, "utf-8")
    return tmp_path


def entries(report: str) -> list[str]:
    """A line for each entry, whose text is folded at the terminal's width."""
    return re.sub(r"\n +", " ", report).splitlines()


def test_gaudis_file_becomes_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = entries(convert(capsys, here, "fsdp_config.json"))
    assert len(lines) == 1 + len(json.loads(GAUDI)) + 1
    words = "translated fsdp_sharding_strategy 1 sharding.strategy: full_shard"
    assert " ".join(lines[5].split()).startswith(words)
    recipe = read_recipe(here / "fsdp_config.recipe.yaml")
    assert recipe.sharding.wrap == ["LlamaDecoderLayer"]  # what a recipe's model is made of
    assert "sharding.wrap: ['LlamaDecoderLayer'] (a class Gaudi" in lines[9]
    assert recipe.sharding.prefetch.forward == 0
    text = convert(capsys, here, "fsdp_config.json", code=1)
    assert "fsdp_config.recipe.yaml exists; name another --output, or pass --overwrite." in text


def test_accelerates_file_also_says_how_to_start(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(capsys, here, "default_config.yaml", "--output", "r.yaml")
    recipe = read_recipe(here / "r.yaml")
    assert recipe.sharding.strategy == "shard_grad_op"
    assert (recipe.launch.nodes, recipe.launch.nproc) == (2, 4)
    assert (recipe.launch.address, recipe.launch.port) == ("10.0.0.1", 29500)
    assert "# Start: shardwise launch r.yaml\n" in (here / "r.yaml").read_text("utf-8")


def test_from_dialect_to_dialect_by_way_of_the_environment(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(capsys, here, "fsdp_config.json", "--to", "environment")
    text = (here / "fsdp_config.environment.env").read_text("utf-8")
    assert "FSDP_SHARDING_STRATEGY=FULL_SHARD\n" in text
    convert(
        capsys, here, "fsdp_config.environment.env", "--to", "fsdp_config", "--output", "b.json"
    )
    back = json.loads((here / "b.json").read_text("utf-8"))
    assert back == json.loads(GAUDI) | {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    }


def test_what_cannot_be_followed_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"fsdp_sharding_stratgy": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    (here / "c.yaml").write_text(yaml.safe_dump(keys), "utf-8")
    text = convert(capsys, here, "c.yaml", code=1)
    assert "did you mean fsdp_sharding_strategy?" in text
    assert "is contradictory: units by size need a min_num_params" in text
    assert not (here / "c.recipe.yaml").exists()
    assert "nearest is 'accelerate'" in convert(capsys, here, "c.yaml", "--to", "acelerate", code=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"zero_optimization": {"stage": 1}, "gradient_clipping": -1}', "optimizer.clip is -1"),
        ("distributed_type: FSDP\nnum_machines: 0\n", "launch.nodes is 0"),
        ("[" * 2000 + "]" * 2000, "is neither JSON nor YAML, or is nested too deeply."),
        ('a: b\nc = "d"\n', "c.yaml:3 is neither JSON nor YAML, or is nested too deeply: could"),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {a: 2}\n", "is another engine"),
    ],
)
def test_what_a_recipe_would_refuse_is_not_written(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    assert_refused(here, capsys, "c.yaml", text, says)


def test_deepspeed_in_accelerates_file_is_read_and_its_own_json_is_json(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": "auto"}
    text = yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": keys})
    (here / "c.yaml").write_text(text, "utf-8")
    convert(capsys, here, "c.yaml")
    sharding = read_recipe(here / "c.recipe.yaml").sharding
    assert (sharding.strategy, sharding.offload) == ("shard_grad_op", "optimizer")
    convert(capsys, here, "c.yaml", "--to", "deepspeed")
    written = json.loads((here / "c.deepspeed.json").read_text("utf-8"))
    assert written["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def test_the_first_documents_command_is_a_recipe(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "finetune.sh").write_text(document("finetune.sh"), "utf-8")
    convert(capsys, here, "finetune.sh", strict=False)
    text = (here / "finetune.recipe.yaml").read_text("utf-8")
    assert "# Start: shardwise train finetune.recipe.yaml\n" in text
    tree = yaml.safe_load(text)
    assert tree["run"] == {
        "folder": "lora_out",
        "epochs": 2,
        "log_every": 1,
        "throughput_warmup": 3,
        "seed": 42,
        "eval_every": "epoch",
        "eval_delay": 2,
    }
    assert tree["batch"] == {"rows": 5 * 2 * 8, "micro": 5}
    assert tree["optimizer"]["schedule"] == "constant"
    assert tree["optimizer"]["lr"] == 4e-4
    assert tree["checkpoint"]["save_every"] == 0
    script = {"rank": 4, "alpha": 16, "dropout": 0.05}  # the last two are not in the command
    assert tree["adapter"].items() >= script.items()
    assert tree["data"]["loss_on"] == "all"
    assert tree["sharding"]["strategy"] == "full_shard"  # of the file that the command names
    assert tree["sharding"]["wrap"] == ["LlamaDecoderLayer"]
    assert read_recipe(here / "finetune.recipe.yaml").run.epochs == 2


def test_a_program_and_a_command_after_two_hyphens(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.py").write_text(document("run.py"), "utf-8")
    convert(capsys, here, "run.py", strict=False)
    tree = yaml.safe_load((here / "run.recipe.yaml").read_text("utf-8"))
    assert tree["batch"] == {"rows": 16 * 8, "micro": 16}
    assert tree["checkpoint"] == {"save_every": 100, "save_total_limit": 2}
    decay = {"schedule": "linear", "warmup": 2, "floor": 0.0, "weight_decay": 0.0}
    assert tree["optimizer"].items() >= decay.items()
    assert tree["sharding"]["precision"] == {"param_dtype": "bfloat16"}
    words = ("python", "t.py", "--learning_rate", "1e-4", "--max_steps", "30", "--seed=7")
    convert(capsys, here, "--to", "transformers", "--", *words)
    back = yaml.safe_load((here / "command.transformers.yaml").read_text("utf-8"))
    assert (back["max_steps"], back["seed"], back["lr_scheduler_type"]) == (30, 7, "linear")
    assert "num_train_epochs" not in back


DIFFERENCES = {
    "llama2-70b-lora": {
        "optimizer.schedule": "constant reads no warm-up (D3)",
        "optimizer.warmup": "the same",
        "run.eval_delay": "two epochs of two leave one validation (D4)",
        "sharding.compile": "true is the backend of any device; Gaudi's is hpu_backend",
        "sharding.wrap": "auto finds the same blocks in any model",
        "sharding.prefetch.forward": "the order is known before the first step, so it is on",
        "checkpoint.save_total_limit": "all are kept, and there are none",
        "run.seed": "Trainer's 42 is as good as 0",
        "launch.nproc": "a recipe is for any number of devices",
    },
    "llama3-8b-qlora": {
        "data.source": "the program has a name to be filled in",
        "data.format": "the same",
        "data.packing": "the program pads; packed rows compute no padding",
        "data.context": "the program cuts nothing, and a recipe's rows have a length",
        "data.validation": "the program validates nothing, and a recipe holds rows out",
        "batch.rows": "of two ranks",
        "model.dtype": "null is that of the base's files, which is the same",
        "model.quantization.type": "fp4 is what the program forgot to choose (D12)",
        "adapter.targets": "w1, w2, w3 are no modules of this model (D11)",
        "run.seed": "Trainer's 42 is as good as 0",
    },
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_recipes_are_what_the_documents_become_but_for_stated_differences(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = "finetune.sh" if name == "llama2-70b-lora" else "run.py"
    (here / file).write_text(document(file), "utf-8")
    convert(capsys, here, file, "--output", "converted.yaml", strict=False)
    ours = read_recipe(RECIPES / f"{name}.yaml")
    text = (here / "converted.yaml").read_text("utf-8")
    text = text.replace("source: FILL-IN", "source: samples.jsonl")
    (here / "converted.yaml").write_text(text.replace("format: FILL-IN", "format: completion"))
    one, other = (
        flatten(recipe.model_dump()) for recipe in (ours, read_recipe(here / "converted.yaml"))
    )
    assert {key for key in one if one[key] != other.get(key)} == set(DIFFERENCES[name])


def test_what_is_to_be_filled_in_is_said_and_no_recipe_before(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.py").write_text(document("run.py"), "utf-8")
    lines = entries(convert(capsys, here, "run.py", strict=False))
    (line,) = (line for line in lines if line.startswith("fill in"))
    assert "data.source needs a value: this is no file, and no OWNER/NAME of the hub" in line
    text = (here / "run.recipe.yaml").read_text("utf-8")
    assert "\n# FILL-IN: data.source needs a value" in text
    with pytest.raises(ConfigError, match=r"data\.format.*'text', 'completion', 'alpaca'"):
        read_recipe(here / "run.recipe.yaml")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--model_name_or_path gpt2", "FILL-IN: data.source needs a value"),
        ("--dataset_name Salesforce/wikitext", "FILL-IN: text of the hub is read while it trains"),
    ],
)
def test_a_recipe_that_is_not_complete_says_what_to_set(
    here: Path, capsys: pytest.CaptureFixture[str], options: str, line: str
) -> None:
    convert(capsys, here, "--", "python", "run_clm.py", *options.split(), strict=False)
    text = (here / "command.recipe.yaml").read_text("utf-8")
    assert text.count("# FILL-IN") == text.count(f"# {line}") == 1
    if "hub" not in line:
        return
    more = {"streaming": {"streams": 8}, "max_bytes": 20_000_000}  # as the line says
    tree = yaml.safe_load(text)
    del tree["run"]["epochs"]
    tree["run"]["steps"] = 100
    tree["data"] |= more
    (here / "filled.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    assert read_recipe(here / "filled.yaml").data.source == "hf://datasets/Salesforce/wikitext"


def test_a_file_that_is_not_there_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.sh cannot be used: No such file" in convert(capsys, here, "nowhere.sh", code=1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 8 train.py", "of 'train.py' no option is shown"),
        ("python t.py --seed 3 --colour red", "most options are unknown (--seed, --colour)"),
        ("srun accelerate launch run.py", "Pass the program itself: shardwise convert-config run."),
        ("accelerate config", "`accelerate config` asks questions and writes a file."),
    ],
)
def test_a_command_of_which_nothing_is_known_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert sentence in convert(capsys, here, "--", *words.split(), code=1)
    assert not (here / "command.recipe.yaml").exists()


def test_options_of_accelerate_launch_are_converted_for_any_script(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "accelerate launch --use_fsdp --fsdp_sharding_strategy NO_SHARD --mixed_precision bf16"
    convert(capsys, here, "--", *words.split(), "train.py")
    tree = yaml.safe_load((here / "command.recipe.yaml").read_text("utf-8"))
    assert tree == {"sharding": {"strategy": "no_shard", "precision": {"param_dtype": "bfloat16"}}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("if True:\nx = 1\n", "p.py:2 is not Python, so nothing is converted"),
        ("tokenizer = AutoTokenizer.from_pretrained('x')\n", "sets nothing that a recipe has"),
        ("for x in y:\n  fully_shard(x, mesh=a)\nfully_shard(m, mesh=b)\n", "keep one of them"),
    ],
)
def test_a_program_that_is_not_understood_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    assert_refused(here, capsys, "p.py", text, sentence)


def test_a_program_with_a_loop_of_its_own_says_that_the_loop_is_not_converted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "p.py").write_text("fully_shard(model)\n", "utf-8")
    assert "the program's own loop is not converted" in convert(capsys, here, "p.py")
    tree = yaml.safe_load((here / "p.recipe.yaml").read_text("utf-8"))
    assert tree == {"sharding": {"strategy": "full_shard"}}  # and not {}, which is the demo


def test_the_report_fits_the_terminal(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = convert(capsys, here, "fsdp_config.json").splitlines()[1:]
    assert max(map(len, lines)) <= 80
    assert "translated     fsdp_sharding_strategy 1" in lines
