"""Which stretches of a flat buffer an optimizer updates in one go. Pure numbers.

Parameter by parameter, an update costs more calls than arithmetic as soon as parameters are
small. Slots that touch each other in their bucket and are updated alike (same group, same count
of steps, a gradient each) form one *run*:

            rank 0's piece    rank 1's
    slots | a a a b b b b b | b c c d d · e e |        c has no gradient, · is padding
    runs  | 1 1 1 1 1 1 1 1 | 2     3 3   4 4 |

A run ends where a rank's piece ends, even where one rank holds all pieces: a fused kernel rounds
the last elements of a buffer otherwise than those before them, so only runs that are the same
in every strategy give the same bits in every strategy. Padding is in no run, so nothing that
happens to gradients can reach it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Run", "runs"]

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Run(Generic[K]):
    """Elements ``[start, stop)`` of a flat buffer that are updated in one go.

    Attributes:
        start, stop: elements.
        first: the position of the slot in which it starts.
        key: what its slots have in common.
    """

    start: int
    stop: int
    first: int
    key: K


def runs(places: Sequence[tuple[int, int]], keys: Sequence[K | None], piece: int) -> list[Run[K]]:
    """The runs of a buffer.

    Args:
        places: ``[start, stop)`` of each slot, in order; they do not overlap.
        keys: per slot, what must be equal within a run; ``None`` leaves the slot out.
        piece: elements of one rank's piece; a run does not cross its multiples.
    """
    found: list[Run[K]] = []
    for position, ((begin, end), key) in enumerate(zip(places, keys, strict=True)):
        if key is None:
            continue
        for start, stop in _pieces(begin, end, piece):
            last = found[-1] if found else None
            if last and last.stop == start and last.key == key and start % piece:
                found[-1] = Run(last.start, stop, last.first, key)
            else:
                found.append(Run(start, stop, position, key))
    return found


def _pieces(start: int, stop: int, piece: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)``, cut at the multiples of ``piece``."""
    while start < stop:
        end = min(stop, (start // piece + 1) * piece)
        yield start, end
        start = end
