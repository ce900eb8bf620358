from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from shardwise.train.metrics_log import MetricsLog, lines_until
from shardwise.train.records import Evaluated, Stepped, Warned


def evaluated(loss: float, step: int = 3) -> Evaluated:
    return Evaluated(step, loss, 0.5, 6.0, 100, 1.0)


def stepped(step: int) -> Stepped:
    return Stepped(step, 9, 5.0 - step, 1e-3, 1.0, 100.0, 2**20, 1.0)


def begun(folder: Path, after: int = 0) -> MetricsLog:
    journal = MetricsLog(folder / "metrics.jsonl")
    journal.start(after)
    return journal


def test_each_record_is_a_line_as_soon_as_it_happens(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal(Warned("é"))
    line = json.loads(journal.path.read_text("ascii"))
    assert {"record": "warned", "message": "é"}.items() <= line.items()
    assert time.time() - line["time"] < 60
    journal(evaluated(2.0))
    last = json.loads(journal.path.read_text("utf-8").splitlines()[1])
    assert last["record"] == "evaluated"
    assert last["perplexity"] == math.exp(2.0)
    assert journal.records == [Warned("é"), evaluated(2.0)]


@pytest.mark.parametrize("text", [*"\u2028\u2029\x85\x0b\x1c\0", "caf\udce9"])
def test_a_record_survives_any_character(tmp_path: Path, text: str) -> None:
    journal = begun(tmp_path)
    for record in (stepped(1), Warned(text), stepped(2)):
        journal(record)
    assert len(journal.path.read_bytes().splitlines()) == 3
    assert begun(tmp_path, 2).records == [stepped(1), stepped(2)]
    lines = journal.path.read_text("utf-8").split("\n")
    assert json.loads(lines[1])["message"] == text


def test_a_record_of_an_earlier_version_is_not_torn_by_its_characters(tmp_path: Path) -> None:
    old = [{"record": "warned", "message": "a\u2028b"}, {"record": "stepped", "step": 1}]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in old)
    (tmp_path / "metrics.jsonl").write_text(text, "utf-8")
    begun(tmp_path, 1)
    assert [json.loads(line) for line in open_lines(tmp_path / "metrics.jsonl")] == old


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal(evaluated(math.nan))
    line = journal.path.read_text("utf-8")
    assert '"loss": null' in line
    assert "NaN" not in line


def test_what_is_said_before_the_run_begins_waits_for_where_that_is(tmp_path: Path) -> None:
    first = begun(tmp_path)
    for step in (1, 2, 3):
        first(stepped(step))
    before = first.path.read_bytes()
    again = MetricsLog(first.path)
    again(Warned("waits"))
    assert first.path.read_bytes() == before
    again.start(2)
    assert [json.loads(line).get("step") for line in open_lines(first.path)] == [1, 2, None]


def open_lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def test_steps_that_will_be_taken_again_are_cut(tmp_path: Path) -> None:
    first = begun(tmp_path)
    for record in (stepped(1), stepped(2), evaluated(4.0, 2), stepped(3), evaluated(3.0, 3)):
        first(record)
    again = begun(tmp_path, 2)
    assert again.records == [stepped(1), stepped(2), evaluated(4.0, 2)]
    again(stepped(3))
    assert [json.loads(line)["step"] for line in open_lines(first.path)] == [1, 2, 2, 3]


def test_a_run_that_begins_anew_begins_an_empty_file(tmp_path: Path) -> None:
    begun(tmp_path)(Warned("old"))
    assert begun(tmp_path).path.read_text("utf-8") == ""


def test_a_torn_line_and_all_after_it_is_cut() -> None:
    whole = '{"record": "stepped", "step": 1}'
    assert list(lines_until([whole, '{"record": "stepp', whole], 9)) == [json.loads(whole)]
    assert list(lines_until([whole, "17"], 9)) == [json.loads(whole)]


def test_a_loss_that_was_no_number_is_none_when_read_back(tmp_path: Path) -> None:
    begun(tmp_path)(evaluated(math.inf, 1))
    (back,) = begun(tmp_path, 1).records
    assert isinstance(back, Evaluated)
    assert math.isnan(back.loss)


def test_a_damaged_line_stays_in_the_file_and_out_of_the_picture(tmp_path: Path) -> None:
    begun(tmp_path)(stepped(1))
    (whole,) = open_lines(tmp_path / "metrics.jsonl")
    damaged = json.dumps(json.loads(whole) | {"loss": [1], "elapsed": "long"})
    (tmp_path / "metrics.jsonl").write_text(f"{whole}\n{damaged}\n{'[' * 100_000}\n", "utf-8")
    assert begun(tmp_path, 1).records == [stepped(1)]
    assert open_lines(tmp_path / "metrics.jsonl") == [whole, damaged]


def test_the_time_of_earlier_attempts_counts_also_that_of_steps_taken_again(tmp_path: Path) -> None:
    lines = [{"record": "stepped", "step": step, "elapsed": 100.0 * step} for step in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"record": "st', "utf-8")
    again = begun(tmp_path, 2)
    again(stepped(3))
    elapsed = [json.loads(line)["elapsed"] for line in open_lines(again.path)]
    assert elapsed[:2] == [100.0, 200.0]
    assert 300.0 <= elapsed[2] == pytest.approx(again.elapsed, abs=10)
    assert begun(tmp_path).elapsed < 60
