"""Few combinations in which every two values of different factors meet: enough to show what two settings do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Combination = Mapping[str, str]
_Pair = tuple[tuple[str, str], tuple[str, str]]

_TRIED = 3  # candidates for each combination


def pairwise(
    factors: Mapping[str, Sequence[str]], *, possible: Callable[[Combination], bool] = lambda _: True
) -> list[dict[str, str]]:
    """Combinations of one value a factor, so that every two values that can meet do so in at least one.

    ``possible`` says of a combination, complete or not, whether it can be. Greedy, so near the fewest and always
    the same. Raises ValueError when some value fits no possible combination.
    """
    open_pairs = [pair for pair in _pairs(factors) if possible(dict(pair))]
    chosen: list[dict[str, str]] = []
    while open_pairs:
        best: dict[str, str] | None = None
        for first in open_pairs[:_TRIED]:
            candidate = _complete(dict(first), factors, open_pairs, possible)
            if candidate is None:
                continue
            if best is None or _met(candidate, open_pairs) > _met(best, open_pairs):
                best = candidate
        if best is None:
            raise ValueError(f"{open_pairs[0]} is possible alone, but in no combination of all factors")
        chosen.append(best)
        open_pairs = [pair for pair in open_pairs if not _meets(best, pair)]
    return chosen


def _pairs(factors: Mapping[str, Sequence[str]]) -> Iterator[_Pair]:
    for one, other in combinations(factors, 2):
        for value, other_value in product(factors[one], factors[other]):
            yield (one, value), (other, other_value)


def _complete(
    partial: dict[str, str],
    factors: Mapping[str, Sequence[str]],
    open_pairs: Sequence[_Pair],
    possible: Callable[[Combination], bool],
) -> dict[str, str] | None:
    """``partial`` with a value for every factor, each the one that meets most; None when there is none."""
    missing = [name for name in factors if name not in partial]
    if not missing:
        return partial
    name = missing[0]
    extended = [{**partial, name: value} for value in factors[name]]
    for candidate in sorted(filter(possible, extended), key=lambda c: -_met(c, open_pairs)):
        complete = _complete(candidate, factors, open_pairs, possible)
        if complete is not None:
            return {factor: complete[factor] for factor in factors}
    return None


def _met(combination: Combination, pairs: Sequence[_Pair]) -> int:
    there = combination.items()
    return sum(one in there and other in there for one, other in pairs)


def _meets(combination: Combination, pair: _Pair) -> bool:
    return all(value in combination.items() for value in pair)
