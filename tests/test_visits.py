"""A forward call, as the backward pass will meet it again, and forgotten with its graph."""

from __future__ import annotations

import gc

from shardwise.visits import Visit, Visits


def test_a_new_visit_waits_for_its_backward_pass() -> None:
    visits, visit = Visits(), Visit("a", None)
    visits.add(visit)
    assert visits.live()
    assert visits.open() == []


def test_an_entered_visit_is_open_until_it_is_done() -> None:
    visits, visit = Visits(), Visit("a", None)
    visits.add(visit)
    visit.entered = True
    assert (visits.live(), visits.open()) == (True, [visit])
    visit.done = True
    assert (visits.live(), visits.open()) == (False, [])


def test_a_unit_that_was_called_twice_is_live_until_both_are_done() -> None:
    visits, first, second = Visits(), Visit("a", None), Visit("a", None)
    visits.add(first)
    visits.add(second)
    second.entered = second.done = True
    assert visits.live()
    first.entered = True
    assert visits.open() == [first]


def test_a_visit_whose_graph_is_thrown_away_is_forgotten() -> None:
    """Only the nodes of a graph hold its visits, so nothing waits for what never comes."""
    visits = Visits()
    visits.add(Visit("a", None))
    gc.collect()
    assert not visits.live()


def test_what_is_done_or_gone_is_not_kept() -> None:
    visits, kept = Visits(), [Visit("a", None) for _ in range(100)]
    for visit in kept:
        visits.add(visit)
        visit.done = True
    visits.add(Visit("a", None))
    assert len(visits._known) == 1


def test_a_second_backward_pass_begins_like_the_first() -> None:
    visits, visit = Visits(), Visit("a", None)
    visit.bounded = True
    visit.entered = visit.ending = visit.done = True
    visit.begin_again()
    visits.add(visit)
    assert visits.live()
    assert not visit.ending
    assert visit.bounded  # a fact of its graph, which stays


def test_open_visits_are_listed_in_the_order_of_their_calls() -> None:
    visits, kept = Visits(), [Visit("a", None) for _ in range(3)]
    for visit in kept:
        visits.add(visit)
        visit.entered = True
    assert visits.open() == kept


def test_only_a_call_without_bounds_and_without_calls_inside_it_is_endless() -> None:
    free, bounded, around = (Visit("a", None) for _ in range(3))
    bounded.bounded = True
    around.encloses = True
    assert [visit.endless for visit in (free, bounded, around)] == [True, False, False]


def test_a_cleared_list_forgets_visits_whose_graphs_still_exist() -> None:
    visits, visit = Visits(), Visit("a", None)
    visits.add(visit)
    visit.entered = True
    visits.clear()
    assert not visits.live()
    assert visit.done  # so a backward pass that comes after all enters it again
