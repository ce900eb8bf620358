"""How values come to be on every rank: made unit by unit, or sent by rank 0; never by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.comm.protocol import Comm, Completed, Label, Pending
from shardwise.config.options import Init, default_init
from shardwise.setup.materialise import sync
from tests import nets
from tests.copies import clones, equal, error_text, local, on_ranks, seeded
from tests.devices import DEVICES
from tests.fake import FakeComm
from tests.nets import NETS, Decoder, Net
from tests.parity.meta import built_on_meta, made_whole
from tests.ranks import run_threads
from tests.steps import STRATEGIES, train
from tests.written import storage


class Rotary(nn.Module):
    """A table that is no part of a state dict, as in most decoders."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(1.0 / 10_000 ** (torch.arange(4) / 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.rotary(x))
        return x


class Forgetful(nn.Module):
    """Sets its weight when it is built, and has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.weight
        return out


def numbers_for(seed: int, rows: int) -> nets.Batch:
    return (nets.numbers(seed, (rows, 4)),) * 2


ROTARY = Net(Rotated, numbers_for)


def drawing(generator: torch.Generator) -> Init:
    """Draws everything that a module holds itself, from a generator of its rank's own."""

    def draw(module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 9)

    return draw


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


# --- built on the meta device ----------------------------------------------------------------


@pytest.mark.parametrize("net", [*NETS, ROTARY], ids=[*map(str, NETS), "rotary"])
def test_a_model_made_unit_by_unit_equals_one_made_whole_with_the_same_seed(net: Net) -> None:
    whole = made_whole(net)
    model = built_on_meta(net)
    torch.manual_seed(0)
    sw.shard(model)
    assert equal(model.state_dict(), clones(whole.state_dict()))
    assert equal(buffers(model), buffers(whole))
    after = torch.rand(1)
    made_whole(net)
    assert torch.equal(after, torch.rand(1))  # nothing was drawn besides


def test_complex_numbers_are_made_and_missed_like_others() -> None:
    with torch.device("meta"):
        models = [nn.Linear(3, 4, dtype=torch.complex64) for _ in range(2)]
    fill = partial(torch.Tensor.fill_, value=1j)
    sw.shard(models[0], init=lambda module: [fill(p.data) for p in module.parameters()])
    assert models[0].state_dict()["weight"].eq(1j).all()
    text = error_text(sw.ConfigError, lambda: sw.shard(models[1], init=lambda module: None))
    assert text.startswith("'weight' of Linear was built on the meta device and still has no value")


def test_parameters_stay_the_objects_that_they_were() -> None:
    """An optimizer that was made for the meta model trains; ties and ``requires_grad`` stay."""
    net = Net(nets.mostly_frozen, nets.mostly_frozen_batch)
    model = built_on_meta(net)
    params = dict(model.named_parameters(remove_duplicate=False))
    trained = {name for name, param in params.items() if param.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.shard(model)
    before = clones(model.state_dict())
    assert all(p is params[n] for n, p in model.named_parameters(remove_duplicate=False))
    assert {name for name, param in params.items() if param.requires_grad} == trained
    train(model, net.batch(0, 2))
    optimizer.step()
    after = model.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == trained


def test_tied_parameters_are_made_once_and_stay_tied() -> None:
    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, comm=comm, init=drawing(torch.Generator().manual_seed(0)))
        assert model.get_parameter("lm_head.weight") is model.get_parameter("embed.weight")

    models = [built_on_meta(Net(nets.tied_decoder, nets.tied_decoder_batch)) for _ in range(2)]
    run_threads(2, rank)


