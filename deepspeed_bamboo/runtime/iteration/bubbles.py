"""Finds the bubbles of a plan that are really long enough for a redundant forward.

A plan counts in whole slots. What begins an iteration (the shadow's own step, the host's work between two iterations)
may make a bubble of one slot shorter than a forward, and the pipeline would wait for the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

# How often a bubble is measured again by leaving its forward out, and a forward that did not fit by doing it.
_BUBBLE_EVERY = 64
_FORWARD_EVERY = 1024


@dataclass(slots=True)
class _Place:
    """One place of a program. The marks are those of its last use: where the forward begins or would, where it is done
    if it was, and where what the worker waits for next is there."""

    begun: Any = None
    done: Any = None
    arrived: Any = None
    bubble_milliseconds: float | None = None
    forward_milliseconds: float | None = None
    uses: int = 0

    def settle(self) -> None:
        """Take over what the marks say, if the device has passed them."""
        marks = (self.begun, self.done or self.begun, self.arrived)
        if self.arrived is None or not all(mark.query() for mark in marks):
            return
        if self.done is not None:
            self.forward_milliseconds = self.begun.elapsed_time(self.done)
        else:
            self.bubble_milliseconds = self.begun.elapsed_time(self.arrived)


class Bubbles:
    """The measured bubbles of one worker.

    Args:
        mark: returns a mark on what the device has been given so far, with the methods of a CUDA event that keeps
            time; None where nothing can be measured. Then every bubble is taken for as long as planned.
    """

    def __init__(self, mark: Callable[[], Any] | None) -> None:
        self._mark = mark
        self._places: dict[Hashable, _Place] = {}
        self._program: Hashable = None
        self._current: _Place | None = None

    def fits(self, place: Hashable, *, program: Hashable) -> bool:
        """Whether to do the forward of ``place`` in this iteration. ``program``: places of another one are forgotten.

        False the first time, when the bubble is measured without it, and now and then.
        """
        if self._mark is None:
            return True
        if program != self._program:
            self._program = program
            self._places.clear()
        here = self._places.setdefault(place, _Place())
        here.settle()
        here.begun, here.done, here.arrived = self._mark(), None, None
        self._current = here
        use, here.uses = here.uses, here.uses + 1
        if here.bubble_milliseconds is None or use % _BUBBLE_EVERY == 0:
            return False
        if here.forward_milliseconds is None or use % _FORWARD_EVERY == 1:
            return True
        return here.forward_milliseconds <= here.bubble_milliseconds

    def done(self) -> None:
        """The forward has been launched."""
        if self._mark is not None and self._current is not None:
            self._current.done = self._mark()

    def arrives(self, mark: Any) -> None:
        """At ``mark`` what the worker waits for next will have arrived, which ends the bubble."""
        if mark is None:
            self.ends()
        elif self._current is not None:
            self._current.arrived = mark
            self._current = None

    def ends(self) -> None:
        """A pass follows that waits for nothing: there is no bubble to measure."""
        if self._current is not None:
            self._current.bubble_milliseconds = float("inf")
            self._current = None
