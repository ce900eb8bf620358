"""Whatever was saved comes back, on any number of ranks, or an error says what did not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.plan import BLOCK
from shardwise.comm.protocol import Comm
from tests import nets
from tests.checkpoint.runs import Make, adamw, loaded_and_saved, same, saved, steps, tensors
from tests.copies import clones, error_text, on_ranks, seeded
from tests.nets import NETS, Net
from tests.ranks import run_processes
from tests.steps import STRATEGIES

DECODER, TIED = NETS[0], NETS[1]


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return tensors(folder, "model") | tensors(folder, "optimizer")


def loads(
    build: Callable[[], nn.Module], path: Path, world: int = 2, **how: Any
) -> tuple[sw.Loaded, dict[str, Tensor]]:
    """The report and the whole state after a load; rank 0's."""

    def rank(comm: Comm, model: nn.Module) -> tuple[sw.Loaded, dict[str, Tensor]]:
        report = sw.shard(model, comm=comm).load(path, **how)
        return report, clones(model.state_dict())

    return on_ranks(world, build, rank)[0]


def refusal(
    build: Callable[[], nn.Module], path: Path, world: int = 2, make: Make | None = None, **how: Any
) -> str:
    """What every rank says when it may not load."""

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        optimizer = make(model.parameters()) if make else None
        return error_text(sw.CheckpointError, lambda: sharded.load(path, optimizer, **how))

    texts = on_ranks(world, build, rank)
    assert len(set(texts)) == 1
    return texts[0]


# --- any world, any strategy -----------------------------------------------------------------


@pytest.mark.parametrize("net", NETS, ids=str)
@pytest.mark.parametrize("worlds", [(3, 2), (1, 4), (4, 1), (2, 5)], ids=str)
def test_any_number_of_ranks_reads_what_any_other_wrote(
    net: Net, worlds: tuple[int, int], tmp_path: Path
) -> None:
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    saved(net, worlds[0], first)
    loaded_and_saved(net, worlds[1], first, second)
    assert same(all_tensors(first), all_tensors(second))


@pytest.mark.parametrize("before", STRATEGIES)
@pytest.mark.parametrize("after", STRATEGIES)
def test_any_strategy_reads_what_any_other_wrote(before: str, after: str, tmp_path: Path) -> None:
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    saved(NETS[4], 3, first, before)
    loaded_and_saved(NETS[4], 2, first, second, after)
    assert same(all_tensors(first), all_tensors(second))


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adamw": adamw,
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_state_is_bit_exact_through_4_3_4_ranks(kind: str, tmp_path: Path) -> None:
    net, make = NETS[4], OPTIMIZERS[kind]
    saved(net, 4, tmp_path / "step-1", make=make)
    loaded_and_saved(net, 3, tmp_path / "step-1", tmp_path / "step-2", make=make)
    loaded_and_saved(net, 4, tmp_path / "step-2", tmp_path / "step-3", "shard_grad_op", make)
    first = all_tensors(tmp_path / "step-1")
    assert same(first, all_tensors(tmp_path / "step-3"))
    assert kind == "plain_sgd" or any("/" in name for name in first)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("worlds", [(2, 2), (3, 1)], ids=str)