class Sharing(nn.Module):
    """One module in two places: ``apply`` comes to it twice, and draws it twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(3, 3)
        self.first = nn.Sequential(shared, nn.Linear(3, 3))
        self.second = nn.Sequential(nn.Linear(3, 3), shared)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def test_a_module_in_two_places_is_drawn_as_often_as_apply_comes_to_it() -> None:
    whole = Sharing().apply(drawing(torch.Generator().manual_seed(7)))
    wrap = sw.wrap.by_hand("first.0", "first.1", "second.0")

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, wrap=wrap, comm=comm, init=drawing(torch.Generator().manual_seed(7)))
        assert equal(model.state_dict(), clones(whole.state_dict()))

    models = [built_on_meta(Net(Sharing, nets.oddities_batch)) for _ in range(2)]
    run_threads(2, rank)


def test_real_values_are_kept_and_only_meta_modules_are_initialised() -> None:
    model = seeded(nets.decoder)
    plain = clones(model.state_dict())
    part = model.get_submodule("blocks.1")
    part.to_empty(device="meta")
    initialised: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        initialised.append(module)
        default_init(module)

    sw.shard(model, init=init)
    filled = {m for m in part.modules() if any(True for _ in m.parameters(recurse=False))}
    assert set(initialised) == filled
    state = model.state_dict()
    for name, value in plain.items():
        assert name.startswith("blocks.1.") or torch.equal(state[name], value)


@pytest.mark.parametrize(
    ("init", "forgotten"),
    [
        (default_init, "weight"),
        (lambda module: nn.init.ones_(getattr(module, "weight", torch.zeros(1))), "linear.bias"),
        (lambda module: [nn.init.ones_(p) for p in module.parameters(recurse=False)], "seen"),
    ],
)
def test_what_is_left_without_a_value_is_an_error_that_names_it(
    init: Callable[[nn.Module], Any], forgotten: str
) -> None:
    def rank(comm: Comm) -> str:
        return error_text(sw.ConfigError, lambda: sw.shard(models[comm.rank], comm=comm, init=init))

    models = [built_on_meta(Net(Forgetful, nets.oddities_batch)) for _ in range(2)]
    for text in run_threads(2, rank):
        owner = "Linear" if "linear" in forgotten else "Forgetful"
        assert text == (
            f"{forgotten!r} of {owner} was built on the meta device and still has no value after "
            "its initialisation, so training would start from garbage. Give "
            f"{owner} a reset_parameters() that fills it, or pass init=<function of a module> to "
            "shard(); for a transformers model init=model._init_weights."
        )


def test_a_half_filled_parameter_is_seen_too() -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.data[:1] = 1

    model = built_on_meta(Net(lambda: nn.Linear(3, 3), nets.oddities_batch))
    assert "'weight' of Linear" in error_text(sw.ConfigError, lambda: sw.shard(model, init=init))


class Sentinel(nn.Module):
    """Fills a buffer with the same value everywhere, and draws its weight."""

    def __init__(self, value: complex, dtype: torch.dtype) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.zeros(2, 2, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("mask").fill_(self.value)
        nn.init.normal_(self.weight)


SENTINELS: list[tuple[complex, torch.dtype]] = [
    (float("nan"), torch.float32),
    (float("nan"), torch.complex64),
    (255, torch.uint8),
    (torch.iinfo(torch.int64).max, torch.int64),
    (True, torch.bool),
]


@pytest.mark.parametrize(("value", "dtype"), SENTINELS, ids=[str(kind) for _, kind in SENTINELS])
def test_any_number_may_be_a_value(value: complex, dtype: torch.dtype) -> None:
    """Also the one with which memory is marked; what is drawn is as in a whole model."""
    net = Net(lambda: nn.Sequential(*[Sentinel(value, dtype) for _ in range(2)]), numbers_for)
    whole, model = made_whole(net), built_on_meta(net)
    torch.manual_seed(0)
    sw.shard(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [kind for _, kind in SENTINELS], ids=str)
def test_what_is_not_filled_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    def fill_half(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data[:1] = 0

    model = built_on_meta(Net(lambda: Sentinel(0, dtype), numbers_for))
    model.register_parameter("weight", None)
    model.linear = nn.Linear(1, 1)
    assert "'mask' of Sentinel" in error_text(
        sw.ConfigError, lambda: sw.shard(model, init=fill_half)
    )


# --- no rank ever holds the whole model ------------------------------------------------------


class Live(TorchDispatchMode):
    """The bytes of all memory that operations of this thread made, at their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                ref = StorageWeakRef(leaf.untyped_storage())
                self._seen[ref.cdata] = ref
        self.peak = max(self.peak, self.nbytes())
        return out

    def nbytes(self) -> int:
        self._seen = {cdata: ref for cdata, ref in self._seen.items() if not ref.expired()}
        return sum(map(size_of, self._seen.values()))


