"""A checkpoint is written again: merged, split, cast, for whoever reads it next."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import wrappers
from shardwise.checkpoint.plan import BLOCK
from shardwise.checkpoint.reader import CheckpointReader
from shardwise.checkpoint.run_folder import check_complete
from shardwise.comm.protocol import Comm
from shardwise.convert.catalogue import Catalogue, damage_of
from shardwise.convert.dcp_export import export_dcp
from shardwise.convert.export import ExportOptions, export
from shardwise.convert.writer import Converted
from tests.checkpoint.recorded import record
from tests.checkpoint.runs import adamw, loaded_and_saved, same, saved, tensors
from tests.copies import clones, on_ranks, seeded
from tests.nets import NETS

DECODER, TIED = NETS[0], NETS[1]


def exported(source: Path, destination: Path, **options: Any) -> Converted:
    with CheckpointReader.open(source) as opened:
        return export(opened, destination, ExportOptions(**options))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks' checkpoint, in many small files."""
    folder = tmp_path_factory.mktemp("made") / "step-2"
    saved(TIED, 2, folder, max_file_size=2_000)
    return folder


def test_many_files_become_one(checkpoint: Path, tmp_path: Path) -> None:
    result = exported(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "model.safetensors",
    ]
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors(checkpoint, "model"))
    assert (result.files, result.cast) == (("model.safetensors",), ())
    assert check_complete(tmp_path / "out").aliases == check_complete(checkpoint).aliases


