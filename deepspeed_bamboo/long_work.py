"""How far something has come that takes long: said after two seconds, and then less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

FIRST_SECONDS = 2.0
_SHORTEST_SECONDS = 1.0
_PART_OF_AGE = 1 / 4
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class WorkFacts:
    """``what`` is done, in words; ``done`` of ``total`` (None: not known) of it after ``seconds``.

    ``unit``: bytes, or what else is counted ("stages").
    """

    what: str
    done: int
    total: int | None
    unit: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WorkFacts:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        total = None if value["total"] is None else int(value["total"])
        return cls(str(value["what"]), int(value["done"]), total, str(value["unit"]), float(value["seconds"]))

    def in_words(self) -> str:
        """What is done, how much of it, how fast, and how long it will take."""
        if self.total is None and not self.done:
            return f"{self.what}: {self.seconds:.0f} s so far"
        rate = self.done / self.seconds if self.seconds > 0 else 0.0
        if self.total is None:
            return f"{self.what}: {amount(self.done, self.unit)}, {_rate(rate, self.unit)}"
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        done = amount(self.done, self.unit) if self.unit == "bytes" else str(self.done)
        text = f"{self.what}: {done} of {amount(self.total, self.unit)}{share}"
        if self.unit == "bytes":
            text += f", {_rate(rate, self.unit)}"
        return f"{text}, {(self.total - self.done) / rate:.0f} s left" if rate and self.done < self.total else text

    def at_the_end(self) -> str:
        """The same once it is done."""
        rate = self.done / self.seconds if self.seconds > 0 else 0.0
        if not self.done:
            return f"{self.what}: done in {self.seconds:.1f} s"
        how_fast = f", {_rate(rate, self.unit)}" if self.unit == "bytes" else ""
        return f"{self.what}: {amount(self.done, self.unit)} in {self.seconds:.1f} s{how_fast}"


class LongWork:
    """Some work, counted by whoever does it and read by whoever tells of it, in another thread."""

    def __init__(
        self, what: str, *, total: int | None, unit: str = "bytes", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """See :class:`WorkFacts`."""
        self._what, self._total, self._unit, self._clock = what, total, unit, clock
        self._done = 0
        self._began = clock()

    def expect(self, total: int) -> None:
        """So much of it is to come."""
        self._total = (self._total or 0) + total

    def add(self, done: int) -> None:
        """So much more of it is done."""
        self._done += done

    def facts(self) -> WorkFacts:
        """How far it is."""
        return WorkFacts(self._what, self._done, self._total, self._unit, self._clock() - self._began)


def pause_seconds(age_seconds: float, *, first_seconds: float = FIRST_SECONDS) -> float:
    """How long to wait before the next line on work of that age: none in its first two seconds, then one each."""
    if age_seconds < first_seconds:
        return first_seconds - age_seconds
    return max(_SHORTEST_SECONDS, age_seconds * _PART_OF_AGE)


def amount(number: float, unit: str) -> str:
    """A number of bytes, as people read it; or of anything else."""
    if unit != "bytes":
        return f"{number:.0f} {unit}"
    for name in _UNITS[:-1]:
        if number < 999.5:
            return f"{number:.3g} {name}"
        number /= 1000
    return f"{number:.3g} {_UNITS[-1]}"


def _rate(per_second: float, unit: str) -> str:
    return f"{amount(per_second, unit)}/s"
