"""Labels and counters: the two values that every Comm shares."""

from __future__ import annotations

from shardwise.comm.protocol import Counters, Label


def test_a_label_reads_as_a_verb_and_a_unit() -> None:
    assert str(Label("gather", "blocks.3")) == "gather blocks.3"
    assert str(Label("agree")) == "agree"
    assert Label("gather", "a") == Label("gather", "a") != Label("gather", "b")


def test_counters_add_up_by_operation_until_they_are_reset() -> None:
    counters = Counters()
    counters.sent("gather", 100)
    counters.sent("gather", 50)
    counters.sent("reduce", 7)
    counters.waited("gather", 0.5)
    counters.waited("gather", 0.25)
    assert counters.calls == {"gather": 2, "reduce": 1}
    assert counters.bytes_sent == {"gather": 150, "reduce": 7}
    assert counters.seconds_waited == {"gather": 0.75}
    counters.reset()
    assert counters == Counters()