def test_one_file_becomes_many_as_hugging_face_names_them(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "one")
    result = exported(tmp_path / "one", tmp_path / "many", max_file_size=5_000)
    assert len(result.files) > 2
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(result.files)
    for name in result.files:
        in_file = load_file(tmp_path / "many" / name)
        assert sum(value.nbytes for value in in_file.values()) <= 5_000 or len(in_file) == 1
        assert all(index["weight_map"][tensor] == name for tensor in in_file)
    assert same(tensors(tmp_path / "many", "model"), tensors(checkpoint, "model"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_are_cast_as_torch_casts_them(
    checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    result = exported(checkpoint, tmp_path / "out", dtype=dtype)
    whole = tensors(checkpoint, "model")
    assert same(tensors(tmp_path / "out", "model"), {n: v.to(dtype) for n, v in whole.items()})
    assert set(result.cast) == set(whole)


def test_halves_are_rounded_to_even(tmp_path: Path) -> None:
    """Between 1 and 1 + 2/128 lie, in bf16, 1 + 1/128; halfway goes to the even neighbour."""
    values = torch.tensor([1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 2**-20])
    save_file({"x": values}, tmp_path / "model.safetensors")
    exported(tmp_path, tmp_path / "out", dtype=torch.bfloat16)
    rounded = load_file(tmp_path / "out" / "model.safetensors")["x"]
    assert rounded.tolist() == [1.0, 1 + 2 / 128, 1 + 1 / 128]


def test_only_floating_point_is_cast(tmp_path: Path) -> None:
    values = {
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.0, dtype=torch.float64),
    }
    save_file(values, tmp_path / "model.safetensors")
    result = exported(tmp_path, tmp_path / "out", dtype=torch.bfloat16)
    cast = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: v.dtype for n, v in cast.items()} == {
        "ids": torch.int64,
        "mask": torch.bool,
        "eight": torch.float8_e4m3fn,
        "none": torch.bfloat16,
        "one": torch.bfloat16,
    }
    assert set(result.cast) == {"none", "one"}
    assert torch.equal(cast["ids"], values["ids"])


def test_a_value_that_would_become_infinite_is_an_error(tmp_path: Path) -> None:
    values = torch.zeros(3_000_000)
    values[2_500_000], values[0] = 70_000.0, torch.inf
    save_file({"x": values}, tmp_path / "model.safetensors")
    with pytest.raises(sw.CheckpointError, match=r"1 values of x do not fit .*70000.*bfloat16"):
        exported(tmp_path, tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    exported(tmp_path, tmp_path / "out", dtype=torch.bfloat16)  # what was infinite stays so


def test_transformers_loads_the_result(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = seeded(lambda: transformers.LlamaForCausalLM(config))
    whole = clones(model.state_dict())
    sw.shard(model).save(tmp_path / "step-1")
    exported(tmp_path / "step-1", tmp_path / "out", dtype=torch.bfloat16, max_file_size=9_000)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(back.state_dict(), {n: v.bfloat16() for n, v in whole.items()})


def test_with_its_optimizer_a_run_goes_on_from_the_result(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out", with_optimizer=True)
    for kind in ("model", "optimizer"):
        assert same(tensors(tmp_path / "out", kind), tensors(checkpoint, kind))
    assert Catalogue.read(tmp_path / "out").training == Catalogue.read(checkpoint).training
    loaded_and_saved(TIED, 3, tmp_path / "out", tmp_path / "again")
    assert same(tensors(tmp_path / "again", "optimizer"), tensors(checkpoint, "optimizer"))


def test_optimizer_state_keeps_its_dtype(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out", with_optimizer=True, dtype=torch.bfloat16)
    assert same(tensors(tmp_path / "out", "optimizer"), tensors(checkpoint, "optimizer"))

    def rank(comm: Any, model: nn.Module) -> tuple[str, ...]:
        sharded = sw.shard(model, comm=comm)
        return sharded.load(tmp_path / "out", adamw(model.parameters()), cast=True).cast

    assert len(on_ranks(2, TIED.build, rank)[0]) == len(tensors(checkpoint, "model"))


def test_weights_alone_have_no_optimizer_to_export(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out")
    with pytest.raises(sw.CheckpointError, match=r"weights alone\. Export it without --with-opt"):
        exported(tmp_path / "out", tmp_path / "again", with_optimizer=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(sw.CheckpointError, match="holds no weights"):
        exported(tmp_path / "empty", tmp_path / "again")


def test_the_result_vouches_for_its_bytes(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out", max_file_size=5_000)
    catalogue = Catalogue.read(tmp_path / "out")
    assert catalogue.problems == ()
    assert [damage for _, damage in damage_of(catalogue) if damage] == []
    with max((tmp_path / "out").glob("*.safetensors")).open("r+b") as file:
        file.seek(5_000)
        file.write(b"!?")
    assert any(damage for _, damage in damage_of(catalogue))


def test_damage_is_found_on_the_way_and_nothing_is_left(checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "step-2"))
    path = max(broken.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(sw.CheckpointError, match=rf"{path.name} is damaged"):
        exported(broken, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-2"]


def test_what_is_there_is_replaced_only_if_told_so(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out")
    with pytest.raises(sw.CheckpointError, match=r"is there already.*--overwrite"):
        exported(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    exported(checkpoint, tmp_path / "out", dtype=torch.bfloat16, overwrite=True)
    assert tensors(tmp_path / "out", "model")["embed.weight"].dtype == torch.bfloat16
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(sw.CheckpointError, match="no checkpoint of shardwise, so it is left alone"):
        exported(checkpoint, tmp_path / "mine", overwrite=True)


def test_what_a_killed_export_left_goes_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    token = "0123456789abcdef"
    names = (f"out.partial-{token}", f"other.partial-{token}", f"out.replaced-{token}")
    for name in names:
        (tmp_path / name).mkdir()
    exported(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[1:], "out"])


def test_a_checkpoint_is_never_written_over_or_into_itself(
    checkpoint: Path, tmp_path: Path
) -> None:
    exported(checkpoint, tmp_path / "out")
    for destination in (tmp_path / "out", tmp_path / "out" / "sub"):
        with pytest.raises(sw.CheckpointError, match="in, the checkpoint that is exported"):
            exported(tmp_path / "out", destination, dtype=torch.bfloat16, overwrite=True)
    assert same(tensors(tmp_path / "out", "model"), tensors(checkpoint, "model"))


def test_weights_alone_say_that_one_process_wrote_them(checkpoint: Path, tmp_path: Path) -> None:
    exported(checkpoint, tmp_path / "out")
    manifest = check_complete(tmp_path / "out")
    assert (manifest.world, manifest.strategy, manifest.kind) == (1, "export", "full")
    exported(checkpoint, tmp_path / "whole", with_optimizer=True)
    assert check_complete(tmp_path / "whole").world == 2


@pytest.mark.parametrize("name", ["step-2", "step-2.partial-0123456789abcdef", "weights"])
def test_what_was_not_written_to_its_end_is_not_exported(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / name))
    (broken / "manifest.json").unlink()
    if name == "weights":
        assert (broken / "training.json").exists()
    else:
        (broken / "training.json").unlink()
    with pytest.raises(sw.CheckpointError, match="not written to its end"):
        exported(broken, tmp_path / "out")
    one = min(broken.glob("model-*.safetensors"))
    assert exported(one, tmp_path / "out").tensors == len(load_file(one))


def test_a_folder_of_torch_names_the_file_to_pass(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(sw.CheckpointError, match=r"it has pytorch_model\.bin\. .*shardwise export"):
        exported(tmp_path, tmp_path / "out")


def test_everything_is_on_the_disk_before_it_has_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record(monkeypatch)
    exported(checkpoint, tmp_path / "out", max_file_size=5_000)
    named = calls.index("rename out")
    unfinished = next(one for one in calls if one.endswith("/.manifest.json.unfinished"))
    partial = unfinished.rpartition("/")[0]
    files = {f"{partial}/{path.name}" for path in (tmp_path / "out").iterdir()}
    files = files - {f"{partial}/manifest.json"} | {unfinished}
    assert files <= set(calls[:named])
    assert calls[named - 1] == partial  # the folder, and with it the names in it
    assert f"fsync {tmp_path}" in calls[named:]


def test_nothing_larger_than_a_few_blocks_is_ever_held(tmp_path: Path) -> None:
    """A tensor of 64 MiB; numpy tells tracemalloc what it holds, torch holds one block."""
    values = {"x": torch.ones(16 << 20), "y": torch.arange(3)}
    save_file(values, tmp_path / "model.safetensors")
    sizes: list[int] = []
    tracemalloc.start()
    try:
        with CheckpointReader.open(tmp_path) as source:
            export(source, tmp_path / "out", progress=lambda more, total: sizes.append(more))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * BLOCK
    assert max(sizes) <= BLOCK
    assert sum(sizes) == sum(value.nbytes for value in values.values())
    assert same(load_file(tmp_path / "out" / "model.safetensors"), values)


# ---- names that wrappers gave -----------------------------------------------------------------


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    return model


def compiled() -> nn.Module:
    """Only its names: the model is not called."""
    model: Any = torch.compile(seeded(tied), backend="eager")
    return nn.Sequential(model)


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint as earlier versions stored it: with the names that ``torch.compile`` gives."""
    with monkeypatch.context() as patch:
        patch.setattr(wrappers, "WRAPPERS", set())
        on_ranks(
            2,
            compiled,
            lambda comm, model: save_stepped(sw.shard(model, comm=comm), tmp_path / "step-1"),
        )
    return tmp_path / "step-1"


def save_stepped(sharded: sw.Sharded, folder: Path) -> None:
    optimizer = adamw(sharded.model.parameters())
    for number, param in enumerate(sharded.model.parameters()):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    sharded.model.get_buffer("0._orig_mod.2.running_mean").fill_(sharded.comm.rank)
    sharded.save(folder, optimizer, sw.Training())


def test_names_of_wrappers_reach_no_file(earlier: Path, tmp_path: Path) -> None:
    """Weights, optimizer, statistics of each rank, ties, and the record of the groups."""
    assert any(b"_orig_mod" in path.read_bytes() for path in earlier.rglob("*.safetensors"))
    exported(earlier, tmp_path / "out", with_optimizer=True)
    export_dcp(earlier, tmp_path / "dcp")
    for path in (p for n in ("out", "dcp") for p in (tmp_path / n).rglob("*") if p.is_file()):
        assert b"_orig_mod" not in path.read_bytes(), path

    def load(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        assert sharded.load(tmp_path / "out", optimizer, sw.Training()).inexact == ()
        assert model.get_buffer("0.2.running_mean").unique().item() == comm.rank
        states = sharded.optimizer_state_dict(optimizer)["state"]
        assert states["0.1.bias"]["exp_avg"].unique().numel() == 1

    on_ranks(2, lambda: nn.Sequential(tied()), load)


def test_files_of_another_program_lose_the_prefix_of_ddp(tmp_path: Path) -> None:
    states = seeded(tied).state_dict()
    save_file(
        {f"module.{n}": value.clone() for n, value in states.items()}, tmp_path / "a.safetensors"
    )
    exported(tmp_path / "a.safetensors", tmp_path / "out")
    assert {*tensors(tmp_path / "out", "model")} == {*states}


def test_a_module_that_a_model_calls_module_keeps_its_name(tmp_path: Path) -> None:
    """Where shardwise wrote the checkpoint, the name is the model's own."""
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    sw.shard(model).save(tmp_path / "step-1")
    exported(tmp_path / "step-1", tmp_path / "out")
    assert {*tensors(tmp_path / "out", "model")} == {"module.weight", "module.bias"}
