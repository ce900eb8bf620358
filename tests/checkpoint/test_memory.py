"""What loading takes: a rank's shard, one bucket, and nothing that grows with the model.

Memory that no file backs is what counts: private pages, and this rank's part of shared ones,
beyond what Python, torch and the group have before the model is there. A model of 112 MB keeps
the suite short; ``SHARDWISE_TEST_LAYERS=48`` makes it 1.1 GB.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.comm.machine import connect
from shardwise.recipe.model_config import ModelConfig
from shardwise.train.decoder import Decoder
from tests.ranks import gloo_group, outcomes_of

LAYERS = int(os.environ.get("SHARDWISE_TEST_LAYERS", "2"))
PER_FILE = 4  # layers
SLACK = (6 << 20) + LAYERS * (192 << 10)
"""One block of a file, what the allocator rounds up, and Python's objects: modules, hooks, views.

The last are 110 kB a layer, whether its tensors have kilobytes or gigabytes.
"""


def decoder(layers: int) -> nn.Module:
    """Matrices in bf16, norms in fp32; 22 MB a layer, 34 MB each for the embedding and the head."""
    config = ModelConfig(width=1024, layers=layers, heads=16, kv_heads=4, hidden=2816, tied=False)
    with torch.device("meta"):
        model = Decoder(config, 16_384, 128).to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    return model


def write_folder(folder: Path, layers: int) -> int:
    """A Hugging Face folder of several files with random weights; bytes of all tensors."""
    folder.mkdir()
    shapes = decoder(layers).state_dict()
    files = {name: f"model-{_number(name)}.safetensors" for name in shapes}
    for file in dict.fromkeys(files.values()):
        values = {
            name: torch.empty(like.shape, dtype=like.dtype).uniform_()
            for name, like in shapes.items()
            if files[name] == file
        }
        save_file(values, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return sum(like.nbytes for like in shapes.values())


def _number(name: str) -> int:
    parts = name.split(".")
    return 1 + int(parts[2]) // PER_FILE if parts[1] == "layers" else 0


def resident() -> int:
    """Bytes of this process that no file backs; shared pages are counted in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
    return sum(int(x.split()[1]) << 10 for x in lines if x.startswith(("Pss_Anon", "Pss_Shmem")))


class Peak:
    """The largest that ``held()`` is while a block runs."""

    def __enter__(self) -> Self:
        self.top, self.samples, self._over = resident(), 0, threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.top, self.samples = max(self.top, resident()), self.samples + 1


@dataclass(frozen=True)
class Taken:
    """Bytes of one rank, counted from before there was a model.

    Attributes:
        baseline: of Python, torch and the group; what all the others do not count.
        shard: of all buckets; no more is to stay.
        bucket: the largest one, whole.
        made, loaded: the peaks of ``shard()`` and ``load()``.
        after: at the end.
        samples: how many the peaks are of.
    """

    baseline: int
    shard: int
    bucket: int
    made: int
    loaded: int
    after: int
    samples: int


def load_and_look(rank: int, world: int, root: str, folder: str, transport: str) -> Taken:
    """One rank: what it takes to build on the meta device, shard and load."""
    with gloo_group(rank, world, root), connect.over(dist.group.WORLD, transport=transport) as comm:
        sw.shard(decoder(1), comm=comm).load(Path(folder) / "one layer")  # what is imported late
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        baseline = resident()
        model = decoder(LAYERS)
        with Peak() as making:
            sharded = sw.shard(model, comm=comm)
        with Peak() as loading:
            sharded.load(Path(folder) / "all layers")
        whole = [bucket.layout.numel * bucket.dtypes.stored.itemsize for bucket in sharded.buckets]
        return Taken(
            baseline,
            sum(bucket.shard.nbytes for bucket in sharded.buckets),
            max(whole),
            making.top - baseline,
            loading.top - baseline,
            resident() - baseline,
            making.samples + loading.samples,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    write_folder(root / "one layer", 1)
    write_folder(root / "all layers", LAYERS)
    return root


@pytest.mark.prove
@pytest.mark.spawn
@pytest.mark.parametrize(("world", "transport"), [(2, "memory"), (4, "messages")])
def test_loading_holds_a_shard_and_one_bucket(folder: Path, world: int, transport: str) -> None:
    files = (folder / "all layers").glob("*.safetensors")
    total = sum(file.stat().st_size for file in files)
    for outcome in outcomes_of(world, load_and_look, str(folder), transport, timeout=240):
        assert outcome.error == ""
        peaks: Taken = outcome.value
        print(peaks)  # noqa: T201 - `pytest -s` shows the numbers
        assert peaks.samples > 20
        assert peaks.shard < total / world + (1 << 20)
        assert peaks.made < peaks.shard + peaks.bucket + SLACK
        assert peaks.loaded < peaks.shard + peaks.bucket + SLACK
        assert peaks.after < peaks.shard + SLACK
