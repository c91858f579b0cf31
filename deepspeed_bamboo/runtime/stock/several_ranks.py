"""Ranks and stages of a worker that stands for several of them, as a script asks for them."""

from __future__ import annotations

from collections.abc import Sequence


class SeveralRanks(int):
    """The rank of a worker that stands for several: a number, its own, which is equal to each of them.

    So ``if rank == 0:`` is true on the worker that stands for rank 0, and ``if rank == 3:`` is, too, if it also stands
    for that. Everything else goes by its own.
    """

    ranks: tuple[int, ...]

    def __new__(cls, ranks: Sequence[int]) -> SeveralRanks:
        """``ranks``: its own first."""
        made = super().__new__(cls, ranks[0])
        made.ranks = tuple(ranks)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(other) in self.ranks

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def as_rank(ranks: Sequence[int]) -> int:
    """The rank of a worker that stands for ``ranks``, its own first."""
    return ranks[0] if len(ranks) == 1 else SeveralRanks(ranks)