def test_training_goes_on_as_if_nothing_had_happened(
    kind: str, worlds: tuple[int, int], tmp_path: Path
) -> None:
    """Bit for bit with as many ranks; the batches of three ranks on one are another run."""
    net, make = NETS[4], OPTIMIZERS[kind]

    def whole(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        optimizer = make(model.parameters())
        steps(model, optimizer, net, comm.rank, range(2))
        sharded.save(tmp_path / "step-2", optimizer, sw.Training(step=2))
        if worlds[0] != worlds[1]:
            return clones(model.state_dict())
        steps(model, optimizer, net, comm.rank, range(2, 4))
        return clones(model.state_dict())

    def rest(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        optimizer = make(model.parameters())
        sharded.load(tmp_path / "step-2", optimizer)
        if worlds[0] == worlds[1]:
            steps(model, optimizer, net, comm.rank, range(2, 4))
        return clones(model.state_dict())

    assert same(on_ranks(worlds[0], net.build, whole)[0], on_ranks(worlds[1], net.build, rest)[0])


def test_an_optimizer_that_has_stepped_is_overwritten_in_place(tmp_path: Path) -> None:
    saved(DECODER, 3, tmp_path / "step-2")

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, DECODER, comm.rank, range(5, 8))
        before = {
            id(p): {key: value.data_ptr() for key, value in state.items()}
            for p, state in optimizer.state.items()
        }
        sharded.load(tmp_path / "step-2", optimizer)
        for param, state in optimizer.state.items():
            assert {k: v.data_ptr() for k, v in state.items()} == before[id(param)]
        sharded.save(tmp_path / "again", optimizer, sw.Training(step=2))

    on_ranks(2, DECODER.build, rank)
    assert same(all_tensors(tmp_path / "again"), all_tensors(tmp_path / "step-2"))


# --- groups ----------------------------------------------------------------------------------


def grouped(model: nn.Module, lr: float = 0.1) -> Optimizer:
    thin = [p for p in model.parameters() if p.ndim < 2]
    wide = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": wide, "weight_decay": 0.3}, {"params": thin, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9))


def test_options_come_back_by_parameter_whatever_the_order_of_groups(tmp_path: Path) -> None:
    def save(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = grouped(model)
        optimizer.param_groups[0]["lr"] = 0.7
        sharded.save(tmp_path / "step-1", optimizer)

    def load(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = grouped(model, lr=9.0)
        optimizer.param_groups.reverse()
        optimizer.param_groups[0]["foreach"] = False
        sharded.load(tmp_path / "step-1", optimizer)
        thin, wide = optimizer.param_groups
        assert (wide["lr"], thin["lr"], wide["weight_decay"]) == (0.7, 0.1, 0.3)
        assert wide["betas"] == (0.8, 0.9)
        assert isinstance(wide["betas"], tuple)
        assert thin["foreach"] is False  # how it computes is the script's business

    on_ranks(2, DECODER.build, save)
    on_ranks(3, DECODER.build, load)


def test_a_group_of_parameters_with_unlike_options_is_an_error(tmp_path: Path) -> None:
    def save(comm: Comm, model: nn.Module) -> None:
        sw.shard(model, comm=comm).save(tmp_path / "step-1", grouped(model))

    on_ranks(2, DECODER.build, save)
    text = refusal(DECODER.build, tmp_path / "step-1", make=adamw)
    assert "norm1.weight: saved with weight_decay=0.0, and embed.weight, now in the same" in text


def test_a_rate_that_is_a_tensor_is_filled_in_place(tmp_path: Path) -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        rate = torch.tensor(0.25)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        sharded.save(tmp_path / "step-1", optimizer)
        rate.fill_(9.0)
        sharded.load(tmp_path / "step-1", optimizer)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == 0.25

    on_ranks(1, DECODER.build, rank)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), "its state is of AdamW, and SGD holds it now"),
        (lambda p: adamw(list(p)[:-1]), "lm_head.weight: stored, and no optimizer has this"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_an_error(make: Make, fact: str, tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")
    assert fact in refusal(DECODER.build, tmp_path / "step-2", make=make)


def test_state_that_cannot_be_cut_is_refused_when_saving(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        pass

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = Odd(model.parameters(), lr=0.1)
        optimizer.state[next(iter(model.parameters()))]["rows"] = torch.zeros(5, 1)
        text = error_text(sw.OptimizerError, lambda: sharded.save(tmp_path / "step-1", optimizer))
        assert "state 'rows' of parameter 'embed.weight' is of other ranks, or has no value" in text

    on_ranks(1, DECODER.build, rank)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    sharded, other = sw.shard(seeded(DECODER.build)), seeded(DECODER.build)
    with pytest.raises(sw.CheckpointError, match="does not belong to this sharded model"):
        sharded.save(tmp_path / "step-1", adamw(other.parameters()))


# --- what a run needs besides ----------------------------------------------------------------


def test_schedule_position_and_values_come_back(tmp_path: Path) -> None:
    def new_state(model: nn.Module) -> tuple[Optimizer, Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3], gamma=0.5)
        return optimizer, schedule, torch.amp.GradScaler("cpu", init_scale=64.0)

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer, schedule, scaler = new_state(model)
        scaler.scale(torch.ones(()))  # so that it has a state
        for _ in range(2):
            optimizer.step()
            schedule.step()
        position = {"epoch": 1, "rows": (3, 4)}
        training = sw.Training(2, schedule, scaler, position, {"lr": 1.0}, f"of rank {comm.rank}")
        sharded.save(tmp_path / "step-2", optimizer, training)

        optimizer, schedule, scaler = new_state(model)
        report = sharded.load(
            tmp_path / "step-2", optimizer, sw.Training(scheduler=schedule, scaler=scaler)
        )
        assert (report.step, report.position, report.local) == (2, position, f"of rank {comm.rank}")
        assert report.document is not None
        assert report.document.config == {"lr": 1.0}
        assert report.document.local == ["of rank 0", "of rank 1"]
        assert report.inexact == ()
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert schedule.last_epoch == 2
        assert scaler.state_dict()["scale"] == 64.0
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.125

    on_ranks(2, DECODER.build, rank)


def test_what_was_not_saved_and_is_wanted_is_named(tmp_path: Path) -> None:
    saved(DECODER, 2, tmp_path / "step-2")

    class Schedule:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    training = sw.Training(scheduler=Schedule())
    text = refusal(DECODER.build, tmp_path / "step-2", training=training)
    assert "scheduler: its state is not stored" in text


def test_a_state_that_its_owner_does_not_take_changes_nothing(tmp_path: Path) -> None:
    """torch's scaler takes no state of one that was switched off."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    sw.shard(seeded(DECODER.build)).save(tmp_path / "step-1", training=sw.Training(scaler=scaler))

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        before = clones(model.state_dict())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        training = sw.Training(scaler=scaler)
        text = error_text(
            sw.CheckpointError, lambda: sharded.load(tmp_path / "step-1", training=training)
        )
        assert "in 1 point; nothing was changed:" in text
        assert "scaler: GradScaler does not take its state (RuntimeError: The source state" in text
        assert same(before, model.state_dict())
        report = sharded.load(tmp_path / "step-1", training=training, strict=False)
        assert report.inexact[0].startswith("scaler: GradScaler does not take")
        assert scaler.get_scale() == 64.0

    on_ranks(2, DECODER.build, rank)


def dropping(comm: Comm, path: str, first: bool) -> list[float]:
    """Two steps with dropout before the save, two after; the same after a load."""
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    sharded = sw.shard(model, comm=comm)
    optimizer = adamw(model.parameters())
    losses = []
    if not first:
        torch.manual_seed(77)
        report = sharded.load(path, optimizer, sw.Training())
        assert report.inexact == ()
    for step in range(2 * (not first), 4):
        if step == 2 and first:
            sharded.save(path, optimizer, sw.Training(step=2))
        x = torch.randn(3, 6) + random.random()  # data that comes from the generators, too
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[-2:]


@pytest.mark.prove
@pytest.mark.spawn
def test_dropout_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    assert run_processes(2, dropping, path, True) == run_processes(2, dropping, path, False)


def test_with_another_number_of_ranks_generators_stay_and_that_is_said(tmp_path: Path) -> None:
    saved(DECODER, 3, tmp_path / "step-2")
    before = torch.get_rng_state()

    def rank(comm: Comm, model: nn.Module) -> sw.Loaded:
        return sw.shard(model, comm=comm).load(tmp_path / "step-2", training=sw.Training())

    report = on_ranks(2, DECODER.build, rank)[0]
    assert report.inexact[0].startswith("world size 3 → 2: RNG states not restored")
    assert report.local is None
    del before


def test_buffers_that_differ_by_rank_come_back_to_each(tmp_path: Path) -> None:
    net = NETS[2]  # batch norm: each rank has seen other rows

    def rank(comm: Comm, model: nn.Module) -> None:
        sharded = sw.shard(model, comm=comm)
        optimizer = adamw(model.parameters())
        steps(model, optimizer, net, comm.rank, range(2))
        mine = {name: buffer.clone() for name, buffer in model.named_buffers()}
        sharded.save(tmp_path / "step-2", optimizer, sw.Training(step=2))
        steps(model, optimizer, net, comm.rank, range(2, 3))
        report = sharded.load(tmp_path / "step-2", optimizer)
        assert same(mine, dict(model.named_buffers()))
        assert report.inexact == ()

    on_ranks(3, net.build, rank)
    report, state = loads(net.build, tmp_path / "step-2")
    name = "features.0.norm.running_mean"
    assert torch.equal(state[name], tensors(tmp_path / "step-2", "model")[name])
    assert f"buffer {name} differed between 3 ranks; all have rank 0's now" in report.inexact


# --- what does not fit -----------------------------------------------------------------------


def test_a_lenient_load_lists_what_it_left_out(tmp_path: Path) -> None:
    state = saved(DECODER, 3, tmp_path / "step-2")

    def other() -> nn.Module:
        model = nets.Decoder(vocabulary=41, tied=False)
        model.extra = nn.Linear(2, 2)
        return model

    report, loaded = loads(other, tmp_path / "step-2", strict=False)
    assert report.missing == ("extra.weight", "extra.bias")
    assert report.unexpected == ()
    assert report.misshapen == ("embed.weight", "lm_head.weight")
    fits = [name for name in state if name not in report.misshapen]
    assert same({n: loaded[n] for n in fits}, {n: state[n] for n in fits})
    fresh = seeded(other).state_dict()
    assert torch.equal(loaded["extra.weight"], fresh["extra.weight"])


def test_dtypes_are_converted_where_that_is_asked_for(tmp_path: Path) -> None:
    state = saved(DECODER, 3, tmp_path / "step-2")

    def half() -> nn.Module:
        return DECODER.build().to(torch.bfloat16)

    assert "embed.weight: stored as F32, the model has BF16" in refusal(half, tmp_path / "step-2")
    report, loaded = loads(half, tmp_path / "step-2", cast=True)
    assert set(report.cast) == set(state)
    assert same(loaded, {name: value.to(torch.bfloat16) for name, value in state.items()})


# --- folders of others -----------------------------------------------------------------------


def test_a_folder_without_a_manifest_loads_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = seeded(DECODER.build, seed=5).state_dict()
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        caplog.clear()
        report, loaded = loads(DECODER.build, path, world=3)
        assert same(loaded, plain)
        assert not report.checked
        assert "has no manifest, so its bytes could not be checked" in caplog.text


def test_a_file_with_an_odd_offset_loads(tmp_path: Path) -> None:
    """Others write no padding: data may begin anywhere."""
    plain = seeded(DECODER.build, seed=5).state_dict()
    data = b"".join(t.contiguous().numpy().tobytes() for t in plain.values())
    entries, at = {}, 0
    for name, tensor in plain.items():
        entries[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (len(text) % 2 == 0)
    (tmp_path / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    for world in (1, 3):
        assert same(loads(DECODER.build, tmp_path / "odd.safetensors", world)[1], plain)

    def half() -> nn.Module:
        return DECODER.build().to(torch.bfloat16)

    loaded = loads(half, tmp_path / "odd.safetensors", cast=True)[1]
    assert same(loaded, {name: value.to(torch.bfloat16) for name, value in plain.items()})


def test_a_folder_of_pickles_is_not_read(tmp_path: Path) -> None:
    torch.save(DECODER.build().state_dict(), tmp_path / "pytorch_model.bin")
    text = refusal(DECODER.build, tmp_path)
    assert "holds no model.safetensors" in text
    assert "a pickle can run anybody's code" in text
    text = refusal(DECODER.build, tmp_path / "pytorch_model.bin")
    assert "is no safetensors file. Files of pickles (.bin, .pt) are not read" in text


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", 7, None])
def test_an_index_that_leads_out_of_its_folder_is_refused(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "Do not trust this folder" in refusal(DECODER.build, folder)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "[" * 99999]
)
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refusal(DECODER.build, tmp_path, world=1)


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "y.safetensors")
    index = {"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "x.safetensors and y.safetensors both hold 'a'" in refusal(DECODER.build, tmp_path)


def test_a_model_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    state = saved(TIED, 3, tmp_path / "step-2")

    def meta() -> nn.Module:
        with torch.device("meta"):
            return TIED.build()

    assert same(loads(meta, tmp_path / "step-2")[1], state)


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("large_blocks")
def test_damage_is_named_with_its_place_and_what_became_of_the_model(tmp_path: Path) -> None:
    def wide() -> nn.Module:
        return nn.Linear(1024, 3 * 1024, bias=False)  # 12 MiB: three blocks and a bit

    on_ranks(2, wide, lambda c, m: sw.shard(m, comm=c).save(tmp_path / "out"))
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(2 * BLOCK + 5)
        file.write(b"!")
    text = refusal(wide, tmp_path / "out")
    assert text.startswith("rank 1: ")
    assert "model.safetensors is damaged: bytes 8,388,608" in text
    assert "(block 2 of 4)" in text
    assert "load another checkpoint before you use it" in text


def test_a_rank_reads_only_its_own_blocks(tmp_path: Path) -> None:
    """Damage where no rank reads harms nobody: here, the optimizer's file without optimizer."""
    saved(DECODER, 2, tmp_path / "step-2")
    path = tmp_path / "step-2" / "training/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    loads(DECODER.build, tmp_path / "step-2")


# --- resuming --------------------------------------------------------------------------------


def resumed(run: Path, world: int = 2, **how: Any) -> sw.Loaded | None:
    def rank(comm: Comm, model: nn.Module) -> sw.Loaded | None:
        sharded = sw.shard(model, comm=comm)
        return sharded.resume(run, adamw(model.parameters()), sw.Training(), **how)

    return on_ranks(world, DECODER.build, rank)[0]


def two(run: Path) -> None:
    for step in (1, 2):
        saved(DECODER, 2, run / f"step-{step}")


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    assert resumed(tmp_path / "no") is None
    assert resumed(tmp_path) is None


def test_a_checkpoint_of_another_model_is_not_skipped(tmp_path: Path) -> None:
    """An older one would not fit either, and training from scratch is not what was asked for."""
    two(tmp_path)

    def rank(comm: Comm, model: nn.Module) -> str:
        sharded = sw.shard(model, comm=comm)
        return error_text(sw.CheckpointError, lambda: sharded.resume(tmp_path))

    assert "does not fit" in on_ranks(2, NETS[2].build, rank)[0]


def test_latest_is_loaded_by_its_name(tmp_path: Path) -> None:
    two(tmp_path)
    report, _ = loads(DECODER.build, tmp_path / "latest")
    assert report.path == tmp_path / "step-2"
    assert report.step == 2


# --- over the other comms --------------------------------------------------------------------


def over_processes(comm: Comm, path: str) -> bool:
    net = NETS[6]
    model = seeded(net.build)
    sharded = sw.shard(model, comm=comm)
    optimizer = adamw(model.parameters())
    steps(model, optimizer, net, comm.rank, range(2))
    sharded.save(path, optimizer, sw.Training(step=2))
    before = clones(model.state_dict())
    steps(model, optimizer, net, comm.rank, range(2, 4))
    after = clones(model.state_dict())
    sharded.load(path, optimizer, sw.Training())
    back = same(before, model.state_dict())
    steps(model, optimizer, net, comm.rank, range(2, 4))
    return back and same(after, model.state_dict())


def over_memory(rank: int, world: int, folder: str, path: str) -> bool:
    import torch.distributed as dist

    from shardwise.comm.machine import connect
    from tests.ranks import gloo_group

    with (
        gloo_group(rank, world, folder),
        connect.over(dist.group.WORLD, transport="memory") as comm,
    ):
        return over_processes(comm, path)


@pytest.mark.prove
@pytest.mark.spawn
def test_processes_that_send_messages(tmp_path: Path) -> None:
    assert run_processes(3, over_processes, str(tmp_path / "step-2")) == [True] * 3
    loaded_and_saved(NETS[6], 2, tmp_path / "step-2", tmp_path / "again")
    assert same(all_tensors(tmp_path / "step-2"), all_tensors(tmp_path / "again"))


@pytest.mark.spawn
@pytest.mark.prove
def test_processes_that_share_memory(tmp_path: Path) -> None:
    from tests.ranks import outcomes_of

    outcomes = outcomes_of(2, over_memory, str(tmp_path / "step-2"))
    assert [(o.value, o.error) for o in outcomes] == [(True, "")] * 2


# --- transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama_in_files"])
def test_transformers_loads_the_folder_as_it_is(kind: str, tmp_path: Path) -> None:
    import transformers as hf

    from tests.parity import test_transformers as models

    build = models.gpt2 if kind == "gpt2" else models.llama
    options: dict[str, Any] = {"max_file_size": 10_000} if kind == "llama_in_files" else {}

    def rank(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        sharded = sw.shard(model, comm=comm)
        sharded.save(tmp_path / "step-1", **options)
        return clones(model.state_dict())

    state = on_ranks(3, build, rank)[0]
    auto: Any = hf.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(tmp_path / "latest", output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is type(seeded(build))
    assert same(loaded.state_dict(), state)


def test_a_folder_that_transformers_saved_loads(tmp_path: Path) -> None:
    from tests.parity import test_transformers as models

    for build in (models.gpt2, models.llama):
        plain: Any = seeded(build, seed=3)
        plain.save_pretrained(tmp_path / build.__name__)
        report, loaded = loads(build, tmp_path / build.__name__, world=3)
        assert same(loaded, plain.state_dict())
        assert not report.checked


def test_a_report_reads_as_one_line(tmp_path: Path) -> None:
    sharded = sw.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    sharded.save(tmp_path / "step-3", training=sw.Training(position=list(range(1000))))
    report = repr(sharded.resume(tmp_path, training=sw.Training()))
    assert report.startswith(f"Loaded('{tmp_path}/step-3', step 3: checksums compared")
    assert len(report) < 200
    smaller = sw.shard(nn.Sequential(nn.Linear(2, 2)))
    assert "; 2 unexpected (1." in repr(smaller.load(tmp_path / "step-3", strict=False))
