"""A flat buffer, cut into the views of its parameters in one call."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.views import Views

FLAT = torch.arange(20.0)


def test_each_place_is_a_view_in_the_order_of_the_places() -> None:
    later, first = Views([(10, 16, (2, 3)), (0, 4, (4,))], 20)(FLAT)
    assert torch.equal(later, FLAT[10:16].view(2, 3))
    assert torch.equal(first, FLAT[:4])
    assert later.data_ptr() == FLAT.data_ptr() + 10 * 4


def test_gaps_are_what_belongs_to_no_place() -> None:
    assert Views([(10, 16, (6,)), (2, 4, (2,))], 20).gaps == [(0, 2), (4, 10), (16, 20)]
    assert Views([(0, 20, (20,))], 20).gaps == []


def test_a_place_without_elements_keeps_its_shape_and_its_storage() -> None:
    empty, full = Views([(20, 20, (0, 7)), (0, 20, (20,))], 20)(FLAT)
    assert empty.shape == (0, 7)
    assert empty.untyped_storage().data_ptr() == FLAT.untyped_storage().data_ptr()
    assert torch.equal(full, FLAT)


def test_a_scalar_is_a_place() -> None:
    assert Views([(3, 4, ())], 20)(FLAT)[0] == 3.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=8), st.randoms())
def test_places_and_gaps_cover_the_buffer_once(
    sizes: list[tuple[int, int]], random: object
) -> None:
    places, at = [], 0
    for gap, size in sizes:
        places.append((at + gap, at + gap + size, (size,)))
        at += gap + size
    random.shuffle(places)  # type: ignore[attr-defined]
    flat = torch.arange(float(at + 2))
    cuts = Views(places, at + 2)
    values = [v for view in cuts(flat) for v in view.tolist()]
    values += [float(i) for start, stop in cuts.gaps for i in range(start, stop)]
    assert sorted(values) == flat.tolist()
