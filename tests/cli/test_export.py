"""The command as a user meets it: sources, formats, options, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.cli import main
from shardwise.cli.export import parse_size
from shardwise.errors import ConfigError
from tests.checkpoint.runs import same, saved, tensors
from tests.nets import NETS

TIED = NETS[1]


def export(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["export", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saved(TIED, 2, folder / "step-2", max_file_size=3_000)
    (folder / "step-9").mkdir()  # broken
    return folder


def test_a_run_s_newest_whole_checkpoint_is_merged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "out") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"wrote    {tmp_path / 'out'}: 42 tensors, ")
    assert out[0].endswith("in 1 file")
    assert out[1] == f"from     {run / 'step-2'}, all bytes read match their checksums"
    assert out[2].startswith("missing  config.json")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors(run / "step-2", "model"))


def test_cast_and_split(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dtype", "bfloat16", "--max-file-size", "4KiB", "--with-optimizer")
    assert export(run / "step-2", tmp_path / "out", *options) == 0
    assert "cast     42 tensors" in capsys.readouterr().out
    exported = tensors(tmp_path / "out", "model")
    assert {value.dtype for value in exported.values()} == {torch.bfloat16}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "out" / "training.json").exists()


def test_one_file_of_torch(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "model.pt", "--format", "pt") == 0
    TIED.build().load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def test_a_file_of_torch_becomes_a_folder(tmp_path: Path) -> None:
    torch.save(TIED.build().state_dict(), tmp_path / "plain.pt")
    assert export(tmp_path / "plain.pt", tmp_path / "out", "--dtype", "bfloat16") == 0
    exported = tensors(tmp_path / "out", "model")
    states = TIED.build().state_dict()
    assert exported.keys() <= states.keys()
    assert {value.dtype for value in exported.values()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain.pt"]


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_one_of_several_files_of_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    write: Any = {"bin": torch.save, "safetensors": save_file}[suffix]
    for number in (1, 2):
        path = tmp_path / f"model-0000{number}-of-00002.{suffix}"
        write({f"layer.{number}": torch.zeros(2)}, path)
    assert export(path, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "is file 2 of 2 of one model, so the tensors of 1 other file would be missing" in error
    assert not (tmp_path / "out").exists()
    if suffix == "bin":
        exec(error.partition("Python: ")[2].replace("DESTINATION", repr(str(tmp_path / "out"))))
        assert tensors(tmp_path / "out", "model").keys() == {"layer.1", "layer.2"}
    else:
        assert f"shardwise export {tmp_path} DESTINATION" in error


def test_dcp_there_and_back(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run, tmp_path / "dcp", "--format", "dcp", "--with-optimizer") == 0
    assert f"wrote    {tmp_path / 'dcp'}" in capsys.readouterr().out
    assert export(tmp_path / "dcp", tmp_path / "out", "--with-optimizer") == 0
    whole = tensors(run / "step-2", "model")
    exported = tensors(tmp_path / "out", "model")  # with tied weights under each of their names
    assert same({name: exported[name] for name in whole}, whole)
    assert same(tensors(tmp_path / "out", "optimizer"), tensors(run / "step-2", "optimizer"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "out"]


def test_options_that_do_not_go_together_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "dcp", "--format", "dcp", "--dtype", "float16") == 1
    assert "does not support --dtype" in capsys.readouterr().err
    for option in (["--optimizer-file", "o.pt"], ["--optimizer-class", "SGD"], ["--trust-source"]):
        assert export(run, tmp_path / "out", *option) == 1
        assert f"{option[0]} is for PyTorch files" in capsys.readouterr().err
    for form in ("pt", "dcp"):
        assert export(run, tmp_path / "out", "--format", form, "--max-file-size", "5GB") == 1
        assert "does not support --max-file-size" in capsys.readouterr().err
    assert export(run, tmp_path / "model.pt") == 1
    assert "Pass --format pt" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_dcp_holds_weights_alone_unless_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "dcp", "--format", "dcp") == 0
    assert export(tmp_path / "dcp", tmp_path / "out") == 0
    assert not list((tmp_path / "out").glob("optimizer*"))
    assert not (tmp_path / "out" / "training.json").exists()
    assert export(tmp_path / "out", tmp_path / "no", "--format", "dcp", "--with-optimizer") == 1
    assert "it has weights alone" in capsys.readouterr().err


def test_a_run_s_folder_may_be_called_as_a_file_of_torch(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run.ckpt")
    assert export(tmp_path / "run.ckpt", tmp_path / "out") == 0


def test_weights_alone_need_no_class_of_an_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.RMSprop(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "both.pt")
    assert export(tmp_path / "both.pt", tmp_path / "out") == 0
    assert same(tensors(tmp_path / "out", "model"), model.state_dict())
    assert export(tmp_path / "both.pt", tmp_path / "all", "--with-optimizer") == 1
    assert "--optimizer-class AdamW" in capsys.readouterr().err
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert export(tmp_path / "weights.pt", tmp_path / "all", "--with-optimizer") == 1
    assert f"{tmp_path / 'weights.pt'} holds weights, and no optim" in capsys.readouterr().err


def test_where_it_came_from_is_said_by_the_name_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "plain.pt")
    assert export(tmp_path / "plain.pt", tmp_path / "out") == 0
    source = tmp_path / "plain.pt"
    line = f"from     {source}, a PyTorch source without checksums: nothing was verified"
    assert line in capsys.readouterr().out.splitlines()
    one = tmp_path / "out" / "model.safetensors"
    assert export(one, tmp_path / "again") == 0
    line = f"from     {one}, which has no manifest, so nothing was verified"
    assert line in capsys.readouterr().out.splitlines()


def test_that_tied_weights_have_one_name_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert export(tmp_path, tmp_path / "model.pt", "--format", "pt") == 0
    assert "tied     config.json has tie_word_embeddings" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert export(tmp_path, tmp_path / "other.pt", "--format", "pt") == 0
    assert "tied  " not in capsys.readouterr().out


def test_the_destination_is_looked_at_before_a_source_of_torch_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.pt").write_text("no pickle at all")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert export(tmp_path / "bad.pt", tmp_path / "out", "--overwrite") == 1
    assert "no checkpoint of shardwise, so it is left alone" in capsys.readouterr().err
    assert export(tmp_path / "bad.pt", tmp_path / "o.pt", "--format", "pt", "--with-optimizer") == 1
    assert "weights only" in capsys.readouterr().err


def test_what_is_there_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "out") == 0
    assert export(run, tmp_path / "out") == 1
    assert "error: " in (err := capsys.readouterr().err)
    assert "is there already" in err
    assert export(run, tmp_path / "out", "--overwrite") == 0


def test_nothing_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "nothing", tmp_path / "out") == 1
    assert "there is no checkpoint here" in capsys.readouterr().err


def test_names_in_errors_cannot_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path / "no\x1b[2Jthing", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "no\\x1b[2Jthing" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("64MiB", 64 << 20),
        ("1.5K", 1500),
        ("300", 300),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes_are_written_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "many", "-5GB", "0", "5PB", "1e9", "5iB", "9" * 400, "5000000TB"]
)
def test_other_sizes_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="pass a size such as 5GB"):
        parse_size(text)