def size_of(ref: StorageWeakRef) -> int:
    """The size as it is now: a bucket's storage is resized, and another rank may have freed it."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    return 0 if storage is None else storage.nbytes()


def test_no_rank_ever_holds_the_whole_model() -> None:
    """Its shards, and the largest unit twice: as it was made, and the bucket it is cut in."""

    def build() -> nn.Module:
        return Decoder(width=32, depth=16, vocabulary=37, tied=True)

    def rank(comm: Comm) -> tuple[int, int]:
        with Live() as live:
            sharded = sw.shard(models[comm.rank], comm=comm)
            nbytes = sum(bucket.shard.nbytes for bucket in sharded.buckets)
            largest = max(unit.nbytes for unit in sharded.units)
            comm.agree({})  # until then a slow rank may still hold what it was sent
            assert live.nbytes() < 1.02 * nbytes + 1_000
        assert live.peak <= 1.02 * (nbytes + 2 * largest) + 1_000
        return live.peak, nbytes

    models = [built_on_meta(Net(build, nets.decoder_batch)) for _ in range(4)]
    whole = sum(p.nbytes for p in build().parameters())
    for peak, nbytes in run_threads(4, rank):
        assert nbytes < 0.27 * whole
        assert peak < 0.45 * whole


def test_the_measure_sees_a_model_that_is_made_whole() -> None:
    with Live() as live:
        model = nets.decoder()
    assert live.peak >= sum(p.nbytes for p in model.parameters())


def test_a_model_that_was_whole_on_every_rank_lets_it_go() -> None:
    def rank(comm: Comm, model: nn.Module) -> None:
        before = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
        sharded = sw.shard(model, comm=comm)
        comm.agree({})  # until then a slow rank may still hold what it was sent
        assert all(ref.expired() for ref in before)
        whole = sum(bucket.layout.used for bucket in sharded.buckets)
        by_storage = {storage(p): local(p).untyped_storage().nbytes() for p in model.parameters()}
        assert sum(by_storage.values()) < 0.4 * 4 * whole

    on_ranks(3, nets.decoder, rank)


# --- rank 0's values -------------------------------------------------------------------------


def differently(world: int, net: Net) -> Iterator[nn.Module]:
    for number in range(world):
        model = seeded(net.build, seed=number)
        for buffer in model.buffers():
            buffer.fill_(number)
        yield model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("net", NETS, ids=str)
def test_ranks_that_start_differently_are_made_equal(net: Net, strategy: str) -> None:
    models = list(differently(3, net))
    first = clones(models[0].state_dict())

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        sw.shard(model, strategy, comm=comm)
        assert equal(model.state_dict(), first)

    run_threads(3, rank)


def test_without_it_ranks_that_differ_are_an_error_that_names_the_tensors() -> None:
    def rank(comm: Comm, model: nn.Module, change: str) -> str:
        if comm.rank == 1:
            with torch.no_grad():
                tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                tensors[change].view(-1)[-1] += 1
        options = {"comm": comm, "sync_module_states": False}
        return error_text(sw.RanksDisagree, lambda: sw.shard(model, **options))  # type: ignore[arg-type]

    for change in ("stem.weight", "features.1.norm.running_var"):
        texts = on_ranks(3, nets.odd_convnet, lambda c, m: rank(c, m, change))  # noqa: B023
        for text in texts:
            assert text.startswith("1 setting is not the same on all ranks:\n")
            assert f"\n  values of {change}: ranks 0 and 2: " in text
            assert "; rank 1: " in text


def test_only_the_first_of_many_tensors_are_named() -> None:
    models = list(differently(2, Net(nets.decoder, nets.decoder_batch)))

    def rank(comm: Comm) -> str:
        model = models[comm.rank]
        options = {"comm": comm, "sync_module_states": False}
        return error_text(sw.RanksDisagree, lambda: sw.shard(model, **options))  # type: ignore[arg-type]

    for text in run_threads(2, rank):
        assert text.splitlines()[1].startswith(
            "  values of blocks.0.attention.key.weight: rank 0: "
        )
        assert text.splitlines()[11].startswith("  … and ")


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_was_built_on_the_cpu_is_sent_from_the_comms_device(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    comm = FakeComm(1, 2, device)
    sent: list[str] = []

    def strict(tensor: Tensor, root: int, label: Label) -> Pending:
        assert tensor.device.type == device  # as NCCL asks
        sent.append(label.unit)
        return Completed()

    monkeypatch.setattr(comm, "broadcast", strict)
    model = nets.odd_convnet()
    train(model, nets.odd_convnet_batch(0, 2))  # gradients follow their parameters
    sw.shard(model, comm=comm)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert sorted(sent) == sorted(names)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert {t.device.type for t in (*model.parameters(), *model.buffers(), *grads)} == {device}


def test_a_value_is_moved_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value can be there; where it is sent from is what counts."""
    elsewhere = FakeComm(1, 2, "meta")
    sent: list[str] = []

    def strict(tensor: Tensor, root: int, label: Label) -> Pending:
        sent.append(tensor.device.type)
        return Completed()

    monkeypatch.setattr(elsewhere, "broadcast", strict)
    assert sync(torch.ones(3), elsewhere, "weight").is_meta
    assert sent == ["meta"]


