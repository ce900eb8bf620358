"""A folder or a name of the hub: every way in which it cannot be had says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.hf.folder import config_of, locate, new_model, tokenizer_of
from tests.hf.folders import tiny


def test_a_name_of_the_hub_that_is_not_in_the_cache_says_how_to_get_it(tmp_path: Path) -> None:
    """Tests have no network: HF_HUB_OFFLINE is set."""
    with pytest.raises(ConfigError) as caught:
        locate("meta-llama/Llama-2-70b-hf", "main", tmp_path)
    assert str(caught.value) == (
        "'meta-llama/Llama-2-70b-hf' at revision 'main' is no folder here and not in the hub's "
        "cache, and the hub is not reached: HF_HUB_OFFLINE is set, or there is no network. Name a "
        "local folder; or run `hf download meta-llama/Llama-2-70b-hf` where there is a network, "
        "and take the cache (HF_HOME) with you."
    )


def test_a_name_that_is_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    cached = tmp_path / "models--owner--name"
    tiny("llama", cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd", "utf-8")
    assert locate("owner/name", None, tmp_path) == cached / "snapshots" / "0123abcd"


def test_a_gated_model_says_where_its_terms_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def gated(*_: object, **__: object) -> str:
        raise errors.GatedRepoError.__new__(errors.GatedRepoError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gated)
    with pytest.raises(ConfigError, match="Accept them at https://huggingface"):
        locate("owner/name")


def test_a_download_that_breaks_off_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("timed out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(
        ConfigError, match=r"RuntimeError: timed out\. Check .* start again: what came is"
    ):
        locate("owner/broken")


def test_the_hub_is_asked_once_by_a_run_though_its_branch_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = iter(["/cache/first", "/cache/second"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: next(commits))
    assert [locate("owner/moving", "main") for _ in range(2)] == [Path("/cache/first")] * 2


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("./nowhere", "there is no folder nowhere"),
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("a name with spaces", "is no folder here, and was not fetched from the hub: "),
    ],
)
def test_what_names_nothing_is_refused(source: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(source)
    assert text in str(caught.value)


def test_a_folder_without_a_config_is_no_model_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config.json, so it is no model's folder"):
        locate(tmp_path)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    tiny("llama", tmp_path)
    assert locate(tmp_path, None, tmp_path) == tmp_path
    with pytest.raises(ConfigError, match=r"is a folder here.* revision 'v9' is of a name on the"):
        locate(tmp_path, "v9")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "new"}, "describes no model of this version of transformers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; set it to 1 or more"),
        ({"vocab_size": 0}, "vocab_size is 0; set it to 1 or more"),
        ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads (7)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "are quantised by 'gptq'"),
    ],
)
def test_a_model_that_cannot_be_trained_as_it_is_is_refused(
    tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    path = tiny("llama", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path)
    assert text in str(caught.value)


def test_a_configuration_of_which_transformers_makes_no_model_is_refused(tmp_path: Path) -> None:
    path = tiny("llama", tmp_path) / "config.json"
    config = json.loads(path.read_text("utf-8")) | {"hidden_act": "none"}
    path.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"makes no model of .*config.json: KeyError: 'none'\. "):
        new_model(config_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", None, "Couldn't instantiate the backend tokenizer"),
        ("tokenizer.json", "", "JSONDecodeError: Expecting value"),
        ("tokenizer.json", "{}", ": "),
        ("tokenizer_config.json", "[]", ": "),
    ],
)
def test_a_tokenizer_that_is_damaged_is_refused(
    tmp_path: Path, name: str, content: str | None, text: str
) -> None:
    path = tiny("llama", tmp_path) / name
    path.unlink() if content is None else path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=r"reads no tokenizer in .* copy them again") as caught:
        tokenizer_of(tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_kind_is_told_where_it_can_be_trained() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"a t5 is no causal language model.* sw\.shard\(model\)"):
        new_model(transformers.T5Config())


@pytest.mark.parametrize(
    ("name", "is_decoder", "refused"),
    [
        ("BertConfig", False, True),
        ("BertConfig", True, False),
        ("BertGenerationConfig", False, True),
        ("BartConfig", False, False),  # whose decoder is one, whatever is written
        ("GPTNeoXConfig", False, False),
    ],
)
def test_a_model_that_would_see_what_it_is_to_predict_is_refused(
    name: str, is_decoder: bool, refused: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    width = "d_model" if name == "BartConfig" else "hidden_size"
    config = getattr(transformers, name)(**small, **{width: 32}, is_decoder=is_decoder)
    ids = torch.arange(8)[None]
    if refused:
        with pytest.raises(ConfigError, match=r"reads in both directions.* is_decoder: true"):
            new_model(config)
        return
    model = new_model(config).eval()
    changed = ids.clone()
    changed[0, -1] = 30
    logits, others = (
        model(input_ids=each, use_cache=False).logits[:, :-1] for each in (ids, changed)
    )
    assert torch.allclose(logits, others, atol=1e-5)
