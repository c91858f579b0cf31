"""A quantity over time in bounded memory: equal bins that double their width when time outgrows them."""

from __future__ import annotations

__all__ = ["Series"]

_FIRST_WIDTH_MILLISECONDS = 1_000


class Series:
    """Amounts spread over time.

    Args:
        bins: at most so many are kept, an even number; when time goes beyond them, pairs are merged.
    """

    def __init__(self, bins: int = 512) -> None:
        self._most = bins
        self._width = _FIRST_WIDTH_MILLISECONDS
        self._amounts: list[float] = []

    def spread(self, start: int, end: int, amount: float) -> None:
        """Add an amount evenly over [start, end), in milliseconds."""
        if end <= start:
            return
        while end > self._most * self._width:
            self._double()
        last = (end - 1) // self._width
        if last >= len(self._amounts):
            self._amounts.extend([0.0] * (last + 1 - len(self._amounts)))
        first = start // self._width
        if first == last:
            self._amounts[first] += amount
            return
        rate = amount / (end - start)
        self._amounts[first] += rate * ((first + 1) * self._width - start)
        for index in range(first + 1, last):
            self._amounts[index] += rate * self._width
        self._amounts[last] += rate * (end - last * self._width)

    def _double(self) -> None:
        if len(self._amounts) % 2:
            self._amounts.append(0.0)
        pairs = zip(self._amounts[::2], self._amounts[1::2], strict=True)
        self._amounts = [left + right for left, right in pairs]
        self._width *= 2

    def averages(self, until: int) -> list[tuple[float, float]]:
        """(milliseconds at the bin's start, amount per millisecond) for each bin up to `until`."""
        found = []
        for index, amount in enumerate(self._amounts):
            start = index * self._width
            covered = min(until, start + self._width) - start
            if covered > 0:
                found.append((float(start), amount / covered))
        return found