def test_each_value_that_was_sent_is_let_go_before_the_next_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = FakeComm(1, 2)
    alive: list[int] = []
    last: list[StorageWeakRef] = []

    def watched(tensor: Tensor, root: int, label: Label) -> Pending:
        alive.append(sum(not ref.expired() for ref in last))
        last[:] = [StorageWeakRef(tensor.untyped_storage())]
        return Completed()

    monkeypatch.setattr(comm, "broadcast", watched)
    sw.shard(nets.decoder(), comm=comm)
    assert set(alive) == {0}
    assert len(alive) > 10


class Slices(nn.Module):
    """Parameters that are parts of something else, in an order that is not their memory's."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 3).T)
        self.sliced = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("strided", torch.randn(6, 6)[::2, 1::2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed @ torch.ones(5, 1) + self.sliced.sum() + self.last.sum()


def test_a_model_may_be_sharded_where_torch_makes_everything_on_meta() -> None:
    """It sent memory that is not there, and gloo ended the process."""
    with torch.device("meta"):
        sharded = sw.shard(nets.tied_decoder())
    assert {bucket.shard.device.type for bucket in sharded.buckets} == {"cpu"}
    train(sharded.model, nets.tied_decoder_batch(0, 2))


# --- values that are read later ---------------------------------------------------------------


def test_what_is_loaded_later_is_neither_made_nor_sent_and_stays_the_object_it_was() -> None:
    """A weight holds zeros until then; a bias beside it is initialised, as ever."""

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        later: dict[str, Tensor] = {}
        later |= {n: p for n, p in model.named_parameters() if n.endswith("weight")}
        later |= {n: b for n, b in model.named_buffers() if n.endswith("running_mean")}
        init = drawing(torch.Generator().manual_seed(0))
        with Live() as live:
            sharded = sw.shard(model, comm=comm, init=init, load_later=frozenset(later.values()))
        assert live.peak < 1.2 * sum(bucket.shard.nbytes for bucket in sharded.buckets) + 2_000
        state = model.state_dict()
        assert {name for name in state if not state[name].any()} >= set(later)
        assert all(state[name].any() for name in state if name.endswith("bias"))
        now = dict(model.named_parameters()) | dict(model.named_buffers())
        assert all(now[name] is tensor for name, tensor in later.items())
        sent = comm.counters.calls["broadcast"]
        assert sent == len([*model.parameters(), *model.buffers()]) - len(later)

    models = [built_on_meta(Net(nets.odd_convnet, nets.odd_convnet_batch)) for _ in range(2)]
    run_threads(2, rank)
