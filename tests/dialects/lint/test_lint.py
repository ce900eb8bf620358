"""Each defect is found on its line, and nothing else; repaired, nothing is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.dialects.lint import DEFECTS, lint
from shardwise.errors import ConfigError
from tests.dialects.lint.documents import DOCUMENTS, MARK, REPAIRED
from tests.dialects.lint.programs import BROKEN, RIGHT

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "recipes").glob("*.yaml")])


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text("".join(f"{MARK.sub('', line)}\n" for line in text.splitlines()), "utf-8")
    return path


def marked(text: str) -> Counter[tuple[int, str]]:
    """Line and number of each mark."""
    marks = [(number, MARK.search(line)) for number, line in enumerate(text.splitlines(), 1)]
    return Counter((number, defect) for number, mark in marks if mark for defect in mark[1].split())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_defects_of_a_document_are_found_where_they_are(tmp_path: Path, name: str) -> None:
    findings = lint(written(tmp_path, name, DOCUMENTS[name]))
    assert {(f.line, f.defect) for f in findings} == set(marked(DOCUMENTS[name]))
    assert all(f.fact and f.fix and "\n" not in f.fix for f in findings)


@pytest.mark.parametrize("name", BROKEN)
def test_the_mistakes_of_a_program_are_found_where_they_are(tmp_path: Path, name: str) -> None:
    findings = lint(written(tmp_path, name, BROKEN[name]))
    assert {(f.line, f.defect) for f in findings} == set(marked(BROKEN[name]))
    assert all(f.fact and f.fix and "{" not in f.fact for f in findings)


@pytest.mark.parametrize(("name", "text"), [*RIGHT.items(), *REPAIRED.items()])
def test_a_program_without_them_has_no_finding(tmp_path: Path, name: str, text: str) -> None:
    assert lint(written(tmp_path, name, text)) == []


def test_every_defect_is_in_a_document_or_says_why_no_file_shows_it() -> None:
    texts = [*DOCUMENTS.values(), *BROKEN.values()]
    shown = {defect for text in texts for _, defect in marked(text)}
    explained = {name.partition("-")[0] for name, row in DEFECTS.items() if "why_not" in row}
    assert shown | explained == {name.partition("-")[0] for name in DEFECTS}
    assert len(shown | explained) == 43
    assert explained - shown == {"D28"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_our_own_programs_and_recipes_have_no_finding(path: Path) -> None:
    assert lint(path) == []


def test_hybrid_shard_as_a_word_and_keys_inside_a_call(tmp_path: Path) -> None:
    text = 'args = TrainingArguments(\n  "out", fsdp="hybrid_shard auto_wrap")  # D2\n'
    findings = lint(written(tmp_path, "a.py", text))
    assert [(f.line, f.fix) for f in findings] == [(2, 'add "version": 1 to the fsdp_config')]
    keys = "fsdp_config:\n  sharding_strategy: FULL_SHARD\n"
    assert [f.line for f in lint(written(tmp_path, "a.yaml", keys))] == [2]


@pytest.mark.parametrize(
    ("model", "targets", "wrong"),
    [
        ("meta-llama/Llama-2-7b-hf", '["q_proj", "w1"]', {"w1": "this model calls it gate_proj"}),
        (
            "mistralai/Mistral-7B-v0.1",
            '["model.layers.0.self_attn.q_proj", "query_key_value"]',
            {"query_key_value": "this model calls it q_proj, k_proj, v_proj"},
        ),
        ("gpt2", '["q_proj", "c_fc"]', {"q_proj": "this model calls it c_attn"}),
        ("tiiuae/falcon-7b", '["query_key_value", "dense"]', {}),
        ("meta-llama/Llama-2-7b-hf", '"all-linear"', {}),
        ("meta-llama/Llama-2-7b-hf", "r'.*(w1|up_proj)'", {}),
        ("meta-llama/Llama-2-7b-hf", "find_all(model)", {}),
        ("some/model", '["w1"]', {}),
        ("tiiuae/Falcon3-7B-Base", '["q_proj"]', {}),
        ("tiiuae/Falcon-H1-7B-Base", '["q_proj", "in_proj"]', {}),
        ("tiiuae/falcon-mamba-7b", '["in_proj"]', {}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", '["in_proj_qkvz"]', {}),
        ("Qwen/Qwen2-57B-A14B", '["shared_expert_gate"]', {}),
        ("Qwen/Qwen1.5-MoE-A2.7B", '["shared_expert_gate"]', {}),
        ("Qwen/Qwen2.5-7B", '["w1"]', {"w1": "this model calls it gate_proj"}),
    ],
)
def test_a_target_that_this_kind_of_model_has_not(
    tmp_path: Path, model: str, targets: str, wrong: dict[str, str]
) -> None:
    text = f'MODEL = "{model}"\nTARGETS = {targets}\nLoraConfig(target_modules=TARGETS)\n'
    text += "AutoModelForCausalLM.from_pretrained(MODEL)\n"
    findings = lint(written(tmp_path, "a.py", text))
    assert {f.fact.split()[0]: f.fix for f in findings} == wrong
    assert {(f.line, f.defect) for f in findings} <= {(3, "D11")}


def test_a_model_may_be_named_by_the_default_of_an_option_alone(tmp_path: Path) -> None:
    text = """
