"""Which forward calls the backward pass is in: the drawings of ``forward_calls``, as tables."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

from shardwise.runtime.forward_calls import ForwardCall, ForwardCalls


class Pass:
    """Forward calls, and what a backward pass tells: ``+unit`` enters, ``-unit`` leaves."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.calls = ForwardCalls(
            lambda unit, together: self.events.append(f"+{unit}"),
            lambda unit: self.events.append(f"-{unit}"),
        )

    def called(
        self,
        unit: str | None,
        inputs: int | None,
        start: int = 0,
        inside: ForwardCall | None = None,
    ) -> ForwardCall:
        """A call of ``unit`` that got what node ``inputs`` made (``None``: no gradients)."""
        call = ForwardCall(unit, inside, start)
        if inputs is not None:
            call.input_nodes, call.end_is_seen = {inputs}, True
        self.calls.expect(call)
        return call

    def come_to(self, call: ForwardCall, node: int) -> None:
        """Autograd is at a node of one thread, of which the number says all."""
        self.calls.come_to(call, node, node)

    def take(self) -> str:
        events, self.events = " ".join(self.events), []
        return events


def test_a_plain_block_is_entered_at_its_output_and_left_at_its_input() -> None:
    step = Pass()
    block = step.called("block", inputs=1)
    assert step.calls.expects("block")
    step.come_to(block, 2)
    assert step.take() == "+block"
    step.come_to(block, 3)  # another output
    assert step.take() == ""
    step.calls.leave(block)
    assert step.take() == "-block"
    assert not step.calls.expects("block")


def test_one_node_ends_a_call_before_it_begins_another() -> None:
    step = Pass()
    first, second = step.called("0", inputs=1), step.called("1", inputs=2)
    step.come_to(second, 3)
    step.come_to(first, 2)
    assert step.take() == "+1 -1 +0"


def test_calls_that_end_at_one_node_end_from_the_inside_out() -> None:
    step = Pass()
    outer = step.called("outer", inputs=1)
    inner = step.called("inner", inputs=1, inside=outer)
    before = step.called("before", inputs=0)
    step.come_to(inner, 2)
    step.come_to(before, 1)
    assert step.take() == "+outer +inner -inner -outer +before"


def test_after_the_gradient_of_a_leaf_those_of_the_parameters_are_waited_for() -> None:
    step = Pass()
    for complete in (True, False):
        block = ForwardCall("block", None, first_node=0)
        block.end_is_seen = True
        step.come_to(block, 2)
        step.calls.inputs_complete(block, complete)
        assert step.take() == ("+block -block" if complete else "+block")
    step.calls.parameters_complete("block", all_trained=False)
    assert step.take() == "-block"


def test_complete_parameters_end_only_a_call_whose_inputs_are_complete_or_have_no_gradients() -> (
    None
):
    step = Pass()
    block, embedding = step.called("block", inputs=1), step.called("embedding", inputs=None)
    step.come_to(block, 2)
    step.come_to(embedding, 2)
    assert step.take() == "+block +embedding"
    for unit in ("block", "embedding"):
        step.calls.parameters_complete(unit, all_trained=False)
    assert step.take() == ""  # a frozen parameter may be needed for an input's gradient
    for unit in ("block", "embedding"):
        step.calls.parameters_complete(unit, all_trained=True)
    assert step.take() == "-embedding"


def test_a_call_without_inputs_has_ended_where_autograd_is_before_its_beginning() -> None:
    """An embedding that is tied: its gradient comes with the first use."""
    step = Pass()
    early = step.called("embedding", inputs=None, start=1)
    encoder = step.called("encoder", inputs=2, start=2)
    late = step.called("embedding", inputs=None, start=5)
    step.come_to(late, 6)
    assert step.take() == "+embedding"
    step.come_to(encoder, 4)
    assert step.take() == "-embedding +encoder"
    step.come_to(early, 2)
    step.calls.parameters_complete("embedding", all_trained=True)
    assert step.take() == "-encoder +embedding -embedding"


def test_numbers_of_another_thread_end_no_call_and_are_no_identity() -> None:
    """On a device, a reentrant checkpoint's recomputation is in the thread of the backward pass."""
    step = Pass()
    with ThreadPoolExecutor(1) as thread:
        recomputed = thread.submit(step.called, "block", inputs=None, start=9).result()
    made, other = object(), object()
    following = step.called("head", inputs=None, start=1)
    following.input_nodes, following.end_is_seen = {made}, True
    step.calls.come_to(recomputed, other, 10)
    step.calls.come_to(following, other, 5)
    step.calls.come_to(step.called("embedding", inputs=None), other, 2)
    assert step.take() == "+block +head +embedding"


def test_a_call_around_others_without_inputs_ends_with_the_pass() -> None:
    step = Pass()
    model = step.called("model", inputs=None, start=1)
    embedding = step.called("embedding", inputs=None, start=1, inside=model)
    block = step.called("block", inputs=2, start=2, inside=model)
    step.come_to(block, 3)
    step.come_to(embedding, 2)
    step.calls.parameters_complete("model", all_trained=True)
    assert step.take() == "+model +block -block +embedding"
    step.calls.leave_all(["block", "embedding", "model"])
    assert step.take() == "-embedding -model"


def test_a_model_around_its_units_is_never_told() -> None:
    step = Pass()
    block = step.called("block", inputs=1, inside=step.called(None, inputs=1))
    step.come_to(block, 2)
    step.calls.leave_all(["block"])
    assert step.take() == "+block -block"


def test_a_second_pass_through_a_retained_graph_enters_and_leaves_once_more() -> None:
    step = Pass()
    block = step.called("block", inputs=1)
    for _ in range(2):
        step.come_to(block, 2)
        assert step.calls.expects("block")
        step.calls.leave(block)
        assert step.take() == "+block -block"


def test_a_unit_is_expected_until_each_of_its_calls_has_been_left() -> None:
    step = Pass()
    first, second = step.called("block", inputs=1), step.called("block", inputs=2)
    step.come_to(second, 3)
    step.calls.leave(second)
    assert step.calls.expects("block")
    step.come_to(first, 2)
    step.calls.leave(first)
    assert not step.calls.expects("block")


def test_a_call_whose_graph_is_thrown_away_is_forgotten() -> None:
    """Only the nodes of a graph hold its calls, so nothing waits for what never comes."""
    step = Pass()
    step.called("block", inputs=1)
    gc.collect()
    assert not step.calls.expects("block")


def test_what_is_forgotten_begins_again_if_its_graph_is_used_after_all() -> None:
    step = Pass()
    block = step.called("block", inputs=1)
    step.come_to(block, 2)
    step.calls.forget()
    assert not step.calls.expects("block")
    step.calls.leave_all(["block"])
    step.come_to(block, 2)
    assert step.take() == "+block +block"
