from __future__ import annotations

import json
import math
from pathlib import Path

from shardwise.train.metrics import Evaluated, Journal, Warned


def evaluated(loss: float) -> Evaluated:
    return Evaluated(3, loss, 0.5, 6.0, 100, 1.0)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert evaluated(2.0).perplexity == math.exp(2.0)


def test_a_perplexity_that_overflows_is_infinite() -> None:
    assert evaluated(1e4).perplexity == math.inf
    assert math.isnan(evaluated(math.nan).perplexity)


def test_each_record_is_a_line_as_soon_as_it_happens(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal(Warned("é"))
    assert journal.path.read_text("utf-8") == '{"record": "warned", "message": "é"}\n'
    journal(evaluated(2.0))
    last = json.loads(journal.path.read_text("utf-8").splitlines()[1])
    assert last["record"] == "evaluated"
    assert last["perplexity"] == math.exp(2.0)
    assert journal.records == [Warned("é"), evaluated(2.0)]


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal(evaluated(math.nan))
    line = journal.path.read_text("utf-8")
    assert '"loss": null' in line
    assert "NaN" not in line
