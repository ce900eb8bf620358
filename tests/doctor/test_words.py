"""The texts: each is found by its names, links are links, and demonstrations really run."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from shardwise.doctor.demos import demonstrate
from shardwise.doctor.words import find, words
from shardwise.errors import ConfigError
from shardwise.plan.units import wrap


def test_words_of_the_documents_are_there() -> None:
    for name in ("All-Gather", "reduce scatter", "NCCL", "sharding", "FSDP", "DDP", "SPMD"):
        assert find(name).text
    for name in ("DeepSpeed", "unit", "bucket", "slot", "cue", "settle", "wrap", "residency"):
        assert find(name).text
    for name in ("tensor", "pipeline", "model_parallel", "ZeRO-2", "shard_grad_op", "mfu"):
        assert find(name).text


def test_a_word_that_is_not_there_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no text about 'all-gater'; nearest are all-gather"):
        find("all-gater")


def test_no_name_means_two_words() -> None:
    names = [name for word in words().values() for name in (word.name, *word.also)]
    assert len(names) == len(set(names))


def test_links_are_links_and_the_documents_references_are_among_them() -> None:
    links = {link for word in words().values() for link in word.links}
    assert all(urlsplit(link).scheme == "https" and urlsplit(link).netloc for link in links)
    for ours in (
        "https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html",
        "https://pytorch.org/blog/introducing-pytorch-fully-sharded-data-parallel-api/",
        "https://arxiv.org/abs/2304.11277",  # FSDP
        "https://arxiv.org/abs/1910.02054",  # ZeRO
        "https://arxiv.org/abs/2407.07852",  # OpenDiLoCo
        "https://arxiv.org/abs/2204.02311",  # MFU
    ):
        assert ours in links


def test_numbers_are_those_of_the_collectives() -> None:
    assert demonstrate("all_gather") == [
        "rank 0: gives [0.0, 1.0, 2.0], has [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], sent 12 bytes",
        "rank 1: gives [3.0, 4.0, 5.0], has [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], sent 12 bytes",
    ]
    assert demonstrate("reduce_scatter") == [
        "rank 0: gives [1.0, 2.0, 3.0, 4.0], has [5.5, 11.0] of the mean, sent 8 bytes",
        "rank 1: gives [10.0, 20.0, 30.0, 40.0], has [16.5, 22.0] of the mean, sent 8 bytes",
    ]
    assert "inf" in demonstrate("averaging")[0]


def test_the_stages_of_zero_are_counted_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap, "JOINED_NBYTES", 4 << 20)  # as for users, unlike tests/conftest.py
    monkeypatch.setattr(wrap, "JOINED_TRAINED_NBYTES", 32 << 20)
    _, none, one, two, three = demonstrate("zero_stages")
    assert "gathers 0 + 0, reduces 4" in none
    assert "gathers 4 + 0, reduces 4" in one
    assert "gathers 4 + 0, reduces 4" in two
    assert "gathers 4 + 3, reduces 4" in three


def test_every_demonstration_runs() -> None:
    assert all(demonstrate(word.demo) for word in words().values() if word.demo)