parser.add_argument("--model-name", default="meta-llama/Llama-2-7b-hf")
AutoModelForCausalLM.from_pretrained(args.model_name)
LoraConfig(target_modules=["w1"])
TrainingArguments("out", eval_strategy="epoch", eval_delay=args.delay)
"""
    findings = lint(written(tmp_path, "a.py", text))
    assert [(f.line, f.defect) for f in findings if f.defect in ("D4", "D11")] == [(4, "D11")]


def test_a_model_that_is_only_mentioned_has_no_targets(tmp_path: Path) -> None:
    text = "# not for llama\npython t.py --lora_target_modules w1 --model_name_or_path {}\n"
    assert lint(written(tmp_path, "a.sh", text.format("mine/model"))) == []
    findings = lint(written(tmp_path, "a.sh", text.format("meta-llama/Llama-2-7b-hf")))
    assert [(f.line, f.defect) for f in findings] == [(2, "D11")]
    text = 'prepare("like llama")\nAutoTokenizer.from_pretrained("gpt2")\n'
    text += (
        'AutoModelForCausalLM.from_pretrained("mine/model")\nLoraConfig(target_modules=["w1"])\n'
    )
    assert lint(written(tmp_path, "a.py", text)) == []


def test_the_command_prints_file_line_fact_and_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "run.sh", "python t.py --warmup_steps 9 \\\n --lr_scheduler_type constant")
    written(tmp_path, "clean.sh", "python t.py --warmup_steps 9")
    for name, code in {"run.sh": 1, "clean.sh": 0}.items():
        with pytest.raises(SystemExit) as end:
            main(["lint", name])
        assert end.value.code == code
    assert capsys.readouterr().out == (
        "run.sh:1: D3 warmup_steps 9 has no effect: the schedule constant has no warm-up\n"
        "    fix: lr_scheduler_type constant_with_warmup\n"
        f"1 defect, {len(DEFECTS) - 2} rules, 1 file\n"
        f"0 defects, {len(DEFECTS) - 2} rules, 1 file\n"
    )


def test_the_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["lint", "--rules"])
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum("why_not" not in row for row in DEFECTS.values())
    assert lines[0].startswith("D1   optimum-habana never reads …")


def test_a_file_that_is_not_what_it_is_called_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.py:1 cannot be read as its suffix says: '\(' was"):
        lint(written(tmp_path, "a.py", "print("))
    with pytest.raises(ConfigError, match=r"a\.json:2 cannot be read"):
        lint(written(tmp_path, "a.json", "{"))


def test_arguments_that_are_said_to_be_gone_are_gone() -> None:
    from tests.dialects.test_tables import fields_of, source

    known = fields_of(source("transformers", "training_args.py"), "TrainingArguments")
    assert len(known) > 100
    assert not known & {"evaluation_strategy", "logging_dir", "warmup_ratio"}
    assert {"eval_strategy", "warmup_steps"} <= known
