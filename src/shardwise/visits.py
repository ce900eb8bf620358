"""One forward call of a unit, as the backward pass will meet it again.

Autograd says when a gradient is there, not when a module's backward begins or ends. A visit
ties the two together: the nodes that made a call's outputs fire when its backward begins, the
nodes that made its inputs when it has ended. Only those nodes hold the visit, so a graph that
is thrown away takes its visits along, and nothing waits for a backward pass that never comes.
"""

from __future__ import annotations

import weakref

__all__ = ["Visit", "Visits"]


class Visit:
    """A forward call of ``unit`` (``None``: of the model around its units).

    Attributes:
        parent: the call around it, which the backward pass enters first.
        start: autograd's number at its beginning; the nodes of its graph have this or higher ones.
        bounded: its inputs carry gradients, so the end of its backward pass can be seen.
        encloses: units were called inside it; its backward pass ends after theirs.
        entered, ending, done: how far the backward pass is; ``ending``: the gradients of its inputs
            are there, those of its parameters not all.
    """

    __slots__ = (
        "__weakref__",
        "bounded",
        "done",
        "encloses",
        "ending",
        "entered",
        "parent",
        "start",
        "unit",
    )

    def __init__(self, unit: str | None, parent: Visit | None, start: int = 0) -> None:
        self.unit, self.parent, self.start = unit, parent, start
        self.bounded = self.encloses = False
        self.begin_again()

    @property
    def endless(self) -> bool:
        """Can its end be seen neither from its inputs nor from calls inside it?"""
        return not self.bounded and not self.encloses

    def begin_again(self) -> None:
        """No backward pass has come through yet."""
        self.entered = self.ending = self.done = False


class Visits:
    """The visits of one unit whose graphs still exist."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Visit]] = []

    def add(self, visit: Visit) -> None:
        self._known = [ref for ref in self._known if (v := ref()) is not None and not v.done]
        self._known.append(weakref.ref(visit))

    def clear(self) -> None:
        """Forget them. One whose graph is used after all begins again, whole."""
        for ref in self._known:
            if (visit := ref()) is not None:
                visit.done = True
        self._known.clear()

    def live(self) -> bool:
        """Is a backward pass still to come, or under way?"""
        return any(not v.done for ref in self._known if (v := ref()) is not None)

    def open(self) -> list[Visit]:
        """Visits whose backward pass is under way."""
        return [v for ref in self._known if (v := ref()) is not None and v.entered and not v.done]
