"""A torch that is newer than every tested one: taken if it keeps to the rules, else refused."""

from __future__ import annotations

import logging
import runpy

import pytest
import torch
from torch.torch_version import TorchVersion

from shardwise import torch_internals
from shardwise.errors import ConfigError
from shardwise.torch_internals.self_tests import NEWEST_TESTED

FACT = f"torch 9.1.0a0+git1 is newer than {NEWEST_TESTED}, the newest one tested"


def import_again() -> None:
    runpy.run_path(torch_internals.__file__, run_name=torch_internals.__name__)


@pytest.fixture
def _newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("9.1.0a0+git1"))


def test_the_newest_tested_torch_is_named_and_nothing_is_tried_on_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(f"{NEWEST_TESTED}.9+cpu"))
    monkeypatch.delattr(torch.Tensor, "detach_")  # a self-test needs it
    import_again()
    assert caplog.messages == []


@pytest.mark.usefixtures("_newer")
@pytest.mark.parametrize("surroundings", [torch.no_grad(), torch.device("meta")])
def test_a_newer_torch_that_keeps_to_the_rules_is_taken_in_one_sentence(
    surroundings: torch.no_grad | torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with surroundings, caplog.at_level(logging.WARNING, "shardwise"):
        import_again()
    assert caplog.messages == [f"{FACT}; self-tests of what shardwise relies on passed"]


@pytest.mark.usefixtures("_newer")
def test_of_many_ranks_the_first_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    import_again()
    assert caplog.messages == []


@pytest.mark.usefixtures("_newer")
def test_a_newer_torch_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    with pytest.raises(ConfigError, match="no attribute '_will_engine_execute_node'") as caught:
        import_again()
    assert str(caught.value).startswith(FACT)
    assert str(caught.value).endswith(f'pip install "torch=={NEWEST_TESTED}.*"')


@pytest.mark.usefixtures("_newer")
@pytest.mark.parametrize(
    ("owner", "name", "other", "rule"),
    [
        (torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True, "in order"),
        (torch._C._autograd, "_get_sequence_nr", lambda: 0, "nodes are numbered"),
        (torch._C._nn, "unflatten_dense_tensors", lambda _, like: [torch.ones(2)] * 2, "untracked"),
    ],
)
def test_a_newer_torch_with_another_rule_is_refused(
    owner: object, name: str, other: object, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(ConfigError, match=rf"relies on \(.*{rule}"):
        import_again()
