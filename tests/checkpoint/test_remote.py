from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch import nn

import shardwise as sw
from shardwise.checkpoint import remote
from shardwise.checkpoint.remote import download, remote_checkpoints, upload
from shardwise.checkpoint.run_folder import check_complete
from shardwise.errors import CheckpointError


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a real server of the S3 protocol, on this machine."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        "127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    options = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    options |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in options}
    os.environ.update(options)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield "s3://bucket"
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a run may upload to: nothing is there yet."""
    if request.param == "s3":
        pytest.importorskip("s3fs")
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4()}/run"
    return (
        f"memory://{uuid.uuid4()}/run" if request.param == "memory" else f"file://{tmp_path}/there"
    )


def saved(run: Path, step: int) -> Path:
    torch.manual_seed(step)
    net = nn.Linear(5, 4)
    sharded, optimizer = sw.shard(net), torch.optim.AdamW(net.parameters())
    net(torch.ones(5)).sum().backward()
    optimizer.step()
    sharded.save(run / f"step-{step}", optimizer, sw.Training(step=step))
    return run / f"step-{step}"


class Watched:
    """A file system that notes what is put there, and fails in the calls named ``fails``."""

    def __init__(self, fs: Any, put: list[str], fails: dict[str, int]) -> None:
        self._fs, self._put, self._fails = fs, put, fails

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._fs, name)

        def call(*given: Any, **options: Any) -> Any:
            if name in self._fails:
                if self._fails[name] == 0:
                    raise OSError("the line is cut")
                self._fails[name] -= 1
            if name == "put_file":
                self._put.append(Path(given[0]).name)
            return real(*given, **options)

        return call


@contextmanager
def watched(**fails: int) -> Iterator[list[str]]:
    """The files that are uploaded; a call fails after so many that do not."""
    put = list[str]()
    with pytest.MonkeyPatch.context() as patched:

        def watching(url: str) -> tuple[Any, str]:
            fs, root = url_to_fs(url)
            return Watched(fs, put, fails), root

        patched.setattr(remote, "url_to_fs", watching)
        yield put


def names(url: str) -> list[str]:
    return [one.url.rpartition("/")[2] for one in remote_checkpoints(url)]


def test_a_checkpoint_comes_back_as_it_was(url: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "run", 3)
    assert remote_checkpoints(url) == []
    assert upload(folder, url).url == f"{url}/step-3"
    copy = download(url, tmp_path / "other")  # the newest of the run
    assert copy == tmp_path / "other" / "step-3"
    for name in check_complete(folder).files:
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    assert sw.shard(nn.Linear(5, 4)).load(copy).step == 3
    assert download(f"{url}/step-3", tmp_path / "other") == copy  # nothing is copied again


def test_the_newest_stay(url: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        upload(saved(tmp_path, step), url, limit=2)
    assert names(url) == ["step-3", "step-2"]


def test_an_upload_that_died_leaves_the_last_good_one_and_goes_on_where_it_was(
    url: str, tmp_path: Path
) -> None:
    upload(saved(tmp_path / "a", 1), url)
    second = saved(tmp_path / "a", 2)
    words = "the line is cut.*goes on where this one ended"
    with watched(put_file=1) as put, pytest.raises(CheckpointError, match=words):
        upload(second, url)
    assert names(url) == ["step-1"]
    assert download(url, tmp_path / "b").name == "step-1"
    with watched() as again:
        upload(second, url)
    assert names(url) == ["step-2", "step-1"]
    assert put[0] not in again
    fs, root = url_to_fs(url)
    assert "uploading" not in [Path(path).name for path in fs.find(root)]


def test_another_save_of_the_same_name_replaces_the_old_one_when_it_is_complete(
    url: str, tmp_path: Path
) -> None:
    upload(saved(tmp_path / "a", 1), url)
    other = saved(tmp_path / "b", 1)
    with watched(rm_file=0), pytest.raises(CheckpointError):  # dies at the last moment
        upload(other, url)
    assert len(names(url)) == 2
    upload(other, url)
    token = check_complete(other).token
    assert names(url) == [f"step-1.{token[:8]}"]
    copy = download(url, tmp_path / "c")
    assert copy.name == "step-1"
    assert check_complete(copy).token == token


def test_a_download_that_died_leaves_nothing_in_another_save_of_the_same_name(
    tmp_path: Path,
) -> None:
    first, second = f"memory://{uuid.uuid4()}/run", f"memory://{uuid.uuid4()}/run"
    for seed, url in ((1, first), (2, second)):
        run = tmp_path / str(seed)
        upload(saved(run, seed).rename(run / "step-9"), url)
    files = len(remote_checkpoints(first)[0].manifest.files)
    with watched(get_file=files - 1), pytest.raises(CheckpointError, match="downloading"):
        download(first, tmp_path / "new")
    folder = download(second, tmp_path / "new")
    for file in (path for path in folder.rglob("*") if path.is_file()):
        own = tmp_path / "2" / "step-9" / file.relative_to(folder)
        assert file.read_bytes() == own.read_bytes()


def test_a_download_that_died_goes_on_and_what_is_there_is_not_overwritten(
    url: str, tmp_path: Path
) -> None:
    upload(saved(tmp_path / "a", 1), url)
    with watched(get_file=1), pytest.raises(CheckpointError, match="downloading"):
        download(url, tmp_path / "b")
    assert not (tmp_path / "b" / "step-1").exists()
    download(url, tmp_path / "b")
    saved(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match="is not the checkpoint of this name"):
        download(url, tmp_path / "c")


def test_what_is_not_there_and_what_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        download("memory://nothing/here", tmp_path)
    with pytest.raises(CheckpointError, match="nosuch"):
        upload(saved(tmp_path, 1), "nosuch://bucket")
