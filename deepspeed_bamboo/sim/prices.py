"""What a machine costs: one price, or a history of prices, of all machines or by zone."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..text_files import UnreadableError, text_of
from .clock import LONGEST_HOURS, LONGEST_MILLISECONDS, MILLISECONDS_PER_SECOND, to_milliseconds
from .errors import ScenarioError, TraceError

__all__ = ["Prices", "ZonedPrices", "constant_price", "read_prices"]

_HEADER = "seconds,dollars_per_hour"
_ZONED_HEADER = f"{_HEADER},zone"


@dataclass(frozen=True)
class Prices:
    """The price of one machine for one hour, from given times on.

    Attributes:
        from_milliseconds: when each price begins; the first is 0; rising.
        dollars_per_hour: as many, each above 0.
    """

    from_milliseconds: tuple[int, ...]
    dollars_per_hour: tuple[float, ...]

    def at(self, milliseconds: int, zone: str = "") -> float:
        """Dollars an hour at a time, in any zone."""
        return self.dollars_per_hour[bisect.bisect_right(self.from_milliseconds, milliseconds) - 1]

    def since(self, milliseconds: int) -> Prices:
        """The prices from a time on, which is time 0 from now on."""
        first = bisect.bisect_right(self.from_milliseconds, milliseconds) - 1
        begins = tuple(max(0, at - milliseconds) for at in self.from_milliseconds[first:])
        return Prices(begins, self.dollars_per_hour[first:])

    def key(self, zone: str) -> str:
        """What machines of a zone have in common with all that cost the same."""
        return ""

    @property
    def changes(self) -> tuple[int, ...]:
        """When a price begins, in order."""
        return self.from_milliseconds


@dataclass(frozen=True)
class ZonedPrices:
    """A history of prices for each zone, in order of their names."""

    zones: tuple[tuple[str, Prices], ...]

    def at(self, milliseconds: int, zone: str) -> float:
        """Dollars an hour in a zone at a time. Raises ScenarioError for a zone without prices."""
        prices = dict(self.zones).get(zone)
        if prices is None:
            raise ScenarioError(self.without(zone))
        return prices.at(milliseconds)

    def since(self, milliseconds: int) -> ZonedPrices:
        """See Prices."""
        return ZonedPrices(tuple((zone, prices.since(milliseconds)) for zone, prices in self.zones))

    def key(self, zone: str) -> str:
        """See Prices."""
        return zone

    @property
    def changes(self) -> tuple[int, ...]:
        """See Prices."""
        return tuple(sorted({at for _, prices in self.zones for at in prices.from_milliseconds}))

    def without(self, zone: str) -> str:
        """What to say of a zone that has no prices."""
        named = f"zone {zone!r}" if zone else "a machine without a zone"
        known = ", ".join(name for name, _ in self.zones)
        return f"there is no price for {named}; the price history has {known}: add its lines, or give one price for all"

    def check(self, zones: Iterable[str]) -> None:
        """Raises ScenarioError unless each of ``zones`` has prices."""
        known = {name for name, _ in self.zones}
        for zone in zones:
            if zone not in known:
                raise ScenarioError(self.without(zone))


def constant_price(dollars_per_hour: float) -> Prices:
    """One price for ever. Raises ScenarioError unless it is above 0."""
    if not 0 < dollars_per_hour < math.inf:
        raise ScenarioError(f"price {dollars_per_hour} $/h: a price is a finite number above 0")
    return Prices((0,), (dollars_per_hour,))


def read_prices(path: Path | str) -> Prices | ZonedPrices:
    """A price history: the header `seconds,dollars_per_hour`, then a line a price, from second 0, in order of time.

    With the header `seconds,dollars_per_hour,zone` the same for each zone, in any order of zones.

    Raises:
        TraceError: a line breaks a rule; says file, line and rule.
    """
    try:
        lines = text_of(Path(path)).splitlines()
    except UnreadableError as error:
        raise TraceError(path, line=0, rule=f"{error}; give a price history") from error
    header = lines[0].replace(" ", "") if lines else ""
    if header not in (_HEADER, _ZONED_HEADER):
        rule = f"a price history begins with the line `{_HEADER}` or `{_ZONED_HEADER}`"
        raise TraceError(path, line=1, rule=rule)
    found: dict[str, list[tuple[int, float]]] = {}
    for number, line in enumerate(lines[1:], start=2):
        if line.strip() and not line.lstrip().startswith("#"):
            zone, at, price = _parsed(line, header, path=path, number=number)
            _check_order(found.setdefault(zone, []), at, path=path, number=number)
            found[zone].append((at, price))
    if not found:
        raise TraceError(path, line=0, rule="holds no prices; the header is followed by at least one line")
    by_zone = {zone: Prices(*(tuple(column) for column in zip(*its, strict=True))) for zone, its in found.items()}
    return ZonedPrices(tuple(sorted(by_zone.items()))) if header == _ZONED_HEADER else by_zone[""]


def _parsed(line: str, header: str, *, path: Path | str, number: int) -> tuple[str, int, float]:
    """Zone, milliseconds and price."""
    fields = [field.strip() for field in line.split(",")]
    zone = fields.pop() if header == _ZONED_HEADER and len(fields) == 3 else ""
    try:
        seconds, price = (float(field) for field in fields)
    except ValueError:
        raise TraceError(path, line=number, rule=f"{line!r} is malformed: a line is `{header}`") from None
    if header == _ZONED_HEADER and not zone:
        raise TraceError(path, line=number, rule=f"{line!r} names no zone: a line is `{header}`")
    if not 0 < price < math.inf:
        raise TraceError(path, line=number, rule=f"price {price} $/h: a price is a finite number above 0")
    if not 0 <= seconds <= LONGEST_MILLISECONDS / MILLISECONDS_PER_SECOND:
        rule = f"time {seconds} s: it lies between 0 and {LONGEST_HOURS} hours (10 years)"
        raise TraceError(path, line=number, rule=rule)
    return zone, to_milliseconds(seconds), price


def _check_order(before: list[tuple[int, float]], at: int, *, path: Path | str, number: int) -> None:
    seconds = at / MILLISECONDS_PER_SECOND
    if not before and at != 0:
        raise TraceError(path, line=number, rule=f"the first price begins at {seconds} s: it begins at second 0")
    if before and at <= before[-1][0]:
        raise TraceError(path, line=number, rule=f"time {seconds} s is not after the line before; sort the file")
