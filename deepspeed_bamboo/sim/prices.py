"""What a machine costs: one price, or a history of prices."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from pathlib import Path

from .clock import LONGEST_HOURS, LONGEST_MILLISECONDS, MILLISECONDS_PER_SECOND, to_milliseconds
from .errors import ScenarioError, TraceError

__all__ = ["Prices", "constant_price", "read_prices"]

_HEADER = "seconds,dollars_per_hour"


@dataclass(frozen=True)
class Prices:
    """The price of one machine for one hour, from given times on.

    Attributes:
        from_milliseconds: when each price begins; the first is 0; rising.
        dollars_per_hour: as many, each above 0.
    """

    from_milliseconds: tuple[int, ...]
    dollars_per_hour: tuple[float, ...]

    def at(self, milliseconds: int) -> float:
        """Dollars an hour at a time."""
        return self.dollars_per_hour[bisect.bisect_right(self.from_milliseconds, milliseconds) - 1]


def constant_price(dollars_per_hour: float) -> Prices:
    """One price for ever. Raises ScenarioError unless it is above 0."""
    if not 0 < dollars_per_hour < math.inf:
        raise ScenarioError(f"price {dollars_per_hour} $/h: a price is a finite number above 0")
    return Prices((0,), (dollars_per_hour,))


def read_prices(path: Path | str) -> Prices:
    """A price history: the header `seconds,dollars_per_hour`, then a line a price, from second 0, in order of time.

    Raises:
        TraceError: a line breaks a rule; says file, line and rule.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TraceError(path, line=0, rule=f"cannot be read ({error.strerror}); give a price history") from error
    except UnicodeDecodeError as error:
        raise TraceError(path, line=0, rule="is not text in UTF-8; give a price history") from error
    if not lines or lines[0].replace(" ", "") != _HEADER:
        raise TraceError(path, line=1, rule=f"a price history begins with the line `{_HEADER}`")
    times: list[int] = []
    prices: list[float] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            seconds, price = (float(field) for field in line.split(","))
        except ValueError:
            raise TraceError(path, line=number, rule=f"{line!r} is malformed: a line is `{_HEADER}`") from None
        if not 0 < price < math.inf:
            raise TraceError(path, line=number, rule=f"price {price} $/h: a price is a finite number above 0")
        if not 0 <= seconds <= LONGEST_MILLISECONDS / MILLISECONDS_PER_SECOND:
            raise TraceError(
                path, line=number, rule=f"time {seconds} s: it lies between 0 and {LONGEST_HOURS} hours (10 years)"
            )
        at = to_milliseconds(seconds)
        if not times and at != 0:
            raise TraceError(path, line=number, rule=f"the first price begins at {seconds} s: it begins at second 0")
        if times and at <= times[-1]:
            raise TraceError(path, line=number, rule=f"time {seconds} s is not after the line before; sort the file")
        times.append(at)
        prices.append(price)
    if not times:
        raise TraceError(path, line=0, rule="holds no prices; the header is followed by at least one line")
    return Prices(tuple(times), tuple(prices))
